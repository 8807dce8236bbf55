"""Tables on a mesh: placements and layouts, ids to their owners and pooled
rows back, and the update of rows and of dense parts."""

import funcrec.core as _core
from funcrec.sharding._copies import copy_problems as copy_problems
from funcrec.sharding._dense_shards import DenseShard as DenseShard
from funcrec.sharding._dense_shards import cut_dense as cut_dense
from funcrec.sharding._dense_shards import cut_state as cut_state
from funcrec.sharding._dense_shards import dense_axes_problems as dense_axes_problems
from funcrec.sharding._dense_shards import dense_specs as dense_specs
from funcrec.sharding._dense_shards import gather_dense as gather_dense
from funcrec.sharding._dense_shards import join_dense as join_dense
from funcrec.sharding._dense_shards import leaf_problems as leaf_problems
from funcrec.sharding._dense_shards import own_dense as own_dense
from funcrec.sharding._dense_shards import sum_dense as sum_dense
from funcrec.sharding._dense_shards import whole_leaves as whole_leaves
from funcrec.sharding._sum_gradients import sync_grads as sync_grads
from funcrec.sharding._tables import ShardedTables as ShardedTables
from funcrec.sharding._tables import gather_tables as gather_tables
from funcrec.sharding._tables import placed_problems as placed_problems
from funcrec.sharding._tables import shard_tables as shard_tables
from funcrec.sharding._transport import Transport as Transport
from funcrec.sharding._transport import dedup_problems as dedup_problems
from funcrec.sharding._transport import joined_overflow as joined_overflow
from funcrec.sharding._transport import transport_of as transport_of
from funcrec.sharding._update import check_whole_rows as check_whole_rows
from funcrec.sharding._update import init_slots as init_slots
from funcrec.sharding._update import update_banks as update_banks
from funcrec.sharding._update import whole_banks as whole_banks
from funcrec.sharding.moves._accumulated import Waiting as Waiting
from funcrec.sharding.moves._accumulated import cut_waiting as cut_waiting
from funcrec.sharding.moves._accumulated import filled as filled
from funcrec.sharding.moves._accumulated import gather_waiting as gather_waiting
from funcrec.sharding.moves._accumulated import of_rank as of_rank
from funcrec.sharding.moves._accumulated import part_of as part_of
from funcrec.sharding.moves._accumulated import rooms_of as rooms_of
from funcrec.sharding.moves._accumulated import steps_problems as steps_problems
from funcrec.sharding.moves._accumulated import waiting_problems as waiting_problems
from funcrec.sharding.moves._accumulated import whole_shape as whole_shape
from funcrec.sharding.moves._gather_rows import Rows as Rows
from funcrec.sharding.moves._gather_rows import bank_problems as bank_problems
from funcrec.sharding.moves._gather_rows import blank_banks as blank_banks
from funcrec.sharding.moves._gather_rows import move as move
from funcrec.sharding.moves._gather_rows import places as places
from funcrec.sharding.moves._gather_rows import rows_of as rows_of
from funcrec.sharding.moves._send_cells import followed_problems as followed_problems
from funcrec.sharding.moves._send_cells import send_rows as send_rows
from funcrec.sharding.placement._layout import Layout as Layout
from funcrec.sharding.placement._layout import layout_of as layout_of
from funcrec.sharding.placement._layout import own_ranks as own_ranks
from funcrec.sharding.placement._placement import OF_TWO_AXES as OF_TWO_AXES
from funcrec.sharding.placement._placement import Block as Block
from funcrec.sharding.placement._placement import Kind as Kind
from funcrec.sharding.placement._placement import Placement as Placement
from funcrec.sharding.placement._placement import column_wise as column_wise
from funcrec.sharding.placement._placement import grid as grid
from funcrec.sharding.placement._placement import replicated as replicated
from funcrec.sharding.placement._placement import row_wise as row_wise
from funcrec.sharding.placement._placement import table_column_wise as table_column_wise
from funcrec.sharding.placement._placement import table_row_wise as table_row_wise
from funcrec.sharding.placement._placement import table_wise as table_wise
from funcrec.sharding.placement._plan import Plan as Plan
from funcrec.sharding.placement._report import RankLine as RankLine
from funcrec.sharding.placement._report import Report as Report
from funcrec.sharding.placement._report import TableLine as TableLine

_core.publish(globals())
