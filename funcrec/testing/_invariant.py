"""A check that a prediction for an example does not see the rest of its batch.

f(batch)[rows] has the bits of f(batch[rows])
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from funcrec.core import describe, fail, own_errors, paths, replace, tree_leaves, tree_map, typed
from funcrec.jagged import KeyedJaggedTensor
from funcrec.tables import Batch
from funcrec.testing._trees import assert_same_bits

CALL = "funcrec.testing.check_invariant"
ALONE = 8  # examples that are asked alone


@typed
def check_invariant(fn: Callable[[Any], Any], batch: Any) -> None:
    """Assert that each example's results have the same bits alone, in any batch, at any place, and on any threads.

    Args:
      fn: batch -> a tree of [B, ...]. Give it its parameters: `lambda batch: predict(params, batch)`.
      batch: a `Batch`, a KeyedJaggedTensor, or a tree of tensors [B, ...].

    Raises:
      AssertionError: the bits differ. The message has the rows or the threads, and the first difference.
      ValueError: the batch has no example, other numbers of examples, or shared bags.

    Example:
      >>> import torch, funcrec as fr
      >>> from funcrec.testing import check_invariant
      >>> w = torch.ones(300, 4)
      >>> check_invariant(fr.invariant(lambda x: torch.sigmoid(x @ w)), torch.linspace(-1, 1, 9000).reshape(30, 300))
    """
    count, threads = examples_of(batch), torch.get_num_threads()

    def ask(given: Any) -> Any:
        with own_errors(CALL, fn, given, need="a batch that it takes"):
            return fn(given)

    whole = ask(batch)
    is_of_examples = lambda x: isinstance(x, Tensor) and x.shape[:1] == (count,)
    wrong = [f"`{path}` {describe(x)}" for path, x in paths(whole) if not is_of_examples(x)]
    if wrong:
        fail(
            CALL,
            "a result is not one of examples.",
            got=wrong[0],
            need=f"tensors [{count}, ...]",
            hint="results of examples",
        )
    every = list(range(count))
    alone = [[i] for i in {*every[:ALONE], count - 1}]
    for rows in (*alone, every[::-1], every[: count // 2 + 1], every[:1] * 3, every * 2):
        same(ask(taken(batch, rows)), whole, rows, f"the results of the rows {rows[:6]}")
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            same(ask(batch), whole, every, f"results on {number} threads")
    finally:
        torch.set_num_threads(threads)


def same(got: Any, whole: Any, rows: list[int], what: str) -> None:
    index = torch.tensor(rows)
    cell = f"{CALL}: {what} have other bits than in the whole batch."
    assert_same_bits(got, tree_map(lambda x: x.index_select(0, index), whole), cell)


def examples_of(batch: Any, call: str = CALL) -> int:
    """Return the number of examples, after a check that the batch can be cut by examples."""
    ids = batch.ids if isinstance(batch, Batch) else batch
    if isinstance(ids, KeyedJaggedTensor):
        if ids.strides is not None or ids.inverse is not None:
            fail(
                call,
                "the bags of the batch are shared.",
                got=repr(ids)[:80],
                need="B bags for each key",
                hint="the ids before fr.dedup_bags",
            )
        counts = {ids.num_examples}
    else:
        counts = {x.shape[0] if x.dim() else -1 for x in tree_leaves(batch) if isinstance(x, Tensor)}
    if any(isinstance(x, Tensor) and x.is_meta for x in tree_leaves(batch)):
        fail(
            call,
            "the batch has no values.",
            got="tensors on the device meta",
            need="numbers",
            hint="a batch on the CPU",
            kind=TypeError,
        )
    if len(counts) != 1 or min(counts) < 1:
        got, need = f"{sorted(counts)} examples", "one number, 1 or more"
        fail(call, "the batch has no number of examples.", got=got, need=need, hint="tensors [B, ...]")
    return counts.pop()


def taken(batch: Any, rows: list[int]) -> Any:
    """Return the examples of these numbers, in this order and with repeats."""
    index = torch.tensor(rows)
    if isinstance(batch, Batch):
        pick = lambda x: None if x is None else x.index_select(0, index)
        fields = {n: pick(getattr(batch, n)) for n in ("label", "dense", "weight")}
        return replace(batch, ids=taken(batch.ids, rows), **fields)
    if isinstance(batch, KeyedJaggedTensor):
        own = {k: x.unpad() for k, x in batch.to_dict().items()}
        size = lambda x: int(x.lengths.index_select(0, index).sum())
        return KeyedJaggedTensor.from_jagged({k: x.select(index, capacity=size(x)) for k, x in own.items()})
    return tree_map(lambda x: x.index_select(0, index), batch)
