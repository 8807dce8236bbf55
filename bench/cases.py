"""The shapes to measure, and their ids.

Ids are uniform, or have a bounded Zipf distribution with exponent `alpha`, spread over the rows.
Shapes: T tables, R rows, D dim, B bags, L ids per bag.
"""

from typing import NamedTuple

import torch
from torch import Tensor

import funcrec as fr

NUM_BATCHES = 4
ZIPF = 1.05


class TableCase(NamedTuple):
    """A case of T tables with one feature each: the shape of the lookup, and the rule of the update."""

    num_tables: int
    num_rows: int
    dim: int
    batch: int
    ids_per_bag: int
    alpha: float = 0.0
    dtype: str = "float32"
    ids: str = "int64"
    mean: bool = False
    weighted: bool = False
    rule: str = "rowwise_adagrad"

    @property
    def table_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def names(self) -> list[str]:
        return [f"t{i}" for i in range(self.num_tables)]

    def features(self) -> list[fr.FeatureConfig]:
        pooling = "mean" if self.mean else "sum"
        return [fr.FeatureConfig(n, table=n, pooling=pooling, weighted=self.weighted) for n in self.names]

    def configs(self) -> list[fr.TableConfig]:
        init = fr.uniform(0.05)
        return [fr.TableConfig(n, self.num_rows, self.dim, self.table_dtype, init) for n in self.names]


SHAPES = {  # a to e are the shapes of the first measurements
    "a": TableCase(26, 100_000, 64, 512, 1),
    "b": TableCase(26, 100_000, 64, 512, 20),
    "c": TableCase(26, 100_000, 64, 4096, 1),
    "d": TableCase(26, 100_000, 64, 4096, 1, alpha=ZIPF),
    "e": TableCase(8, 1_000_000, 128, 1024, 20),
}
# all rules except the rule of the shapes, and except adamw, which is like adam
RULES = tuple(n for n in fr.kernels.ops.RULES if n not in ("rowwise_adagrad", "adamw"))
SHORT = {"f16": "float16", "bf16": "bfloat16"}

LOOKUPS = {
    **SHAPES,
    **{f"{s}-{short}": SHAPES[s]._replace(dtype=dtype) for s in "bce" for short, dtype in SHORT.items()},
    "b-mean": SHAPES["b"]._replace(mean=True),
    "b-weighted": SHAPES["b"]._replace(weighted=True),
    "b-i32": SHAPES["b"]._replace(ids="int32"),
    "dim16": TableCase(26, 100_000, 16, 2048, 5),
    "dim100": TableCase(26, 100_000, 100, 2048, 5),
}
UPDATES = {
    **SHAPES,
    **{f"b-{rule}": SHAPES["b"]._replace(rule=rule) for rule in RULES},
    **{f"{s}-{short}": SHAPES[s]._replace(dtype=dtype) for s in "bce" for short, dtype in SHORT.items()},
    "b-sgd-bf16": SHAPES["b"]._replace(rule="sgd", dtype="bfloat16"),
    "c-adam": SHAPES["c"]._replace(rule="adam"),
    "dim16": TableCase(26, 100_000, 16, 2048, 5),
}
QUICK_LOOKUPS = ("a", "b", "c", "e")
QUICK_UPDATES = ("a", "b", "c", "e", "b-adam", "b-bf16")


class StepCase(NamedTuple):
    """A whole training step. model: "dlrm", or "dcnv2" with MLPerf's tables cut to `num_rows`.

    precision: the precision of matrix products: "float32", "tf32" (on a GPU), or "bfloat16" by autocast.
    """

    model: str
    num_rows: int
    dim: int
    batch: int
    ids_per_bag: int = 0
    alpha: float = 0.0
    precision: str = "float32"


def _dlrm(dim: int, batch: int, ids_per_bag: int, alpha: float) -> tuple[str, StepCase]:
    name = f"dlrm-d{dim}-b{batch}-l{ids_per_bag}" + ("-zipf" if alpha else "")
    return name, StepCase("dlrm", 100_000, dim, batch, ids_per_bag, alpha)


STEPS = {
    **dict(
        _dlrm(d, b, n, a) for d in (16, 64, 128) for b in (512, 2048, 8192) for n in (1, 5, 20) for a in (0.0, ZIPF)
    ),
    "dcnv2": StepCase("dcnv2", 1_000_000, 128, 2048),
    "dcnv2-tf32": StepCase("dcnv2", 1_000_000, 128, 2048, precision="tf32"),
    "dcnv2-bf16": StepCase("dcnv2", 1_000_000, 128, 2048, precision="bfloat16"),
    **{
        f"{model}-b{batch}-{short}": StepCase(model, rows, dim, batch, ids, precision=precision)
        for model, rows, dim, ids in (("dcnv2", 1_000_000, 128, 0), ("dlrm", 100_000, 64, 5))
        for batch in (16384, 65536)
        for short, precision in (("f32", "float32"), ("tf32", "tf32"), ("bf16", "bfloat16"))
    },
}
QUICK_STEPS = ("dlrm-d64-b512-l1", "dlrm-d64-b2048-l5")
GPU_STEPS = (  # the first are measured first, and time may be up before the last
    "dcnv2-b16384-bf16", "dcnv2-b16384-tf32", "dcnv2-b16384-f32", "dcnv2-bf16", "dlrm-b65536-bf16", "dlrm-b65536-f32",
    "dcnv2-b65536-bf16", "dcnv2-tf32", "dlrm-b16384-tf32",
)  # fmt: skip


