"""An approximate index of items by FAISS. A search finds most of the best items, and is faster than reading all items.

recall@k = |rows(index) ∩ rows(top_k)| / k        a higher effort gives a higher recall and longer searches

Shapes: B queries, R items, D dim, k.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from funcrec.core import Count, Form, Problem, Within, check, describe, fail, is_by_tree, is_followed, typed
from funcrec.retrieval._top_k import NumItems

LEAST_EFFORT = {"hnsw": 64, "ivf": 8}
MIN_PER_LIST = 39  # the least number of vectors that FAISS expects in each list
# FAISS counts in C ints without a check. It divides by log(links), and doubles the links.
Links = Annotated[int, Within("2 to 4096", lambda n: 2 <= n <= 4096)]
BuildEffort = Annotated[int, Within("an int in [1, 2³¹)", lambda n: 1 <= n < 2**31)]
Queries = Annotated[Tensor, Form("f16+[B, D]")]


@dataclass(frozen=True, repr=False)
class Index:
    """An index of FAISS on the CPU, with a copy of the items. `build_index` returns it.

    Args:
      kind: "hnsw" or "ivf".
      num_items, dim: the shape of the items.
      faiss: the object of FAISS, for functions that are missing here, such as `faiss.write_index(index.faiss, path)`.

    Example:
      >>> import torch, funcrec as fr
      >>> fr.build_index(torch.eye(3), "ivf")
      Index(ivf of f32[3, 3])
    """

    kind: str
    num_items: int
    dim: int
    faiss: Any

    def __repr__(self) -> str:
        return f"Index({self.kind} of f32[{self.num_items}, {self.dim}])"


@typed
def build_index(
    items: Annotated[Tensor, Form("f16+[R, D]")],
    kind: Literal["hnsw", "ivf"] = "hnsw",
    *,
    links: Links = 32,
    build_effort: BuildEffort = 200,
    num_lists: Count | None = None,
) -> Index:
    """Return an index of items f[R, D] for `search_index`, by inner products. Install 'funcrec[retrieval]' for it.

    Args:
      items: floats on the CPU, finite in f32. The index stores f32. No gradient goes through an index.
      kind: "hnsw" is a graph. Each item has `links` neighbours on a level (M of FAISS), found among `build_effort`
        candidates (efConstruction). The graph is fast to search and slow to build. "ivf" has `num_lists` lists. A list
        has the items that are nearest to its centre. The lists are quick to build, for many items.
      links: 2 to 4096.
      num_lists: at most R. None chooses about 4 · √R, but at least one list, and at least 39 items for each list.

    Returns:
      an Index of about R · (4 · D + 8 · links) bytes. It is built on as many threads as torch uses. On one thread, the
      same items make the same graph.

    Raises:
      ImportError: FAISS is missing.
      TypeError: the items are tracked.
      ValueError: items are not finite in f32, or a count is outside the range of FAISS.

    Law: recall against `top_k` rises with `effort`, and is 1 for "ivf" if the effort is `num_lists`.

    Example:
      >>> import torch, funcrec as fr
      >>> items = torch.eye(4) * torch.tensor([1.0, 2.0, 3.0, 4.0])[:, None]
      >>> index = fr.build_index(items)
      >>> index, fr.search_index(index, torch.ones(1, 4), 2)
      (Index(hnsw of f32[4, 4]), (tensor([[4., 3.]]), tensor([[3, 2]])))

    Source: Malkov, Yashunin, "Efficient and robust approximate nearest neighbor search using hierarchical navigable
    small world graphs" (arXiv:1603.09320), and FAISS's IndexHNSWFlat and IndexIVFFlat.
    """
    call = "funcrec.build_index"
    check(call, list_problems(items, kind, num_lists))
    check(call, value_problems("items", items))
    faiss = imported(call)
    (num_items, dim), metric = items.shape, faiss.METRIC_INNER_PRODUCT
    if kind == "hnsw":
        made = faiss.IndexHNSWFlat(dim, links, metric)
        made.hnsw.efConstruction = build_effort
    else:
        usual = max(min(round(4 * num_items**0.5), num_items // MIN_PER_LIST), 1)
        made = faiss.IndexIVFFlat(faiss.IndexFlatIP(dim), dim, num_lists or usual, metric)
        made.cp.min_points_per_centroid = 1  # otherwise FAISS warns if a list has too few items
    array = items.detach().to(torch.float32).contiguous().numpy()
    if num_items:
        made.train(array)
        made.add(array)
    return Index(kind, num_items, dim, made)


@typed
def search_index(index: Index, queries: Queries, k: NumItems, *, effort: Count | None = None) -> tuple[Tensor, Tensor]:
    """Return nearly the k best items for each query, in the form of `top_k`: their scores, and their rows.

    Args:
      queries: f[B, D], finite in f32, on the CPU. The search is in f32, on as many threads as torch uses.
      k: the number of items for each query. It may exceed the number of items in the index.
      effort: how many candidates the graph keeps (efSearch of FAISS; at least k), or how many lists are read (nprobe).
        None means 64 candidates, or 8 lists.

    Returns:
      two tensors, f32[B, k] or i64[B, k]: the scores, descending, and their rows. Among equal scores the lower row
      comes first. If a search finds fewer than k items, the other scores are -inf and the other rows -1. Scores are
      inner products up to the rounding of f32. Only `top_k` returns the same bits on every machine.

    Raises:
      TypeError, ValueError: queries are tracked, are not finite, or have another dim than the index; `invariant` runs.

    Example:
      >>> import torch, funcrec as fr
      >>> fr.search_index(fr.build_index(torch.eye(3)), torch.tensor([[0.5, 1.0, 0.0]]), 2)
      (tensor([[1.0000, 0.5000]]), tensor([[1, 0]]))

    Source: FAISS's IndexHNSW.search and IndexIVF.search.
    """
    call = "funcrec.search_index"
    check(call, query_problems(index, queries))
    check(call, value_problems("queries", queries))
    faiss, count = imported(call), queries.shape[0]
    if not count or not index.num_items:
        return torch.full((count, k), -torch.inf), torch.full((count, k), -1)
    effort = LEAST_EFFORT[index.kind] if effort is None else effort
    if index.kind == "hnsw":
        how = faiss.SearchParametersHNSW(efSearch=min(max(effort, k), index.num_items))
    else:
        how = faiss.SearchParametersIVF(nprobe=min(effort, index.faiss.nlist))
    found = min(k, index.num_items)
    array = queries.detach().to(torch.float32).contiguous().numpy()
    scores, rows = map(torch.from_numpy, index.faiss.search(array, found, params=how))
    order = rows.argsort(1)
    scores, rows = scores.gather(1, order).masked_fill(rows.gather(1, order) < 0, -torch.inf), rows.gather(1, order)
    scores, order = scores.sort(dim=1, descending=True, stable=True)
    pad = torch.nn.functional.pad
    return pad(scores, (0, k - found), value=-torch.inf), pad(rows.gather(1, order), (0, k - found), value=-1)


def imported(call: str) -> ModuleType:
    """Return the module faiss, set to the number of threads that torch uses."""
    try:
        import faiss
    except ImportError:
        need, hint = "faiss-cpu >= 1.8", "pip install 'funcrec[retrieval]', or `top_k`, which is exact"
        fail(call, "an index requires FAISS.", got="no module faiss", need=need, hint=hint, kind=ImportError)
    faiss.omp_set_num_threads(torch.get_num_threads())
    return faiss


# -- validators --------------------------------------------------------------------------------------------------


def list_problems(items: Tensor, kind: str, num_lists: int | None) -> Iterator[Problem]:
    if kind == "ivf" and num_lists is not None and num_lists > max(items.shape[0], 1):
        got = f"num_lists={num_lists} of {describe(items)}"
        yield Problem("there are more lists than items.", got, "num_lists <= R", "num_lists=None")


def query_problems(index: Index, queries: Tensor) -> Iterator[Problem]:
    if queries.shape[1] != index.dim:
        got, need = describe(queries), f"f[B, {index.dim}], as {index!r}"
        yield Problem("`queries` have another dim than the index.", got, need, "the query tower of the same model")
    if is_by_tree():
        got, need = "a call inside of fr.invariant", "sums of a fixed order"
        yield Problem("FAISS sums in an order of its own.", got, need, "fr.top_k(queries, items, k)", TypeError)


def value_problems(name: str, x: Tensor) -> Iterator[Problem]:
    """Yield a problem for tensors that FAISS, which only reads memory, cannot see or search."""
    if is_followed(x):
        need, hint = "plain tensors, outside of grad, vmap and jit", f"{name}.detach()"
        yield Problem(f"`{name}` are tracked, and an index has no derivative.", describe(x), need, hint, TypeError)
    elif x.device.type != "cpu":
        yield Problem(f"`{name}` are not on the CPU.", f"{x.device}", "cpu", f"{name}.cpu()")
    elif not x.shape[1]:
        yield Problem(f"`{name}` have no columns.", describe(x), "D >= 1", "vectors of a model's tower")
    elif not bool(torch.isfinite(x.to(torch.float32)).all()):
        got, need = "NaN, inf or numbers beyond f32 among them", "numbers that are finite in f32"
        yield Problem(f"`{name}` are not finite in f32.", got, need, "torch.nan_to_num")
