"""Constraints on a table that its config does not contain: the use of the table, and the places where it may lie."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any

from funcrec.core import (
    Count,
    Magnitude,
    Problem,
    Size,
    Within,
    check,
    field_problems,
    nearest,
    plain_numbers,
    unknown_problems,
)  # fmt: skip
from funcrec.sharding import PlacementKind

MOST_IDS = 1e9  # the most ids in a bag
IdsOfABag = Annotated[float, Within(f"a number from 0 to {MOST_IDS:.0e}", lambda x: 0 <= x <= MOST_IDS)]


Part = Annotated[float, Within("a number from 0 to 1, without 0", lambda x: 0 < x <= 1)]
Places = Annotated[Sequence[Size], Within("distinct ints >= 0", lambda r: len(set(r)) == len(r), "are not places")]


@plain_numbers
@dataclass(frozen=True)
class TableConstraint:
    """Constraints on one table, for `fr.plan(constraints={table: ...})`.

    Args:
      kinds: the allowed kinds of placement; () for all kinds.
      min_partition: the fewest columns of a block.
      pooling_factor: the average number of ids in a bag: one number for all features of the table, or {feature: ids};
        None for a feature's max_length, or 1.
      zipf: the exponent of the distribution of ids: row r occurs in proportion to 1 / r^zipf; 0 for all rows alike.
      row_counts: the number of times that each row was seen, instead of `zipf`.
      ranks: places on the placement's axis, or on the first of two axes, where the table may lie; () for all places.
      in_memory: the share of the table's rows that are in memory, the others in a store, as `cached_tables` has them; 1
        for all. None: the planner chooses, if the hardware has a disk and no other table reads the table's columns.
        Tables that read one column have one share. With `replicas` all tables are whole.
      together: tables with the same name here get the same placement, part by part on the same ranks.
      vocabulary: tables with the same name here follow one vocabulary, as `dynamic_tables` has it; None for tables
        whose ids are rows. The planner counts the vocabularies' memory, messages and admissions, and cuts them by
        buckets (`plan.buckets`) where that is faster or must be. With `replicas`, or if some table may lie partly in a
        store, they stay whole. The plan cannot know that a policy is a function: then take one without `buckets`.

    Example:
      >>> import funcrec as fr
      >>> fr.TableConstraint(kinds=("row_wise", "table_wise"), pooling_factor=20.0).kinds
      ('row_wise', 'table_wise')

    Source: TorchRec's ParameterConstraints.
    """

    kinds: Sequence[PlacementKind] = ()
    min_partition: Count = 1
    pooling_factor: IdsOfABag | Mapping[str, IdsOfABag] | None = None
    zipf: Magnitude = 0.0
    row_counts: Sequence[Magnitude] | None = None
    ranks: Places = ()
    in_memory: Part | None = None
    together: str | None = None
    vocabulary: str | None = None

    def __post_init__(self) -> None:
        check("funcrec.TableConstraint", field_problems(self))
        check("funcrec.TableConstraint", constraint_problems(self))
        for name in ("kinds", "ranks"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    def pooling_of(self, feature: Any) -> float:
        """Return the average number of ids in a bag of the feature."""
        told = self.pooling_factor
        told = told.get(feature.name) if isinstance(told, Mapping) else told
        return float(told if told is not None else feature.max_length or 1)


def constraint_of(given: Any) -> TableConstraint:
    return given if isinstance(given, TableConstraint) else TableConstraint(**given)


# -- validators --------------------------------------------------------------------------------------------------


def constraint_problems(c: TableConstraint) -> Iterator[Problem]:
    if c.row_counts is not None and not sum(c.row_counts) > 0:
        got = f"{len(c.row_counts)} numbers"
        yield Problem("`row_counts` are out of range.", got, "numbers >= 0, not all 0", "row_counts=[5, 3, 1]")


def given_problems(
    constraints: Mapping[str, Any], tables: Sequence[str], features: Mapping[str, Sequence[str]]
) -> Iterator[Problem]:
    """Report invalid `constraints` of `fr.plan`. features: {table: its features}."""
    names = [f.name for f in fields(TableConstraint)]
    yield from unknown_problems("`constraints` name a table that does not exist.", constraints, tables, kind=KeyError)
    for table, c in ((table, c) for table, c in constraints.items() if table in tables):
        for key in (k for k in c if k not in names) if isinstance(c, Mapping) else ():
            near = next((n for n in names if n.startswith(str(key))), None) or nearest(str(key), names)
            what = f"`constraints[{table!r}]` has an unknown key."
            yield Problem(what, f"{key!r}", f"one of {names}", f"{near}=...", KeyError)
        told = c.get("pooling_factor") if isinstance(c, Mapping) else c.pooling_factor
        what = f"`constraints[{table!r}].pooling_factor` names a feature that does not read it."
        named = told if isinstance(told, Mapping) else ()
        yield from unknown_problems(what, named, features.get(table, ()), kind=KeyError)
