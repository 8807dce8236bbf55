"""train_step is one function: eager, compiled and donated. The cost of a step follows the batch."""

import copy
import functools
import gc
import inspect
import re
import sys
from pathlib import Path

import pytest
import torch

import funcrec as fr
from funcrec.testing import assert_trees_close

pytestmark = pytest.mark.xdist_group("step")  # its step is compiled once
TABLES = (
    fr.TableConfig("item", num_embeddings=50, embedding_dim=8),
    fr.TableConfig("user", num_embeddings=20, embedding_dim=3, dtype=torch.bfloat16),
)
FEATURES = (
    fr.FeatureConfig("clicked", table="item", pooling="mean"),
    fr.FeatureConfig("shown", table="item", max_length=1),
    fr.FeatureConfig("user", table="user", weighted=True, hash=fr.modulo()),
    fr.FeatureConfig("history", table="item", pooling="none", column="clicked"),
)


def loss_fn(params, batch, *, key):
    acts = fr.lookup(params.tables, batch.ids, FEATURES)
    history = fr.lookup_sequence(params.tables, batch.ids, FEATURES)["history"]
    keep = fr.nn.dropout(acts.values, key, 0.5)
    logits = keep @ params.dense["w"] + torch.tanh(history.values).sum() * params.dense["b"]
    return torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.label), {"logits": logits}


def make_batch(seed: int) -> fr.Batch:
    draw = torch.Generator().manual_seed(seed)
    number = lambda high, size: torch.randint(0, high, (size,), generator=draw)
    lengths = torch.cat([torch.full((4,), 3), torch.ones(4, dtype=torch.int64), torch.full((4,), 2)])
    values = torch.cat([number(50, 12), number(50, 4), number(1000, 8)])
    ids = fr.KeyedJaggedTensor.from_lengths(
        ["clicked", "shown", "user"], values, lengths, weights=torch.rand(24, generator=draw)
    )
    return fr.Batch(fr.pad_to_bucket(ids), number(2, 4).float())


def make_step():
    dense = fr.optim.dense(torch.optim.Adam, lr=0.01)
    return fr.train_step(loss_fn, sparse=fr.optim.adam(lr=0.01), dense=dense, has_aux=True)


def first_state(step) -> fr.TrainState:
    dense = {"w": torch.linspace(-1, 1, 19), "b": torch.tensor(0.1)}
    return step.init(fr.Params(fr.init(fr.key(0), TABLES), dense), fr.key(1))


def run(step, state, num_steps: int, first: int = 0):
    losses = []
    for i in range(first, first + num_steps):
        state, metrics = step(state, make_batch(i))
        losses.append(metrics["loss"].clone())
    return state, losses


@functools.cache
def compiled_step(donate=()):
    return fr.jit(make_step(), donate=donate)


def test_compiled_and_donated_steps_equal_eager_ones():
    """jit(step) and jit(step, donate) give the same bits over five steps, and the values of eager mode within f32
    rounding."""
    step = make_step()
    eager, eager_losses = run(step, first_state(step), 5)
    compiled, losses = run(compiled_step(), first_state(step), 5)
    donated, donated_losses = run(compiled_step(("state",)), first_state(step), 5)
    assert_trees_close(donated, compiled)
    assert_trees_close(donated_losses, losses)
    assert_trees_close(losses, eager_losses, rtol=1e-5)
    assert_trees_close(compiled.dense, eager.dense, rtol=1e-4, atol=1e-6)
    assert_trees_close(compiled.tables["item"], eager.tables["item"], rtol=1e-4, atol=1e-6)


def test_a_step_is_pure():
    """Neither the state nor the batch of an undonated step changes, in eager or compiled calls."""
    step = make_step()
    for function in (step, compiled_step()):
        state, batch = first_state(step), make_batch(0)
        function(state, batch)
        assert_trees_close(state, first_state(step))
        assert_trees_close(batch, make_batch(0))


def test_a_step_compiles_once():
    """Batches of one capacity share one compilation."""
    step, fast = make_step(), compiled_step(("state",))
    with torch._dynamo.config.patch(error_on_recompile=True):
        run(fast, first_state(step), 4)
    assert fast.num_compiled() == 1


