"""Normal noise for gradients, made by a key: that of a row follows its table's name and its number.

noise of row r of table t = normal(fold_in(key, t), row r)        in f64, whose tail reaches 8 deviations
"""

import hashlib
from typing import cast

import torch
from torch import Tensor

from funcrec.core import random, replace, tree_flatten, tree_unflatten
from funcrec.jagged import is_concrete
from funcrec.tables import Entries, Params, RowGrads


def with_noise(grads: Params, key: Tensor, scale: float | Tensor, rows: str) -> Params:
    """Return the gradients with normal noise of standard deviation `scale` for each dense number and each row.

    rows: "all", "touched", or "later", which leaves tables without noise."""
    leaves, structure = tree_flatten(grads.dense)
    for_dense, _ = random.split(key)
    noise = lambda i, x: random.normal(random.fold_in(for_dense, i), tuple(x.shape), dtype=torch.float64)
    dense = [(x + scale * noise(i, x)).to(x.dtype) if isinstance(x, Tensor) else x for i, x in enumerate(leaves)]
    noisy = lambda n, g: g if rows == "later" else _noisy_rows(g, key_of_table(key, n), scale, rows)
    tables = {n: noisy(n, g) for n, g in grads.tables.items()}
    return Params(tables, tree_unflatten(dense, structure))


def key_of_table(key: Tensor, name: str) -> Tensor:
    """Return the key that makes the noise of a table's rows."""
    return random.fold_in(random.split(key)[1], number_of(name))


def number_of(name: str) -> int:
    """Return 63 bits that hardly any two names share: two tables with one number would have the same noise."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1


def _noisy_rows(grads: RowGrads, key: Tensor, scale: float | Tensor, rows: str) -> RowGrads:
    if rows == "touched":
        out = grads.coalesce()
        term = cast(Entries, out.terms[0])
        if is_concrete(out.count):  # else noise is made for padding, too
            own = slice(int(out.count))
            term = Entries(term.rows[own], term.grads[own], out.count, None)
            out = replace(out, terms=(term,))
        noisy = (term.grads + scale * row_noise(key, term.rows, grads.dim)).to(term.grads.dtype)
        return replace(out, terms=(replace(term, grads=torch.where(out.valid[:, None], noisy, term.grads)),))
    every = torch.arange(grads.num_embeddings, device=key.device)
    noise = (scale * row_noise(key, every, grads.dim)).to(grads.floats[0].dtype)
    return grads + RowGrads.from_entries(every, noise, num_embeddings=grads.num_embeddings)


def row_noise(key: Tensor, rows: Tensor, dim: int) -> Tensor:
    """Return normal numbers f64[M, D] of rows i[M]: those of a row are the same in whatever place it stands."""
    return random.normal(key, (rows.shape[0], dim), start=rows.long() * dim, dtype=torch.float64)
