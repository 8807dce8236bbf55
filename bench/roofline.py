"""The least time of a case on its machine, from its bytes and its products, and rates measured in the same run.

    roofline = copied bytes / copy + gathered bytes / gather + Σ time of each product + pairs' FLOPs / fastest product

Copies and gathers run at the rates of `bandwidth.py`. A product runs as long as torch's fastest product (of BLAS and
oneDNN) of two row-major matrices of its shape, its operands and result included. Bytes and FLOPs are counted from the
shapes of the model and the ids of the batches. A row counts once for each time that it must be read or written: however
often its batch names it. What an implementation may leave out is not counted: copies of activations, sums of biases.
Shapes: B batch, F features, D dim, K and N columns of a layer's input and output.
"""

import math
import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import bandwidth
import torch
from measure import digits, interleave, wait_for
from torch import Tensor
from torch.utils import _pytree as torch_tree

ROUNDS = 7


class Work(NamedTuple):
    """What a call must do.

    copied, gathered: bytes moved in order, and by rows at random. products: {(rows, inner, columns): how many}.
    flops: those of products of vectors.
    """

    copied: float
    gathered: float
    products: Mapping[tuple[int, int, int], int] = {}
    flops: float = 0.0


def lookup_work(case, batches: Sequence) -> Work:
    """Return the work of a pooled lookup of full bags: ids and weights are read, and vectors written, in order; each
    distinct row is read at random."""
    copied = sum(ids_bytes(ids) for ids in batches) / len(batches) + 4 * case.num_tables * case.batch * case.dim
    return Work(copied, sum(touched([n], batches) for n in case.names) * case.dim * case.table_dtype.itemsize)


def update_work(case, batches: Sequence, slots: Mapping[str, Mapping[str, Tensor]]) -> Work:
    """Return the work of a lookup, its transpose and its update: the lookup's; ids and the gradient are read in order;
    each distinct row is read again, with its slots, and both are written."""
    first = lookup_work(case, batches)
    row = case.dim * case.table_dtype.itemsize + slot_bytes(slots[case.names[0]])
    return Work(2 * first.copied, first.gathered + 2 * sum(touched([n], batches) for n in case.names) * row)


def step_work(model, params, batches: Sequence, slots: Mapping[str, Mapping[str, Tensor]], how: "Dense") -> Work:
    """Return the work of a training step: lookups and updates as in `update_work`; three products for each matrix of
    the dense part (two, if it reads the dense inputs); interactions forward and backward; the dense optimizer."""
    size, dims = len(batches[0].label), {t.name: t.embedding_dim for t in model.tables}
    readers: dict[str, list[str]] = {}
    for f in model.features:
        readers.setdefault(f.table, []).append(f.key)
    ids = [b.ids for b in batches]
    copied = 2 * (sum(map(ids_bytes, ids)) / len(ids) + 4 * size * sum(dims[f.table] for f in model.features))
    gathered = 0.0
    for table, keys in readers.items():
        row = dims[table] * params.tables[table].element_size()
        gathered += touched(keys, ids) * (3 * row + 2 * slot_bytes(slots[table]))
    leaves = torch_tree.tree_leaves(params.dense)
    copied += 4 * sum(x.numel() for x in leaves) * (3 + 2 * how.num_slots)  # gradients are read; the rest also written
    num_dense = batches[0].dense.shape[1]
    matrices = [x.shape for x in leaves if x.dim() == 2]
    products = Counter(p for shape in matrices if min(shape) > 1 for p in layer_products(size, shape, num_dense))
    narrow = sum(6 * size * math.prod(shape) for shape in matrices if min(shape) == 1)
    pairs = pair_work(dims[model.features[0].table], len(model.features) + 1, size) if how.has_pairs else Work(0, 0)
    return Work(copied + pairs.copied, gathered, dict(products), narrow + pairs.flops)


class Dense(NamedTuple):
    """num_slots: the numbers of state of the dense optimizer for each parameter. has_pairs: whether the model computes
    the dot products of all pairs of vectors."""

    num_slots: int = 0
    has_pairs: bool = False