def test_a_saved_state_goes_on_to_the_same_bits(tmp_path):
    """Six steps equal three steps, a checkpoint, and three steps."""
    step, fast = make_step(), compiled_step(("state",))
    whole, _ = run(fast, first_state(step), 6)
    half, _ = run(fast, first_state(step), 3)
    resumed, _ = run(fast, fr.load(fr.save(tmp_path / "state.pt", half)), 3, first=3)
    assert_trees_close(resumed, whole)


def test_the_key_moves_with_the_step():
    """Two steps on one batch draw different dropout. The same state draws the same dropout."""
    step = make_step()
    state = first_state(step)
    later = fr.TrainState(state.step + 1, state.tables, state.slots, state.dense, state.dense_opt, state.key)
    losses = [float(step(s, make_batch(0))[1]["loss"]) for s in (state, state, later)]
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_a_donated_step_allocates_nothing_of_its_table_size():
    """Peak memory over donated steps on a 256 MB table grows by less than 32 MB. Undonated, it grows by the table."""
    clicked = fr.FeatureConfig("clicked", table="item", max_length=2)
    loss = lambda p, b: fr.lookup(p.tables, b.ids, [clicked]).values.square().sum() * p.dense
    dense = fr.optim.dense(torch.optim.SGD, lr=0.1)
    step = fr.train_step(loss, sparse=fr.optim.rowwise_adagrad(lr=0.1), dense=dense)
    ids = fr.KeyedJaggedTensor.from_lists({"clicked": [[1, 999_999], [7]]})
    batch = fr.Batch(ids, torch.zeros(2))
    peak_mb = lambda: int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024

    fast = fr.jit(step, donate=("state",))
    state = step.init(fr.Params({"item": torch.ones(1_000_000, 64)}, torch.tensor(1.0)))
    state, _ = fast(state, batch)
    Path("/proc/self/clear_refs").write_text("5")  # The peak begins anew: the compiler's was higher.
    before = peak_mb()
    for _ in range(3):
        state, _ = fast(state, batch)
    assert peak_mb() - before < 32
    fr.jit(step)(state, batch)
    assert peak_mb() - before > 200, "the measure would not see a copy"


def test_signatures_are_readable():
    """A step's parameters have the names that `donate` takes."""
    assert list(inspect.signature(make_step()).parameters) == ["state", "batch"]


def other_state():
    step = fr.train_step(
        loss_fn, sparse=fr.optim.sgd(lr=0.1), dense=fr.optim.dense(torch.optim.SGD, lr=0.1), has_aux=True
    )
    return first_state(step)


BAD = {
    "sparse is not an optimizer": (lambda: fr.train_step(loss_fn, sparse=0.1, dense=None), TypeError,
        "`sparse` is not"),
    "dense is not an optimizer": (lambda: fr.train_step(loss_fn, sparse=fr.optim.sgd(), dense=0.1), TypeError,
        "`dense` is not"),
    "params are a dict": (lambda: make_step().init({}), TypeError, "`params` is not Params"),
    "key is a number": (lambda: make_step().init(fr.Params({}, {}), 3), TypeError, "`key` is not a key"),
    "state is params": (lambda: make_step()(fr.Params({}, {}), make_batch(0)), TypeError,
        "`state` is not a TrainState"),
    "another optimizer's state": (lambda: make_step()(other_state(), make_batch(0)), (TypeError, ValueError), "slots"),
    "an integer dense leaf": (lambda: make_step().init(fr.Params({}, {"n": torch.ones(1).int()})), TypeError,
        "cannot be"),
}  # fmt: skip


@pytest.mark.parametrize("call, kind, fragment", BAD.values(), ids=BAD.keys())
def test_bad_input(call, kind, fragment):
    """Each invalid argument raises before any work."""
    with pytest.raises(kind, match=fragment):
        call()


