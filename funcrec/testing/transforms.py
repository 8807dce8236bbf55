"""The library's functions under every transform, as a table: `python -m funcrec.testing.transforms [row ...]`.

    rows: functions; columns: modes; cells: right, raises, or WRONG, against central differences in f64

With --jit it has the columns that compile, which take an hour on two cores. They move all inputs of a row at once,
so that a row needs one program for each. A cell that raises names what is not supported; the text of its error stands
below the table.
"""

import argparse
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from funcrec.core import replace
from funcrec.grad import accumulate_grads, example_norms, hvp, per_example_grads, private_grads, remat, value_and_grad
from funcrec.history import logged
from funcrec.jagged import (
    JaggedTensor,
    KeyedJaggedTensor,
    bag_filter,
    bag_reduce,
    bag_softmax,
    dedup_bags,
    jagged_attention,
)
from funcrec.kinds import VocabularyConfig, admit, dequantize, dynamic_tables, fake_quantize, quantize, vocabulary
from funcrec.losses import bce
from funcrec.mesh import Mesh, P, psum, shard_map
from funcrec.optim import adagrad, dense, sgd
from funcrec.retrieval import top_k
from funcrec.sharding import Placement, Plan, column_wise, row_wise, shard_tables, table_wise
from funcrec.tables import Batch, FeatureConfig, Params, TableConfig, lookup, lookup_each, lookup_sequence
from funcrec.testing._modes import COMPILED, RAISED, RIGHT
from funcrec.testing._transform_rows import IDS, LABEL, LENGTHS, TABLE, Row, drawn, of_losses, of_models, of_updates
from funcrec.testing._transforms import TRANSFORMS, UNCOMPILED
from funcrec.train import scan, train_step

WEIGHTS = drawn(6, seed=1).abs() + 0.1
CODES = quantize({"t": TABLE.float()}, "int8")
BAGS = JaggedTensor.from_lengths(drawn(6, seed=2), LENGTHS)
KEPT = torch.tensor([True, False, True, True, False, True])
SGD = dense(torch.optim.SGD, lr=0.1)
PLACES = {"table_wise": table_wise("model", rank=1), "row_wise": row_wise("model"), "column_wise": column_wise("model")}


def read(pooling: Any, ids: Any = IDS, **how: Any) -> Callable[..., Any]:
    feature = [FeatureConfig("a", table="t", pooling=pooling, **how)]
    if pooling == "none":
        return lambda table: lookup_sequence({"t": table}, ids, feature)["a"].values
    return lambda table: lookup({"t": table}, ids, feature).values


def weighted(table: Tensor, weights: Tensor) -> Tensor:
    return weighted_of({"t": table})(weights)


def weighted_of(tables: Any) -> Callable[..., Any]:
    with_weights = lambda weights: KeyedJaggedTensor(IDS.values, IDS.offsets, weights, None, IDS.keys)
    return lambda weights: lookup(tables, with_weights(weights), [FeatureConfig("a", table="t", weighted=True)]).values


def reduced(reduce: Any) -> Callable[..., Any]:
    return lambda x: bag_reduce(x, reduce)[[0, 2, 3]]


def as_if(dtype: Any) -> Callable[..., Any]:
    return lambda t: lookup(fake_quantize({"t": t}, dtype), IDS, [FeatureConfig("a", table="t")]).values


