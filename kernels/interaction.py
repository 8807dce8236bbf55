"""The schemas of the products of all pairs of vectors and of their transpose, and the shapes of their results."""

SCHEMAS = {
    "dot_interaction": "(Tensor[] x) -> Tensor",
    "dot_interaction_transpose": "(Tensor d, Tensor[] x) -> Tensor[]",
}


def num_pairs(x) -> int:
    """Return the number of pairs of different vectors in parts [B, F, D] of a stack."""
    vectors = sum(part.shape[1] for part in x)
    return vectors * (vectors - 1) // 2


FAKES = {
    "dot_interaction": lambda x: x[0].new_empty((x[0].shape[0], num_pairs(x))),
    "dot_interaction_transpose": lambda d, x: [part.new_empty(part.shape) for part in x],
}
