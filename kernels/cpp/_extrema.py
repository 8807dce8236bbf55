"""The greatest or least value of each bag, and the transpose of its choice, in C++ (csrc/extrema.h)."""

import torch
from funcrec.kernels.cpp._native import bounds, call, empty, fail
from torch import Tensor

KINDS = {
    torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3, torch.int32: 4, torch.int64: 5,
    torch.int16: 6, torch.int8: 7, torch.uint8: 8,
}  # fmt: skip


def bag_extrema(values: Tensor, offsets: Tensor, greatest: bool, placed: bool) -> tuple[Tensor, Tensor]:
    """Return (the best value of each bag [B, ...], the first place of that value i64[B, ...], or [0] if not placed)."""
    if values.dtype not in KINDS or not values.is_cpu or not values.dim():
        got, need = f"{values.dtype}{list(values.shape)} on {values.device}", f"{[*map(str, KINDS)]} on cpu"
        fail("bag_extrema", "the values have no extrema here.", got, need, "values.float()", TypeError)
    values, offsets = values.contiguous(), offsets.contiguous()
    width, described = values.shape[1:].numel(), bounds(offsets)
    shape = (offsets.shape[0] - 1, *values.shape[1:])
    out = empty(shape, values.dtype)
    places = empty(shape if placed else (0,), torch.int64)
    at = values.data_ptr(), KINDS[values.dtype], values.shape[0], width, width
    call("bag_extrema", [*at, *described, greatest, out.data_ptr(), placed, places.data_ptr()])
    return out, places


def bag_extrema_transpose(d: Tensor, offsets: Tensor, places: Tensor, num_values: int) -> Tensor:
    """Return zeros [N, ...] with d[b, j] at places[b, j]. A place outside its bag is left out."""
    if places.dtype != torch.int64 or places.shape != d.shape or not d.shape or d.shape[0] != offsets.shape[0] - 1:
        got, need = f"{places.dtype}{list(places.shape)}", f"i64{list(d.shape)}, a row for each bag"
        fail("bag_extrema_transpose", "`places` do not match.", got, need, "the places that bag_extrema gave")
    if d.itemsize > 8 or not (d.is_cpu and places.is_cpu):
        got, need = f"{d.dtype} on {d.device}", "at most 8 bytes for each number, on cpu"
        fail("bag_extrema_transpose", "`d` cannot be moved.", got, need, "d.float().cpu()", TypeError)
    d, offsets, places = d.contiguous(), offsets.contiguous(), places.contiguous()
    described = bounds(offsets)
    out = empty((num_values, *d.shape[1:]), d.dtype)
    at = d.data_ptr(), d.shape[1:].numel(), d.itemsize
    call("bag_extrema_transpose", [*at, *described, places.data_ptr(), out.data_ptr(), num_values])
    return out
