"""The roles of the columns of a table: labels, numbers, ids, lists of ids, weights, time."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from funcrec.core import Problem, Within, check, field_problems, html_table, pytree, twice_problems

FIELDS = ("label", "dense", "categorical", "multivalued", "weights", "weight", "time", "label_kind")
LabelKind = Literal["binary", "number", "class"]


@pytree(static=FIELDS)
class Schema:
    """The roles of the columns of a table. Equal schemas are equal values. A column without a role is not read.

    Args:
      label: one column, or several (the label is then f32[B, T]), or None if there is nothing to learn from.
      dense: columns of numbers. A column of fixed-size lists of k numbers counts as k columns.
      categorical: columns with one id per row.
      multivalued: columns of lists of ids. `categorical` and `multivalued` name at least one column together. These
        columns are the keys of a batch, in this order.
      weights: {column of ids: column of weights}. The weights are numbers where the ids are single, and lists of
        numbers where the ids are lists. The field holds pairs.
      weight: a column of the weights of rows, numbers >= 0.
      time: a column of numbers, timestamps or dates, for splits. Batches do not contain it.
      label_kind: the kind of all labels, or a tuple with the kind of each label. "binary" is a number in [0, 1],
        "class" an integer 0, 1, 2, ..., and "number" any finite number.

    Example:
      >>> from funcrec.data import Schema
      >>> Schema(label="click", categorical=["user", "item"], multivalued=["genres"]).categorical
      ('user', 'item')
    """

    label: str | Annotated[tuple[str, ...], Within("a name, a tuple of names", bool, "is empty")] | None = None
    dense: tuple[str, ...] = ()
    categorical: tuple[str, ...] = ()
    multivalued: tuple[str, ...] = ()
    weights: Mapping[str, str] | tuple[tuple[str, str], ...] = ()
    weight: str | None = None
    time: str | None = None
    label_kind: LabelKind | tuple[LabelKind, ...] = "binary"

    def __post_init__(self) -> None:
        if isinstance(self.weights, Mapping):
            object.__setattr__(self, "weights", tuple(self.weights.items()))
        for name in ("label", "dense", "categorical", "multivalued", "weights", "label_kind"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        check("funcrec.data.Schema", field_problems(self))
        check("funcrec.data.Schema", _set_problems(self), _kind_problems(self))

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the columns of labels: none, one or several names."""
        return () if self.label is None else (self.label,) if isinstance(self.label, str) else self.label

    @property
    def label_kinds(self) -> tuple[str, ...]:
        """Return the kind of each label."""
        kind = self.label_kind
        return (kind,) * len(self.labels) if isinstance(kind, str) else kind

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the keys of the ids in a batch."""
        return self.categorical + self.multivalued

    @property
    def columns(self) -> tuple[str, ...]:
        """Return all columns that are read, each once."""
        one = tuple(n for n in (self.weight, self.time) if n is not None)
        return tuple(dict.fromkeys((*self.labels, *self.dense, *self.keys, *(by for _, by in self.weights), *one)))

    def __eq__(self, other: object) -> bool:
        return type(other) is Schema and _values(self) == _values(other)

    def __hash__(self) -> int:
        return hash(_values(self))

    def __repr__(self) -> str:
        defaults = Schema.__dataclass_fields__
        own = {n: getattr(self, n) for n in FIELDS if getattr(self, n) != defaults[n].default}
        own |= {"weights": dict(self.weights)} if self.weights else {}
        return f"Schema({', '.join(f'{n}={x!r}' for n, x in own.items())})"

    def _repr_html_(self) -> str:
        """Return the columns as a table in HTML, for a notebook."""
        rows = [("label", n, kind) for n, kind in zip(self.labels, self.label_kinds, strict=True)]
        rows += [(name, n, "") for name in ("dense", "categorical", "multivalued") for n in getattr(self, name)]
        rows += [("weights", by, f"of {of}") for of, by in self.weights]
        rows += [(name, n, "") for name in ("weight", "time") if (n := getattr(self, name)) is not None]
        return html_table(("", "column", ""), rows)


def _values(schema: Schema) -> tuple:
    return tuple(getattr(schema, n) for n in FIELDS)


def _set_problems(schema: Schema) -> Iterator[Problem]:
    """Yield problems if there are no ids, if a column is named twice, or if weights belong to no ids."""
    if not schema.keys:
        hint = 'categorical=("item",); bucketize numbers to have ids of them'
        yield Problem("`categorical` and `multivalued` are empty.", "no column of ids", "one or more", hint)
    groups = {"categorical and multivalued": schema.keys, "dense": schema.dense, "label": schema.labels}
    for name, group in groups.items():
        yield from twice_problems(f"columns are named twice in {name}.", group, need="each once")
    leaked = sorted(set(schema.labels) & {*schema.keys, *schema.dense, *(by for _, by in schema.weights)})
    if leaked:
        hint = "a column of another name, if a copy of the label is wanted"
        need = "a label apart from ids, dense and weights"
        yield Problem("`label` is also an input.", f"{leaked}", need, hint)
    of = [of for of, _ in schema.weights]
    unknown = [n for n in of if n not in schema.keys]
    if unknown or len(set(of)) < len(of):
        need = f"among {list(schema.keys)}, each once"
        yield Problem("`weights` belong to columns that are not ids.", f"{unknown or of}", need)


def _kind_problems(schema: Schema) -> Iterator[Problem]:
    kind = schema.label_kind
    if isinstance(kind, tuple) and len(kind) != len(schema.labels):
        need = f"{len(schema.labels)}, or one for all"
        yield Problem("`label_kind` does not match `label`.", f"{len(kind)} kinds", need)
