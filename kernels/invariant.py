"""The schemas of products and sums whose bits do not depend on the batch, and the shapes of their results."""

SCHEMAS = {"invariant_bmm": "(Tensor a, Tensor b) -> Tensor", "invariant_sum": "(Tensor x) -> Tensor"}
# Elementwise functions of one number, in the order of csrc/functions_loop.h.
FUNCTIONS = (
    "exp", "expm1", "log", "log1p", "log2", "log10", "sigmoid", "tanh", "sqrt", "rsqrt", "sinh", "cosh", "asinh",
    "acosh", "atanh", "sin", "cos", "tan", "asin", "acos", "atan", "erf", "erfc", "erfinv",
)  # fmt: skip
CHAIN = 256  # the most terms that are summed in order; csrc/chains.h has the same number

FAKES = {
    "invariant_bmm": lambda a, b: a.new_empty((a.shape[0], a.shape[1], b.shape[2])),
    "invariant_sum": lambda x: x.new_empty((x.shape[0], x.shape[2])),
}


def num_blocks(terms: int) -> int:
    """Return the number of blocks of a sum: the least power of two for which no block has more than CHAIN terms."""
    return 1 << (max(-(-terms // CHAIN), 1) - 1).bit_length()