def layer_products(size: int, shape: Sequence[int], num_dense: int) -> list[tuple[int, int, int]]:
    """Return the products of a matrix [N, K] on B rows: x Wᵀ and d_yᵀ x, and d_y W if its input has a gradient."""
    columns, inner = shape
    backward = [] if inner == num_dense else [(size, columns, inner)]
    return [(size, inner, columns), (columns, size, inner), *backward]


def pair_work(dim: int, count: int, size: int) -> Work:
    """Return the work of the dot products of `count` vectors: D products for each pair, and twice as many backward.
    Vectors are read twice and their cotangents written; the products are written and their cotangents read."""
    pairs = count * (count - 1) // 2
    return Work(4 * size * (3 * count * dim + 2 * pairs), 0, {}, 6 * size * dim * pairs)


def ids_bytes(ids) -> int:
    return sum(x.nbytes for x in (ids.values, ids.offsets, ids.weights) if x is not None)


def slot_bytes(slots: Mapping[str, Tensor]) -> int:
    """Return the bytes of one row's state."""
    return sum(s.element_size() * s[:1].numel() for s in slots.values() if s.dim())


def touched(keys: Sequence[str], batches: Sequence) -> float:
    """Return the distinct rows of one table that the features `keys` read, in the mean over batches."""
    rows = [torch.cat([ids[key].unpad().values for key in keys]) for ids in batches]
    return sum(len(x.unique()) for x in rows) / len(rows)


def product_seconds(shapes: Collection[tuple[int, int, int]], setting, dtype: torch.dtype) -> dict:
    """Return {shape: seconds} of torch's fastest product of such matrices: BLAS's, and oneDNN's on a CPU."""
    found = {}
    for rows, inner, columns in shapes:
        a, w = (torch.randn(n, inner, device=setting.device).to(dtype) for n in (rows, columns))
        calls = {"blas": lambda a=a, w=w: torch.mm(a, w.t())}
        if not a.is_cuda and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
            calls["onednn"] = lambda a=a, w=w: torch.ops.mkldnn._linear_pointwise(a, w, None, "none", [], "")
        with torch.no_grad():
            times = interleave(calls, rounds=ROUNDS, wait=wait_for(setting.device))
        found[rows, inner, columns] = min(map(statistics.median, times.values()))
    return found


def figures(work: Work, limits: Mapping[str, float], products: Mapping, ms: float) -> dict:
    """Return the roofline of a case that took `ms`: its parts in ms, their sum, and the time over it.

    limits: the rates in GB/s. products: the seconds of one product of each shape.
    """
    copied, gathered = (work[i] / limits[f"{name}_gb_per_s"] / 1e6 for i, name in enumerate(("copy", "gather")))
    dense = 1e3 * sum(count * products[shape] for shape, count in work.products.items())
    fastest = max((2 * math.prod(shape) / s for shape, s in products.items()), default=0.0)
    pairs = 1e3 * work.flops / fastest if work.flops else 0.0
    total = copied + gathered + dense + pairs
    parts = {"copied": copied, "gathered": gathered, "products": dense, "pairs": pairs}
    flops = work.flops + sum(2 * math.prod(shape) * count for shape, count in work.products.items())
    return {
        "ms": digits(total),
        "time_over_roofline": digits(ms / total),
        "parts_ms": {name: digits(x) for name, x in parts.items()},
        "copied_mb": digits(work.copied / 1e6),
        "gathered_mb": digits(work.gathered / 1e6),
        "gflop": digits(flops / 1e9),
        "product_gflop_per_s": digits(fastest / 1e9),
    }


def added(line: dict, work: Work, setting, dim: int, dtype: torch.dtype, products: torch.dtype = torch.float32) -> dict:
    """Return a case's figures with its roofline, or a red case's as they are.

    dim, dtype: those of the gathered rows, if the case has not measured the rates of a copy and of gathers itself.
    """
    if "ms" not in line:
        return line
    limits = line if "copy_gb_per_s" in line else bandwidth.measure(dim, dtype, setting)
    seconds = product_seconds(work.products, setting, products)
    return {**line, "roofline": figures(work, limits, seconds, line["ms"]["funcrec"]["median"])}
