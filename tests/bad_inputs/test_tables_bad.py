"""Invalid tables raise: sparse tables, nested tables, and tables without a row for a hashed id."""

import pytest
import torch

import funcrec as fr

IDS = fr.KeyedJaggedTensor.from_lists({"x": [[0], [1, 2]]})
FEATURES = (fr.FeatureConfig("x", table="t"),)
SEQUENCES = (fr.FeatureConfig("x", table="t", pooling="none"),)
GOOD = {"t": torch.ones(5, 3)}
ACTS, ROWS = fr.lookup(GOOD, IDS, FEATURES), fr.lookup_sequence(GOOD, IDS, SEQUENCES)
MESH, PLAN = fr.Mesh.emulated(a=2), fr.Plan({"t": fr.row_wise("a")})
SPARSE, DENSE = fr.optim.adagrad(lr=0.1), fr.optim.dense(torch.optim.SGD, lr=0.1)
GRADS = fr.lookup_transpose(ACTS, IDS, FEATURES, GOOD)
loss_fn = lambda params, batch: fr.lookup(params.tables, batch, FEATURES).values.sum() * params.dense
STEP = fr.train_step(loss_fn, sparse=SPARSE, dense=DENSE)
ON_MESH = fr.train_step(loss_fn, sparse=SPARSE, dense=DENSE, mesh=MESH, plan=PLAN)
STATE = STEP.init(fr.Params(GOOD, torch.ones(())))
params = lambda tables: fr.Params(tables, torch.ones(()))
state = lambda tables: fr.TrainState(STATE.step, tables, STATE.slots, STATE.dense, STATE.dense_opt, STATE.key)

CALLS = {
    "lookup": lambda tables: fr.lookup(tables, IDS, FEATURES),
    "lookup_sequence": lambda tables: fr.lookup_sequence(tables, IDS, SEQUENCES),
    "lookup_transpose": lambda tables: fr.lookup_transpose(ACTS, IDS, FEATURES, tables),
    "lookup_sequence_transpose": lambda tables: fr.lookup_sequence_transpose(ROWS, IDS, SEQUENCES, tables),
    "value_and_grad": lambda tables: fr.value_and_grad(loss_fn)(params(tables), IDS),
    "validate": lambda tables: fr.validate(IDS, FEATURES, tables),
    "quantize": lambda tables: fr.quantize(tables),
    "shard_tables": lambda tables: fr.shard_tables(tables, PLAN, MESH),
    "optim.init": lambda tables: SPARSE.init(tables),
    "optim.update": lambda tables: SPARSE.update(GRADS, STATE.slots, tables, 0),
    "step.init": lambda tables: STEP.init(params(tables)),
    "step.init on a mesh": lambda tables: ON_MESH.init(params(tables)),
    "step": lambda tables: STEP(state(tables), IDS),
    "reshard": lambda tables: fr.reshard(state(tables), PLAN, mesh=MESH, sparse=SPARSE),
}  # fmt: skip
WRONG = {
    "coo": lambda x: x.to_sparse(), "csr": lambda x: x.to_sparse_csr(), "csc": lambda x: x.to_sparse_csc(),
    "bsr": lambda x: x.to_sparse_bsr((1, 1)), "mkldnn": lambda x: x.to_mkldnn(),
    "nested": lambda x: torch.nested.nested_tensor([x[0], x[1]]),
    "jagged": lambda x: torch.nested.nested_tensor([x[0], x[1]], layout=torch.jagged),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*(Sparse|nested tensors)")
@pytest.mark.parametrize("layout", WRONG)
@pytest.mark.parametrize("call", CALLS)
def test_a_table_is_dense_memory(call, layout):
    """Every function that takes tables refuses a table without dense memory. The error names the table and says how to
    make it dense."""
    CALLS[call](GOOD)
    with pytest.raises(TypeError) as error:
        CALLS[call]({"t": WRONG[layout](GOOD["t"])})
    text = str(error.value)
    assert "ables['t']` is not a table." in text.split("\n")[0] and "funcrec" in text
    assert "  need  f[num_embeddings, dim]" in text
    assert ("  try   torch.nested.to_padded_tensor(" if layout in ("nested", "jagged") else "].to_dense(): ") in text


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_table_without_rows_is_named(is_sharded):
    """A table of 0 rows, which has no row for any id, raises with its name."""
    features = (fr.FeatureConfig("x", table="t", hash=fr.modulo()),)
    tables = {"t": torch.ones(0, 3)}
    with pytest.raises(ValueError) as error:
        fr.shard_tables(tables, PLAN, MESH) if is_sharded else fr.lookup(tables, IDS, features)
    assert "`tables['t']` has no row" in str(error.value) and "  try   " in str(error.value)
    assert "num_embeddings" not in str(error.value).split("\n")[0]
