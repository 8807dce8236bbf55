"""Whole programs give the same results on a CUDA device and on the CPU.

The programs are recorded steps, optimizers, transforms and checkpoints."""

import functools
import threading

import pytest
import torch
from funcrec.kernels import ops
from programs import interrupts

import funcrec as fr
from funcrec.core import random
from funcrec.core._tree import map_tensors, tree_leaves
from funcrec.testing import assert_trees_close

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
CALLS = 20
TABLES = (fr.TableConfig("item", 50, 8), fr.TableConfig("user", 9, 3, torch.bfloat16))
FEATURES = (
    fr.FeatureConfig("clicked", table="item", pooling="mean"),
    fr.FeatureConfig("seen", table="item", max_length=2),
    fr.FeatureConfig("user", table="user", weighted=True),
)
NEAR = {"rtol": 1e-4, "atol": 1e-5}
on = lambda device: functools.partial(map_tensors, lambda x: x.to(device))
to_cuda, to_cpu = on("cuda"), on("cpu")


def loss_fn(params, batch, *, key):
    acts = fr.lookup(params.tables, batch.ids, FEATURES).values
    keep = fr.nn.dropout(acts, key, 0.5)
    return ((keep @ params.dense["w"]).sigmoid() - batch.label[:, None]).square().mean(), {"acts": acts}


def make_step(sparse=None):
    dense = fr.optim.dense(torch.optim.Adam, lr=0.01)
    return fr.train_step(loss_fn, sparse=sparse or fr.optim.rowwise_adagrad(0.1), dense=dense, has_aux=True)


