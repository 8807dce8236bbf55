"""Tables on a mesh: placements and layouts, ids to their owners and pooled
rows back, and the update of rows and of dense parts."""

import funcrec.core as _core
from funcrec.sharding._copies import copy_problems as copy_problems
from funcrec.sharding._dense import DenseShard as DenseShard
from funcrec.sharding._dense import cut_dense as cut_dense
from funcrec.sharding._dense import cut_state as cut_state
from funcrec.sharding._dense import dense_axes_problems as dense_axes_problems
from funcrec.sharding._dense import dense_specs as dense_specs
from funcrec.sharding._dense import gather_dense as gather_dense
from funcrec.sharding._dense import join_dense as join_dense
from funcrec.sharding._dense import leaf_problems as leaf_problems
from funcrec.sharding._dense import own_dense as own_dense
from funcrec.sharding._dense import sum_dense as sum_dense
from funcrec.sharding._dense import whole_leaves as whole_leaves
from funcrec.sharding._layout import Layout as Layout
from funcrec.sharding._layout import layout_of as layout_of
from funcrec.sharding._layout import own_ranks as own_ranks
from funcrec.sharding._move import Rows as Rows
from funcrec.sharding._move import bank_problems as bank_problems
from funcrec.sharding._move import blank_banks as blank_banks
from funcrec.sharding._move import move as move
from funcrec.sharding._move import places as places
from funcrec.sharding._move import rows_of as rows_of
from funcrec.sharding._placement import OF_TWO_AXES as OF_TWO_AXES
from funcrec.sharding._placement import Block as Block
from funcrec.sharding._placement import Kind as Kind
from funcrec.sharding._placement import Placement as Placement
from funcrec.sharding._placement import column_wise as column_wise
from funcrec.sharding._placement import grid as grid
from funcrec.sharding._placement import replicated as replicated
from funcrec.sharding._placement import row_wise as row_wise
from funcrec.sharding._placement import table_column_wise as table_column_wise
from funcrec.sharding._placement import table_row_wise as table_row_wise
from funcrec.sharding._placement import table_wise as table_wise
from funcrec.sharding._plan import Plan as Plan
from funcrec.sharding._report import RankLine as RankLine
from funcrec.sharding._report import Report as Report
from funcrec.sharding._report import TableLine as TableLine
from funcrec.sharding._send import followed_problems as followed_problems
from funcrec.sharding._send import send_rows as send_rows
from funcrec.sharding._sync import sync_grads as sync_grads
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
from funcrec.sharding._waiting import Waiting as Waiting
from funcrec.sharding._waiting import cut_waiting as cut_waiting
from funcrec.sharding._waiting import filled as filled
from funcrec.sharding._waiting import gather_waiting as gather_waiting
from funcrec.sharding._waiting import of_rank as of_rank
from funcrec.sharding._waiting import part_of as part_of
from funcrec.sharding._waiting import rooms_of as rooms_of
from funcrec.sharding._waiting import steps_problems as steps_problems
from funcrec.sharding._waiting import waiting_problems as waiting_problems
from funcrec.sharding._waiting import whole_shape as whole_shape

_core.publish(globals())
