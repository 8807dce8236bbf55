"""The schemas of the extrema of bags and of their transpose, and the shapes of their results."""

import torch

SCHEMAS = {
    "bag_extrema": "(Tensor values, Tensor offsets, bool greatest, bool placed) -> (Tensor, Tensor)",
    "bag_extrema_transpose": "(Tensor d, Tensor offsets, Tensor places, SymInt num_values) -> Tensor",
}


def _bag_extrema(values, offsets, greatest, placed):
    shape = (offsets.shape[0] - 1, *values.shape[1:])
    return values.new_empty(shape), values.new_empty(shape if placed else (0,), dtype=torch.int64)


FAKES = {
    "bag_extrema": _bag_extrema,
    "bag_extrema_transpose": lambda d, offsets, places, num_values: d.new_empty((num_values, *d.shape[1:])),
}