def make_batch(seed: int, size: int = 5, least: int = -1, most: int = 12, longest: int = 4) -> fr.Batch:
    """Return bags of 0 to 4 ids. Some ids repeat, some are outside their table, and garbage follows the last bag."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, longest + 1, (3 * size,), generator=draw)
    n, room = int(lengths.sum()), 12 * size + 3
    values = torch.randint(least, most, (room,), generator=draw)
    weights = torch.rand(room, generator=draw)
    values[n:], weights[n:] = 2**62, torch.nan
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    ids = fr.KeyedJaggedTensor.from_offsets([f.name for f in FEATURES], values, offsets, weights=weights)
    return fr.Batch(ids, torch.rand(size, generator=draw))


def first_state(step, seed: int = 0):
    params = fr.Params(fr.init(fr.key(seed), TABLES), {"w": random.normal(fr.key(seed), (19, 4))})
    return step.init(params, fr.key(seed))


def run(step, state, batches):
    seen = []
    for batch in batches:
        state, metrics = step(state, batch)
        seen.append(metrics)
    return state, seen


@pytest.fixture
def recorded(monkeypatch):
    """Return a list with an item for each recorded CUDA graph."""
    made = []
    from funcrec.compile import _compiled

    capture = _compiled.capture_cuda
    monkeypatch.setattr(_compiled, "capture_cuda", lambda once: made.append(1) or capture(once))
    return made


def test_a_donated_step_is_replayed(recorded):
    """Twenty donated steps make one recording. States and metrics equal those of eager steps on the CPU."""
    step, batches = make_step(), [make_batch(i) for i in range(CALLS)]
    need = run(step, first_state(step), batches)
    fast = fr.jit(step, donate=("state",))
    got = run(fast, to_cuda(first_state(step)), map(to_cuda, batches))
    assert_trees_close(to_cpu(got), need, **NEAR)
    assert len(recorded) == 1 and fast.num_compiled() == 1


def test_eager_and_plain_jit_on_cuda():
    """An eager step, and a compiled step without donation, equal the step on the CPU. Their arguments do not change."""
    step, batches = make_step(), [make_batch(i) for i in range(3)]
    need = run(step, first_state(step), batches)
    for one in (step, fr.jit(step)):
        first = to_cuda(first_state(step))
        got = run(one, first, map(to_cuda, batches))
        assert_trees_close(to_cpu(got), need, **NEAR)
        assert_trees_close(to_cpu(first), first_state(step))


def test_other_shapes_are_recorded_anew(recorded):
    """Each batch size has its own program and recordings. A batch size that returns reuses its recordings."""
    step, sizes = make_step(), [5, 5, 5, 7, 7, 7, 5, 5, 7, 7]
    batches = [make_batch(i, size) for i, size in enumerate(sizes)]
    need = run(step, first_state(step), batches)
    fast = fr.jit(step, donate=("state",))
    assert_trees_close(to_cpu(run(fast, to_cuda(first_state(step)), map(to_cuda, batches))), need, **NEAR)
    assert fast.num_compiled() == 2 and 2 <= len(recorded) <= 8


def test_a_donated_state_is_gone():
    """After a recorded call, every use of the donated state raises and names the argument. An earlier copy stays
    valid."""
    step = make_step()
    fast, state = fr.jit(step, donate=("state",)), to_cuda(first_state(step))
    batch = to_cuda(make_batch(0))
    for _ in range(4):
        kept, old = fr.copy(state), state
        state, _ = fast(state, batch)
        with pytest.raises(fr.DonatedError, match="state"):
            old.tables["item"] + 1
        assert_trees_close(kept.step + 1, state.step)


def test_a_holder_of_the_state_keeps_its_values():
    """A recorded call does not write to memory that another name holds. The call warns and takes a copy."""
    step = make_step()
    fast, state = fr.jit(step, donate=("state",)), to_cuda(first_state(step))
    for i in range(3):
        state, _ = fast(state, to_cuda(make_batch(i)))
    view = state.tables["item"][:3]
    before = view.clone()
    with pytest.warns(UserWarning, match="item"):
        state, _ = fast(state, to_cuda(make_batch(4)))
    assert torch.equal(view, before)


@pytest.mark.parametrize("moment", [interrupts.AtEvent, interrupts.AtOperation])
def test_an_interrupted_recording(moment):
    """After an interrupt during recording or replay, the state is either whole or gone, and no capture stays open."""
    stream = torch.cuda.current_stream()
    ends = interrupts.at_every(interrupts.Trial("cuda"), moment, step=37)
    assert ends["whole"] > 5 and ends["gone"]
    assert torch.cuda.current_stream() == stream and not torch.cuda.is_current_stream_capturing()


def test_batches_from_the_host_and_at_any_address(recorded):
    """Batches in pageable memory are replayed like other batches. So are batches at addresses that are no multiple of
    16 bytes."""
    step = make_step()
    batches = [make_batch(i) for i in range(6)]
    shifted = lambda x: torch.cat([x[:1], x])[1:] if x.dim() else x
    forms = [to_cuda, lambda b: b, lambda b: map_tensors(shifted, to_cuda(b))] * 2
    need = run(step, first_state(step), batches)
    fast = fr.jit(step, donate=("state",))
    got = run(fast, to_cuda(first_state(step)), (form(b) for form, b in zip(forms, batches)))
    assert_trees_close(to_cpu(got), need, **NEAR)


def test_other_threads_may_work_while_a_step_is_recorded():
    """Another thread that allocates, pins and copies does not disturb a recording."""
    step, ends, wrong = make_step(), threading.Event(), []

    def work():
        try:
            while not ends.is_set():
                x = torch.empty(1 << 20).pin_memory().to("cuda", non_blocking=True)
                float(x[0])
                torch.cuda.empty_cache()
        except BaseException as error:
            wrong.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        need = run(step, first_state(step), [make_batch(i) for i in range(4)])
        for _ in range(3):
            fast = fr.jit(step, donate=("state",))
            got = run(fast, to_cuda(first_state(step)), (to_cuda(make_batch(i)) for i in range(4)))
            assert_trees_close(to_cpu(got), need, **NEAR)
    finally:
        ends.set()
        thread.join()
    assert not wrong


def test_a_stream_of_ones_own():
    """A recorded step on a stream that the caller made gives the same values."""
    step = make_step()
    need = run(step, first_state(step), [make_batch(i) for i in range(5)])
    fast, stream = fr.jit(step, donate=("state",)), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        got = run(fast, to_cuda(first_state(step)), (to_cuda(make_batch(i)) for i in range(5)))
    stream.synchronize()
    assert_trees_close(to_cpu(got), need, **NEAR)


def test_the_same_bits_in_every_run():
    """Two runs of a recorded step give the same bits of tables and slots."""
    step = make_step(fr.optim.adam(0.1))
    runs = []
    for _ in range(2):
        fast = fr.jit(step, donate=("state",))
        runs.append(run(fast, to_cuda(first_state(step)), (to_cuda(make_batch(i, 200)) for i in range(4)))[0])
    assert_trees_close(runs[0].tables, runs[1].tables)
    assert_trees_close(runs[0].slots, runs[1].slots)


RULES = {
    **{name: {} for name in ops.RULES if name not in ("rowwise_adagrad_counter", "adamw", "rowwise_adagrad_cowclip")},
    "adamw": {"weight_decay": 0.1},
}


@pytest.mark.parametrize("rule", [*RULES, "mine", "rounded"])
def test_optimizers_on_cuda(rule):
    """Every row optimizer, a user's rule and stochastic rounding train on CUDA to the results of the CPU."""
    if rule == "mine":
        sparse = fr.optim.row_optimizer(
            init=lambda table: {"age": torch.zeros(table.shape[0], device=table.device)},
            rule=lambda row, grad, slots, hyper: (
                row - hyper.lr * grad.tanh() / (slots["age"] + 1), {"age": slots["age"] + 1},
            ),
            lr=0.1,
        )  # fmt: skip
    else:
        sparse = getattr(fr.optim, "sgd" if rule == "rounded" else rule)(lr=0.1, **RULES.get(rule, {}))
    sparse = fr.optim.stochastic_rounding(sparse, key=fr.key(5)) if rule == "rounded" else sparse
    step = make_step(sparse)
    batches = [make_batch(i) for i in range(3)]
    need, _ = run(step, first_state(step), batches)
    got, _ = run(fr.jit(step, donate=("state",)), to_cuda(first_state(step)), map(to_cuda, batches))
    # the table is bf16, so that one rounding may differ
    rows = {"rtol": 2e-2, "atol": 2e-2}
    assert_trees_close(to_cpu(got.tables["user"]), need.tables["user"], **rows)
    assert_trees_close(to_cpu(got.tables["item"]), need.tables["item"], rtol=1e-3, atol=1e-4)