class JaggedCase(NamedTuple):
    """A case of F features with B bags of 0 to L ids.

    op: "permute", "regroup", "bucketize", "to_padded", "from_padded", "bag_sum", "bag_max", "bag_softmax" or
    "lookup_max".
    """

    op: str
    num_features: int
    batch: int
    longest: int
    dim: int = 1


JAGGED = {
    "permute": JaggedCase("permute", 26, 4096, 20),
    "permute-long": JaggedCase("permute", 8, 1024, 200),
    "regroup": JaggedCase("regroup", 26, 4096, 0, 64),
    "bucketize": JaggedCase("bucketize", 26, 4096, 20),
    "to_padded": JaggedCase("to_padded", 1, 4096, 50, 64),
    "from_padded": JaggedCase("from_padded", 1, 4096, 50, 64),
    "bag_sum": JaggedCase("bag_sum", 1, 4096, 50, 64),
    "bag_max": JaggedCase("bag_max", 1, 4096, 50, 64),
    "bag_softmax": JaggedCase("bag_softmax", 1, 4096, 50, 64),
    "lookup_max": JaggedCase("lookup_max", 1, 4096, 50, 64),
}


def tiny(case):
    """Return a case with the same structure that takes no time, to check that all code runs."""
    small = {"num_tables": 3, "num_rows": 500, "batch": 16, "num_features": 3, "longest": 5}
    return case._replace(
        **{name: min(value, getattr(case, name)) for name, value in small.items() if hasattr(case, name)}
    )


def table_batches(case: TableCase, device: str) -> list[fr.KeyedJaggedTensor]:
    """Return NUM_BATCHES batches of ids, with one key per table and full bags."""
    data = fr.data.random_rows(
        fr.key(0), dict.fromkeys(case.names, case.num_rows), ids_per_bag=case.ids_per_bag, alpha=case.alpha
    )
    draw, batches = torch.Generator().manual_seed(1), []
    for k in range(NUM_BATCHES):
        ids = fr.data.take(data, torch.arange(k * case.batch, (k + 1) * case.batch)).ids
        weights = torch.rand(ids.capacity, generator=draw) if case.weighted else None
        values, offsets = (x.to(getattr(torch, case.ids)) for x in (ids.values, ids.offsets))
        made = fr.KeyedJaggedTensor.from_offsets(ids.keys, values, offsets, weights=weights)
        batches.append(to_device(made, device))
    return batches


def to_device(ids: fr.KeyedJaggedTensor, device: str) -> fr.KeyedJaggedTensor:
    weights = None if ids.weights is None else ids.weights.to(device)
    return fr.KeyedJaggedTensor(ids.values.to(device), ids.offsets.to(device), weights, None, ids.keys, ids.strides)


def make_tables(case: TableCase, device: str) -> dict[str, Tensor]:
    """Return the tables, with the same numbers in every call, in memory from funcrec's allocator for tables.

    Peers copy them into their own memory.
    """
    return {n: t.to(device) for n, t in fr.init(fr.key(0), case.configs()).items()}


def lookup_bytes(case: TableCase) -> int:
    """Return the bytes of a lookup, which reads ids (and weights) and a row per id, and writes the output."""
    num_ids = case.num_tables * case.batch * case.ids_per_bag
    per_id = getattr(torch, case.ids).itemsize + case.dim * case.table_dtype.itemsize + 4 * case.weighted
    return num_ids * per_id + 4 * case.num_tables * case.batch * case.dim


def update_bytes(case: TableCase, ids: fr.KeyedJaggedTensor, slots: dict[str, dict[str, Tensor]]) -> int:
    """Return the bytes of a lookup and its update.

    They are the bytes of the lookup, of the ids again, of the gradient, and of each touched row and its slots, read and
    written.
    """
    touched = sum(len(ids[n].unpad().values.unique()) for n in case.names)
    of_slots = sum(s.element_size() * s[:1].numel() for s in slots[case.names[0]].values())
    row = case.dim * case.table_dtype.itemsize + of_slots
    again = ids.capacity * getattr(torch, case.ids).itemsize
    return lookup_bytes(case) + again + 4 * case.num_tables * case.batch * case.dim + 2 * touched * row
