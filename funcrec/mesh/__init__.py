"""Ranks in a grid with named axes: exchanges between them, collectives, and one rank's function run on all."""

import funcrec.core as _core
from funcrec.mesh._axes import Axis as Axis
from funcrec.mesh._axes import AxisName as AxisName
from funcrec.mesh._axes import bind as bind
from funcrec.mesh._axes import bound as bound
from funcrec.mesh._axes import bound_names as bound_names
from funcrec.mesh._axes import coordinates as coordinates
from funcrec.mesh._axes import rank_at as rank_at
from funcrec.mesh._bytes import swap_bytes as swap_bytes
from funcrec.mesh._codec import Codec as Codec
from funcrec.mesh._codec import codec_problems as codec_problems
from funcrec.mesh._codec import send as send
from funcrec.mesh._collectives import all_gather as all_gather
from funcrec.mesh._collectives import all_to_all as all_to_all
from funcrec.mesh._collectives import axis_index as axis_index
from funcrec.mesh._collectives import axis_size as axis_size
from funcrec.mesh._collectives import pmax as pmax
from funcrec.mesh._collectives import pmean as pmean
from funcrec.mesh._collectives import pmin as pmin
from funcrec.mesh._collectives import ppermute as ppermute
from funcrec.mesh._collectives import psum as psum
from funcrec.mesh._collectives import psum_invariant as psum_invariant
from funcrec.mesh._collectives import psum_scatter as psum_scatter
from funcrec.mesh._collectives import pvary as pvary
from funcrec.mesh._exchange import AWAIT as AWAIT
from funcrec.mesh._exchange import LEAVES as LEAVES
from funcrec.mesh._exchange import MOVES as MOVES
from funcrec.mesh._exchange import SWAP as SWAP
from funcrec.mesh._exchange import has_effect as has_effect
from funcrec.mesh._joined import added as added
from funcrec.mesh._joined import gather_as_one as gather_as_one
from funcrec.mesh._joined import gather_each as gather_each
from funcrec.mesh._joined import is_small as is_small
from funcrec.mesh._joined import ordered_sum as ordered_sum
from funcrec.mesh._joined import part_by_part as part_by_part
from funcrec.mesh._mesh import Mesh as Mesh
from funcrec.mesh._mesh import alone as alone
from funcrec.mesh._mesh import ambient as ambient
from funcrec.mesh._parts import Part as Part
from funcrec.mesh._parts import cut as cut
from funcrec.mesh._parts import flatten_parts as flatten_parts
from funcrec.mesh._parts import is_jagged as is_jagged
from funcrec.mesh._ragged import ragged_all_to_all as ragged_all_to_all
from funcrec.mesh._same import bits_of as bits_of
from funcrec.mesh._same import checksum as checksum
from funcrec.mesh._shard_map import shard as shard
from funcrec.mesh._shard_map import shard_map as shard_map
from funcrec.mesh._shard_map import unshard as unshard
from funcrec.mesh._spec import P as P
from funcrec.mesh._twins import Twins as Twins
from funcrec.mesh._twins import tell as tell
from funcrec.mesh._twins import twins_of as twins_of

_core.publish(globals())
