"""Fused updates in compiled functions give the values of eager mode.

This holds for any donated arguments and for any other reads of the tables."""

import dataclasses
import functools

import pytest
import torch
from funcrec.kernels import ops

import funcrec as fr
from funcrec import optim
from funcrec.core._tree import map_tensors
from funcrec.testing import assert_trees_close

DTYPES = {"item": torch.float32, "user": torch.bfloat16, "page": torch.float64}
SHAPES = {"item": (12, 4), "user": (6, 3), "page": (5, 2)}
FEATURES = (
    fr.FeatureConfig("clicked", table="item", pooling="mean"),
    fr.FeatureConfig("shown", table="item", max_length=1),
    fr.FeatureConfig("user", table="user", weighted=True),
    fr.FeatureConfig("page", table="page", weighted=True, hash=fr.modulo()),
    fr.FeatureConfig("history", table="item", pooling="none", column="clicked"),
)
pytestmark = pytest.mark.xdist_group("fused")  # runs of one worker are shared by all laws
CALLS = 3
by_name = lambda cases: pytest.mark.parametrize("name", cases)
copied = functools.partial(map_tensors, torch.clone)


def make_batch(seed: int) -> fr.KeyedJaggedTensor:
    """Return three bags of four features, with 14 ids in a buffer of 16. Some ids are outside their table."""
    draw = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 7, (14,), generator=draw)
    lengths = torch.tensor([3, 0, 2, 1, 2, 0, 1, 1, 1, 0, 2, 1])
    keys, weights = ["clicked", "shown", "user", "page"], torch.rand(14, generator=draw)
    return fr.KeyedJaggedTensor.from_lengths(keys, values, lengths, weights=weights).pad_to(16)


def loss_fn(params, ids):
    """Return a loss of two lookups of one table and a sequence, with learned weights. Each cotangent is a product, so
    that the order of sums does not matter."""
    ids = dataclasses.replace(ids, weights=params.dense["weights"])
    acts = fr.lookup(params.tables, ids, FEATURES)
    again = fr.lookup(params.tables, ids, FEATURES[1:2]).values
    history = fr.lookup_sequence(params.tables, ids, FEATURES)["history"].values
    return acts.values.square().sum() + (3 * again).sum() + history.square().sum() + params.dense["bias"] ** 2


def small_loss(params, ids):
    """Return a loss of one lookup of all tables: by the reference, each lookup is hundreds of operations."""
    ids = dataclasses.replace(ids, weights=params.dense["weights"])
    return fr.lookup(params.tables, ids, FEATURES[1:4]).values.square().sum() + params.dense["bias"] ** 2


def own_rule(row, grad, slots, hyper):
    """Return the row and slots of a user's rule with slots of three shapes."""
    total = slots["sum"] + (grad * grad)[0]
    mean = 0.5 * slots["mean"] + grad
    last = torch.stack([slots["last"][1], slots["last"][2], hyper.step * hyper.repeats])
    row = row - hyper.lr * mean / (total.sqrt() + hyper.eps) - 0.01 * last[0]
    return row, {"mean": mean, "last": last, "sum": total}


def own_init(table):
    num_rows, dim = table.shape
    return {"sum": torch.zeros(num_rows), "mean": torch.zeros(num_rows, dim), "last": torch.zeros(num_rows, 3)}


OPTIMIZERS = {
    "adam": optim.adam(0.1),
    "by_table": optim.by_table({"item": optim.adagrad(0.1), "user": optim.momentum(0.1)}, default=optim.sgd(0.1)),
    "clip": optim.clip(optim.rowwise_adagrad(0.1), max_norm=0.5),
    "schedule": optim.sgd(optim.schedule([optim.Stage("linear", 5, value=0.1)], lr=0.2)),
    "freeze": optim.freeze(optim.adagrad(0.1), tables=["user"]),
    "accumulate": optim.accumulate(optim.sgd(0.1), every=2, capacity=64),
    "stochastic_rounding": optim.stochastic_rounding(optim.adam(0.01), key=fr.key(7)),
    "own rule": optim.row_optimizer(init=own_init, rule=own_rule, lr=0.1, eps=0.1),
}
ROUNDS = {"clip": 1e-6}  # a compiled norm rounds in another order
SGD = optim.dense(torch.optim.SGD, lr=0.125)
STEPS = {n: fr.train_step(loss_fn, sparse=sparse, dense=SGD) for n, sparse in OPTIMIZERS.items()}
# Adam's step has all lookups, the others have one.
SMALL = {n: fr.train_step(small_loss, sparse=sparse, dense=SGD) for n, sparse in OPTIMIZERS.items()}
SMALL |= {"adam": STEPS["adam"]}
BY_REFERENCE = ("adam", "accumulate", "stochastic_rounding", "own rule")


