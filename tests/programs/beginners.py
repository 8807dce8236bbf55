"""First attempts of newcomers from TorchRec, Keras, PyTorch and pandas, and the outcome of each attempt.

    PYTHONPATH=tests python -m programs.beginners        prints the table

A row holds code, whose result is `out`. If an expression follows the code, the code runs and the expression is true.
All other rows are mistakes. They raise or warn in four parts, or, if the row has OWN, in the words of Python or torch.
"""

import tempfile
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import funcrec as fr

PARTS = ("\n  got ", "\n  need ", "\n  try ")
OWN = None  # the words of Python or torch are clear enough


class Outcome(NamedTuple):
    """The outcome of a row. kind: "raises", "warns" or "returns". text: the error or warning, with its notes.
    is_whole: whether the text has all four parts."""

    kind: str
    text: str
    value: Any = None
    is_whole: bool = False


def namespace() -> dict[str, Any]:
    """Return the names that a row's code may use: a small model of each kind, and data."""
    made: dict[str, Any] = {"fr": fr, "torch": torch, "np": np, "path": Path(tempfile.mkdtemp())}
    exec(BEFORE, made)
    return made


BEFORE = """
item, user = fr.TableConfig("item", 5, 4), fr.TableConfig("user", 3, 4)
clicked, seen = fr.FeatureConfig("clicked", table="item"), fr.FeatureConfig("seen", table="item", pooling="none")
weighted = fr.FeatureConfig("clicked", table="item", weighted=True)
KJT = fr.KeyedJaggedTensor
ids = KJT.from_lists({"clicked": [[0], [1, 2]]})
ids_w = KJT.from_lists({"clicked": [[0], [1, 2]]}, weights={"clicked": [[1.0], [0.5, 2.0]]})
tables = fr.init(fr.key(0), [item])
params = fr.Params(tables, {"w": torch.ones(4)})
loss_fn = lambda p, ids: (fr.lookup(p.tables, ids, [clicked])["clicked"] @ p.dense["w"]).square().mean()
grad_fn = fr.value_and_grad(loss_fn)
sparse, dense = fr.optim.adagrad(lr=0.1), fr.optim.dense(torch.optim.SGD, lr=0.1)
step = fr.train_step(loss_fn, sparse=sparse, dense=dense)
state = step.init(params)
net = torch.nn.Linear(4, 1)
own = dict(net.named_parameters())
call = lambda own, x: torch.func.functional_call(net, own, (x,))
batch = fr.Batch(ids, torch.tensor([0.0, 1.0]))
model = fr.models.deepfm((item,), (clicked,), sizes=(2,))
mesh, plan = fr.Mesh.emulated(model=2), fr.Plan({"item": fr.row_wise("model")})
held = fr.shard_tables(tables, plan, mesh)
grads = fr.RowGrads.from_entries(torch.tensor([1]), torch.ones(1, 4), num_embeddings=5)
schema = fr.data.Schema("click", categorical=("item",))
columns = {"item": [0, 1, 2, 3], "click": [0, 1, 0, 1]}
data = fr.data.examples(columns, schema)
ruled = lambda rule: fr.optim.row_optimizer(init=lambda t: {}, rule=rule).update(
    {"item": grads}, {"item": {}}, {"item": torch.zeros(5, 4)}, 0)
"""

