"""RowGrads: the cotangent of a table as a sum of terms, one or more from each lookup of the table.

    dense gradient [R, D] = Σ_terms Σ_i e_{rows[i]} ⊗ grads[i]

A term is either `Entries`, each a row and a gradient, or `Bags`: a pooled lookup's ids and the gradient of its output,
which determine the entries. Sums and factors keep the terms. `coalesce`, an update, or reading `rows` or `grads` writes
the entries out. An entry counts if its place is less than `count` and its row is in [0, R).
Shapes: M entries, N ids, B bags, C columns, R rows of the table, D dim.
"""

from collections.abc import Sequence
from typing import Annotated, Any, cast

import torch
from torch import Tensor

from funcrec.core import (
    Device,
    Form,
    Movable,
    NotNegative,
    Scalar,
    Size,
    describe,
    fail,
    is_forward,
    is_tracked,
    plain,
    pytree,
    replace,
    sure,
    typed,
)
from funcrec.kernels import ops, reference
from funcrec.kernels.forms import Feature, Segment, Terms, capacity_of, flatten
from funcrec.mesh import is_readable
from funcrec.tables._exact_sum import exact_sum, root
from funcrec.tables._primitives import dense_sum, segments_of_lookup

WAITING = "pending_rows", "pending_grads"  # names of the slots with a gradient's entries that a later step will use


@pytree(optional=("count", "repeats"))
class Entries:
    """Entries of a gradient: rows i[M] and grads f[M, D].

    Entries from place `count`, i64[], on are padding. `repeats`, i64[M], is how many ids each entry sums."""

    rows: Tensor
    grads: Tensor
    count: Tensor | None = None
    repeats: Tensor | None = None

    def marked(self) -> Tensor:
        """Return the rows, with -1 from place `count` on."""
        if self.count is None:
            return self.rows
        return torch.where(torch.arange(self.rows.shape[0], device=self.rows.device) < self.count, self.rows, -1)


@pytree(static=("features",), optional=("weights",))
class Bags:
    """The gradients of one pooled lookup for one table.

    Row rows[i] gets s_i · d[b, column : column + D], for each id i of bag b. s_i is the id's factor, as in `lookup`.
    d: f[B, C], the cotangent of the lookup's output. rows: i[N]. offsets: the bags of all features. weights: f[N]."""

    d: Tensor
    rows: Tensor
    offsets: Tensor
    weights: Tensor | None = None
    features: tuple[Feature, ...] = ()