def of_vocabulary(table: Tensor) -> Tensor:
    """Return the rows of ids that a vocabulary has admitted, 7, 9 and 8, and zeros for one that it has not."""
    words = vocabulary(100)
    wide = torch.cat([table] * (words.num_embeddings // 4))
    config = VocabularyConfig(words, (TableConfig("t", len(wide), 3, torch.float64),), [FeatureConfig("a", table="t")])
    tables = dynamic_tables({"t": wide}, {"v": config}, key=torch.tensor(1))
    known = admit(tables.vocabularies["v"], torch.tensor([7, 9, 8]))[0]
    ids = KeyedJaggedTensor.from_lists({"a": [[7, 8], [], [9, 7], [5]]})
    return lookup(replace(tables, vocabularies={"v": known}), ids, [FeatureConfig("a", table="t")]).values


def sharded(place: Placement) -> Row:
    mesh, features = Mesh.emulated(model=2), [FeatureConfig("a", table="t")]
    whole = P(mesh.axis_names)

    def f(table):
        held = shard_tables({"t": table}, Plan({"t": place}), mesh)
        rank = lambda tables, ids: lookup(tables, ids, features).values
        return shard_map(rank, mesh=mesh, in_specs=(held.specs(), whole), out_specs=whole)(held, IDS)

    return Row(f, (drawn(4, 4),))


def again(table: Tensor, dense: Tensor, layer: Tensor) -> Tensor:
    """Return a loss with a part that is computed again, once by arguments and once by a closure."""
    hidden = remat(lambda x: torch.tanh(x @ layer))
    return remat(small_loss)(Params({"t": hidden(hidden(table))}, dense), Batch(IDS, LABEL))


def logged_step() -> Row:
    step = logged(train_step(small_loss, sparse=sgd(0.1), dense=SGD), steps=2, rows=8)

    def f(tables, dense):
        run = step.init(Params(tables, dense))
        return step(run, Batch(IDS, LABEL))[0].state

    return Row(f, ({"t": TABLE}, drawn(3)))


def attended(queries: Tensor, keys: Tensor, values: Tensor, **how: Any) -> Tensor:
    bags = lambda x: JaggedTensor(x, IDS.offsets)
    return jagged_attention(bags(queries), bags(keys), values, **how).values


def of_strides(table: Tensor) -> dict[str, Tensor]:
    """Return the pooled rows of two features with other numbers of bags (VBE)."""
    lengths = torch.tensor([2, 0, 3, 1])
    ids = KeyedJaggedTensor.from_lengths(["a", "b"], IDS.values, lengths, strides=(3, 1))
    return lookup_each({"t": table}, ids, [FeatureConfig(k, table="t") for k in ("a", "b")])


def private(f: Callable[..., Any]) -> Callable[..., Any]:
    grads = private_grads(f, max_norm=0.3, noise_multiplier=0.1, max_ids=3)
    return lambda *args: grads(*args, key=torch.tensor(7))


def curvature(table: Tensor, dense: Tensor) -> tuple[Tensor, Tensor]:
    params = Params({"t": table}, dense)
    product = hvp(small_loss)(params, params, Batch(IDS, LABEL))
    return product.dense, product.tables["t"].to_dense()


def small_loss(params: Params, batch: Batch) -> Tensor:
    x = lookup(params.tables, batch.ids, [FeatureConfig("a", table="t")]).values @ params.dense
    return bce(x, batch.label)


def step_of(optimizer: Callable[..., Any], **how: Any) -> Row:
    step = train_step(small_loss, sparse=optimizer(lr=0.1), dense=SGD, **how)
    state = step.init(Params({"t": TABLE}, drawn(3)))
    return Row(lambda tables, dense: step(replace(state, tables=tables, dense=dense), Batch(IDS, LABEL))[0],
               (state.tables, state.dense))  # fmt: skip


def taken(grad: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of (table, dense): the gradients that a transform of the loss gives, with dense tables."""

    def f(table, dense):
        value, grads = grad(small_loss)(Params({"t": table}, dense), Batch(IDS, LABEL))
        if grads.dense.dim() > 1:
            return value, grads.dense, example_norms(grads)
        return value, grads.dense, grads.tables["t"].to_dense()

    return f


def rows() -> dict[str, Row]:
    """Return the rows by name."""
    both = (TABLE, drawn(3))
    heads = tuple(drawn(6, 2, 3, seed=i) for i in (5, 6, 7))
    mesh = Mesh.emulated(data=2)
    on_ranks = shard_map(lambda x: psum(x.sin().sum(), "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
    shared = dedup_bags(KeyedJaggedTensor.from_lists({"a": [[1, 2], [3], [1, 2]]}))
    found = {
        "lookup, sum": Row(read("sum"), (TABLE,)), "lookup, mean": Row(read("mean", max_length=2), (TABLE,)),
        "lookup, max": Row(read("max"), (TABLE,)), "lookup, weighted": Row(weighted, (TABLE, WEIGHTS)),
        "lookup of shared bags": Row(read("sum", shared), (TABLE,)), "lookup_sequence": Row(read("none"), (TABLE,)),
        "lookup_each": Row(of_strides, (TABLE,)),
        "lookup as if float16": Row(as_if("float16"), (TABLE,), read("sum")),
        "lookup as if int8": Row(as_if("int8"), (TABLE,), read("sum")),
        "lookup, quantised": Row(
            weighted_of(CODES), (WEIGHTS,), weighted_of({"t": dequantize(CODES)["t"].double()}), 1e-5),
        "lookup of growing tables": Row(of_vocabulary, (TABLE,)),
        **{f"lookup, {n}": sharded(place) for n, place in PLACES.items()},
        **{f"bag_reduce, {r}": Row(reduced(r), (BAGS,))
           for r in ("sum", "mean", "max", "min", "prod", "logsumexp")},
        "bag_softmax": Row(lambda x: bag_softmax(x).values, (BAGS,)),
        "bag_filter": Row(lambda x: bag_reduce(bag_filter(x, KEPT), "sum"), (BAGS,)),
        "jagged_attention": Row(attended, heads),
        "jagged_attention, silu": Row(partial(attended, activation="silu", normalizer=3), heads),
        **of_losses(), **of_models(), **of_updates(),
        "value_and_grad": Row(taken(value_and_grad), both),
        "per_example_grads": Row(taken(lambda f: per_example_grads(f, max_ids=3)), both),
        "private_grads": Row(taken(private), both), "hvp": Row(curvature, both),
        "accumulate_grads": Row(taken(lambda f: accumulate_grads(f, 2)), both),
        "train_step": step_of(adagrad), "train_step, micro-batches": step_of(sgd, micro_batches=2),
        "train_step, logged": logged_step(), "remat": Row(again, (*both, drawn(3, 3, seed=10))),
        "scan": Row(lambda x, b: scan(lambda s, b: ((s * b).sin(), {"s": s}), x, b), (drawn(2), drawn(3, 2, seed=1))),
        "top_k": Row(lambda q, t: top_k(q, t, 2)[0], (drawn(2, 3, seed=3), TABLE)),
        "shard_map": Row(on_ranks, (drawn(4),)),
    }  # fmt: skip
    return found


def cell(outcomes: Mapping[str, str]) -> str:
    """Return the cell of a row and a mode, from the outcomes by the row's inputs."""
    if any(o != RIGHT and not o.startswith(RAISED) for o in outcomes.values()):
        return "WRONG"
    return "raises" if any(o != RIGHT for o in outcomes.values()) else "right"


def lines(named: Mapping[str, Row], modes: tuple[str, ...]) -> Iterator[str]:
    """Yield the lines of the table, each row when it is done, then what the cells say that are not right."""
    width, notes = max(map(len, named)), defaultdict(Counter)
    yield " " * width + "  " + "  ".join(f"{m:>{max(len(m), 6)}}" for m in modes)
    for name, row in named.items():
        found = row.cells(modes)
        by_mode = {m: {path: o for (path, mode), o in found.items() if mode == m} for m in modes}
        yield f"{name:<{width}}  " + "  ".join(f"{cell(o):>{max(len(m), 6)}}" for m, o in by_mode.items())
        for (_, mode), o in found.items():
            if o != RIGHT:
                notes[re.sub(r" object at 0x\w+", "", " ".join(o.split()))[:400]][mode] += 1
    for text, counts in notes.items():
        yield f"{', '.join(counts)} ({sum(counts.values())} cells): {text}"


def main(args: list[str] | None = None) -> Any:
    parser = argparse.ArgumentParser(
        prog="python -m funcrec.testing.transforms", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("rows", nargs="*", help="names of rows; all by default")
    parser.add_argument("--jit", action="store_true", help=f"the columns that compile, too: {', '.join(COMPILED)}")
    options, found = parser.parse_args(args), rows()
    unknown = [n for n in options.rows if n not in found]
    if unknown:
        parser.error(f"no row {unknown}; the rows are {', '.join(found)}")
    chosen = {n: found[n] for n in options.rows or found}
    for line in lines(chosen, TRANSFORMS if options.jit else UNCOMPILED):
        print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
