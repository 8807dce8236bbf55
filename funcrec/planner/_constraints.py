"""Constraints on a table, beyond its config: how it is used, and where it may lie."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from funcrec.core import Problem, check, describe, field_problems, nearest, plain_numbers
from funcrec.sharding import Kind

MOST_IDS = 1e9  # in a bag


@plain_numbers
@dataclass(frozen=True)
class TableConstraint:
    """Constraints on one table, for `fr.plan(constraints={table: ...})`.

    Args:
      kinds: the allowed kinds of placement; () for all.
      min_partition: the fewest columns of a block.
      pooling_factor: average number of ids in a bag, for each of its features or {feature: ids}; None for a feature's
        max_length, or 1.
      zipf: exponent of the ids' distribution: row r occurs in proportion to 1 / r^zipf; 0 for all rows alike.
      row_counts: how often each row was seen, in place of `zipf`.
      ranks: places on the placement's axis, or on the first of two axes, where the table may lie; () for all.
      together: tables with the same name here get the same placement, part by part on the same ranks.

    Example:
      >>> import funcrec as fr
      >>> fr.TableConstraint(kinds=("row_wise", "table_wise"), pooling_factor=20.0).kinds
      ('row_wise', 'table_wise')

    Source: TorchRec's ParameterConstraints.
    """

    kinds: Sequence[Kind] = ()
    min_partition: int = 1
    pooling_factor: float | Mapping[str, float] | None = None
    zipf: float = 0.0
    row_counts: Sequence[float] | None = None
    ranks: Sequence[int] = ()
    together: str | None = None

    def __post_init__(self):
        check("funcrec.TableConstraint", constraint_problems(self, ""))
        for name in ("kinds", "ranks"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    def pooling_of(self, feature: Any) -> float:
        """The average number of ids in a bag of the feature."""
        told = self.pooling_factor
        told = told.get(feature.name) if isinstance(told, Mapping) else told
        return float(told if told is not None else feature.max_length or 1)


def constraint_of(given: Any) -> TableConstraint:
    return given if isinstance(given, TableConstraint) else TableConstraint(**given)


# -- validators --------------------------------------------------------------------------------------------------


def constraint_problems(c: TableConstraint, path: str) -> Iterator[Problem]:
    found = [p._replace(what=p.what.replace("`", f"`{path}", 1)) for p in field_problems(c)]
    yield from found
    if found:
        return
    if c.min_partition < 1:
        yield Problem(f"`{path}min_partition` is too small.", f"{c.min_partition}", "an int >= 1")
    told = c.pooling_factor.values() if isinstance(c.pooling_factor, Mapping) else [c.pooling_factor or 0.0]
    if not all(0 <= x <= MOST_IDS for x in told):
        need = f"numbers from 0 to {MOST_IDS:.0e}"
        yield Problem(f"`{path}pooling_factor` is out of range.", f"{c.pooling_factor}", need, "pooling_factor=20.0")
    if not 0 <= c.zipf < float("inf"):
        yield Problem(f"`{path}zipf` is out of range.", f"{c.zipf}", "a finite number >= 0", "zipf=1.1")
    if c.row_counts is not None and not (all(0 <= x < float("inf") for x in c.row_counts) and sum(c.row_counts) > 0):
        got = f"{len(c.row_counts)} numbers"
        yield Problem(f"`{path}row_counts` are out of range.", got, "numbers >= 0, not all 0", "row_counts=[5, 3, 1]")
    if any(r < 0 for r in c.ranks) or len(set(c.ranks)) < len(c.ranks):
        yield Problem(f"`{path}ranks` are not places.", f"{tuple(c.ranks)}", "distinct ints >= 0", "ranks=(0, 1)")


def given_problems(constraints: Any, tables: Sequence[str], features: Mapping[str, Sequence[str]]) -> Iterator[Problem]:
    """Check `fr.plan`'s argument `constraints`; features: {table: its features}."""
    names, hint = [f.name for f in fields(TableConstraint)], '{"item": fr.TableConstraint(pooling_factor=20.0)}'
    if not isinstance(constraints, Mapping):
        need = "{table: TableConstraint}"
        yield Problem("`constraints` is not a mapping.", describe(constraints), need, hint, TypeError)
        return
    for table, c in constraints.items():
        if table not in tables:
            got, need = f"{table!r}", f"one of {list(tables)[:8]}"
            yield Problem("`constraints` name a table that is not there.", got, need, kind=KeyError)
        elif isinstance(c, Mapping):
            for key in (k for k in c if k not in names):
                near = next((n for n in names if n.startswith(str(key))), None) or nearest(str(key), names)
                what = f"`constraints[{table!r}]` has an unknown key."
                yield Problem(what, f"{key!r}", f"one of {names}", f"{near}=...", KeyError)
        elif not isinstance(c, TableConstraint):
            need = "a TableConstraint, or a dict of its fields"
            yield Problem(f"`constraints[{table!r}]` is not a TableConstraint.", describe(c), need, hint, TypeError)
            continue
        told = c.get("pooling_factor") if isinstance(c, Mapping) else c.pooling_factor
        for f in told if isinstance(told, Mapping) else ():
            if f not in features.get(table, ()):
                got = f"{f!r}"
                yield Problem(f"`constraints[{table!r}].pooling_factor` names a feature that does not read it.", got,
                    f"one of {list(features.get(table, ()))}", kind=KeyError)  # fmt: skip
