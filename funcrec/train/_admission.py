"""Before a step reads its tables, vocabularies admit the ids of its batch, and the rows of new ids are drawn.

state, batch --admit--> vocabularies', turnovers --renew--> tables', slots'
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from funcrec.core import Named, Problem, check, mapping, pytree, replace
from funcrec.kinds import DynamicTables, NewRows, admit_batch, configs_of, stored_problems, with_new_rows
from funcrec.optim import RowOptimizer
from funcrec.tables import layout_in
from funcrec.train._state import TrainState


def admitted(sparse: RowOptimizer, state: TrainState, batch: Any) -> tuple[TrainState, dict, NewRows | None]:
    """Return (the state with a row for each admitted id of the batch, metrics, the new rows), in one process."""
    if not is_dynamic(state.tables):
        return state, {}, None
    check("funcrec.train_step", admission_problems(sparse), unserved_problems(state.tables))
    dynamic, new, numbers = admit_batch(state.tables, batch)
    tables, slots = dynamic.tables, state.slots
    if new is not None:
        forms = {n: ((t.shape[0], t.shape[1]), t.dtype) for n, t in tables.items()}
        configs = [(i, c) for i, n in enumerate(dynamic.vocabularies) for c in configs_of(dynamic, n, forms)]
        tables, slots = with_new_rows(tables, slots, new, configs, sparse, dynamic.first_key)
    return replace(state, tables=replace(dynamic, tables=tables), slots=slots), counts_of(dynamic, numbers), new


def is_dynamic(tables: Any) -> bool:
    """Return whether tables, whole or sharded, follow vocabularies."""
    return (type(tables) if layout_in(tables) is None else tables.of) is DynamicTables


@mapping(lambda counts: dict(zip(counts.names, map(named, counts.numbers.unbind(-2)), strict=True)), "vocabulary")
@pytree(static=("names",))
class Counts(Named[Any]):
    """{vocabulary: the numbers of distinct ids of a step}, read like a dict. One tensor holds all of them.

    numbers: i64[V, 4], those of `admit_batch`. names: the vocabularies.
    """

    numbers: Tensor
    names: tuple[str, ...]

    def __repr__(self) -> str:
        return repr(dict(self.items()))


def named(numbers: Tensor) -> dict[str, Tensor]:
    admitted, evicted, hits, refused = numbers.unbind(-1)
    return {"hits": hits, "admitted": admitted, "evicted": evicted, "refused": refused}


def counts_of(dynamic: DynamicTables, numbers: Tensor) -> dict[str, Counts]:
    """Return {"vocabularies": numbers of distinct ids}, metrics of a step. numbers: i64[V, 4]."""
    return {"vocabularies": Counts(numbers, tuple(dynamic.vocabularies))} if dynamic.vocabularies else {}


# -- validators --------------------------------------------------------------------------------------------------


def admission_problems(sparse: RowOptimizer, capacity: int | None = None) -> Iterator[Problem]:
    """Report arguments of a step that cannot train tables of vocabularies."""
    if sparse.waiting:
        what, got = "`sparse` keeps gradients for rows that may pass to other ids.", f"slots {list(sparse.waiting)}"
        yield Problem(what, got, "slots of one row each", "an optimizer without `accumulate`")
    if capacity is not None:
        what = "`capacity` does not go with vocabularies: a step without room would already have admitted its ids."
        yield Problem(what, f"{capacity}", "capacity=None", "dedup=False, capacity=None")


def unserved_problems(dynamic: DynamicTables) -> Iterator[Problem]:
    """Report tables of stores: the rows of new ids come from there."""
    for p in stored_problems(dynamic):
        yield p._replace(hint="fr.cached_step(fr.train_step(..., admit=False), stores)")


def dynamic_problems(tables: Any, what: str) -> Iterator[Problem]:
    """Report tables of vocabularies. what: a sentence that says what cannot take them."""
    if is_dynamic(tables):
        yield Problem(what, "DynamicTables", "tables whose rows keep their ids")