def first_state(name: str) -> fr.TrainState:
    draw = torch.Generator().manual_seed(0)
    tables = {n: torch.randn(SHAPES[n], generator=draw, dtype=torch.float64).to(DTYPES[n]) for n in SHAPES}
    dense = {"weights": torch.rand(16, generator=draw), "bias": torch.tensor(0.5)}
    return copied(STEPS[name].init(fr.Params(tables, dense), fr.key(1)))


@functools.cache
def run_steps(name: str, kind: str, implementation: str, is_compiled: bool = True):
    """Return ([(state, metrics)] of each call, the tables' addresses). implementation: "small" is "cpp" with SMALL.
    Without `is_compiled` the staged graph is interpreted."""
    eager = (STEPS if implementation == "cpp" else SMALL)[name]
    step = {"eager": eager, "undonated": fr.jit(eager.update), "donated": fr.jit(eager.update, donate=("state",))}[kind]
    state, out, places = first_state(name), [], []
    with ops.using("cpp" if implementation == "small" else implementation), pytest.MonkeyPatch.context() as patch:
        if not is_compiled:
            patch.setattr("funcrec.compile._program.compile_graph", lambda graph, arguments: graph)
        for i in range(CALLS):
            state, metrics = step(state, make_batch(i))
            out.append(copied((state, metrics)))
            places.append({n: t.data_ptr() for n, t in state.tables.items()})
    return out, places


@functools.cache
def run_together(kind: str):
    """Return {name: [(state, metrics)] of each call} of compiled steps that are one program, "donated" or not."""
    names = {"undonated": ("adam", "own rule"), "donated": COMPILED}[kind]
    update = lambda states, ids: {n: SMALL[n].update(states[n], ids) for n in names}
    step = fr.jit(update, donate=("states",) if kind == "donated" else ())
    states, out = {n: first_state(n) for n in names}, {n: [] for n in names}
    for i in range(CALLS):
        ids, before = make_batch(i), copied(states)
        found = step(states, ids)
        if kind == "undonated":
            assert_trees_close((states, ids), (before, make_batch(i)))
        states = {n: state for n, (state, _) in found.items()}
        for n in names:
            out[n].append(copied(found[n]))
    return out


STAGED = [*((n, "cpp") for n in STEPS), *((n, "reference") for n in BY_REFERENCE)]


@pytest.mark.parametrize("name, implementation", STAGED, ids=map("-".join, STAGED))
def test_staged_steps_are_eager_ones(name, implementation):
    """The staged graph gives the states and metrics of the eager step, bit for bit, after each of three calls. Three
    steps are also staged without donation."""
    eager = run_steps(name, "eager", implementation)[0]
    if implementation == "cpp" and name in ("adam", "by_table", "own rule"):
        assert_trees_close(run_steps(name, "undonated", implementation, False)[0], eager)
    assert_trees_close(run_steps(name, "donated", implementation, False)[0], eager)


COMPILED = [n for n in STEPS if n not in ("freeze", "by_table")]


@by_name(COMPILED)
def test_compiled_steps_are_eager_ones(name):
    """Compiled and donated steps give the bits of the eager step. A norm may round in another order."""
    compiled = run_together("donated")[name]
    eager, rtol = run_steps(name, "eager", "small")[0], ROUNDS.get(name, 0)
    for (state, metrics), (need, values) in zip(compiled, eager, strict=True):
        assert_trees_close(metrics, values, rtol=1e-6)
        if rtol:  # a 16-bit row may round to the next number
            assert_trees_close(state.tables["user"], need.tables["user"], rtol=2**-7)
            state, need = without_user(state), without_user(need)
        assert_trees_close(state, need, rtol=rtol, atol=rtol)


def test_a_compiled_step_by_the_reference_is_the_eager_one():
    """The operations of the reference, compiled and donated, give the bits of the eager step, for pooled, weighted and
    hashed bags."""
    loss = lambda params, ids: fr.lookup(params.tables, ids, FEATURES[2:4]).values.square().sum()
    step = fr.train_step(loss, sparse=OPTIMIZERS["schedule"])
    tables = {n: t for n, t in first_state("schedule").tables.items() if n != "item"}
    eager, state = (step.init(fr.Params(copied(tables), {}), fr.key(1)) for _ in range(2))
    with ops.using("reference"):
        compiled = fr.jit(step.update, donate=("state",))
        for i in range(CALLS):
            (eager, want), (state, got) = step(eager, make_batch(i)), compiled(state, make_batch(i))
            assert_trees_close(got, want, rtol=1e-6)
            assert_trees_close(state, eager)