@pytree(static=("num_embeddings", "dim", "coalesced", "axes"), optional=("first", "origin", "mark"))
class RowGrads(Movable):
    """The gradient of one table, row by row. `to_dense` returns it as a matrix.

    Args:
      terms: the terms of the sum.
      num_embeddings: R, the height of the table. dim: D.
      coalesced: whether the gradient is one term of Entries, with distinct, ascending rows before its count.
      axes: the mesh axes that cut the table, if this is one rank's part. Norms are norms of the whole table's gradient.
      first: i64[], for a table that holds columns [first, first + width) of rows of D columns. The gradient has all D
        columns, for optimizers that read whole rows (`RowOptimizer.is_gradient_wise`). None for a table of whole rows.
      origin: S + 1 rows of five integers, the tables from which the rows come, if the optimizer sees them in another
        place. Each segment of rows has an `origin_of`, by ascending begin; BEHIND comes last. None for the table's own
        rows and columns. The bits of random rounding depend on the origin. Ids of a vocabulary are rows of an origin.
      mark: i64[], 1, set where forward derivatives are taken (jvp). A tangent has the same tree, with zeros for
        integers: its mark is 0, and its rows are lost. Code that reads rows refuses tangents. So call `to_dense` inside
        the jvp.

    Example:
      >>> import torch, funcrec as fr
      >>> g = fr.RowGrads.from_entries(torch.tensor([2, 0, 2]), torch.ones(3, 1), num_embeddings=4)
      >>> g.coalesce().to_dense().flatten()
      tensor([1., 0., 2., 0.])
    """

    terms: tuple[Entries | Bags, ...]
    num_embeddings: int = 0
    dim: int = 0
    coalesced: bool = False
    axes: tuple[str, ...] = ()
    first: Tensor | None = None
    origin: Tensor | None = None
    mark: Tensor | None = None

    def __post_init__(self) -> None:
        if is_forward() and self.mark is None:
            object.__setattr__(self, "mark", torch.ones((), dtype=torch.int64))

    @staticmethod
    @typed
    def from_entries(
        rows: Annotated[Tensor, Form("i[M]")],
        grads: Annotated[Tensor, Form("f[M, D]")],
        *,
        num_embeddings: Size,
        count: Annotated[Tensor, Form("i[]")] | None = None,
        repeats: Annotated[Tensor, Form("i[M]")] | None = None,
        coalesced: bool = False,
    ) -> "RowGrads":
        """Return the gradient with these entries, in any order and with repeated rows.

        An entry with a row outside [0, num_embeddings) is padding, and so is each entry from place `count` on.

        Args:
          rows: i32[M] or i64[M]. grads: f[M, D].
          count: i64[]; None for M. repeats: i64[M], how many ids each entry sums; None for one id each.
          coalesced: whether the caller guarantees that the rows before place `count` are distinct and ascend.
        """
        if num_embeddings > torch.iinfo(rows.dtype).max:
            call, got = "funcrec.RowGrads.from_entries", f"{describe(rows)}; {num_embeddings} rows"
            fail(call, "`rows` cannot hold every row.", got=got, need="i64 rows")
        return RowGrads((Entries(rows, grads, count, repeats),), num_embeddings, grads.shape[1], coalesced)

    @staticmethod
    @typed
    def zeros(
        shape: tuple[Size, Size], *, dtype: torch.dtype = torch.float32, device: Device | None = None
    ) -> "RowGrads":
        """Return the zero gradient of a table [R, D], which has no entries."""
        rows = torch.zeros(0, dtype=torch.int64, device=device)
        grads = torch.zeros(0, shape[1], dtype=dtype, device=device)
        return RowGrads((Entries(rows, grads),), shape[0], shape[1], False)

    @property
    def capacity(self) -> int:
        """Return M, the number of entries when written out."""
        return sum(map(_capacity, self.terms))

    @property
    def floats(self) -> list[Tensor]:
        """Return the tensors that can be differentiated: those in which the gradient is linear, and the weights."""
        own = lambda t: (t.d, t.weights) if isinstance(t, Bags) else (t.grads,)
        return [x for t in self.terms for x in own(t) if x is not None]

    @property
    def has_repeats(self) -> bool:
        """Return whether an entry may sum several ids."""
        return any(_has_repeats(t) for t in self.terms)

    def entries(self) -> Entries:
        """Return all terms, written out as one term in plain torch."""
        self = usable(self)
        if len(self.terms) == 1 and isinstance(self.terms[0], Entries):
            return self.terms[0]
        d, rows, offsets, weights, segments = terms_of([self])
        rows, grads = reference.expand(d, rows, offsets, weights, flatten(segments), [self.num_embeddings, self.dim])
        if not self.has_repeats:
            return Entries(rows, grads)
        ones = lambda t: torch.ones(_capacity(t), dtype=torch.int64, device=rows.device)
        ids = [sure(t.repeats) if isinstance(t, Entries) and _has_repeats(t) else ones(t) for t in self.terms]
        return Entries(rows, grads, None, torch.cat(ids))

    @property
    def rows(self) -> Tensor:
        """Return the row of each entry -> i[M]."""
        return self.entries().rows

    @property
    def grads(self) -> Tensor:
        """Return the gradient of each entry -> f[M, D]."""
        return self.entries().grads

    @property
    def count(self) -> Tensor:
        """Return the place from which on entries are padding -> i64[]."""
        entries = self.entries()
        if entries.count is not None:
            return entries.count
        return torch.full((), entries.rows.shape[0], dtype=torch.int64, device=entries.rows.device)

    @property
    def repeats(self) -> Tensor | None:
        """Return how many ids each entry sums -> i64[M], or None if each entry sums one id."""
        return self.entries().repeats

    @property
    def valid(self) -> Tensor:
        """Return whether each entry counts -> bool[M]."""
        rows = self.entries().marked()
        return (rows >= 0) & (rows < self.num_embeddings)

    def coalesce(self, *, implementation: str | None = None) -> "RowGrads":
        """Return the gradient with one entry per distinct row, by ascending row. Sums run in the order of entries."""
        if self.coalesced:
            return self
        shape = (self.num_embeddings, self.dim)
        rows, grads, count, repeats = ops.coalesce(terms_of([self]), [shape], implementation=implementation)[0]
        if self.has_repeats:  # In a sum of coalesced gradients, an entry may sum several ids.
            own = self.entries()
            numbers = sure(own.repeats).to(torch.float64)[:, None]
            counts = RowGrads((replace(own, grads=numbers, repeats=None),), shape[0], 1)
            repeats = counts.coalesce(implementation=implementation).grads[:, 0].to(torch.int64)
        return RowGrads(
            (Entries(rows, grads, count, repeats),), *shape, True, self.axes, first=self.first, origin=self.origin
        )

    def to_dense(self) -> Tensor:
        """Return the dense gradient -> f[R, D]."""
        entries = self.entries()
        return dense_sum(entries.marked(), entries.grads, self.num_embeddings)

    @typed
    def scale(self, factor: float | Scalar) -> "RowGrads":
        """Return the gradient times a number, or a factor f[]."""
        times = lambda t: replace(t, d=t.d * factor) if isinstance(t, Bags) else replace(t, grads=t.grads * factor)
        return replace(self, terms=tuple(map(times, self.terms)))

    @typed
    def clip(self, max_value: NotNegative | Scalar) -> "RowGrads":
        """Return the coalesced gradient with each element clamped to [-max_value, max_value]."""
        out = self.coalesce()
        clamped = torch.clamp(out.grads, cast(Any, -max_value), cast(Any, max_value))  # both numbers, or both tensors
        return replace(out, terms=(replace(out.terms[0], grads=clamped),))

    def squared_norm(self) -> Tensor:
        """Return the sum of squares of the coalesced gradient -> f[]. Its bits do not depend on the rows' numbers."""
        return exact_sum([row_squares(self)])

    def norm(self) -> Tensor:
        """Return the Euclidean norm of the dense gradient -> f[]."""
        return root(self.squared_norm())

    @typed
    def __add__(self, other: "RowGrads") -> "RowGrads":
        """Return the sum of both gradients, with this gradient's terms before the other's terms."""
        shape, theirs = (self.num_embeddings, self.dim), (other.num_embeddings, other.dim)
        if shape != theirs:
            got = f"{list(shape)} and {list(theirs)}"
            fail("funcrec.RowGrads.__add__", "the gradients belong to different tables.", got=got, need="one shape")
        mine, theirs = usable(self), usable(other)
        return RowGrads(mine.terms + theirs.terms, *shape, False, self.axes, first=self.first, origin=self.origin)

    @typed
    def where(self, condition: Annotated[Tensor, Form("b[]")]) -> "RowGrads":
        """Return this gradient if condition bool[] holds, else a gradient without rows."""
        masked: dict[int, Tensor] = {}  # Terms that share a tensor keep sharing it.
        for t in self.terms:
            masked.setdefault(id(t.rows), torch.where(condition, t.rows, -1))
        return replace(self, terms=tuple(replace(t, rows=masked[id(t.rows)]) for t in self.terms))

    def __repr__(self) -> str:
        state = "coalesced" if self.coalesced else "entries"
        shape = f"[{self.capacity}, {self.dim}]"
        return f"RowGrads({state}, at most {shape}, of {self.num_embeddings} rows)"


