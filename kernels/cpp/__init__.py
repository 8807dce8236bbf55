"""The operations in C++ for the CPU, as functions of flat arguments. The first call loads the compiled object."""

from funcrec.kernels.cpp._attention import jagged_attention as jagged_attention
from funcrec.kernels.cpp._attention import jagged_attention_transpose as jagged_attention_transpose
from funcrec.kernels.cpp._columns import admit_columns as admit_columns
from funcrec.kernels.cpp._columns import find_columns as find_columns
from funcrec.kernels.cpp._columns import settle_columns_ as settle_columns_
from funcrec.kernels.cpp._draws import draw_rows_ as draw_rows_
from funcrec.kernels.cpp._draws import initial_rows as initial_rows
from funcrec.kernels.cpp._extrema import bag_extrema as bag_extrema
from funcrec.kernels.cpp._extrema import bag_extrema_transpose as bag_extrema_transpose
from funcrec.kernels.cpp._functions import invariant_function as invariant_function
from funcrec.kernels.cpp._generate import UnsupportedError as UnsupportedError
from funcrec.kernels.cpp._interaction import dot_interaction as dot_interaction
from funcrec.kernels.cpp._interaction import dot_interaction_transpose as dot_interaction_transpose
from funcrec.kernels.cpp._invariant import invariant_bmm as invariant_bmm
from funcrec.kernels.cpp._invariant import invariant_sum as invariant_sum
from funcrec.kernels.cpp._jagged import bucketize as bucketize
from funcrec.kernels.cpp._jagged import from_padded as from_padded
from funcrec.kernels.cpp._jagged import owner_blocks as owner_blocks
from funcrec.kernels.cpp._jagged import take_ranges as take_ranges
from funcrec.kernels.cpp._jagged import take_ranges_transpose as take_ranges_transpose
from funcrec.kernels.cpp._jagged import to_padded as to_padded
from funcrec.kernels.cpp._lookup import gather_block as gather_block
from funcrec.kernels.cpp._lookup import gather_rows as gather_rows
from funcrec.kernels.cpp._lookup import planned_pooled_lookup as planned_pooled_lookup
from funcrec.kernels.cpp._lookup import pooled_lookup as pooled_lookup
from funcrec.kernels.cpp._lookup import pooled_lookup_weights as pooled_lookup_weights
from funcrec.kernels.cpp._lookup import scatter_block_ as scatter_block_
from funcrec.kernels.cpp._lookup import scatter_rows_ as scatter_rows_
from funcrec.kernels.cpp._operators import compiled_operators as compiled_operators
from funcrec.kernels.cpp._planned_update import planned_fused_update_ as planned_fused_update_
from funcrec.kernels.cpp._quantized import planned_lookup as planned_lookup
from funcrec.kernels.cpp._quantized import quantize_rows as quantize_rows
from funcrec.kernels.cpp._quantized import quantized_lookup as quantized_lookup
from funcrec.kernels.cpp._quantized import quantized_rows as quantized_rows
from funcrec.kernels.cpp._records import move_records as move_records
from funcrec.kernels.cpp._rules import Generated as Generated
from funcrec.kernels.cpp._rules import decompositions as decompositions
from funcrec.kernels.cpp._rules import generate as generate
from funcrec.kernels.cpp._top_k import planned_top_k as planned_top_k
from funcrec.kernels.cpp._top_k import top_k as top_k
from funcrec.kernels.cpp._update import MOST_SLOTS as MOST_SLOTS
from funcrec.kernels.cpp._update import coalesce as coalesce
from funcrec.kernels.cpp._update import expand as expand
from funcrec.kernels.cpp._update import fused_update_ as fused_update_
from funcrec.kernels.cpp._update import generated_update_ as generated_update_
from funcrec.kernels.cpp._vocabulary import admit_ids as admit_ids
from funcrec.kernels.cpp._vocabulary import find_ids as find_ids
from funcrec.kernels.cpp._vocabulary import settle_ids_ as settle_ids_

READS_STACKS = True  # whether pooled_lookup takes a stack of tables as one tensor
TAKES_MEMBERS = True  # whether fused_update_ takes stacks
USUAL = {
    "pooled_lookup": planned_pooled_lookup,
    "fused_update_": planned_fused_update_,
}  # or None: not the usual arguments
