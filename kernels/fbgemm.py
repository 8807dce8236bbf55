"""FBGEMM's operators under the contract of the table operations, for CPU tensors: `implementation="fbgemm"`.

    pooled_lookup, gather_rows     split_embedding_codegen_forward_cpu, per feature
    pooled_lookup_weights          split_embedding_codegen_grad_indice_weights_cpu
    fused_update_                  split_embedding_backward_codegen_{sgd, adagrad, rowwise_adagrad}_cpu, per table
    take_ranges                    expand_into_jagged_permute
    bucketize                      block_bucketize_sparse_features
    to_padded, from_padded         jagged_to_padded_dense_forward, jagged_to_padded_dense_backward
    quantized_lookup               int_nbit_split_embedding_codegen_lookup_function, per feature
    quantize_rows, quantized_rows  FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf, and back

FBGEMM has no operator that expands or coalesces row gradients into tensors, so this module has no `expand` and no
`coalesce`. FBGEMM's operators raise for an id outside its table; this module leaves such ids out. For a mean, FBGEMM
divides before the sum; this module divides after the sum. Tables are f32 or f16, and 4 divides the dim. The first call
imports fbgemm_gpu; the import of this module does not.
Shapes: B bags, N ids of a buffer, K ids that count, R rows, D dim.
"""

import functools
import math
from collections.abc import Sequence
from typing import cast

import torch
from funcrec.kernels.fbgemm_bags import Bags, _bags, _check_dtype, _fail, _ints32, _offsets, _operators, _positions
from funcrec.kernels.fbgemm_quantized import quantize_rows as quantize_rows
from funcrec.kernels.fbgemm_quantized import quantized_lookup as quantized_lookup
from funcrec.kernels.fbgemm_quantized import quantized_rows as quantized_rows
from funcrec.kernels.forms import Segment, features_of, segments_of, width_of
from funcrec.kernels.reference_jagged import ascending
from torch import Tensor

SUM = 0  # the pooling_mode of a sum
F32 = 0  # the output_dtype of f32
DIM_STEP = 4
TABLE_DTYPES = (torch.float32, torch.float16)
PADDED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
RULES = {"sgd": ("weight_decay",), "adagrad": ("eps", "weight_decay"),
    "rowwise_adagrad": ("eps", "weight_decay", "decoupled", "max_norm")}  # fmt: skip
UNSUPPORTED = ("weight_decay", "max_norm")  # hyper-parameters that the operators' f32 paths ignore silently


def pooled_lookup(
    tables: Sequence[Tensor], rows: Sequence[Tensor], offsets: Tensor, weights: Tensor | None,
    features: Sequence[int], num_bags: int, blocks: int = 1,
) -> Tensor:  # fmt: skip
    """Return the pooled rows, f32[n · B, C / n], by one operator call per feature."""
    call = "funcrec.kernels.pooled_lookup"
    ops = _operators(call, *tables, *rows, offsets, weights)
    found = features_of(features)
    out = torch.empty(num_bags, width_of(found, tables), dtype=torch.float32)
    for f in found:
        table = tables[f.table]
        _check_table(call, table)
        bounds = ascending(offsets)[f.first_bag : f.first_bag + num_bags + 1]
        bags = _bags(ops, rows[f.rows], bounds, f.max_length, table.shape[0])
        pooled = _forward(ops, table, bags, bags.take(cast(Tensor, weights)) if f.weighted else None)
        out[:, f.column : f.column + table.shape[1]] = bags.per_bag(pooled) if f.mean else pooled
    return out if blocks == 1 else torch.cat(out.chunk(blocks, 1))


