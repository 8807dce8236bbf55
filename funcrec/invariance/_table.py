"""What each of torch's operators becomes under `invariant`.

exact       elementwise operations that IEEE 754 rounds in one way, moves of values, comparisons: as they are
replaced    products, sums and functions, by those of this folder
composed    all that torch writes as a composition of others: each of its parts in turn
in place    the pure operator, then a copy
unknown     anything else: it may make no floats
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch._ops import OpOverload

from funcrec.invariance._extrema import with_unsigned
from funcrec.invariance._replaced import REPLACED

aten = torch.ops.aten


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Names of operators, with all of their overloads that do not reduce.
EXACT = words("""
    abs alias amax amin aminmax arange argmax argmin argsort as_strided_scatter bitwise_and bitwise_left_shift
    bitwise_not bitwise_or bitwise_right_shift bitwise_xor __and__ __or__ __xor__ __lshift__ __rshift__
    bucketize cat ceil clamp clamp_max clamp_min clone constant_pad_nd copy copy_ copysign count_nonzero cummax cummin
    cumprod cumsum
    as_strided_ squeeze_ unsqueeze_ t_ transpose_ swapaxes_ swapdims_
    detach detach_ diagonal_copy diagonal_scatter div embedding empty empty_like empty_permuted empty_strided eq eye
    fill fill_ flip floor fmax fmin fmod frac full full_like gather ge gt heaviside
    index index_copy index_fill index_select isin isinf isnan item kthvalue le leaky_relu leaky_relu_backward lift
    lift_fresh lift_fresh_copy _local_scalar_dense logical_and logical_not logical_or logical_xor lt masked_fill
    masked_fill_ masked_scatter masked_select max maximum median min minimum mode mul nan_to_num narrow_copy ne neg
    new_empty new_empty_strided new_full new_ones new_zeros nextafter nonzero ones ones_like pin_memory positive
    promote_types reciprocal relu relu_ remainder repeat repeat_interleave resize_ result_type roll round
    scalar_tensor scatter searchsorted select_backward select_scatter set_ sgn sign signbit slice_backward slice_scatter
    sort threshold threshold_backward _to_copy topk tril triu trunc unfold_backward _unique2 unique_dim where zero
    zero_ zeros zeros_like _efficientzerotensor _new_zeros_with_same_feature_meta
""")
EXACT_PRIMS = words("""
    add as_strided bitwise_not broadcast_in_dim collapse collapse_view convert_element_type copy_strided copy_to
    device_put iota isfinite maximum_value minimum_value reshape rev shift_left shift_right_arithmetic split_dim squeeze
    sub transpose view_of view_of_dtype
""")
# Operators whose compositions fail for tensors without elements. Their results then have none.
OF_SOME = (
    aten.max_pool2d_with_indices.default,
    aten.max_pool3d_with_indices.default,
    aten.mse_loss_backward.default,
    aten.huber_loss_backward.default,
)
EXCHANGES = ("all_gather", "all_to_all", "broadcast", "wait")  # exchanges that add nothing


def place_of(func: Any) -> tuple[str, Callable]:
    """Return how an operator runs, and the function that runs."""
    return _place_of(func) if isinstance(func, OpOverload) else ("unknown", func)


@functools.cache
def _place_of(func: OpOverload) -> tuple[str, Callable]:
    name, composed = func._schema.name.partition("::")[2], compositions()
    if func in REPLACED:
        return "replaced", REPLACED[func]
    if is_exact(func, name):  # A program may hold no views that are operators of prims.
        return ("composed", cast(Any, func).impl_aten) if func.namespace == "prims" else ("exact", func)
    if func.namespace != "aten":
        return "unknown", func
    pure = getattr(getattr(aten, name[:-1], None), func._overloadname, None) if name.endswith("_") else None
    if pure is not None:
        return "in place", pure
    if func is aten.native_batch_norm.default:
        return "composed", with_unsigned(composed[func])
    if func in composed:
        return "composed", composed[func]
    is_written_of_others = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    return ("composed", func.decompose) if is_written_of_others else ("unknown", func)  # seen in inference mode alone


def is_exact(func: OpOverload, name: str) -> bool:
    space = func.namespace
    if space == "aten":
        return func.is_view or (name in EXACT and "reduce" not in func._overloadname)
    if space == "prims":
        return name in EXACT or name in EXACT_PRIMS
    own = space.startswith("funcrec") and space != "funcrec_fbgemm"  # FBGEMM's sums depend on the instruction set
    return own or space == "prim" or (space == "_c10d_functional" and name.startswith(EXCHANGES))


@functools.cache
def compositions() -> dict[Any, Callable]:
    from torch._decomp import core_aten_decompositions, decomposition_table  # It takes a third of a second.

    return {**decomposition_table, **core_aten_decompositions()}