@by_name(["adam", "own rule"])
def test_compiled_donation_changes_no_bit(name):
    """A compiled step gives the same bits, donated or not. An undonated step changes neither the state nor the
    batch."""
    assert_trees_close(run_together("undonated")[name], run_together("donated")[name])


def without_user(state):
    return dataclasses.replace(state, tables={n: t for n, t in state.tables.items() if n != "user"})


@by_name(STEPS)
def test_steps_do_something(name):
    """Each optimizer moves each table that is not frozen. The laws here therefore test an update."""
    (state, _), tables = run_steps(name, "eager", "cpp")[0][-1], first_state(name).tables
    moved = {n for n in tables if not torch.equal(tables[n], state.tables[n])}
    assert moved == set(tables) - ({"user"} if name == "freeze" else set())


@pytest.mark.parametrize("name, implementation", STAGED, ids=map("-".join, STAGED))
def test_donated_tables_stay_where_they_are(name, implementation):
    """Donated steps copy no table. Each table keeps its address."""
    places = run_steps(name, "donated", implementation, False)[1]
    assert all(p == places[0] for p in places)


# -- programs around updates -------------------------------------------------------------------------------------


def gradients(tables, d):
    """Return gradients for all tables, with repeated rows and rows outside."""
    rows = torch.tensor([1, 4, 1, -1, 3, 99])
    return {
        n: fr.RowGrads.from_entries(rows, d[:, : t.shape[1]].to(t.dtype), num_embeddings=t.shape[0])
        for n, t in tables.items()
    }


OPT, OTHER = optim.rowwise_adagrad(0.1), optim.sgd(0.5)
bare = lambda tables: {n: {} for n in tables}


def updated(tables, slots, d):
    return OPT.update(gradients(tables, d), slots, tables, 0)


def read(outputs):
    """Return a program: an update, then `outputs` of (new tables, new slots, old tables, old slots)."""
    return lambda tables, slots, d: outputs(*updated(tables, slots, d), tables, slots)


READERS = {
    "norms of the new tables": lambda new, own, old, slots: (new, own, {n: t.abs().amax() for n, t in new.items()}),
    "rows of the old tables": lambda new, own, old,
    slots: (new, own, {n: (t.amax(), t[1], t[:2]) for n, t in old.items()}),
    "a table twice": lambda new, own, old, slots: (new, own, new["item"]),
    "old and new": lambda new, own, old, slots: (new, own, old),
    "slots discarded": lambda new, own, old, slots: (new, slots, None),
    "tables discarded": lambda new, own, old, slots: (old, own, None),
    "one table discarded": lambda new, own, old, slots: ({**new, "user": old["user"]}, own, None),
    "all discarded": lambda new, own, old, slots: (old, slots, None),
}  # fmt: skip


def in_sequence(tables, slots, d):
    """Return the results of two optimizers, one after the other, on the same tables."""
    new, own = updated(tables, slots, d)
    new, _ = OTHER.update(gradients(tables, d + 1), bare(new), new, 0)
    return new, own, None


def between(tables, slots, d):
    """Return the results of two updates. The gradient of the second update has rows that the first update wrote."""
    new, own = updated(tables, slots, d)
    rows = torch.tensor([1, 3])
    seen = {n: fr.RowGrads.from_entries(rows, t[rows], num_embeddings=t.shape[0]) for n, t in new.items()}
    return *OTHER.update(seen, bare(new), new, 0)[:1], own, None


def own_rows(tables, slots, d):
    """Return the results of an update. The gradient of each table has rows of that table and of another table."""
    rows = torch.tensor([0, 2, 2])
    width = lambda t, n: torch.nn.functional.pad(t[1:4], (0, 4))[:, :n].double()
    mixed = {n: t[rows].double() + width(tables["page"], t.shape[1]) for n, t in tables.items()}
    of = lambda g, t: fr.RowGrads.from_entries(rows, g.to(t.dtype), num_embeddings=len(t))
    grads = {n: of(g, tables[n]) for n, g in mixed.items()}
    return *OPT.update(grads, slots, tables, 0), None


