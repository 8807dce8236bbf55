"""torch.func.linearize of funcrec's functions gives the tangents of jvp.

linearize traces the operations of a jvp once, without writes through views. Values written through a view would be
silently lost.
"""

import pytest
import torch
from torch.func import jvp, linearize

import funcrec as fr
from funcrec.tables import _init

MESH, SPARSE = fr.Mesh.emulated(x=2), fr.optim.adagrad(lr=0.1)
ROWS, ONE = fr.Plan({"t": fr.row_wise("x")}), fr.Plan({"t": fr.table_wise("x", rank=1)})
COLUMNS = fr.Plan({"t": fr.column_wise("x")})
CLICKED = fr.FeatureConfig("clicked", table="t")
IDS = fr.KeyedJaggedTensor.from_lists({"clicked": [[1], [2, 2], [], [3, 0]]})
X = torch.arange(8.0).reshape(4, 2) / 4 - 1
W = torch.tensor([0.5, -2.0])


def loss_fn(params, ids):
    return (fr.lookup(params.tables, ids, [CLICKED])["clicked"] * params.dense).square().sum()


def step_on(plan):
    dense = fr.optim.dense(torch.optim.SGD, lr=0.1)
    return fr.train_step(loss_fn, sparse=SPARSE, dense=dense, mesh=MESH, plan=plan)


def moved(x, plan=ROWS, to=ONE):
    state = fr.reshard(step_on(plan).init(fr.Params({"t": x}, W)), to, mesh=MESH, sparse=SPARSE)
    return fr.gather_state(state, MESH).tables["t"]


def updated(name, x, lr):
    rule = getattr(fr.optim, name)(lr=0.1)
    _, grads = fr.value_and_grad(loss_fn)(fr.Params({"t": x}, W * lr), IDS)
    tables, slots = rule.update(grads.tables, rule.init({"t": x}), {"t": x}, 0)
    return tables["t"], slots


def coded(x, kind):
    on_ranks = lambda tables: fr.lookup(tables, IDS, [CLICKED]).values
    tables = fr.shard_tables({"t": x}, ROWS, MESH, codec=fr.Codec(kind))
    return fr.shard_map(on_ranks, mesh=MESH, in_specs=(tables.specs(),), out_specs=fr.P(), check=False)(tables)


def drawn(x, lr):
    """Return a table that is drawn in blocks, as a constant, times the tracked arguments."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_init, "INIT_BLOCK", 2)
        return fr.init(fr.key(0), [fr.TableConfig("t", 4, 2)])["t"] * x * lr


def differentiated(x, lr):
    loss, grads = fr.value_and_grad(loss_fn)(fr.Params({"t": x}, W * lr), IDS)
    return loss, grads.dense, grads.tables["t"].to_dense()


def sharded(x, lr):
    return fr.gather_tables(fr.shard_tables({"t": x}, ROWS, MESH), MESH)["t"] * lr


CASES = {
    "shard_tables, gather_tables": sharded,
    "reshard, gather_state": lambda x, lr: moved(x) * lr,
    "reshard of columns": lambda x, lr: moved(x, COLUMNS, ROWS) * lr,
    "init": drawn,
    "lookup": lambda x, lr: fr.lookup({"t": x}, IDS, [CLICKED]).values * lr,
    "value_and_grad": differentiated,
    "float16 vectors": lambda x, lr: coded(x * lr, "float16"),
    "int8 vectors": lambda x, lr: coded(x * lr, "int8") * lr,
    **{n: lambda x, lr, n=n: updated(n, x, lr) for n in ("adam", "rowwise_adagrad", "lion")},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")
def test_linearize_is_jvp(name):
    """The linear map of linearize equals that of jvp, for a table and for a factor. Its value equals the function's
    value."""
    f, at = CASES[name], (X, torch.tensor(0.5))
    value, linear = linearize(f, *at)
    torch.testing.assert_close(value, f(*at))
    for tangents in ((X.cos(), torch.tensor(0.0)), (X * 0, torch.tensor(1.0)), (X.sin(), torch.tensor(2.0))):
        torch.testing.assert_close(linear(*tangents), jvp(f, at, tangents)[1])