def test_dense_updates_of_matrices_compile():
    """A compiled update of a weight matrix, whose gradient is a matrix product, equals the eager update."""
    names = ("SGD", "AdamW", "RMSprop", "NAdam")
    opts = {n: fr.optim.dense(getattr(torch.optim, n), lr=0.1, weight_decay=0.01) for n in names}
    draw = torch.Generator().manual_seed(0)
    ws, xs = ({n: torch.randn(*shape, generator=draw) for n in names} for shape in ((4, 3), (5, 4)))
    states = {n: opt.init(ws[n]) for n, opt in opts.items()}

    def step(w, state, x, opt):
        d = torch.func.grad(lambda w: (x @ w).square().mean())(w)
        return opt.update(d, state, w, 0)

    every = lambda ws, states, xs: {n: step(ws[n], states[n], xs[n], opt) for n, opt in opts.items()}
    assert_trees_close(fr.jit(every)(ws, states, xs), every(ws, states, xs), rtol=1e-5, atol=1e-6)


def test_an_optimizer_may_be_made_inside_the_compiled_function():
    """A staged rule lives as long as the compiled function, even after the rule's optimizer is gone."""

    def update(table, rows, grads):
        mine = fr.optim.row_optimizer(
            init=lambda t: {}, rule=lambda row, grad, slots, hyper: (row - hyper.lr * grad.sign(), slots), lr=0.5
        )
        g = fr.RowGrads.from_entries(rows, grads, num_embeddings=3)
        return mine.update({"t": g}, {"t": {}}, {"t": table}, 0)[0]["t"]

    args = torch.zeros(3, 2), torch.tensor([1, 1]), torch.tensor([[1.0, -1.0], [2.0, -3.0]])
    fast = fr.jit(update)
    fast(*args)
    gc.collect()
    assert_trees_close(fast(*args), torch.tensor([[0.0, 0.0], [-0.5, 0.5], [0.0, 0.0]]))


def test_a_users_key_is_not_donated():
    """A new state copies its key. The user therefore keeps the key. Other states may be made with the key."""
    key, params = fr.key(3), fr.Params({}, torch.ones(2))
    step = fr.train_step(
        lambda p, b: p.dense.square().sum(), sparse=fr.optim.sgd(), dense=fr.optim.dense(torch.optim.SGD, lr=0.1)
    )
    fast = fr.jit(step, donate=("state",))
    one, two = step.init(params, key), step.init(fr.copy(params), key)
    one, _ = fast(one, None)
    two, _ = fast(two, None)
    assert_trees_close((one.key, two.key), (fr.key(3), fr.key(3)))
    assert_trees_close(fr.split(key), fr.split(fr.key(3)))


def test_a_deep_copy_of_what_is_gone_raises():
    """copy.deepcopy of a donated state raises. The error says which call took the state."""
    step = fr.train_step(
        lambda p, b: p.dense.square().sum(), sparse=fr.optim.sgd(), dense=fr.optim.dense(torch.optim.SGD, lr=0.1)
    )
    old = step.init(fr.Params({}, torch.ones(2)))
    fr.jit(step, donate=("state",))(old, None)
    with pytest.raises(fr.DonatedError, match="was donated to call 1"):
        copy.deepcopy(old)


@pytest.mark.parametrize("rule", ["sgd", "adam", "ftrl"])
def test_compiled_members_begin_with_one_table(rule):
    """jit(vmap(update)) = vmap(update) where all members share the tables and slots, or the rate, in one memory. Each
    member has its own gradients f[K, M, D] or rates f[K]."""
    tables = {"t": torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))}
    d = torch.arange(18, dtype=torch.float64).reshape(2, 3, 3) / 10

    def run(rate, d):
        own = getattr(fr.optim, rule)(rate)
        grads = {"t": fr.RowGrads.from_entries(torch.tensor([0, 2, 4]), d, num_embeddings=5)}
        return own.update(grads, own.init(tables), tables, 1)

    rates = torch.tensor([0.1, 0.2], dtype=torch.float64)
    every = lambda rates, d: (
        torch.func.vmap(run, in_dims=(None, 0))(rates[0], d),
        torch.func.vmap(run, in_dims=(0, None))(rates, d[0]),
        torch.func.vmap(run, in_dims=(0, 2))(rates, d.permute(1, 2, 0)),
    )
    assert_trees_close(fr.jit(every)(rates, d), every(rates, d), rtol=1e-12, atol=1e-12)
