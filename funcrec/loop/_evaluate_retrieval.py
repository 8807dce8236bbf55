"""Evaluates a retrieval model on batches of held-out items: each query ranks all items.

    metrics(rows, relevant(b)),    rows = top_k(query(params, b), items, k, exclude=seen(b)),      summed over batches b

Shapes: B queries, R items, D dim.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from funcrec import metrics as lists
from funcrec.core import (
    Count,
    Form,
    Problem,
    Sizes,
    Within,
    check,
    describe,
    element_problems,
    fail,
    own_errors,
    replace,
    stray,
    tree_map,
    typed,
)
from funcrec.jagged import JaggedTensor, is_concrete
from funcrec.kinds import QuantizedTables
from funcrec.loop._evaluate import batches_of
from funcrec.loop._numbers import named_numbers
from funcrec.loop._ranks import all_parts, num_processes
from funcrec.mesh import Mesh
from funcrec.metrics import Metric, collect
from funcrec.retrieval import Index, search_index, top_k
from funcrec.tables import table_shapes

CALL = "funcrec.evaluate_retrieval"
USUAL_LENGTH = 10
Items = Tensor | QuantizedTables | Index
Bags = str | Callable[[Any], JaggedTensor]


class Judged(NamedTuple):
    """The values that judge the lists of a batch. The fields are arguments of `evaluate_retrieval`."""

    relevant: Bags
    seen: Bags | None
    groups: Mapping[str, Callable]
    item_groups: Mapping[str, Tensor]
    weight: Callable[[Any], Tensor | None]


Metrics = Annotated[Mapping[str, Metric], Within("{name: metric of lists}", len, "are none")]


@typed(needs={"metrics": "k"})
def evaluate_retrieval(
    query: Callable[[Any, Any], Tensor],
    params: Any,
    batches: Iterable[Any] | Callable[[], Iterable[Any]],
    items: Items,
    relevant: Bags,
    *,
    seen: Bags | None = None,
    k: Count | Sizes | None = None,
    metrics: Metrics | None = None,
    counts: Annotated[Tensor, Form("n[R]")] | None = None,
    num_users: Count | None = None,
    groups: Mapping[str, Callable[[Any], Tensor]] | None = None,
    item_groups: Mapping[str, Annotated[Tensor, Form("b[R]")]] | None = None,
    weight: Callable[[Any], Tensor | None] = lambda batch: batch.weight,
    effort: Count | None = None,
    mesh: Mesh | None = None,
) -> dict[str, float]:
    """Return {name: number}, the metrics of lists that rank all items for each query of the batches.

    Args:
      query: (params, batch) -> a vector for each query, of the dim of the items, such as `two_tower(...).query`, or
        `fr.jit` of it.
      batches: an iterable of batches or of (position, batch), or a function that returns such an iterable, as a loader
        does.
      items: vectors f[R, D], QuantizedTables of one table, or an `Index`. Row r is the item that ids call r.
      relevant: the key of the ids, or a function of a batch that returns bags. The bags hold the rows to be found, one
        bag for each query. A query whose bag is empty counts only in coverage and novelty.
      seen: the rows that are never in a list, such as those of the training set (`fr.data.known_items`).
      k: the length of the lists. Several lengths give the metrics for each length. None is 10; with `metrics` a length
        must be given, the largest that one of them reads.
      metrics: {name: metric of lists}, such as {"recall@5": fr.metrics.recall(5)}. None gives recall, ndcg, hit_rate,
        mrr, mean_average_precision and coverage at each k, and novelty with `counts`.
      counts: [R], the number of users who took each item in training. It adds novelty, and the numbers of the list of
        the most popular items, with names "popularity ...". In that list items of equal counts have the order of their
        rows.
      num_users: the number of users in training, for novelty; None takes the largest of the counts.
      groups: {name: function of a batch that returns a truth for each query}. It adds the numbers of these queries
        alone, with names "... of name".
      item_groups: {name: a truth for each item}. It adds the numbers of these relevant items alone, with names "... of
        name". The lists are the same.
      weight: a function of a batch that returns the weight of each query; None counts all queries alike. A query of
        weight 0 is padding.
      effort: the effort of a search in an Index, as for `search_index`.
      mesh: a mesh of real ranks. Each rank has its own batches, all ranks equally many. The numbers cover all batches.

    Raises:
      TypeError, ValueError: if bags, groups or counts do not fit the batches or the items, or if there is no batch.

    Law: one batch or many, in any order, give the same numbers up to rounding. An `Index` that finds all items gives
      the numbers of its vectors.

    Example:
      >>> import torch, funcrec as fr
      >>> bags = {"user": [[0], [1]], "bought": [[2], [0]], "before": [[1], []]}
      >>> batch = fr.Batch(fr.KeyedJaggedTensor.from_lists(bags))
      >>> params, items = {"user": torch.eye(2)}, torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.9, 0.5]])
      >>> features = [fr.FeatureConfig("user", table="user")]
      >>> query = lambda params, batch: fr.lookup(params, batch.ids, features).values
      >>> found = fr.evaluate_retrieval(query, params, [batch], items, "bought", seen="before", k=1)
      >>> found["recall@1"], round(found["coverage@1"], 3)
      (1.0, 0.667)

    Source: Rendle et al., "On sampled metrics for item recommendation" (KDD 2020): all items are ranked, and no item is
      sampled.
    """
    cutoffs, num_items = tuple(k) if isinstance(k, Sequence) else (k or USUAL_LENGTH,), count_of(items)
    check(CALL, count_problems(counts, item_groups, num_items), name_problems(groups, item_groups))
    metrics = dict(metrics or usual(cutoffs, num_items, counts, num_users))
    metric, judged_by = collect(metrics), Judged(relevant, seen, groups or {}, item_groups or {}, weight)
    rankings = {"": lambda vectors, bags: ranked(vectors, items, max(cutoffs), bags, effort)}
    if counts is not None:
        rankings["popularity "] = lambda vectors, bags: most_popular(vectors, counts, max(cutoffs), bags)
    ends = ["", *(f" of {name}" for name in (*judged_by.groups, *judged_by.item_groups))]
    given, mesh = batches_of(CALL, batches, mesh)
    states = {(before, end): None for before in rankings for end in ends}
    for batch in given or ():
        with own_errors(CALL, query, params, batch, need="params and a batch that it reads"):
            vectors = query(params, batch)
        check(CALL, vector_problems("query(params, batch)", "B", vectors))
        vectors = vectors.detach()
        parts, bags = parts_of(judged_by, batch, vectors, num_items)
        for before, rank in rankings.items():
            rows = rank(vectors, bags)
            for end, (wanted, w) in zip(ends, parts, strict=True):
                old = states[before, end]
                old = metric.init(vectors.device) if old is None else old
                states[before, end] = metric.update(old, rows, wanted, w)
    if given is not None:
        check(CALL, empty_problems(states))
        states = tree_map(lambda x: all_parts(x[None], mesh).sum(0), states) if num_processes(mesh) > 1 else states
    values = {key: dict.fromkeys(metrics, math.nan) if s is None else metric.compute(s) for key, s in states.items()}
    numbers = {key: named_numbers(CALL, own, "`metrics[{name}]` gave no number.") for key, own in values.items()}
    return {f"{before}{n}{end}": x for (before, end), own in numbers.items() for n, x in own.items()}


def parts_of(
    judged_by: Judged, batch: Any, queries: Tensor, num_items: int
) -> tuple[list[tuple[JaggedTensor, Tensor]], JaggedTensor | None]:
    """Return ([(relevant rows, weights)], seen rows).

    The list has entries for all queries, for each group of queries and for each group of items.
    """
    wanted = bags_of(batch, judged_by.relevant, "relevant", queries, num_items)
    seen = None if judged_by.seen is None else bags_of(batch, judged_by.seen, "seen", queries, num_items)
    with own_errors(CALL, judged_by.weight, batch, need="a batch that it reads"):
        w = judged_by.weight(batch)
    check(CALL, weight_problems(w, queries))
    w = torch.ones(len(queries), dtype=torch.float64, device=queries.device) if w is None else w.double()
    parts = [(wanted, w)]
    parts += [(wanted, w * group_of(batch, name, fn, w)) for name, fn in judged_by.groups.items()]
    parts += [(only(wanted, mask), w) for mask in judged_by.item_groups.values()]
    return parts, seen


def ranked(queries: Tensor, items: Items, k: int, seen: JaggedTensor | None, effort: int | None) -> Tensor:
    """Return the best items for each query among those it has not seen, i64[B, k]; -1 after the last such item."""
    if not isinstance(items, Index):
        return top_k(queries, items, k, exclude=seen)[1]
    if seen is None:
        return search_index(items, queries, k, effort=effort)[1]
    longest = int(seen.offsets.diff().max()) if len(queries) else 0
    rows = search_index(items, queries, k + longest, effort=effort)[1]
    is_left = (rows >= 0) & ~are_in(rows, seen, items.num_items)
    order = (~is_left).long().argsort(dim=1, stable=True)
    return torch.where(is_left, rows, -1).gather(1, order)[:, :k]


def most_popular(queries: Tensor, counts: Tensor, k: int, seen: JaggedTensor | None) -> Tensor:
    """Return the unseen items of the largest counts for each query, i64[B, k].

    Of items with equal counts the lower row comes first.
    """
    ones = queries.new_ones((len(queries), 1), dtype=torch.float64)
    return top_k(ones, counts.double()[:, None].to(queries.device), k, exclude=seen)[1]


def are_in(rows: Tensor, bags: JaggedTensor, num_items: int) -> Tensor:
    """Return whether bag b has rows[b, j], bool[B, K]."""
    values = bags.values[: int(bags.offsets[-1])].long()
    bag = torch.repeat_interleave(bags.offsets.diff().long(), output_size=len(values))
    keys = (bag * num_items + values).sort().values
    asked = torch.arange(len(rows), device=rows.device)[:, None] * num_items + rows
    if not len(keys):
        return torch.zeros_like(asked, dtype=torch.bool)
    return keys[torch.searchsorted(keys, asked).clamp(max=len(keys) - 1)] == asked


def only(bags: JaggedTensor, mask: Tensor) -> JaggedTensor:
    """Return the bags with -1, which is not a row, in place of items outside the mask."""
    values = bags.values.long()
    is_in = mask.to(values.device)[values.clamp(0, len(mask) - 1)] & (values >= 0)
    return replace(bags, values=torch.where(is_in, values, -1))


def usual(cutoffs: Sequence[int], num_items: int, counts: Tensor | None, num_users: int | None) -> dict[str, Metric]:
    """Return {name: metric} of the metrics that users of retrieval compare, for each length."""
    names = ("recall", "ndcg", "hit_rate", "mrr", "mean_average_precision")
    made = {f"{n}@{k}": getattr(lists, n)(k) for k in cutoffs for n in names}
    made |= {f"coverage@{k}": lists.coverage(k, num_items) for k in cutoffs}
    if counts is not None:
        users = num_users or max(math.ceil(counts.double().max()), 1)
        made |= {f"novelty@{k}": lists.novelty(k, counts.double(), users) for k in cutoffs}
    return made


def count_of(items: Items) -> int:
    if isinstance(items, Index):
        return items.num_items
    if isinstance(items, QuantizedTables):  # of one table, or `top_k` refuses them
        return next((rows for rows, _ in table_shapes(items).values()), 0)
    check(CALL, vector_problems("items", "R", items))
    return items.shape[0]


def bags_of(batch: Any, which: Bags, name: str, queries: Tensor, num_items: int) -> JaggedTensor:
    """Return the bags of a batch, one for each query.

    The batch has them under a key, or a function makes them from the batch.
    """
    if isinstance(which, str):
        keys = getattr(getattr(batch, "ids", None), "keys", ())
        check(CALL, key_problems(name, which, keys), shared_problems(name, batch.ids))
        bags = batch.ids[which]
    else:
        with own_errors(CALL, which, batch, need="a batch that it reads"):
            bags = which(batch)
    check(CALL, bag_problems(name, bags, queries))
    check(CALL, row_problems(name, bags, num_items))
    return bags


def group_of(batch: Any, name: str, fn: Callable, w: Tensor) -> Tensor:
    with own_errors(CALL, fn, batch, need="a batch that it reads"):
        mask = fn(batch)
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != w.shape:
        need, hint = f"bool[{len(w)}], a truth for each query", "lambda batch: batch.dense[:, 0] < 5"
        fail(CALL, f"`groups[{name!r}]` does not say which queries.", got=describe(mask), need=need, hint=hint)
    return mask.to(w.device)


# -- validators --------------------------------------------------------------------------------------------------


def empty_problems(states: Mapping) -> Iterator[Problem]:
    if None in states.values():
        hint = "a list, or a function: batches=lambda: fr.data.batches(data, rows, 1024, pad_last=True)"
        yield Problem("`batches` are empty.", "no batch", "a batch or more", hint)


def count_problems(counts: Tensor | None, item_groups: Mapping | None, num_items: int) -> Iterator[Problem]:
    for name, x in {"counts": counts, **{f"item_groups[{n!r}]": x for n, x in (item_groups or {}).items()}}.items():
        if x is not None and len(x) != num_items:
            yield Problem(f"`{name}` do not match `items`.", describe(x), f"[{num_items}], one for each item")
    if counts is not None:
        wrong = ~((numbers := counts.double()) >= 0) | numbers.isinf()
        hint = "ids.bincount(minlength=R)"
        yield from element_problems("`counts` leave their range.", "counts", counts, wrong, "finite numbers >= 0", hint)


def name_problems(groups: Mapping | None, item_groups: Mapping | None) -> Iterator[Problem]:
    if both := sorted({*(groups or {})} & {*(item_groups or {})}):
        need, hint = "a name for each", "another name for the items' group"
        yield Problem("groups of queries and of items have one name.", f"{both}", need, hint)


def vector_problems(name: str, count: str, x: object) -> Iterator[Problem]:
    if not isinstance(x, Tensor) or x.dim() != 2 or not x.is_floating_point():
        need, hint = f"f[{count}, D]", "model.query and model.candidate, of fr.models.two_tower"
        yield Problem(f"`{name}` are not vectors.", describe(x), need, hint, TypeError)
    elif is_concrete(x) and bool(x.isnan().any()):
        at, hint = int(x.isnan().any(1).to(torch.int8).argmax()), "parameters of a run that did not diverge"
        yield Problem(f"`{name}` have NaN.", f"NaN in row {at}", "numbers", hint)


def weight_problems(w: Any, queries: Tensor) -> Iterator[Problem]:
    is_number = isinstance(w, Tensor) and not w.is_complex()
    if w is not None and not (is_number and w.shape == queries.shape[:1]):
        need = f"[{len(queries)}], a number for each query, or None"
        yield Problem(
            "`weight` gave no number for each query.", describe(w), need, "lambda batch: batch.weight", TypeError
        )


def key_problems(name: str, key: str, keys: Sequence[str]) -> Iterator[Problem]:
    if key not in keys:
        got, need = f"{name}={key!r}", f"one of {list(keys)}, or a function of a batch"
        yield Problem(f"`{name}` names ids that the batch does not have.", got, need, "lambda batch: bags of rows")


def bag_problems(name: str, bags: Any, queries: Tensor) -> Iterator[Problem]:
    need, hint = f"a JaggedTensor of {len(queries)} bags of rows", "fr.JaggedTensor.from_lists([[3], [5, 1]])"
    is_rows = isinstance(bags, JaggedTensor) and bags.values.dtype in (torch.int32, torch.int64)
    if not is_rows or bags.values.dim() != 1:
        yield Problem(f"`{name}` gave no bags of rows.", describe(bags), need, hint, TypeError)
    elif bags.offsets.shape[0] != len(queries) + 1:
        got = f"{bags.offsets.shape[0] - 1} bags"
        yield Problem(f"`{name}` has bags of other queries.", got, need, hint)


def row_problems(name: str, bags: JaggedTensor, num_items: int) -> Iterator[Problem]:
    """Report rows that no item has. Such a row would count as a row that is never found."""
    own = bags.values[: int(bags.offsets[-1])]
    if (row := stray(own, num_items)) is not None:
        need, hint = f"rows from 0 to {num_items - 1}, those of `items`", "items of all ids that occur"
        yield Problem(f"`{name}` has rows that no item has.", f"row {row}", need, hint)


def shared_problems(name: str, ids: object) -> Iterator[Problem]:
    if getattr(ids, "inverse", None) is not None:
        got, need = "ids with inverse indices, whose bags are not those of queries", "one bag for each query"
        yield Problem(f"`{name}` has bags that queries share.", got, need, "the ids before `fr.dedup_bags`")
