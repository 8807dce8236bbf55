"""P: describes how a tensor is cut over the axes of a mesh.

P("a", None): dimension 0 is cut over the ranks of axis a, dimension 1 is whole
P(("a", "b")): dimension 0 is cut over the ranks of both axes, of which a is the major one
"""

import dataclasses

from funcrec.core import fail
from funcrec.mesh._axes import AxisName, is_names


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class P:
    """The cut of a tensor over a mesh: for each dimension an axis, a tuple of axes, or None.

    The first axis of a tuple is the major one. A dimension without an axis stays whole. `P()` is the whole tensor on
    every rank.

    Example:
      >>> import funcrec as fr
      >>> fr.P("data", None), fr.P(("data", "model"))
      (P('data', None), P(('data', 'model')))

    Source: jax.sharding.PartitionSpec.
    """

    dims: tuple[tuple[str, ...], ...]

    def __init__(self, *dims: AxisName | None):
        wrong = [d for d in dims if not (d is None or isinstance(d, str) or is_names(d))]
        if wrong:
            need, hint = "axis names, tuples of them, or None", 'fr.P("data", None), fr.P(("data", "model"))'
            fail("funcrec.P", "a dimension has no axis.", got=f"{wrong}", need=need, hint=hint, kind=TypeError)
        named = tuple(() if d is None else (d,) if isinstance(d, str) else tuple(d) for d in dims)
        twice = sorted({a for d in named for a in d if sum(e.count(a) for e in named) > 1})
        if twice:
            fail("funcrec.P", "an axis is named twice.", got=f"{twice} in {dims}", need="an axis in one dimension only")
        object.__setattr__(self, "dims", named)

    @property
    def axes(self) -> tuple[str, ...]:
        """Return all axes that the spec names."""
        return tuple(a for d in self.dims for a in d)

    def __repr__(self) -> str:
        show = lambda d: "None" if not d else repr(d[0]) if len(d) == 1 else repr(d)
        return f"P({', '.join(map(show, self.dims))})"