def test_keys_give_the_same_numbers():
    """Random bits, uniform numbers and fresh tables equal those of the CPU bit for bit. Normal numbers differ by
    roundings."""
    key = fr.key(3)
    assert torch.equal(random.bits(key.cuda(), (1000,)).cpu(), random.bits(key, (1000,)))
    assert torch.equal(random.uniform(key.cuda(), (1000,)).cpu(), random.uniform(key, (1000,)))
    assert_trees_close(random.normal(key.cuda(), (1000,)).cpu(), random.normal(key, (1000,)), rtol=1e-5, atol=1e-6)
    assert_trees_close(to_cpu(fr.init(key, TABLES, device="cuda")), fr.init(key, TABLES))


def test_transforms_on_cuda():
    """Derivatives equal those of the CPU: value_and_grad, vmap of it over an ensemble, per-example gradients, and a
    Hessian-vector product."""
    configs = TABLES[:1]
    features, draw = FEATURES[:2], torch.Generator().manual_seed(0)
    w, batch = torch.randn(16, generator=draw), make_batch(1)

    def loss(params, batch):
        acts = fr.lookup(params.tables, batch.ids, features).values
        return ((acts @ params.dense).tanh() - batch.label).square().mean()

    one = fr.Params(fr.init(fr.key(0), configs), w)
    many = fr.Params({"item": torch.stack([one.tables["item"], -one.tables["item"]])}, torch.stack([w, 2 * w]))

    def dense_grads(params, batch):
        value, grads = fr.value_and_grad(loss)(params, batch)
        return value, {n: g.to_dense() for n, g in grads.tables.items()}, grads.dense

    members = torch.func.vmap(dense_grads, in_dims=(fr.Params(0, 0), None))
    tangent = torch.randn(50, 8, generator=draw)
    of_table = lambda t, batch, w: loss(fr.Params({"item": t}, w), batch)
    product = lambda t, batch, w, v: torch.func.jvp(torch.func.grad(lambda t: of_table(t, batch, w)), (t,), (v,))[1]
    for fn, args in [
        (dense_grads, (one, batch)), (members, (many, batch)), (product, (one.tables["item"], batch, w, tangent)),
    ]:  # fmt: skip
        assert_trees_close(to_cpu(fn(*to_cuda(args))), fn(*args), **NEAR)
        assert_trees_close(to_cpu(fr.jit(fn)(*to_cuda(args))), fn(*args), **NEAR)