ROWS: dict[str, list[tuple[str, ...]]] = {
    "ids": [
        ("fr.lookup(tables, [0, 1], [clicked])",),
        ("fr.lookup(tables, torch.tensor([0, 1]), [clicked])",),
        ("fr.lookup(tables, np.array([0, 1]), [clicked])",),
        ("fr.lookup(tables, {'clicked': [[0], [1]]}, [clicked])",),
        ("fr.lookup(tables, 3, [clicked])",),
        ("fr.lookup(tables, ids['clicked'], [clicked])",),
        ("KJT.from_lists({'clicked': [0, 1]})",),
        ("KJT.from_lists({'clicked': ['a', 'b']})",),
        ("KJT.from_lists({'clicked': [['a'], ['b']]})",),
        ("KJT.from_lists({'clicked': [[None]]})",),
        ("KJT.from_lists([[0], [1]])",),
        ("KJT.from_lists({'clicked': 3})",),
        ("KJT.from_lists({'clicked': np.array([[0, 1], [2, 3]])})", "out.to_lists() == {'clicked': [[0, 1], [2, 3]]}"),
        ("KJT.from_lists({'clicked': [np.array([0, 1]), []]})", "out.to_lists() == {'clicked': [[0, 1], []]}"),
        ("KJT.from_lists({'clicked': [(0, 1), range(2)]})", "out.to_lists() == {'clicked': [[0, 1], [0, 1]]}"),
        ("fr.lookup(tables, KJT.from_lists({'clicked': [[0.0], [1.0]]}), [clicked])",),
        ("KJT.from_lists({'clicked': [[0]]}, weights=[[1.0]])",),
        ("KJT.from_lists({'clicked': [[0, 1]]}, weights={'clicked': [[1.0]]})",),
        ("KJT(['clicked'], torch.tensor([1]), torch.tensor([1]))",),
        ("KJT(keys=['clicked'], values=torch.tensor([1]), lengths=torch.tensor([1]))",),
        ("KJT.from_lengths(['clicked'], [1, 2], [1, 1])",),
        ("KJT.from_lengths(['clicked'], torch.tensor([1, 2]), torch.tensor([1.0, 1.0]))",),
        ("KJT.from_lengths(['clicked'], torch.tensor([1, 2]), torch.tensor([1, 4]))",),
        ("KJT.from_lengths(['clicked', 'clicked'], torch.tensor([1, 2]), torch.tensor([1, 1]))",),
        ("KJT.from_lengths('clicked', torch.tensor([1, 2]), torch.tensor([1, 1]))",),
        ("KJT.from_offsets(['clicked'], torch.tensor([1, 2]), torch.tensor([0, 2, 1]))",),
        ("KJT.from_offsets(['clicked'], torch.tensor([1, 2]), torch.tensor([1, 2]))",),
        ("ids['nope']",),
        ("ids[torch.tensor([True, False])]",),
        ("ids.pad_to(1)",),
        ("ids.values()", OWN),
        ("fr.validate(KJT.from_lists({'clicked': [[9]]}), [clicked], tables)",),
        ("fr.validate(KJT.from_lists({'clicked': [[-1]]}), [clicked], tables)",),
        ("fr.checked(fr.lookup)(tables, KJT.from_lists({'clicked': [[9]]}), [clicked])",),
        ("fr.validate(ids_w, [clicked], tables)",),
        ("fr.lookup(tables, ids, [weighted])",),
    ],
    "tables": [
        ("fr.TableConfig('item', 0, 4)",),
        ("fr.TableConfig('item', 5.0, 4)",),
        ("fr.TableConfig('item', '5', 4)",),
        ("fr.TableConfig('item', True, 4)",),
        ("fr.TableConfig(num_embeddings=5, embedding_dim=4)",),
        ("fr.TableConfig('item', 5)",),
        ("fr.TableConfig('item', np.int64(5), np.int64(4))", "type(out.num_embeddings) is int"),
        ("fr.TableConfig('item', 5, 4, dtype=torch.int8)",),
        ("fr.TableConfig('item', 5, 4, dtype='float32')",),
        ("fr.TableConfig('item', 5, 4, initializer='uniform')",),
        ("fr.TableConfig(item, 5, 4)",),
        ("fr.init(0, [item])",),
        ("fr.init(fr.key(0), item)",),
        ("fr.init(fr.key(0), ['item'])",),
        ("fr.init(fr.key(0), {'item': (5, 4)})",),
        ("fr.init(fr.key(0), [item, item])",),
        ("fr.init([item])",),
        ("fr.key('seed')",),
        ("fr.key(np.int64(3))", "out == fr.key(3)"),
        ("fr.lookup({'itm': tables['item']}, ids, [clicked])",),
        ("fr.lookup({'item': torch.nn.Embedding(5, 4)}, ids, [clicked])",),
        ("fr.lookup({'item': np.zeros((5, 4))}, ids, [clicked])",),
        ("fr.lookup({'item': torch.zeros(5)}, ids, [clicked])",),
        ("fr.lookup({'item': torch.zeros(5, 4, dtype=torch.int64)}, ids, [clicked])",),
        ("fr.lookup([torch.zeros(5, 4)], ids, [clicked])",),
        ("fr.lookup(params, ids, [clicked])",),
        ("fr.lookup([item], ids, [clicked])",),
        ("fr.lookup({'item': net.weight.T}, ids, [clicked])", "out.values.requires_grad"),
    ],
    "features": [
        ("fr.FeatureConfig('clicked')",),
        ("fr.FeatureConfig('clicked', table=item)",),
        ("fr.FeatureConfig('clicked', table='item', pooling='median')",),
        ("fr.FeatureConfig('clicked', table='item', pooling=torch.sum)",),
        ("fr.FeatureConfig('clicked', table='item', max_length=0)",),
        ("fr.FeatureConfig('clicked', table='item', max_length='50')",),
        ("fr.FeatureConfig('clicked', table='item', weighted='yes')",),
        ("fr.FeatureConfig('clicked', table='item', hash='modulo')",),
        ("fr.FeatureConfig('clicked', table='item', hash=fr.modulo)",),
        ("fr.lookup(tables, ids, ['clicked'])",),
        ("fr.lookup(tables, ids, 'clicked')",),
        ("fr.lookup(tables, ids, clicked)",),
        ("fr.lookup(tables, ids, {'clicked': clicked})",),
        ("fr.lookup(tables, ids, [fr.FeatureConfig('clicked', table='other')])",),
        ("fr.lookup(tables, ids, [fr.FeatureConfig('viewed', table='item')])",),
        ("fr.lookup(tables, ids, [clicked, clicked])",),
        ("fr.lookup(tables, KJT.from_lists({'seen': [[0]]}), [seen])",),
        ("fr.lookup_sequence(tables, ids, [clicked])",),
        ("fr.lookup(tables, ids, [clicked])['nope']",),
        ("fr.lookup(tables, KJT.from_lists({'clicked': [[0]], 'b': [[0], [1]]}), "
            "[clicked, fr.FeatureConfig('b', table='item')])",),
    ],
    "a loss": [
        ("fr.value_and_grad(lambda p: p.dense['w'])(params)",),
        ("fr.value_and_grad(lambda p: 1.0)(params)",),
        ("fr.value_and_grad(lambda p: None)(params)",),
        ("fr.value_and_grad(lambda p, i: loss_fn(p, i).item())(params, ids)",),
        ("fr.value_and_grad(lambda p, i: (loss_fn(p, i), 1))(params, ids)",),
        ("fr.value_and_grad(loss_fn, has_aux=True)(params, ids)",),
        ("fr.value_and_grad(loss_fn(params, ids))",),
        ("fr.value_and_grad(net)",  "callable(out)"),
        ("grad_fn(tables, ids)",),
        ("grad_fn((tables, {}), ids)",),
        ("grad_fn({'tables': tables, 'dense': {}}, ids)",),
        ("grad_fn(params)",),
        ("grad_fn(params, [[0], [1]])",),
        ("fr.value_and_grad(lambda p, i: loss_fn(p, i) + p.tables['item'].square().sum())(params, ids)",),
        ("fr.value_and_grad(lambda p, i: net(fr.lookup(p.tables, i, [clicked]).values).mean())(params, ids)",),
        ("net.requires_grad_(False) and fr.value_and_grad(lambda p, i: "
            "net(fr.lookup(p.tables, i, [clicked]).values).mean())(params, ids)", "not out[0].requires_grad"),
        ("(w := torch.ones(4, requires_grad=True)) is w and "
            "fr.value_and_grad(lambda p, i: (fr.lookup(p.tables, i, [clicked]).values @ w).mean())(params, ids)",),
        ("fr.Params(tables, net) and grad_fn(fr.Params(tables, net), ids)",),
        ("grad_fn(fr.Params(tables, {'w': 0.5}), ids)",),
        ("grad_fn(fr.Params(tables, {'w': torch.ones(4, dtype=torch.int64)}), ids)",),
        ("grad_fn(fr.Params(tables, None), ids)",),
        ("grad_fn(fr.Params(tables, net.parameters()), ids)",),
        ("fr.Params([tables['item']], {})",),
        ("fr.Params(tables)", OWN),
        ("fr.value_and_grad(lambda p, i: call(p.dense, fr.lookup(p.tables, i, [clicked]).values).mean())"
            "(fr.Params(tables, own), ids)", "set(out[1].dense) == {'weight', 'bias'}"),
        ("grad_fn(params, ids)[0].backward()", OWN),
        ("fr.value_and_grad(lambda p: torch.utils.checkpoint.checkpoint(torch.sum, p.dense['w'], use_reentrant=False))"
            "(params)",),
        ("fr.Batch(ids, [0, 1])",),
        ("fr.Batch(ids, np.array([0.0, 1.0]))",),
        ("fr.Batch(ids, 1.0)",),
        ("fr.Batch({'clicked': [[0]]}, torch.zeros(1))",),
        ("fr.validate(fr.Batch(ids, torch.tensor([-1.0, 1.0])), [clicked], tables)",),
        ("fr.validate(fr.Batch(ids, torch.tensor([5.0, 1.0])), [clicked], tables)",),
        ("fr.validate(fr.Batch(ids, torch.tensor([float('nan'), 1.0])), [clicked], tables)",),
        ("fr.validate(fr.Batch(ids, torch.zeros(3)), [clicked], tables)",),
        ("fr.validate(fr.Batch(ids, torch.zeros(2, 1)), [clicked], tables)",),
        ("fr.value_and_grad(fr.models.loss(model))(model.init(fr.key(0)), fr.Batch(ids))",),
        ("fr.value_and_grad(fr.models.loss(model))(model.init(fr.key(0)), fr.Batch(ids, torch.zeros(3)))",),
        ("fr.value_and_grad(fr.models.loss(model))(model.init(fr.key(0)), ids)",),
    ],
    "optimizers": [
        ("fr.optim.adam(lr='fast')",),
        ("fr.optim.adam(lr=-1)",),
        ("fr.optim.adam(lr=float('nan'))",),
        ("fr.optim.adam(betas=(0.9, 0.999))",),
        ("fr.optim.adam(net.parameters(), lr=0.1)",),
        ("fr.optim.sgd(momentum=0.9)",),
        ("fr.optim.adam(lr=np.float32(0.1))", "out.init(tables)"),
        ("fr.optim.dense('adam')",),
        ("fr.optim.dense(torch.optim.Adam(net.parameters()))",),
        ("fr.optim.dense(torch.optim.Adam, learning_rate=0.1)",),
        ("fr.optim.dense(torch.optim.LBFGS)",),
        ("fr.train_step(loss_fn, sparse=torch.optim.Adam, dense=dense)",),
        ("fr.train_step(loss_fn, sparse=dense, dense=sparse)",),
        ("fr.train_step(loss_fn, sparse, dense)",),
        ("fr.train_step(loss_fn)", "out.init(params).step == 0"),
        ("fr.train_step(model)", "out.init(params).step == 0"),
        ("fr.train_step(loss_fn(params, ids), sparse=sparse, dense=dense)",),
        ("sparse.update(tables, sparse.init(tables), {'item': grads}, 0)",),
        ("sparse.update({'item': torch.zeros(5, 4)}, sparse.init(tables), tables, 0)",),
        ("sparse.update({'item': grads}, {}, tables, 0)",),
        ("sparse.update({'item': grads}, fr.optim.adam().init(tables), tables, 0)",),
        ("sparse.update({'item': grads}, sparse.init(tables), tables, -1)",),
        ("sparse.update({'itm': grads}, sparse.init(tables), tables, 0)",),
        ("sparse.init(params)",),
        ("fr.optim.freeze(sparse, tables='item')",),
        ("fr.optim.clip(sparse, max_norm=-1)",),
        ("fr.optim.by_table({'item': 'adam'})",),
        ("ruled(lambda row, grad, slots, h: (row - h.learning_rate * grad, slots))",),
        ("ruled(lambda row, grad, slots, h: (row - torch.rand(4) * grad, slots))",),
        ("ruled(lambda row, grad, slots, h: (row if grad.sum() > 0 else grad, slots))",),
        ("ruled(lambda row, grad, slots, h: row - h.lr * grad)",),
        ("ruled(lambda row, grad: row - grad)",),
    ],
    "a step": [
        ("step(params, ids)",),
        ("step(state)", OWN),
        ("step(state, None)",),
        ("step.init(tables)",),
        ("step.init((tables, {}))",),
        ("step.init(params, 0)",),
        ("fr.jit(step).init(params)", "out.tables.keys() == tables.keys()"),
        ("fr.jit(step, donate='params')",),
        ("fr.jit(step(state, ids))",),
        ("fr.jit(lambda x: x.item())(torch.ones(()))",),
        ("fr.jit(lambda x: torch.from_numpy(x.numpy()))(torch.ones(2))",),
        ("fr.jit(lambda x: x + torch.rand(2))(torch.ones(2))",),
        ("fr.jit(lambda x: x if x.sum() > 0 else -x)(torch.ones(2))",),
        ("fr.jit(lambda x: x.add_(1))(torch.ones(2))",),
        ("fr.jit(lambda n, x: n.weight @ x)(net, torch.ones(4))",),
        ("fr.jit(lambda x, l: x * l[0])(torch.ones(2), np.ones(1))",),
        ("fr.jit(sparse)",),
        ("fr.jit(step, donate=('state',)) and [fast := fr.jit(step, donate=('state',)), s := step.init(params), "
            "fast(s, ids), s.tables['item'] + 1]",),
        ("step(step.init(fr.Params(tables, {'w': net.weight[0].detach()})), ids)[0]", "int(out.step) == 1"),
        ("fr.train_step(lambda p, i: call(p.dense, fr.lookup(p.tables, i, [clicked]).values).mean(), sparse=sparse, "
            "dense=dense).init(fr.Params(tables, own)).dense['weight']", "not out.requires_grad"),
        ("torch.no_grad()(step)(state, ids)[0]", "not bool((out.dense['w'] == 1).all())"),
        ("step(fr.train_step(loss_fn, sparse=fr.optim.adam(), dense=dense).init(params), ids)",),
    ],
    "data": [
        ("fr.data.Schema('click', categorical='item')",),
        ("fr.data.Schema('click')",),
        ("fr.data.examples({'itm': [0], 'click': [1]}, schema)",),
        ("fr.data.examples({'item': ['a'], 'click': [1]}, schema)",),
        ("fr.data.examples({'item': [0.5], 'click': [1]}, schema)",),
        ("fr.data.examples({'item': [None], 'click': [1]}, schema)",),
        ("fr.data.examples({'item': [0, 1], 'click': [1]}, schema)",),
        ("fr.data.examples({'item': [0], 'click': [-1]}, schema)",),
        ("fr.data.examples({'item': [0], 'click': [5]}, schema)",),
        ("fr.data.examples({'item': [0], 'click': [float('nan')]}, schema)",),
        ("fr.data.examples({'item': [0], 'click': ['yes']}, schema)",),
        ("fr.data.examples([[0, 1]], schema)",),
        ("fr.data.take(data, torch.tensor([True, False, True, False]))",),
        ("fr.data.take(data, [0, 1])",),
        ("fr.data.take(data, torch.tensor([-1]))",),
        ("fr.data.take(data, torch.tensor([4]))",),
        ("next(iter(fr.data.batches(data, torch.arange(4), 0)))",),
        ("next(iter(fr.data.batches(data, torch.tensor([True, False, True, False]), 2)))",),
        ("fr.data.read('nope.csv')",),
        ("(path / 'a.csv.gz').write_bytes(b'item,click') and fr.data.read(path / 'a.csv.gz')",),
        ("fr.data.random_split(4, (0.5, 0.6), key=fr.key(0))",),
        ("fr.data.random_split(4, (0.5, 0.5), key=0)",),
        ("fr.metrics.auc().update(fr.metrics.auc().init(), torch.zeros(3), torch.zeros(2))",),
        ("fr.models.ml1m('nope')",),
        ("fr.save(params, path / 'a')",),
        ("fr.load(path / 'nothing')",),
        ("fr.save(path / 'b', fr.Params(tables, own))",),
        ("fr.save(path / 'c', {'f': len})",),
    ],
    "a mesh": [
        ("fr.Mesh.emulated(2)",),
        ("fr.Mesh.emulated(model='2')",),
        ("fr.Mesh.emulated(model=0)",),
        ("fr.Plan({'item': 'row_wise'})",),
        ("fr.train_step(loss_fn, sparse=sparse, dense=dense, mesh=mesh)",),
        ("fr.train_step(loss_fn, sparse=sparse, dense=dense, mesh=2, plan=plan)",),
        ("fr.train_step(loss_fn, sparse=sparse, dense=dense, mesh=mesh, plan=fr.Plan({'user': fr.row_wise('model')}))"
            ".init(params)",),
        ("fr.train_step(loss_fn, sparse=sparse, dense=dense, mesh=mesh, plan=plan)(state, ids)",),
        ("fr.shard_tables(tables, plan, fr.Mesh.emulated(data=2))",),
        ("fr.lookup(held, ids, [clicked])",),
        ("fr.shard_map(len, mesh=mesh, in_specs='model', out_specs='model')(torch.ones(2))",),
        ("fr.shard_map(torch.sum, mesh=mesh, in_specs=fr.P('data'), out_specs=fr.P())(torch.ones(2))",),
        ("fr.shard_map(lambda x: x, mesh=mesh, in_specs=fr.P('model'), out_specs=fr.P('model'))(torch.ones(3))",),
        ("fr.psum(torch.ones(2), 'model')",),
        ("fr.gather_tables(tables, mesh)",),
    ],
}  # fmt: skip