def pooled_lookup_weights(
    d_out: Tensor, tables: Sequence[Tensor], rows: Sequence[Tensor], offsets: Tensor, weights: Tensor,
    features: Sequence[int],
) -> Tensor:  # fmt: skip
    """Return the gradient of the weights, f[N]."""
    call = "funcrec.kernels.pooled_lookup_weights"
    ops = _operators(call, d_out, *tables, *rows, offsets, weights)
    num_bags, out = d_out.shape[0], torch.zeros(weights.shape[0], dtype=torch.float32)
    for f in features_of(features):
        table = tables[f.table]
        _check_table(call, table)
        bounds = ascending(offsets)[f.first_bag : f.first_bag + num_bags + 1]
        bags = _bags(ops, rows[f.rows], bounds, f.max_length, table.shape[0])
        if not f.weighted or num_bags == 0 or bags.rows.shape[0] == 0:
            continue
        d = d_out[:, f.column : f.column + table.shape[1]].to(torch.float32)
        d = (bags.per_bag(d) if f.mean else d).contiguous()
        at, widths = torch.zeros(1, dtype=torch.int64), _ints32(0, table.shape[1])
        where = (d, table.view(-1), at, widths, bags.rows, bags.offsets, None)
        g = ops.split_embedding_codegen_grad_indice_weights_cpu(*where)
        if bags.positions is None:
            begin, end = int(bags.offsets[0]), int(bags.offsets[-1])
            out[begin:end] += g[begin:end]
        else:
            out.index_add_(0, bags.positions, g)
    return out.to(weights.dtype)


def gather_rows(table: Tensor, rows: Tensor) -> Tensor:
    """Return table[rows], f32[K, D], by a lookup of bags of one id.

    An id outside the table leaves its bag empty, which gives a row of zeros.
    """
    call = "funcrec.kernels.gather_rows"
    ops = _operators(call, table, rows)
    _check_table(call, table)
    return _forward(ops, table, _bags(ops, rows, torch.arange(rows.shape[0] + 1), 0, table.shape[0]), None)


def fused_update_(
    tables: Sequence[Tensor], slots: Sequence[Tensor], d: Sequence[Tensor], rows: Sequence[Tensor],
    offsets: Sequence[Tensor], weights: Sequence[Tensor], segments: Sequence[int], lr: Tensor, step: Tensor,
    key: Tensor | None, rule: str, hyper: Sequence[float], first: Tensor | None = None, dims: Sequence[int] = (),
) -> None:  # fmt: skip
    """Update tables and slots in place, with one operator call per table.

    The call has one feature, which joins the bags of all segments of the table.
    """
    call = "funcrec.kernels.fused_update_"
    _check_whole_rows(call, tables, dims)
    ops = _operators(call, *tables, *slots, *d, *rows, *offsets, *weights, lr)
    numbers = _check_rule(call, rule, hyper)
    of_table: list[list[Segment]] = [[] for _ in tables]
    for segment in segments_of(segments):
        of_table[segment.table].append(segment)
    for table, own in zip(tables, of_table, strict=True):
        if own:
            _check_table(call, table)
            _check_rounding(call, table, key)
    for t, own in enumerate(of_table):
        parts = [_segment(ops, tables[t], d, rows, offsets, weights, s) for s in own]
        parts = [p for p in parts if p[0].rows.shape[0] > 0]
        if parts:
            state = slots[t] if slots else None
            _update(ops, tables[t], state, *_joined(parts), lr.to(torch.float32), rule, numbers)