def test_an_ensemble_in_one_recording(recorded):
    """A donated vmap of a step over states gives the steps of each member."""
    step = make_step()
    fresh = lambda key: step.init(fr.Params(fr.init(key, TABLES), {"w": random.normal(key, (19, 4))}), key)
    states = torch.func.vmap(fresh)(fr.split(fr.key(0), 3))
    ensemble = torch.func.vmap(step, in_dims=(0, None))
    need = run(ensemble, fr.copy(states), [make_batch(i) for i in range(4)])[0]
    got = run(fr.jit(ensemble, donate=("state",)), to_cuda(states), (to_cuda(make_batch(i)) for i in range(4)))[0]
    assert_trees_close(to_cpu(got), need, **NEAR)
    assert len(recorded) == 1


def test_checkpoints_to_and_from_cuda(tmp_path):
    """A state saved on CUDA loads on CUDA or on the CPU bit for bit, and trains on to the same bits."""
    step = make_step()
    fast = fr.jit(step, donate=("state",))
    state, _ = run(fast, to_cuda(first_state(step)), (to_cuda(make_batch(i)) for i in range(3)))
    path = fr.save(tmp_path / "state", state)
    back, host = fr.load(path), fr.load(path, device="cpu")
    assert all(x.is_cuda for x in tree_leaves(back)) and not any(x.is_cuda for x in tree_leaves(host))
    assert_trees_close(to_cpu(back), host)
    assert_trees_close(back, state)
    moved = fr.load(fr.save(tmp_path / "host", host), device="cuda")
    more = lambda state: run(fast, state, (to_cuda(make_batch(i)) for i in range(3, 6)))[0]
    goes_on = more(state)
    assert_trees_close(more(back).tables, goes_on.tables)
    assert_trees_close(more(moved).tables, goes_on.tables)


def test_a_loop_on_cuda(tmp_path):
    """fit on CUDA, with a checkpoint, ends with the result of steps on the CPU. Prefetched batches equal those of the
    source."""
    step = make_step()
    batches = [make_batch(i, least=0, most=9, longest=2) for i in range(4)]
    ahead = list(fr.data.prefetch(batches, device="cuda", pin_memory=True))
    assert_trees_close(to_cpu(ahead), batches)
    done = fr.fit(
        fr.jit(step, donate=("state",)), to_cuda(first_state(step)), ahead, epochs=2, progress=False,
        checkpoint=tmp_path / "run", evaluate=lambda p: {"size": float(p.tables["item"].square().mean())},
    )  # fmt: skip
    need = run(step, first_state(step), batches * 2)[0]
    assert_trees_close(to_cpu(done.state), need, **NEAR)
    assert len(done.history) == 2


@pytest.mark.parametrize("name", ["dlrm", "dcnv2"])
def test_models_on_cuda(name):
    """A model's compiled step on CUDA has the loss of its eager step on the CPU."""
    tables = [fr.TableConfig(f"t{i}", 100, 8) for i in range(3)]
    features = [fr.FeatureConfig(f"f{i}", table=f"t{i}") for i in range(3)]
    make = {"dlrm": fr.models.dlrm, "dcnv2": fr.models.dcnv2}[name]
    more = {"num_dense": 4, "bottom": (16, 8), "sizes": (16,)} if name == "dlrm" else {"num_dense": 4, "sizes": (16,)}
    model = make(tables, features, **more)
    step = fr.train_step(
        fr.models.loss(model), sparse=fr.optim.rowwise_adagrad(0.05), has_aux=True,
        dense=fr.optim.dense(torch.optim.SGD, lr=0.01),
    )  # fmt: skip
    data = fr.data.random_rows(fr.key(0), dict.fromkeys(("f0", "f1", "f2"), 100), ids_per_bag=2, num_dense=4)
    batches = [fr.data.take(data, torch.arange(k * 32, k * 32 + 32)) for k in range(4)]
    params = model.init(fr.key(0))
    need = run(step, step.init(fr.copy(params)), batches)
    got = run(fr.jit(step, donate=("state",)), to_cuda(step.init(params)), map(to_cuda, batches))
    losses = lambda out: torch.stack([m["loss"].cpu() for m in out[1]])
    assert_trees_close(losses(got), losses(need), rtol=1e-3, atol=1e-4)


def test_programs_without_tensors_on_cuda_arguments():
    """Two functions compile. One makes its tensors on the device. The other takes an argument from the host."""
    assert torch.equal(fr.jit(lambda: torch.arange(4, device="cuda") * 2)().cpu(), torch.arange(4) * 2)
    doubled = fr.jit(lambda x: x.to("cuda") * 2 + torch.tensor([1.0, 2.0], device="cuda"))
    assert torch.equal(doubled(torch.ones(2)).cpu(), torch.tensor([3.0, 4.0]))