def row_squares(grads: RowGrads) -> tuple[Tensor, tuple[str, ...]]:
    """Return (the sum of squares of each row of the coalesced gradient f[M], the axes whose ranks have other rows)."""
    out = grads.coalesce()
    valid, x = out.valid, out.grads
    if is_tracked(x):  # the derivative by garbage in the padding is 0
        x = torch.where(valid[:, None], x, 0)
    return torch.where(valid, x.square().sum(1), 0), out.axes


def is_stacked(term: "Entries | Bags") -> bool:
    """Return whether a term holds the gradients of all members of a vmap, as code outside the vmap sees them."""
    return (term.d if isinstance(term, Bags) else term.grads).dim() != 2


def usable(grads: RowGrads) -> RowGrads:
    """Return the gradient if code may read its rows. Raise if it is a tangent, or holds all members of a vmap."""
    what = hint = ""
    for t in grads.terms:
        if is_stacked(t):
            what, got = "the row gradients are stacked, one for each member of a vmap.", describe(grads.floats[0])
            hint = "torch.func.vmap(lambda g: g.to_dense())(grads), or use them inside of the mapped function"
    if grads.mark is not None and not what:
        mark = plain(grads.mark)
        if mark is None or not is_readable(grads.mark):  # `jit` or `linearize` is tracing a graph.
            return grads.scale(torch.where(grads.mark == 1, 1.0, torch.nan))
        if bool((mark == 0).any()):
            what, got = "these are tangents of row gradients, whose rows are not among them.", "RowGrads from a jvp"
            hint = "take `to_dense`, norms or updates inside of the function that is differentiated"
    if what:
        fail("funcrec.RowGrads", what, got=got, need="row gradients of one table", hint=hint, kind=TypeError)
    return grads


def terms_of(grads: Sequence[RowGrads]) -> Terms:
    """Return the terms of several tables' gradients in the form that kernels take. Each list has a tensor only once."""
    out = Terms([], [], [], [], [])
    for table, g in enumerate(grads):
        for t in usable(g).terms:
            if isinstance(t, Entries):
                places = {"d": _place(out.d, t.grads), "rows": _place(out.rows, t.marked()), "offsets": -1}
            else:
                places = {
                    "d": _place(out.d, t.d),
                    "rows": _place(out.rows, t.rows),
                    "offsets": _place(out.offsets, t.offsets),
                }
            for s in _segments(t):
                weights = _place(out.weights, sure(t.weights)) if isinstance(t, Bags) and s.weights >= 0 else -1
                out.segments.append(s._replace(table=table, weights=weights, **places))
    return out


def _segments(term: Entries | Bags) -> list[Segment]:
    """Return one segment for entries, or one per feature for bags. `terms_of` sets the numbers of the tensors."""
    if isinstance(term, Entries):
        return [Segment(0, 0, 0, 0, -1, 0, term.rows.shape[0], 0, False, -1)]
    return segments_of_lookup(term.features, term.d.shape[0])


def _capacity(term: Entries | Bags) -> int:
    return sum(capacity_of(s, term.rows.shape[0]) for s in _segments(term))


def _place(tensors: list[Tensor], x: Tensor) -> int:
    """Return the number of x in the list; append it first if it is missing."""
    for i, y in enumerate(tensors):
        if x is y:
            return i
    tensors.append(x)
    return len(tensors) - 1


def _has_repeats(term: Entries | Bags) -> bool:
    return isinstance(term, Entries) and term.repeats is not None
