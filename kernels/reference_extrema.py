"""The greatest or least value of each bag in plain torch, the place of that value, and the transpose of its choice.

Shapes: B bags, N values.
"""

import torch
from funcrec.kernels.reference_jagged import ascending, place_among
from torch import Tensor


def bag_extrema(values: Tensor, offsets: Tensor, greatest: bool, placed: bool) -> tuple[Tensor, Tensor]:
    num_bags, size, given = offsets.shape[0] - 1, values.shape[0], values
    values = values.detach() if placed else values  # the choice has no derivative
    bag, how = _bags(offsets, size), "amax" if greatest else "amin"
    index = _column(bag, values).expand(values.shape)
    start = values.new_full((num_bags + 1, *values.shape[1:]), limit_of(values.dtype, greatest))
    best = start.scatter_reduce(0, index, values, how)  # the last row is for positions in no bag
    if not placed:
        return best[:num_bags], torch.empty(0, dtype=torch.int64, device=values.device)
    is_best = (values == best.index_select(0, bag)) | (values != values)  # next to a NaN, nothing equals the best
    dtype = torch.float32 if isinstance(size, int) and size < 1 << 24 else torch.int64  # f32 holds these positions
    place = _column(torch.arange(size, dtype=dtype, device=values.device), values).expand(values.shape)
    place = torch.where(is_best, place, torch.full((), size, dtype=dtype, device=values.device))
    last = torch.full((num_bags + 1, *values.shape[1:]), size, dtype=dtype, device=values.device)
    places = last.scatter_reduce(0, index, place, "amin")[:num_bags].long()
    return picked(given, places, greatest), places


def bag_extrema_transpose(d: Tensor, offsets: Tensor, places: Tensor, num_values: int) -> Tensor:
    own = torch.arange(d.shape[0], device=d.device)
    bag = torch.cat([_bags(offsets, num_values), own.new_full((1,), -1)])
    inside = (places >= 0) & (places < num_values)
    place = torch.where(inside, places, num_values)
    is_own = bag.index_select(0, place.flatten()).unflatten(0, places.shape) == _column(own, places)
    place, d = torch.where(is_own, place, num_values), torch.where(is_own, d, 0)
    return d.new_zeros((num_values + 1, *d.shape[1:])).scatter_add(0, place, d)[:-1]


def picked(values: Tensor, places: Tensor, greatest: bool) -> Tensor:
    """Return values[places[b, j], j], and the limit of the dtype at place N."""
    limit = values.new_full((1, *values.shape[1:]), limit_of(values.dtype, greatest))
    return torch.cat([values, limit]).gather(0, places)


def limit_of(dtype: torch.dtype, greatest: bool) -> float | int:
    """Return the extremum of no values: the dtype's least number for the maximum, its greatest number for the
    minimum."""
    if dtype.is_floating_point:
        return -torch.inf if greatest else torch.inf
    return torch.iinfo(dtype).min if greatest else torch.iinfo(dtype).max


def _bags(offsets: Tensor, size: int) -> Tensor:
    """Return the bag of each position, i64[N], and B for positions in no bag."""
    bag = place_among(ascending(offsets).long(), torch.arange(size, device=offsets.device)) - 1
    return torch.where(bag < 0, offsets.shape[0] - 1, bag)


def _column(x: Tensor, like: Tensor) -> Tensor:
    return x.view(-1, *[1] * (like.dim() - 1))