def take_ranges(values: Tensor, starts: Tensor, lengths: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Return (values [capacity, ...], offsets i64[B + 1]), without values that exceed the capacity."""
    ops = _operators("funcrec.kernels.take_ranges", values, starts, lengths)
    offsets = _offsets(ops, lengths.clamp(min=0))
    positions = _positions(ops, starts, offsets.clamp(max=capacity))
    inside = (positions >= 0) & (positions < values.shape[0])
    out = values.new_zeros((capacity, *values.shape[1:]))
    if values.shape[0] > 0:
        found = values.index_select(0, torch.where(inside, positions, 0))
        mask = inside.reshape(-1, *(1,) * (values.dim() - 1))
        out[: positions.shape[0]] = torch.where(mask, found, found.new_zeros(()))
    return out, offsets


def bucketize(
    rows: Tensor, offsets: Tensor, weights: Tensor | None, num_shards: int, block: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (rows i[N], lengths i64[S * B], weights f[N] or empty, positions i64[N]).

    Ids whose owner is S or more are left out first, because the operator would wrap the owner around.
    """
    ops = _operators("funcrec.kernels.bucketize", rows, offsets, weights)
    wide = num_shards * block > torch.iinfo(rows.dtype).max  # the operator's product has the ids' dtype
    ids = rows.to(torch.int64) if wide else rows
    bags = _bags(ops, ids, ascending(offsets), 0, num_shards * block)
    if bags.positions is None:  # The operator allows no padding around the bags.
        begin, end = int(bags.offsets[0]), int(bags.offsets[-1])
        bags = Bags(ids[begin:end], bags.offsets - begin, torch.arange(begin, end), bags.lengths)
    total, scale = bags.rows.shape[0], None if weights is None else bags.take(weights)
    blocks = torch.full((1,), block, dtype=ids.dtype)
    lengths, local, moved, _, went = ops.block_bucketize_sparse_features(
        bags.offsets.diff(), bags.rows, False, True, blocks, num_shards, scale
    )
    out, positions = torch.zeros_like(rows), torch.full_like(rows, -1, dtype=torch.int64)
    out[:total] = local
    positions[bags.positions] = went.to(torch.int64)
    new_weights = torch.zeros(0) if weights is None else torch.zeros_like(weights)
    if moved is not None and weights is not None:
        new_weights[:total] = moved.to(weights.dtype)
    return out, lengths.to(torch.int64), new_weights, positions


def to_padded(values: Tensor, offsets: Tensor, max_length: int, fill: float | int) -> Tensor:
    """Return the bags, cut or filled to max_length, f[B, max_length, D]."""
    call = "funcrec.kernels.to_padded"
    ops = _operators(call, values, offsets)
    _check_dtype(call, values, PADDED_DTYPES)
    bounds, rows = ascending(offsets).to(torch.int64).clamp(0, values.shape[0]), _matrix(values, 1)
    out = ops.jagged_to_padded_dense_forward(rows, [bounds], [max_length], fill)
    return out.reshape(bounds.shape[0] - 1, max_length, *values.shape[1:])


def from_padded(padded: Tensor, offsets: Tensor, capacity: int) -> Tensor:
    """Return the places inside their bags end to end, f[capacity, D]. Raise if offsets descend."""
    call = "funcrec.kernels.from_padded"
    ops = _operators(call, padded, offsets)
    _check_dtype(call, padded, PADDED_DTYPES)
    bounds = offsets.to(torch.int64).clamp(0, capacity)
    if bool((bounds.diff() < 0).any()):  # Bags would overlap, and writes would have no fixed order.
        hint = "offsets that ascend"
        _fail(call, "the offsets descend.", "offsets[b] > offsets[b + 1]", "0 <= offsets[0] <= offsets[1] ...", hint)
    out = ops.jagged_to_padded_dense_backward(_matrix(padded, 2), [bounds], capacity)
    return out.reshape(capacity, *padded.shape[2:])


def _matrix(x: Tensor, lead: int) -> Tensor:
    """Return x with all dimensions after the first `lead` flattened to one dimension, D."""
    return x.reshape(*x.shape[:lead], math.prod(x.shape[lead:])).contiguous()


# -- a lookup ---------------------------------------------------------------------------------------------------


def _forward(ops, table: Tensor, bags: Bags, weights: Tensor | None) -> Tensor:
    """Return the sums of the bags, f32[B, D]."""
    num_rows, dim = table.shape
    if bags.offsets.shape[0] == 1:
        return torch.empty(0, dim, dtype=torch.float32)
    at, rows_before = torch.zeros(1, dtype=torch.int64), torch.tensor([0, num_rows])
    return ops.split_embedding_codegen_forward_cpu(
        table.view(-1), at, _ints32(0, dim), dim, rows_before, bags.rows, bags.offsets, SUM, weights, F32
    )


# -- the update --------------------------------------------------------------------------------------------------


def _segment(ops, table, d, rows, offsets, weights, s: Segment) -> tuple[Bags, Tensor, Tensor | None]:
    """Return (bags, d f32[B, D], weights f32[K] or None) of one segment. A segment of entries has bags of one id."""
    entries = s.offsets < 0
    bounds = torch.arange(s.num_bags + 1)
    bounds = bounds if entries else ascending(offsets[s.offsets])[s.first_bag : s.first_bag + s.num_bags + 1]
    bags = _bags(ops, rows[s.rows], bounds, 0 if entries else s.max_length, table.shape[0])
    own = d[s.d][: s.num_bags, s.column : s.column + table.shape[1]].to(torch.float32)
    own = bags.per_bag(own) if s.mean and not entries else own
    return bags, own, bags.take(weights[s.weights]) if s.weights >= 0 else None


def _joined(parts: list[tuple[Bags, Tensor, Tensor | None]]) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return (rows i[K], offsets i[ΣB + 1], d f32[ΣB, D], weights f32[K] or None): a table's segments, joined."""
    if len(parts) == 1:
        bags, d, weights = parts[0]
        return bags.rows, bags.offsets, d.contiguous(), weights
    dtype = functools.reduce(torch.promote_types, (bags.rows.dtype for bags, *_ in parts))
    rows, offsets, scales, total = [], [torch.zeros(1, dtype=dtype)], [], 0
    for bags, _, weights in parts:
        begin, end = int(bags.offsets[0]), int(bags.offsets[-1])
        rows.append(bags.rows[begin:end].to(dtype))
        offsets.append(bags.offsets[1:].to(dtype) + (total - begin))
        scales.append(torch.ones(end - begin) if weights is None else weights[begin:end])
        total += end - begin
    weighted = any(weights is not None for *_, weights in parts)
    return (
        torch.cat(rows),
        torch.cat(offsets),
        torch.cat([d for _, d, _ in parts]),
        torch.cat(scales) if weighted else None,
    )


def _update(ops, table, state, rows, offsets, d, weights, lr, rule, numbers) -> None:
    num_rows, dim = table.shape
    placement, at, rows_before = _ints32(0), torch.zeros(1, dtype=torch.int64), torch.tensor([0, num_rows])
    bits = max(num_rows.bit_length(), 1)
    where = (
        d,
        table.view(-1),
        placement,
        at,
        _ints32(0, dim),
        dim,
        rows_before,
        bits,
        rows,
        offsets,
        SUM,
        weights,
        False,
    )
    if rule == "sgd":
        ops.split_embedding_backward_codegen_sgd_cpu(*where, lr)
        return
    names = {"adagrad": "split_embedding_backward_codegen_adagrad_cpu"}
    update = getattr(ops, names.get(rule, "split_embedding_backward_codegen_rowwise_adagrad_cpu"))
    update(*where, state.view(-1), placement, at, lr, numbers["eps"])


# -- what FBGEMM cannot do ---------------------------------------------------------------------------------------


def _check_table(call: str, table: Tensor) -> None:
    _check_dtype(call, table, TABLE_DTYPES)
    if table.shape[1] % DIM_STEP or table.shape[1] == 0:
        need = f"a dim that {DIM_STEP} divides"
        _fail(call, "FBGEMM's tables have no such dim.", f"dim {table.shape[1]}", need, "another implementation")
    if not table.is_contiguous():
        got = f"strides {table.stride()}"
        _fail(call, "a table is not contiguous.", got, "rows end to end", "table.contiguous()")


def _check_rule(call: str, rule: str, hyper: Sequence[float]) -> dict[str, float]:
    """Return {name: number} of the rule's hyper-parameters. Raise if FBGEMM cannot run the rule."""
    if rule not in RULES:
        got, need = f"{rule!r}", f"one of {sorted(RULES)}"
        _fail(call, "FBGEMM's CPU operators do not train this rule.", got, need, "another implementation")
    numbers = dict(zip(RULES[rule], hyper, strict=True))
    for name in UNSUPPORTED:
        if numbers.get(name):
            what = f"FBGEMM's CPU operators drop `{name}`."
            _fail(call, what, f"{name}={numbers[name]}", f"{name}=0", "another implementation")
    return numbers


def _check_whole_rows(call: str, tables: Sequence[Tensor], dims: Sequence[int]) -> None:
    if any(dim != t.shape[1] for t, dim in zip(tables, dims)):
        got = f"gradients of {list(dims)} columns for tables of {[t.shape[1] for t in tables]}"
        _fail(call, "FBGEMM's CPU operators know no columns of a row.", got, "whole rows", "another implementation")


def _check_rounding(call: str, table: Tensor, key: Tensor | None) -> None:
    if key is not None and table.dtype != torch.float32:
        got = f"a key and a table of {table.dtype}"
        _fail(
            call,
            "FBGEMM's stochastic rounding takes no key.",
            got,
            "no key: rounding to nearest",
            "another implementation",
        )
