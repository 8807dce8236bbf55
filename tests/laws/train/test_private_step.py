"""private_step: noise on every row of every table, drawn when a row is next read."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from programs.as_staged import staged_only

import funcrec as fr
from funcrec.grad import key_of_table, row_noise
from funcrec.testing import assert_trees_close

READ = (fr.FeatureConfig("a", table="item"), fr.FeatureConfig("b", table="user", pooling="mean"))
SHAPES = {"item": (11, 3), "user": (5, 2)}
HOW = {"max_norm": 0.7, "noise_multiplier": 1.3, "max_ids": 8}
DENSE = fr.optim.dense(torch.optim.Adam, lr=0.1)


def params(seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    tables = {n: torch.randn(shape, generator=g, dtype=dtype) for n, shape in SHAPES.items()}
    return fr.Params(tables, {"w": torch.randn(5, generator=g, dtype=dtype)})


def batch(seed, num_examples=3, every=False):
    """Return a batch of bags with up to two ids; `every`: whether the first example reads every row."""
    g = torch.Generator().manual_seed(seed)
    bags = lambda n: [
        list(range(n)) if every and not i else torch.randint(0, n, (int(k),), generator=g).tolist()
        for i, k in enumerate(torch.randint(0, 3, (num_examples,), generator=g))
    ]
    ids = fr.KeyedJaggedTensor.from_lists({"a": bags(11), "b": bags(5)}, dtype=torch.int64)
    return fr.Batch(ids, torch.randn(num_examples, generator=g, dtype=torch.float64))


def loss_fn(p, b):
    return ((fr.lookup(p.tables, b.ids, READ).values * p.dense["w"]).sum(1) - b.label).square().mean()


def eager(sparse, **how):
    grad = functools.partial(fr.private_grads, **{**HOW, **how})
    return fr.train_step(loss_fn, sparse=sparse, dense=DENSE, grad=grad)


def lazy(sparse, loss_fn=loss_fn, **how):
    return fr.private_step(loss_fn, sparse=sparse, dense=DENSE, **{**HOW, **how})


def trained(step, state, batches):
    for b in batches:
        state, _ = step(state, b)
    return state


def test_it_is_noise_in_every_step_where_every_batch_reads_every_row():
    """If no noise waits for longer than a step, flushed states are those of private_grads with noise on all rows."""
    batches = [batch(i, every=True) for i in range(4)]
    batches = [fr.Batch(fr.pad_to_bucket(b.ids), b.label) for b in batches]
    sparse = fr.optim.sgd(lambda step: 0.1 / (step + 1))
    how = {"max_ids": 16}
    plain = trained(eager(sparse, **how), eager(sparse).init(params()), batches)
    step = lazy(sparse, **how)
    assert_trees_close(fr.flush(trained(step, step.init(params()), batches)), plain, rtol=1e-9, atol=1e-11)


@settings(max_examples=5)
@given(
    seeds=st.lists(st.integers(0, 99), max_size=5), size=st.sampled_from([None, 7]), chunk=st.sampled_from([None, 2])
)
def test_a_row_has_the_sum_of_its_noise_whenever_it_is_read(seeds, size, chunk):
    """Every row follows its gradients, and one normal number for the steps between two reads, of their variance."""
    rate = {"item": lambda step: 0.1 / (step + 1), "user": lambda step: 0.2}
    sparse = fr.optim.by_table({n: fr.optim.sgd(f) for n, f in rate.items()})
    step, silent = lazy(sparse, batch_size=size, chunk_size=chunk), eager(sparse, noise_multiplier=0.0, batch_size=size)
    run, noisy = step.init(params()), lazy(sparse, batch_size=size)
    tables, last = dict(params().tables), {n: [0] * rows for n, (rows, _) in SHAPES.items()}
    spent = {n: [] for n in SHAPES}

    def read(name, row, t):
        """Add the noise of steps last..t-1 to one row, by the rule in words."""
        key = key_of_table(fr.split(fr.fold_in(run.bare.key, t - 1))[0], name)
        z = row_noise(key, torch.tensor([row]), SHAPES[name][1])[0]
        tables[name][row] -= sum(spent[name][last[name][row] : t]) ** 0.5 * z
        last[name][row] = t

    for t, seed in enumerate(seeds):
        b = batch(seed)
        for name, key in (("item", "a"), ("user", "b")):
            tables[name] = tables[name].clone()
            for row in set(b.ids[key].unpad().values.tolist()):
                read(name, row, t)
            spent[name].append(float(rate[name](torch.tensor(t))) ** 2 * (1.3 * 0.7 / (size or 3)) ** 2)
        state = fr.TrainState(
            torch.tensor(t), tables, {n: {} for n in SHAPES}, run.bare.dense, run.bare.dense_opt, run.bare.key
        )
        tables = dict(silent(state, b)[0].tables)
        run, _ = step(run, b)
    for name, (rows, _) in SHAPES.items():
        tables[name] = tables[name].clone()
        for row in range(rows):
            read(name, row, len(seeds))
    assert_trees_close(fr.flush(run).tables, tables, rtol=1e-9, atol=1e-11)
    assert noisy.init(fr.flush(run)).bare.step == len(seeds)


@pytest.mark.parametrize("steps_read", [(), (2,), (1, 3)], ids=["never read", "read once", "read twice"])
def test_waiting_noise_has_the_distribution_of_noise_in_every_step(steps_read):
    """100,000 numbers of rows that are read in some steps, or in none, pass a test of Kolmogorov and Smirnov."""
    from scipy import stats

    rows, rate = 20_000, lambda step: 0.1 * (step + 1)
    sparse = fr.optim.sgd(rate)
    loss = lambda p, ids: fr.lookup(p.tables, ids, READ[:1]).values.sum() * 0
    step = fr.private_step(loss, sparse=sparse, max_norm=3.0, noise_multiplier=0.5)
    run = step.init(fr.Params({"item": torch.zeros(rows, 5)}, {}))
    every = fr.KeyedJaggedTensor.from_lists({"a": [list(range(rows)), []]})
    none = fr.KeyedJaggedTensor.from_lists({"a": [[], []]})
    for t in range(4):
        run, _ = step(run, every if t in steps_read else none)
    made = fr.flush(run).tables["item"]
    spread = (sum(rate(t) ** 2 for t in range(4))) ** 0.5 * 3.0 * 0.5 / 2
    assert stats.kstest(made.flatten().numpy() / spread, "norm").pvalue > 0.01
    early = run.bare.tables["item"]  # the noise after the last read is independent of the noise before
    assert (
        not steps_read
        or abs(float(torch.corrcoef(torch.stack([early.flatten(), (made - early).flatten()]))[0, 1])) < 0.01
    )


def test_jit_donation_and_checkpoints_keep_the_bits(interpreted, tmp_path):
    """Staged and donated steps, over a save and a load, give the bits of the eager, uninterrupted run."""
    sparse = fr.optim.sgd(0.1)
    step = lazy(sparse)
    batches = [fr.Batch(batch(i).ids.pad_to(12), batch(i).label) for i in range(4)]
    want = trained(step, step.init(params()), batches)
    fast = fr.jit(step, donate=("state",))
    run = trained(fast, step.init(params()), batches[:2])
    fr.save(tmp_path / "run", run)
    run, _ = fast(run, batches[2])
    loaded, _ = step(fr.load(tmp_path / "run"), batches[2])
    assert_trees_close(fr.flush(fast(run, batches[3])[0]), fr.flush(want), rtol=1e-12, atol=1e-12)
    assert fr.tree.equal(fr.flush(step(loaded, batches[3])[0]), fr.flush(want))


def test_a_donated_step_keeps_its_memory():
    """The rows that a batch reads are settled in the memory of the donated state, before the loss reads them."""
    memory = lambda run: [x.data_ptr() for x in fr.tree.leaves((run.bare.tables, run.drawn))]
    step, b = lazy(fr.optim.sgd(0.1)), fr.Batch(batch(0).ids.pad_to(12), batch(0).label)
    with staged_only():
        fast, run = fr.jit(step, donate=("state",)), fr.copy(step.init(params()))
        where = memory(run)
        for _ in range(2):
            run, _ = fast(run, b)
            assert memory(run) == where
    assert fr.tree.equal(fr.flush(run), fr.flush(trained(step, step.init(params()), [b, b])))


def test_members_of_a_vmap_are_runs_of_their_own():
    """A step over stacked states is a step of each state, with noise of its own key."""
    step = lazy(fr.optim.sgd(0.1))
    keys = fr.split(fr.key(3), 2)
    states = torch.func.vmap(step.init, (None, 0))(params(), keys)
    for i in range(2):
        states, _ = torch.func.vmap(step, (0, None))(states, fr.Batch(batch(i).ids.pad_to(12), batch(i).label))
    flushed = torch.func.vmap(fr.flush)(states)
    for k, key in enumerate(keys):
        alone = trained(step, step.init(params(), key), [batch(i) for i in range(2)])
        assert_trees_close(fr.member(flushed, k), fr.flush(alone), rtol=1e-9, atol=1e-11)


def test_without_noise_it_is_the_step_with_private_gradients():
    """With a multiplier of 0 every state has the bits of the eager step, and nothing waits."""
    sparse, batches = fr.optim.sgd(0.1), [batch(i) for i in range(3)]
    step, plain = lazy(sparse, noise_multiplier=0.0), eager(sparse, noise_multiplier=0.0)
    run = trained(step, step.init(params()), batches)
    assert fr.tree.equal(run.bare, trained(plain, plain.init(params()), batches))
    assert fr.tree.equal(fr.flush(run), run.bare)


def test_empty_batches_and_models():
    """A batch without examples reads no row. A model stands for its loss."""
    step = lazy(fr.optim.sgd(0.1), batch_size=3)
    b = batch(0)
    none = fr.Batch(b.ids[0:0], b.label[:0])
    run, metrics = step(step.init(params()), none)
    assert bool(metrics["loss"].isnan())
    assert torch.equal(run.bare.tables["item"], params().tables["item"])
    assert not bool((fr.flush(run).tables["item"] == params().tables["item"]).any())
    model = fr.models.fm([fr.TableConfig("item", 11, 4)], READ[:1])
    step = fr.private_step(model, sparse=fr.optim.sgd(0.1), max_norm=1.0, noise_multiplier=1.0)
    labelled = fr.Batch(b.ids, (b.label > 0).float())
    run, metrics = step(step.init(model.init(fr.key(0))), labelled)
    assert bool(metrics["loss"].isfinite())


REFUSED = {
    "adagrad": (lambda: fr.optim.adagrad(0.1), "not plain SGD"),
    "momentum": (lambda: fr.optim.momentum(0.1), "not plain SGD"),
    "clip": (lambda: fr.optim.clip(fr.optim.sgd(0.1), max_norm=1.0), "not plain SGD"),
    "accumulate": (lambda: fr.optim.accumulate(fr.optim.sgd(0.1), every=2, capacity=4), "not plain SGD"),
    "stochastic rounding": (lambda: fr.optim.stochastic_rounding(fr.optim.sgd(0.1), key=fr.key(0)), "not plain SGD"),
    "weight decay": (lambda: fr.optim.sgd(0.1, weight_decay=0.1), "not plain SGD"),
    "one of two": (lambda: fr.optim.by_table({"item": fr.optim.adam(0.1)}, default=fr.optim.sgd(0.1)), "not plain SGD"),
}  # fmt: skip


@pytest.mark.parametrize(("sparse", "said"), REFUSED.values(), ids=REFUSED)
def test_noise_waits_for_plain_sgd_alone(sparse, said):
    """Optimizers whose update is not a rate times the gradient are refused before any work."""
    with pytest.raises(TypeError, match=said):
        lazy(sparse())


def test_what_cannot_wait_is_refused(interpreted):
    """Other tables, coarse tables, wrong states, reads that follow from tables, and `params` with noise that waits."""
    step = lazy(fr.optim.sgd(0.1))
    quantised = fr.Params(fr.fake_quantize(params().tables), params().dense)
    with pytest.raises(TypeError, match="not plain tables"):
        step.init(quantised)
    with pytest.raises(TypeError, match="too coarse for noise"):
        step.init(fr.Params({n: t.bfloat16() for n, t in params().tables.items()}, params().dense))
    run = step.init(params())
    with pytest.raises(ValueError, match="noise waits"):
        _ = run.params
    with pytest.raises(TypeError, match="PrivateState"):
        step(run.bare, batch(0))
    with pytest.raises(ValueError, match="does not fit"):
        step(fr.PrivateState(run.bare, {}, run.due), batch(0))
    tracked = fr.PrivateState(run.bare, run.drawn, {n: x.requires_grad_() for n, x in run.due.items()})
    with pytest.raises(TypeError, match="differentiated"):
        fr.flush(tracked)
    one = fr.optim.by_table({"item": fr.optim.sgd(0.1)})
    with pytest.raises(ValueError, match="'user' has no optimizer"):
        lazy(one).init(params())


def test_a_loss_that_mines_rows_is_refused(interpreted):
    """A row that a loss finds by values of a table lacks its noise: an error, and NaN in a program."""

    def mined(p, b):
        first = fr.lookup(p.tables, b.ids, READ[:1]).values
        worst = (first.sum().abs() * 1e6).long() % 11
        ids = fr.KeyedJaggedTensor.from_lengths(["a"], worst[None], torch.ones_like(worst[None]))
        return fr.lookup(p.tables, ids, READ[:1]).values.sum() + first.sum() + p.dense["w"].sum() * 0

    step = lazy(fr.optim.sgd(0.1), mined)
    batches = [fr.Batch(batch(i).ids.pad_to(12), batch(i).label) for i in range(4)]
    with pytest.raises(TypeError, match="reads other rows when its tables change"):
        trained(step, step.init(params()), batches)
    run = trained(fr.jit(step), step.init(params()), batches)
    assert bool(fr.flush(run).tables["item"].isnan().all())
