"""Helpers for calls of FBGEMM's operators: load the operators, prepare bags for them, and report unsupported calls.

Shapes: B bags, N ids of a buffer, K ids that count.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Bags(NamedTuple):
    """B bags, with only the ids that count.

    rows: i[K], or the whole buffer.
    offsets: i[B + 1], the boundaries of the bags in `rows`.
    positions: i64[K], the buffer position of each row; None if `rows` is the whole buffer.
    lengths: i64[B], the divisors of means; they also count ids that were left out.
    """

    rows: Tensor
    offsets: Tensor
    positions: Tensor | None
    lengths: Tensor

    def take(self, x: Tensor) -> Tensor:
        """Return the number of x, f[N], for each of `rows`, in f32."""
        x = x.to(torch.float32)
        return x.contiguous() if self.positions is None else x.index_select(0, self.positions)

    def per_bag(self, d: Tensor) -> Tensor:
        """Return d f[B, D] divided by the lengths of the bags."""
        return d / self.lengths.clamp(min=1).to(d.dtype)[:, None]


# -- bags in FBGEMM's form ---------------------------------------------------------------------------------------


def _ints32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def _offsets(ops, lengths: Tensor) -> Tensor:
    """Return offsets i64[B + 1] from lengths i[B]."""
    return ops.asynchronous_complete_cumsum(lengths.to(torch.int64).contiguous())


def _positions(ops, starts: Tensor, offsets: Tensor) -> Tensor:
    """Return the positions starts[b], starts[b] + 1, ... of each bag b, end to end, i64[offsets[-1]]."""
    if starts.shape[0] == 0:  # The operator raises if there are no bags.
        return torch.zeros(0, dtype=torch.int64)
    bags = torch.arange(starts.shape[0])
    starts = torch.cat([starts.to(torch.int64), starts.new_zeros(1, dtype=torch.int64)])  # B + 1 numbers
    return ops.expand_into_jagged_permute(bags, starts, offsets, int(offsets[-1]))


def _bags(ops, rows: Tensor, bounds: Tensor, max_length: int, num_rows: int) -> Bags:
    """Return the bags at `bounds`, each cut to max_length, without ids outside [0, num_rows).

    Most often `rows` needs no change, and is returned itself.
    """
    bounds = bounds.to(torch.int64).clamp(0, rows.shape[0])
    lengths = bounds.diff().clamp(min=0)
    lengths = lengths.clamp(max=max_length) if max_length else lengths
    begin, end = int(bounds[0]), int(bounds[-1])
    if torch.equal(lengths, bounds.diff()):
        least, most = rows[begin:end].aminmax() if end > begin else (0, -1)
        if least >= 0 and most < num_rows:
            return Bags(rows.contiguous(), _like_rows(bounds, rows), None, lengths)
    offsets = _offsets(ops, lengths)
    positions = _positions(ops, bounds[:-1], offsets)
    chosen = rows.index_select(0, positions)
    inside = (chosen >= 0) & (chosen < num_rows)
    offsets = _offsets(ops, inside).index_select(0, offsets)
    return Bags(chosen[inside], _like_rows(offsets, rows), positions[inside], lengths)


def _like_rows(offsets: Tensor, rows: Tensor) -> Tensor:
    """Return offsets in the dtype of the ids, as the operators require. The dtype must hold the offsets [0, N]."""
    if rows.dtype == torch.int32 and rows.shape[0] > torch.iinfo(torch.int32).max:
        what, got = "the buffer is too long for i32 ids.", f"{rows.shape[0]} ids"
        _fail("funcrec.kernels", what, got, "i64 ids", "rows.long()")
    return offsets.to(rows.dtype)


# -- what FBGEMM cannot do ---------------------------------------------------------------------------------------


@functools.cache
def _load(call: str):
    try:
        import fbgemm_gpu  # noqa: F401 (registers the operators)
    except (ImportError, OSError) as error:
        what, hint = "FBGEMM cannot be imported.", 'pip install "funcrec[fbgemm-cpu]", in the version that fits torch'
        _fail(call, what, f"{type(error).__name__}: {error}", "fbgemm_gpu", hint, ImportError, error)
    return torch.ops.fbgemm


def _operators(call: str, *tensors: Tensor | None):
    """Return torch.ops.fbgemm. Raise if a tensor is not on the CPU."""
    elsewhere = sorted({str(x.device) for x in tensors if x is not None and x.device.type != "cpu"})
    if elsewhere:
        hint = "another implementation"
        _fail(call, "the FBGEMM adapter calls CPU operators.", f"tensors on {elsewhere}", "CPU tensors", hint)
    return _load(call)


def _check_dtype(call: str, x: Tensor, dtypes: Sequence[torch.dtype]) -> None:
    if x.dtype not in dtypes:
        need = " or ".join(map(str, dtypes))
        _fail(call, "FBGEMM's CPU operator has no such dtype.", str(x.dtype), need, "another implementation", TypeError)


def _fail(
    call: str, what: str, got: str, need: str, hint: str, kind: type = ValueError, cause: Exception | None = None
):
    raise kind(f"{call}: {what}\n  got   {got}\n  need  {need}\n  try   {hint}") from cause
