"""What to write in place of an operator that has no fixed order of operations."""

from typing import Any

OTHERWISE = "products, sums and elementwise functions in its place"
OUTSIDE = "compute it before the call, and pass it as an argument"
HINTS = {  # beginnings of operators' names: words
    "rand normal uniform bernoulli exponential log_normal geometric cauchy poisson multinomial native_dropout rrelu": (
        "fr.random with a key, such as fr.random.bernoulli(key, ...)"
    ),
    "convolution _convolution mkldnn_convolution conv": "x.unfold(-1, size, step), and torch.einsum with the weights",
    "_embedding_bag": "fr.lookup, or torch.nn.functional.embedding(ids, x).sum(1)",
    "scatter_reduce segment_reduce index_reduce": "fr.bag_reduce for bags, x.scatter_add for sums, reduce='amax'",
    "bincount histc histogram": "torch.zeros(n).index_add(0, ids, weights)",
    "_cdist _pdist cdist": "torch.linalg.vector_norm(x[:, None] - y, dim=-1)",
    "_trilinear": "torch.einsum('bi,oij,bj->bo', x, weights, y)",
    "cond while_loop": "fr.cond, fr.while_loop, fr.fori_loop",
    "hypot": "(x * x + y * y).sqrt()",
    "_foreach _fused": "a loop over the tensors (foreach=False)",
    "_native_multi_head _transformer_encoder": "torch.backends.mha.set_fastpath_enabled(False)",
    "mkldnn_rnn": "the call inside of torch.backends.mkldnn.flags(enabled=False)",
    "linalg _linalg svd qr cholesky triangular lu inverse eig geqrf ormqr lstsq _fft fft stft logdet": OUTSIDE,
    "index_put put": "x.index_put(indices, values, accumulate=True) with indices of whole numbers",
}


def hint_for(operator: Any) -> str:
    """Return what to write in place of an operator."""
    name = str(operator).split(".")[1] if str(operator).count(".") else str(operator)
    found = (words for starts, words in HINTS.items() if name.startswith(tuple(starts.split())))
    return next(found, OTHERWISE)
