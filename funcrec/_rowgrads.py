"""RowGrads: a table's cotangent as (row, gradient) entries.

    dense gradient [R, D] = Σ_i e_{rows[i]} ⊗ grads[i]

An entry counts when it stands before `count` and its row is in [0, R); all others are padding. Floor 2.
Shapes: M entries, R rows of the table, D dim.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from funcrec._errors import describe, fail
from funcrec._tree import pytree, replace
from funcrec.kernels import ops


@pytree(static=("num_embeddings", "coalesced"), optional=("repeats",))
class RowGrads:
    """The gradient of one table, row by row; `dense == grads.to_dense()`.

    Args:
      rows: i[M].
      grads: f[M, D].
      count: i64[], entries behind it are padding.
      repeats: i64[M], how many ids each entry sums, once coalesced.
      num_embeddings: R, the height of the table.
      coalesced: whether rows[:count] are distinct and ascending.

    Example:
      >>> import torch, funcrec as fr
      >>> g = fr.RowGrads.from_entries(torch.tensor([2, 0, 2]), torch.ones(3, 1), num_embeddings=4)
      >>> g.coalesce().to_dense().flatten()
      tensor([1., 0., 2., 0.])
    """

    rows: Tensor
    grads: Tensor
    count: Tensor
    repeats: Tensor | None = None
    num_embeddings: int = 0
    coalesced: bool = False

    @staticmethod
    def from_entries(rows: Tensor, grads: Tensor, *, num_embeddings: int) -> "RowGrads":
        """Entries in any order, with repeats; a row outside [0, num_embeddings) marks padding."""
        call = "funcrec.RowGrads.from_entries"
        if not isinstance(rows, Tensor) or rows.dtype not in (torch.int32, torch.int64) or rows.dim() != 1:
            fail(call, "`rows` are not rows.", got=describe(rows), need="i32[M] or i64[M]", kind=TypeError)
        if not isinstance(grads, Tensor) or grads.dim() != 2 or grads.shape[0] != rows.shape[0]:
            got = f"{describe(grads)}; rows is {describe(rows)}"
            fail(call, "`grads` does not match its rows.", got=got, need=f"f[{rows.shape[0]}, D]")
        if num_embeddings > torch.iinfo(rows.dtype).max:
            fail(call, "`rows` cannot hold every row.", got=f"{describe(rows)}; {num_embeddings} rows", need="i64 rows")
        count = torch.full((), rows.shape[0], dtype=torch.int64, device=rows.device)
        return RowGrads(rows, grads, count, None, num_embeddings, False)

    @staticmethod
    def zeros(shape: tuple[int, int], *, dtype: torch.dtype = torch.float32, device=None) -> "RowGrads":
        """The zero gradient of a table [R, D]: no entries."""
        rows = torch.zeros(0, dtype=torch.int64, device=device)
        return RowGrads.from_entries(
            rows, torch.zeros(0, shape[1], dtype=dtype, device=device), num_embeddings=shape[0]
        )

    @property
    def valid(self) -> Tensor:
        """bool[M]: the entries that count."""
        position = torch.arange(self.rows.shape[0], device=self.rows.device)
        return (position < self.count) & (self.rows >= 0) & (self.rows < self.num_embeddings)

    def coalesce(self, *, implementation: str = "reference") -> "RowGrads":
        """One entry per distinct row, rows ascending; gradients of a row are summed in the order of their entries."""
        if self.coalesced:
            return self
        marked = torch.where(self.valid, self.rows, -1)
        rows, grads, count, repeats = ops.coalesce(
            marked, self.grads, self.num_embeddings, implementation=implementation
        )
        if self.repeats is not None:  # a sum of coalesced gradients: its entries stand for several ids each
            counts = self.repeats.to(torch.float64)[:, None]
            repeats = ops.coalesce(marked, counts, self.num_embeddings)[1][:, 0].to(torch.int64)
        return RowGrads(rows, grads, count, repeats, self.num_embeddings, True)

    def to_dense(self) -> Tensor:
        """f[R, D]."""
        rows = torch.where(self.valid, self.rows, self.num_embeddings)
        terms = torch.where(self.valid[:, None], self.grads, 0)
        dense = terms.new_zeros(self.num_embeddings + 1, terms.shape[1])
        return dense.scatter_add(0, rows[:, None].expand(terms.shape), terms)[: self.num_embeddings]

    def scale(self, factor: float | Tensor) -> "RowGrads":
        """factor · gradient."""
        return replace(self, grads=self.grads * factor)

    def clip(self, max_value: float) -> "RowGrads":
        """Each element of the (coalesced) gradient clamped to [-max_value, max_value]."""
        out = self.coalesce()
        return replace(out, grads=out.grads.clamp(-max_value, max_value))

    def squared_norm(self) -> Tensor:
        """f[]: Σ of the squares of the coalesced gradient."""
        out = self.coalesce()
        return torch.where(out.valid[:, None], out.grads, 0).square().sum()

    def norm(self) -> Tensor:
        """f[]: the Euclidean norm of the dense gradient."""
        return self.squared_norm().sqrt()

    def __add__(self, other: "RowGrads") -> "RowGrads":
        """The entries of both, this one's first."""
        shape, theirs = (self.num_embeddings, self.grads.shape[1]), (other.num_embeddings, other.grads.shape[1])
        if shape != theirs:
            got = f"{list(shape)} and {list(theirs)}"
            fail("funcrec.RowGrads.__add__", "the gradients are of different tables.", got=got, need="one shape")
        mark = lambda g: torch.where(g.valid, g.rows, -1)
        rows = torch.cat([mark(self), mark(other).to(self.rows.dtype)])
        out = RowGrads.from_entries(rows, torch.cat([self.grads, other.grads]), num_embeddings=self.num_embeddings)
        if self.repeats is None and other.repeats is None:
            return out
        ids = lambda g: torch.ones_like(g.rows, dtype=torch.int64) if g.repeats is None else g.repeats
        return replace(out, repeats=torch.cat([ids(self), ids(other)]))

    def __repr__(self) -> str:
        state = "coalesced" if self.coalesced else "entries"
        return f"RowGrads({state}, rows={describe(self.rows)}, grads={describe(self.grads)}, of {self.num_embeddings} rows)"


def global_norm(grads: Mapping[str, RowGrads], *more: Tensor) -> Tensor:
    """f[]: the norm over all tables, and over dense gradients if given.

    Example:
      >>> import torch, funcrec as fr
      >>> g = fr.RowGrads.from_entries(torch.tensor([1]), torch.tensor([[3.0]]), num_embeddings=2)
      >>> fr.global_norm({"item": g}, torch.tensor([4.0]))
      tensor(5.)
    """
    squares = [g.squared_norm() for g in grads.values()] + [g.square().sum() for g in more]
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros(())


def clip_by_global_norm(grads: Mapping[str, RowGrads], max_norm: float) -> dict[str, RowGrads]:
    """Scale all tables' gradients by min(1, max_norm / global norm).

    Example:
      >>> import torch, funcrec as fr
      >>> g = fr.RowGrads.from_entries(torch.tensor([0]), torch.tensor([[3.0, 4.0]]), num_embeddings=1)
      >>> fr.clip_by_global_norm({"t": g}, 1.0)["t"].to_dense()
      tensor([[0.6000, 0.8000]])
    """
    coalesced = {name: g.coalesce() for name, g in grads.items()}
    factor = (max_norm / (global_norm(coalesced) + CLIP_EPS)).clamp(max=1)
    return {name: g.scale(factor) for name, g in coalesced.items()}


CLIP_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_'s