def two_updates_of_one(tables, slots, d):
    """Return the results of two updates of the same tables."""
    new, own = updated(tables, slots, d)
    other, _ = OTHER.update(gradients(tables, d), bare(tables), tables, 0)
    return new, own, other


def swapped(tables, slots, d):
    """Return the results of an update after which two tables of one form swap places. Their slots do, too."""
    tables = {**tables, "twin": tables["item"] * 2}
    more = {**slots, "twin": {"sum": slots["item"]["sum"] + 1}}
    new, own = OPT.update(gradients(tables, d), more, tables, 0)
    swap = lambda x: {**{n: x[n] for n in SHAPES}, "item": x["twin"]}
    return swap(new), swap(own), (new["item"], own["item"])


def after_a_write(tables, slots, d):
    """Return the results of an update with writes of rows before and after the update."""
    at = (torch.tensor([1, 2]),)
    written = {n: t.index_put(at, d[:2, : t.shape[1]].to(t.dtype)) for n, t in tables.items()}
    new, own = OPT.update(gradients(tables, d), slots, written, 0)
    return {n: t.index_put(at, tables[n][:2], accumulate=True) for n, t in new.items()}, own, None


BUILT = (in_sequence, between, own_rows, two_updates_of_one, swapped, after_a_write)
PROGRAMS = {n: read(outputs) for n, outputs in READERS.items()} | {f.__name__: f for f in BUILT}
# in these programs only the outputs read the new tables
IN_PLACE = ("rows of the old tables", "in_sequence", "own_rows")


def all_programs(tables, slots, d):
    made = {n: program(tables[n], slots[n], d) for n, program in PROGRAMS.items()}
    return tuple({n: out[i] for n, out in made.items()} for i in range(3))


@functools.cache
def program_runs(donate: tuple[str, ...] | None, is_compiled: bool = True):
    """Return ([(tables, slots, extra)] of three calls, the tables' addresses)."""
    with pytest.MonkeyPatch.context() as patch:
        if not is_compiled:
            patch.setattr("funcrec.compile._program.compile_graph", lambda graph, arguments: graph)
        return run_programs(donate)


def run_programs(donate):
    fn = all_programs if donate is None else fr.jit(all_programs, donate=donate)
    tables = {n: first_state("adam").tables for n in PROGRAMS}
    slots = {n: copied(OPT.init(t)) for n, t in tables.items()}
    out, places = [], []
    for i in range(CALLS):
        d = torch.randn(6, 4, generator=torch.Generator().manual_seed(i))
        given, before = (tables, slots), copied((tables, slots))
        tables, slots, extra = fn(tables, slots, d)
        kept = [i for i, name in enumerate(("tables", "slots")) if name not in (donate or ())]
        assert_trees_close([given[i] for i in kept], [before[i] for i in kept])
        out.append(copied((tables, slots, extra)))
        places.append({n: {t: x.data_ptr() for t, x in own.items()} for n, own in tables.items()})
    return out, places


@by_name(PROGRAMS)
@pytest.mark.parametrize("donate", [(), ("tables",), ("slots",), ("tables", "slots")], ids=" ".join)
def test_programs_around_updates(donate, name):
    """The values equal those of eager mode, whichever tables a program reads, old or new, and whatever is donated.
    Arguments that are not donated keep every bit."""
    assert_trees_close(calls_of(name, program_runs(donate, False)), calls_of(name, program_runs(None)))


@by_name(PROGRAMS)
def test_compiled_programs_around_updates(name):
    """The programs of the law above give the values of eager mode in compiled code."""
    assert_trees_close(calls_of(name, program_runs(("tables", "slots"))), calls_of(name, program_runs(None)))


def test_rows_of_a_table_are_added_to_itself():
    """A compiled index_put may add the rows of a table to the same table."""
    at = (torch.tensor([1, 2]),)
    fn = lambda x: (p := x.sort(0)[0]).index_put(at, p[:2], accumulate=True)
    x = torch.arange(8.0).reshape(4, 2)
    assert_trees_close(fr.jit(fn)(x), fn(x))


def calls_of(name, result):
    return [[x[name] for x in call] for call in result[0]]


@by_name(IN_PLACE)
def test_tables_that_nobody_else_sees_are_written_in_place(name):
    """A donated table is not copied when a program reads the old rows or updates twice."""
    places = [p[name] for p in program_runs(("tables", "slots"), False)[1]]
    assert all(p == places[0] for p in places)
