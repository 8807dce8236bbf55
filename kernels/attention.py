"""The schemas of attention and of its transpose, and the shapes of their results."""

import torch
from funcrec.kernels.forms import accumulation_dtype
from torch import Tensor

_PAIRS = (
    "Tensor queries, Tensor keys, Tensor values, Tensor offsets, Tensor key_offsets, Tensor? position_bias, Tensor? "
    "time_bias, Tensor? query_times, Tensor? key_times, Tensor? num_targets, float scale, float normalizer, bool "
    "softmax, bool causal"
)
SCHEMAS = {
    "jagged_attention": f"({_PAIRS}) -> (Tensor, Tensor)",
    "jagged_attention_transpose": f"(Tensor d_out, Tensor out, Tensor logs, {_PAIRS}) -> (Tensor, Tensor, Tensor, "
    "Tensor, Tensor)",
}


def _blank(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _jagged_attention(queries, keys, values, *rest):
    num_queries, heads = queries.shape[:2]
    logs = queries.new_empty((num_queries if rest[9] else 0, heads), dtype=accumulation_dtype(queries.dtype))
    return queries.new_empty((num_queries, heads, values.shape[2])), logs


def _jagged_attention_transpose(d_out, out, logs, queries, keys, values, offsets, key_offsets, *rest):
    biases = (queries.new_empty((0, 0)) if x is None else _blank(x) for x in rest[:2])
    return _blank(queries), _blank(keys), _blank(values), *biases


FAKES = {"jagged_attention": _jagged_attention, "jagged_attention_transpose": _jagged_attention_transpose}