def outcome(code: str) -> Outcome:
    """Return the error of a row's code, else funcrec's warning, else the code's value."""
    made = namespace()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            value = eval(code, made)
        except Exception as error:
            text = "\n".join([str(error.args[0]) if error.args else str(error), *getattr(error, "__notes__", ())])
            return Outcome("raises", f"{type(error).__name__} {text}", None, all(p in f"\n{text}" for p in PARTS))
    ours = [str(w.message) for w in said if str(w.message).startswith("funcrec")]
    if ours:
        return Outcome("warns", ours[0], value, all(p in ours[0] for p in PARTS))
    return Outcome("returns", repr(value), value)


def is_right(row: tuple, got: Outcome) -> bool:
    """Return whether a mistake gets an error of four parts, or correct code succeeds."""
    right = list(row[1:])
    if right == [OWN]:
        return got.kind == "raises" and not got.is_whole
    if right:
        return got.kind == "returns" and bool(eval(right[0], namespace() | {"out": got.value}))
    return got.kind != "returns" and got.is_whole


def rows() -> list[tuple]:
    return [row for each in ROWS.values() for row in each]


def figures(found: dict[str, Outcome]) -> str:
    told = [o for o in found.values() if o.kind != "returns"]
    right = sum(is_right(row, found[row[0]]) for row in rows())
    return (
        f"{len(found)} rows: {len(told)} are told, {sum(o.is_whole for o in told)} of them in four parts; "
        f"{len(found) - len(told)} work; silently wrong: {len(found) - right}"
    )


def show(row: tuple, got: Outcome) -> str:
    what = f"works: {row[1]}" if got.kind == "returns" and len(row) > 1 else f"{got.kind} {got.text}".splitlines()[0]
    return f"  {row[0]}\n      {what[:160]}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    every = {row[0]: outcome(row[0]) for row in rows()}
    print(figures(every), "\nCommand: PYTHONPATH=tests .venv/bin/python -m programs.beginners")
    for group, each in ROWS.items():
        print(f"\n{group}")
        for row in each:
            print(show(row, every[row[0]]), "" if is_right(row, every[row[0]]) else "\n      NOT RIGHT")
