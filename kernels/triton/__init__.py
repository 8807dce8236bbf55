"""The operations on tables as Triton kernels, for CUDA (and ROCm) devices.

The import of this package imports triton; nothing else in funcrec does. The functions take flat arguments, as in every
implementation. All of them keep these rules:
 - sums run in f32 (f64 for f64 tables), and the terms of each bag and each row are added in the order of positions; no
   float is added atomically, so the same arguments give the same bits. `group` describes one exception: runs of more
   than `group.CHUNK` entries of one row are summed in chunks;
 - nothing is read on the host and no shape depends on a value: every function can be captured in a CUDA graph;
 - one launch serves several tables: kernel arguments carry the tables' addresses into a small tensor (`launch.pack`).

If TRITON_INTERPRET=1 is set at the import of this package, the kernels run on CPU tensors in triton's slow interpreter.
Tests without a device use this. Otherwise CPU tensors raise.
"""

import importlib.util

if importlib.util.find_spec("triton") is None:
    raise ImportError(
        "funcrec.kernels.triton: triton is not installed.\n"
        "  got   no module named triton\n"
        "  need  triton >= 3.6, which torch's CUDA wheels bring\n"
        '  try   pip install triton, or implementation="reference"'
    )

from funcrec.kernels.owners import blocks_by
from funcrec.kernels.triton import launch
from funcrec.kernels.triton.admission import admit_columns, admit_ids
from funcrec.kernels.triton.attention import jagged_attention, jagged_attention_transpose
from funcrec.kernels.triton.draws import draw_rows_, initial_rows
from funcrec.kernels.triton.invariant import invariant_bmm, invariant_sum
from funcrec.kernels.triton.jagged import bucketize, from_padded, take_ranges, take_ranges_transpose, to_padded
from funcrec.kernels.triton.lookup import gather_rows, pooled_lookup, pooled_lookup_weights, scatter_rows_
from funcrec.kernels.triton.quantized import quantize_rows, quantized_lookup, quantized_rows
from funcrec.kernels.triton.segments import coalesce, expand
from funcrec.kernels.triton.settling import settle_columns_, settle_ids_
from funcrec.kernels.triton.update import fused_update_
from funcrec.kernels.triton.vocabulary import find_columns, find_ids

owner_blocks = blocks_by(take_ranges, bucketize, lambda values, device: launch.pack(values, device)[: len(values)])

__all__ = [
    "admit_columns", "admit_ids", "bucketize", "coalesce", "draw_rows_", "expand", "find_columns", "find_ids",
    "from_padded", "fused_update_", "gather_rows", "initial_rows", "invariant_bmm", "invariant_sum", "jagged_attention",
    "jagged_attention_transpose", "owner_blocks", "pooled_lookup", "pooled_lookup_weights", "quantize_rows",
    "quantized_lookup", "quantized_rows", "scatter_rows_", "settle_columns_", "settle_ids_", "take_ranges",
    "take_ranges_transpose", "to_padded",
]  # fmt: skip
