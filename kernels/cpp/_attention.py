"""Attention within bags, and its transpose, in C++ (csrc/attention.h, csrc/attention_transpose.h)."""

import math
from typing import Any, cast

import torch
from funcrec.kernels.cpp._native import ABSENT, DTYPES, FLOATS, bounds, call, check, empty, fail, ints, real
from funcrec.kernels.forms import accumulation_dtype, time_bounds
from torch import Tensor


def jagged_attention(queries: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Return (out f[N, H, V], logs f[N, H]); without softmax the second is [0, H]."""
    described, kept = _described("jagged_attention", queries, keys, values, *rest)
    softmax, (num_queries, heads, _) = rest[9], queries.shape
    out = empty((num_queries, heads, values.shape[2]), queries.dtype)
    logs = torch.empty((num_queries if softmax else 0, heads), dtype=accumulation_dtype(queries.dtype))
    call("jagged_attention", [*described, out.data_ptr(), logs.data_ptr()])
    del kept  # The call reads these copies.
    return out, logs


def jagged_attention_transpose(
    d_out: Tensor, out: Tensor, logs: Tensor, queries: Tensor, keys: Tensor, values: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    """Return the cotangents of queries, keys, values, position_bias and time_bias, [0, 0] for a bias that is None."""
    described, kept = _described("jagged_attention_transpose", queries, keys, values, *rest)
    wide = accumulation_dtype(queries.dtype)
    given = [d_out.contiguous(), out.contiguous(), logs.contiguous()]
    shape = (*queries.shape[:2], values.shape[2])
    forms = [(shape, queries.dtype), (shape, queries.dtype), ((shape[0] if rest[9] else 0, shape[1]), wide)]
    for name, x, (size, dtype) in zip(("d_out", "out", "logs"), given, forms, strict=True):
        if tuple(x.shape) != size or x.dtype != dtype or not x.is_cpu:
            fail("jagged_attention_transpose", f"`{name}` does not fit.", f"{x.dtype}{list(x.shape)}",
                f"{dtype}{list(size)} on cpu", "the results of jagged_attention")  # fmt: skip
    results = [empty(tuple(x.shape), x.dtype) for x in (queries, keys, values)]
    sums = [None if x is None else torch.empty(x.shape, dtype=wide) for x in rest[2:4]]
    at = [x.data_ptr() for x in (*given, *results)] + [0 if x is None else x.data_ptr() for x in sums]
    call("jagged_attention_transpose", [*described, *at])
    del kept
    of_bias = lambda x, d: queries.new_empty((0, 0)) if d is None else d.to(x.dtype)
    return *results, *(of_bias(x, d) for x, d in zip(rest[2:4], sums, strict=True))


def _described(
    name: str,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    offsets: Tensor,
    key_offsets: Tensor,
    position_bias: Tensor | None,
    time_bias: Tensor | None,
    query_times: Tensor | None,
    key_times: Tensor | None,
    num_targets: Tensor | None,
    scale: float,
    normalizer: float,
    softmax: bool,
    causal: bool,
) -> tuple[list[int], list[Tensor]]:
    """Return the numbers that describe a call, and the tensors whose memory these numbers name."""
    kept = [x.contiguous() for x in (queries, keys, values, offsets, key_offsets)]
    (num_queries, heads, dim), (num_keys, _, width) = queries.shape, values.shape
    shapes = [(num_queries, heads, dim), (num_keys, heads, dim), (num_keys, heads, width)]
    if [tuple(x.shape) for x in kept[:3]] != shapes or {x.dtype for x in kept[:3]} != {queries.dtype}:
        _differ(name, "queries, keys and values", [f"{x.dtype}{list(x.shape)}" for x in kept[:3]])
    if offsets.shape != key_offsets.shape:
        _differ(name, "offsets and key_offsets", [list(x.shape) for x in (offsets, key_offsets)])
    numbers = [
        *(check(x, 3, FLOATS) for x in kept[:3]),
        DTYPES[queries.dtype],
        num_queries,
        num_keys,
        heads,
        dim,
        width,
    ]
    numbers += [*bounds(kept[3]), *bounds(kept[4])]
    for bias in (position_bias, time_bias):
        if bias is not None and (bias.dim() != 2 or bias.shape[0] not in (1, heads) or not bias.shape[1]):
            _differ(name, "a bias and the heads", [list(bias.shape), heads])
        wide = None if bias is None else bias.to(accumulation_dtype(queries.dtype)).contiguous()
        numbers += [0, 0, 0] if wide is None else [check(wide, 2, FLOATS), wide.shape[1], wide.shape[0]]
        kept += [] if wide is None else [wide]
    times = []
    if time_bias is not None:
        inside = time_bounds(time_bias)
        edges = [inside.new_tensor([-math.inf]), inside, inside.new_tensor([math.nan])]  # nothing reaches NaN
        times = [torch.cat(edges), *(cast(Tensor, x).double().contiguous() for x in (query_times, key_times))]
        if [x.shape[0] for x in times[1:]] != [num_queries, num_keys]:
            _differ(name, "times and their rows", [list(x.shape) for x in times[1:]])
    numbers += [check(x, 1, FLOATS) for x in times] or [0, 0, 0]
    targets = None if num_targets is None else num_targets.contiguous()
    if targets is not None and targets.shape[0] != offsets.shape[0] - 1:
        _differ(name, "num_targets and the bags", [list(targets.shape), offsets.shape[0] - 1])
    numbers += ABSENT if targets is None else ints(targets)
    numbers += [real(scale), real(normalizer), int(softmax), int(causal)]
    return numbers, [*kept, *times, *([] if targets is None else [targets])]


def _differ(name: str, what: str, got: object) -> None:
    fail(
        name, f"{what} do not fit each other.", got, "the shapes and dtypes of ops.jagged_attention", "see its contract"
    )
