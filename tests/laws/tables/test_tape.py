"""Lookups in a differentiated loss. The gradient follows the table, under every name and every transform inside the
loss."""

import itertools

import pytest
import torch
from torch.utils._pytree import tree_map

import funcrec as fr
from funcrec.testing import assert_trees_close, check_grads

F64 = torch.float64
CLOSE = {"rtol": 1e-11, "atol": 1e-11}
IDS = fr.KeyedJaggedTensor.from_lists(
    {"a": [[0, 2, 2], [1]], "b": [[1], [0, -1]]}, weights={"a": [[1.0, 0.5, 2.0], [1.5]], "b": [[0.5], [2.0, 1.0]]}
)
IDS = fr.KeyedJaggedTensor(IDS.values, IDS.offsets, IDS.weights.double(), None, IDS.keys).pad_to(9)
TABLES = {"x": torch.arange(6.0, dtype=F64).reshape(3, 2).sin(), "y": torch.arange(6.0, dtype=F64).reshape(3, 2).cos()}
FROZEN = torch.arange(8.0, dtype=F64).reshape(4, 2).cos() / 3
PARAMS = fr.Params(TABLES, {"w": torch.tensor([0.5, -1.0], dtype=F64), "s": torch.tensor(0.7, dtype=F64)})
BATCHED = tree_map(lambda x: torch.stack([x, x]), IDS)
BATCHED = fr.KeyedJaggedTensor(
    torch.stack([IDS.values, IDS.values.flip(0) % 3]), BATCHED.offsets, BATCHED.weights * torch.tensor([[1.0], [0.5]]),
    None, IDS.keys,
)  # fmt: skip


def pooled(first, second=None, **options):
    """Return a feature of each key for these tables. The first feature is weighted, the second feature is a mean."""
    own = {"weighted": True, **options}
    return [fr.FeatureConfig("a", table=first, **own), fr.FeatureConfig("b", table=second or first, pooling="mean")]


def histories(first, second=None):
    return [
        fr.FeatureConfig("a", table=first, pooling="none", weighted=True),
        fr.FeatureConfig("b", table=second or first, pooling="none", max_length=1),
    ]


def vectors(tables, features, ids=IDS):
    """Return all numbers of a lookup, pooled or not, in rows of two."""
    if features[0].pooling != "none":
        return fr.lookup(tables, ids, features).values.reshape(-1, 2)
    return torch.cat([x.values for x in fr.lookup_sequence(tables, ids, features).values()])


def bent(x, scale=1.0):
    return (x * scale).sin().sum() + (x**2).sum() / 3


def densely(loss, params):
    """Return the loss and its gradients by torch.func, with tables as dense leaves."""
    fn = lambda tables, dense: loss(fr.Params(tables, dense))
    return torch.func.grad_and_value(fn, argnums=(0, 1))(params.tables, params.dense)


def assert_is_torch(loss, plainly=None, params=PARAMS):
    """Check that value_and_grad of the loss equals the gradient in torch of the loss, or of `plainly`."""
    value, grads = fr.value_and_grad(loss)(params)
    (want_tables, want_dense), want = densely(plainly or loss, params)
    assert_trees_close(value, want, **CLOSE)
    assert_trees_close(grads.dense, want_dense, **CLOSE)
    assert_trees_close({n: g.to_dense() for n, g in grads.tables.items()}, want_tables, **CLOSE)
    assert any(bool((g != 0).any()) for g in want_tables.values()), "a test that cannot fail"
    return grads


# -- names -------------------------------------------------------------------------------------------------------

NAMED = {
    "swapped": lambda p: {"x": p.tables["y"], "y": p.tables["x"]},
    "a new name": lambda p: {"x": p.tables["y"], "t": p.tables["y"], "y": FROZEN},
    "one table under two names": lambda p: {"x": p.tables["x"], "y": p.tables["x"]},
    "a plain tensor beside it": lambda p: {"x": p.tables["y"], "y": FROZEN},
    "a plain tensor first": lambda p: {"x": FROZEN, "y": p.tables["x"]},
    "a table made of dense parameters beside it": lambda p: {"x": p.tables["y"], "y": FROZEN * p.dense["w"]},
}


@pytest.mark.parametrize("kind", [pooled, histories], ids=["pooled", "sequence"])
@pytest.mark.parametrize("name", NAMED)
def test_a_gradient_follows_its_table(name, kind):
    """Whatever name a table has in a lookup, the gradient belongs to the table. A plain tensor next to it has no
    gradient."""
    assert_is_torch(lambda p: bent(vectors(NAMED[name](p), kind("x", "y")), p.dense["s"]))


@pytest.mark.parametrize("kind", [pooled, histories], ids=["pooled", "sequence"])
def test_siamese_and_target_networks(kind):
    """A table that two towers read under two names gets the sum of both gradients. The copy in a target network is a
    constant."""

    def loss(p):
        online = vectors({"t": p.tables["x"]}, kind("t"))
        other = vectors({"left": p.tables["x"], "right": p.tables["x"]}, kind("left", "right"))
        target = vectors({"t": TABLES["x"] * 0.9}, kind("t"))
        return ((online - target) ** 2).sum() + bent(other * online.detach())

    assert_is_torch(loss)


def test_a_step_trains_the_table_that_the_loss_read():
    """train_step moves the table that was read under another table's name. The other table does not change."""
    loss = lambda p, ids: bent(fr.lookup({"x": p.tables["y"]}, ids, pooled("x")).values)
    step = fr.train_step(loss, sparse=fr.optim.sgd(lr=0.1), dense=fr.optim.dense(torch.optim.SGD, lr=0.1))
    state, _ = step(step.init(PARAMS), IDS)
    assert torch.equal(state.tables["x"], TABLES["x"])
    want = torch.func.grad(lambda y: loss(fr.Params({"y": y}, {}), IDS))(TABLES["y"])
    assert_trees_close(state.tables["y"], TABLES["y"] - 0.1 * want, **CLOSE)


@pytest.mark.parametrize("plan", [fr.row_wise, fr.column_wise])
@pytest.mark.parametrize("kind", [pooled, histories], ids=["pooled", "sequence"])
def test_banks_may_be_swapped(plan, kind):
    """If ShardedTables hold a bank under the name of another bank, the gradient follows the bank."""
    mesh = fr.Mesh.emulated(model=1)
    held = fr.shard_tables(TABLES, fr.Plan({n: plan("model") for n in TABLES}), mesh, labels={"x": "x", "y": "y"})
    first, second = held.banks

    def run(tables, dense):
        def loss(p):
            renamed = {first: p.tables[second], second: p.tables[first]}
            return bent(vectors(fr.core._tree.replace(p.tables, banks=renamed), kind("x", "y")), p.dense["s"])

        return {n: g.to_dense() for n, g in fr.value_and_grad(loss)(fr.Params(tables, dense))[1].tables.items()}

    got = fr.shard_map(run, mesh=mesh, in_specs=(held.specs(), fr.P()), out_specs=fr.P("model"))(held, PARAMS.dense)
    swapped = lambda p: bent(vectors({"x": p.tables["y"], "y": p.tables["x"]}, kind("x", "y")), p.dense["s"])
    (want, _), _ = densely(swapped, PARAMS)
    assert_trees_close(dict(zip(("x", "y"), got.values(), strict=True)), want, **CLOSE)


# -- a loss is a function ----------------------------------------------------------------------------------------

AGAIN = fr.KeyedJaggedTensor.from_lists({"a": [[0], [1], [2]], "b": [[1], [], [0]]},
    weights={"a": [[1.0]] * 3, "b": [[1.0], [], [1.0]]})  # fmt: skip
IMPURE = {
    "another table": lambda p, n: bent(vectors({"t": p.tables["xy"[n % 2]]}, pooled("t"))),
    "another table of a sequence": lambda p, n: bent(vectors({"t": p.tables["xy"[n % 2]]}, histories("t"))),
    "a table, then a constant": lambda p, n: bent(
        vectors({"t": p.tables["x"], "u": p.tables["y"] if n % 2 else FROZEN}, pooled("t", "u"))
    ),
    "more lookups": lambda p, n: sum(bent(vectors(p.tables, pooled("x"))) for _ in range(n + 1)),
    "fewer lookups": lambda p, n: sum(bent(vectors(p.tables, pooled("x"))) for _ in range(2 - n)),
    "other shapes": lambda p, n: bent(vectors(p.tables, pooled("x"), [IDS, AGAIN][n % 2])),
    "another kind": lambda p, n: bent(vectors(p.tables, [pooled, histories][n % 2]("x"))),
    "another order of features": lambda p, n: bent(vectors(p.tables, pooled(*["xy", "yx"][n % 2]))),
}


@pytest.mark.parametrize("name", IMPURE)
def test_a_loss_that_changes_between_its_passes_is_refused(name):
    """`value_and_grad` raises if a loss's second pass looks up other tables or shapes, or more or fewer times."""
    counter = itertools.count()
    with pytest.raises(ValueError, match="not a function of its arguments") as e:
        fr.value_and_grad(lambda p: IMPURE[name](p, next(counter)))(PARAMS)
    assert all(part in str(e.value) for part in ("  got  ", "  need ", "  try  "))


def test_a_loss_may_draw_its_ids():
    """If a loss draws new ids in each pass, the gradient is that of the pass whose value is returned."""
    seen = []

    def loss(p):
        ids = fr.KeyedJaggedTensor(torch.randint(0, 3, (9,)), IDS.offsets, IDS.weights, None, IDS.keys)
        seen.append(ids)
        return bent(vectors(p.tables, pooled("x"), ids))

    _, grads = fr.value_and_grad(loss)(PARAMS)
    (want, _), _ = densely(lambda p: bent(vectors(p.tables, pooled("x"), seen[-1])), PARAMS)
    assert_trees_close(grads.tables["x"].to_dense(), want["x"], **CLOSE)


# -- transforms inside the loss ----------------------------------------------------------------------------------


def weighted_by(w, ids=IDS):
    """Return ids whose weights depend on w."""
    return fr.KeyedJaggedTensor(ids.values, ids.offsets, ids.weights * (1 + w.sum()), None, ids.keys)


grad, vmap, jvp = torch.func.grad, torch.func.vmap, torch.func.jvp
KINDS = {"pooled": pooled("x", "y"), "sequence": histories("x", "y")}
INSIDE = {
    "penalty on activations": lambda p, f: (
        lambda acts: (grad(lambda a: bent(a, p.dense["s"]))(acts) ** 2).sum() + bent(acts)
    )(vectors(p.tables, f)),
    "penalty on dense": lambda p, f: (grad(lambda w: bent(vectors(p.tables, f) * w))(p.dense["w"]) ** 2).sum(),
    "penalty of a penalty": lambda p, f: (
        grad(lambda w: (grad(lambda v: bent(vectors(p.tables, f) * v))(w) ** 2).sum())(p.dense["w"]) ** 2
    ).sum(),
    "inner grad of weights": lambda p, f: (
        grad(lambda w: bent(vectors(p.tables, f, weighted_by(w))))(p.dense["w"]) ** 2
    ).sum(),
    "inner jvp of weights": lambda p, f: bent(
        jvp(lambda w: vectors(p.tables, f, weighted_by(w)), (p.dense["w"],), (p.dense["w"] * 2,))[1]
    ),
    "inner grad of grad of weights": lambda p, f: bent(
        grad(lambda v: grad(lambda w: bent(vectors(p.tables, f, weighted_by(w * v))))(p.dense["w"]).sum())(p.dense["w"])
    ),
    "inner hessian of dense": lambda p, f: bent(
        torch.func.hessian(lambda w: bent(vectors(p.tables, f) * w))(p.dense["w"])
    ),
    "inner jacrev of dense": lambda p, f: bent(torch.func.jacrev(lambda w: vectors(p.tables, f) * w)(p.dense["w"])),
    "vmap over ids": lambda p, f: bent(vmap(lambda ids: vectors(p.tables, f, ids))(BATCHED), p.dense["s"]),
    "vmap over rows of ids": lambda p, f: bent(
        vmap(
            lambda v: vectors(p.tables, f, fr.KeyedJaggedTensor(v, IDS.offsets, IDS.weights, None, IDS.keys)),
            in_dims=1,
            out_dims=1,
        )(BATCHED.values.T)
    ),
    "vmap over weights": lambda p, f: bent(
        vmap(lambda w: vectors(p.tables, f,
                weighted_by(w)))(torch.stack([p.dense["w"], p.dense["w"] * 2, p.dense["w"]]))
    ),
    "vmap over dense": lambda p, f: bent(
        vmap(lambda w: vectors(p.tables, f) * w)(torch.stack([p.dense["w"], p.dense["w"] * 2]))
    ),
    "vmap of vmap over ids": lambda p, f: bent(
        vmap(lambda one: vmap(lambda ids, w: vectors(p.tables, f, weighted_by(w, ids)), in_dims=(None, 0))(
            one, torch.stack([p.dense["w"], p.dense["w"] + 1, p.dense["w"] * 2])
        ))(BATCHED)
    ),
    "vmap of grad over ids": lambda p, f: bent(
        vmap(lambda ids: grad(lambda w: bent(vectors(p.tables, f, ids) * w))(p.dense["w"]))(BATCHED)
    ),
    "vmap of grad of weights over ids": lambda p, f: bent(
        vmap(lambda ids: grad(lambda w: bent(vectors(p.tables, f, weighted_by(w, ids))))(p.dense["w"]))(BATCHED)
    ),
    "grad of vmap over ids": lambda p, f: bent(
        grad(lambda w: bent(vmap(lambda ids: vectors(p.tables, f, ids) * w)(BATCHED)))(p.dense["w"])
    ),
    "grad of vmap of weights over ids": lambda p, f: bent(
        grad(lambda w: bent(vmap(lambda ids: vectors(p.tables, f, weighted_by(w, ids)))(BATCHED)))(p.dense["w"])
    ),
    "a constant table's own gradient": lambda p, f: bent(
        grad(lambda y: bent(vectors({"x": p.tables["x"], "y": y}, f)))(FROZEN)
    ) + bent(vectors(p.tables, f)),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", INSIDE)
def test_transforms_inside_the_loss(name, kind):
    """A loss with grad, vmap and jvp of lookups inside it has the gradient of torch."""
    assert_is_torch(lambda p: INSIDE[name](p, KINDS[kind]))


@pytest.mark.parametrize(
    "name", ["penalty on activations", "inner grad of weights", "vmap of grad of weights over ids"]
)
def test_they_agree_with_differences(name):
    """Gradient penalties trained through tables agree with central differences in f64."""

    def value(tables, dense):
        return INSIDE[name](fr.Params(tables, dense), KINDS["pooled"])

    check_grads(value, (TABLES, PARAMS.dense), order=1)


def test_they_are_staged_and_mapped(interpreted):
    """The gradients of these losses are the same under jit, and under vmap over stacked parameters."""
    names = ("inner grad of weights", "vmap over ids", "grad of vmap of weights over ids")
    of_one = lambda name, p: (lambda v, g: (v, g.dense, {n: t.to_dense() for n, t in g.tables.items()}))(
        *fr.value_and_grad(lambda p: INSIDE[name](p, KINDS["pooled"]))(p)
    )
    run = lambda p: {name: of_one(name, p) for name in names}
    assert_trees_close(fr.jit(run)(PARAMS), run(PARAMS), **CLOSE)
    two = [PARAMS, tree_map(lambda x: x * 0.5 + 0.1, PARAMS)]
    got = vmap(run)(tree_map(lambda *x: torch.stack(x), *two))
    assert_trees_close(got, tree_map(lambda *x: torch.stack(x), *map(run, two)), **CLOSE)


# -- value_and_grad in a loss of value_and_grad ------------------------------------------------------------------


def inner_loss(f):
    return lambda q: bent(vectors(q.tables, f, weighted_by(q.dense["w"])) * q.dense["w"], q.dense["s"])


def through(p, f, run):
    """Return a loss of the inner gradients (dense leaves and tables) and of the lookup itself."""
    value, inner = run(inner_loss(f))(p)
    rows = sum((g * g.cos()).sum() for g in inner.tables.values())
    return value + (inner.dense["w"] ** 2).sum() * inner.dense["s"] + rows + bent(vectors(p.tables, f))


def rows_of(loss):
    """Return value_and_grad of a loss, with the gradients of the tables in dense form."""

    def run(p):
        value, g = fr.value_and_grad(loss)(p)
        return value, fr.Params({n: t.to_dense() for n, t in g.tables.items()}, g.dense)

    return run


def dense_of(loss):
    def run(p):
        (tables, dense), value = densely(loss, p)
        return value, fr.Params(tables, dense)

    return run


@pytest.mark.parametrize("kind", KINDS)
def test_value_and_grad_of_the_outer_tables(kind):
    """value_and_grad inside a loss, of the loss's own tables, gives dense and row gradients that can be
    differentiated."""
    f = KINDS[kind]
    assert_is_torch(lambda p: through(p, f, rows_of), lambda p: through(p, f, dense_of))


def test_value_and_grad_of_some_outer_tables():
    """The inner loss may own one table, read another of the outer loss, and rename both."""
    f = pooled("t", "u")

    def through_one(p, run):
        own = lambda q: bent(vectors({"t": q.tables["mine"], "u": p.tables["y"]}, f) * q.dense)
        _, inner = run(own)(fr.Params({"mine": p.tables["x"]}, p.dense["w"]))
        return (inner.tables["mine"] ** 2).sum() + (inner.dense**2).sum()

    assert_is_torch(lambda p: through_one(p, rows_of), lambda p: through_one(p, dense_of))


def test_three_deep():
    """value_and_grad may be nested three deep."""
    f = KINDS["pooled"]

    def middle(run):
        return lambda p: (run(inner_loss(f))(p)[1].dense["w"] ** 2).sum()

    def outer(run):
        return lambda p: (run(middle(run))(p)[1].dense["w"] ** 2).sum()

    assert_is_torch(outer(rows_of), outer(dense_of))


def test_per_example_gradients_inside_the_loss():
    """The mean squared length of per-example gradients, by vmap of value_and_grad in the loss, can be trained through
    tables."""
    f = KINDS["pooled"]

    def loss(p, run):
        one = lambda ids: lambda q: bent(vectors(p.tables, f, ids) * q.dense)
        each = vmap(lambda ids: run(one(ids))(fr.Params({}, p.dense["w"]))[1].dense)(BATCHED)
        return (each**2).mean()

    assert_is_torch(lambda p: loss(p, fr.value_and_grad), lambda p: loss(p, dense_of))


# -- tables of other libraries -----------------------------------------------------------------------------------


def test_tables_of_modules_are_differentiated():
    """With an nn.Parameter as table, lookup and value_and_grad have the derivatives of torch. A training state takes
    the values of the parameter. For another tensor that requires grad, the step has the derivative of torch."""
    table, dense = torch.nn.Parameter(TABLES["x"]), torch.nn.Parameter(PARAMS.dense["s"].clone())
    loss = lambda p, _=None: bent(vectors(p.tables, pooled("x")), p.dense)
    value, grads = fr.value_and_grad(loss)(fr.Params({"x": table}, dense))
    plain = fr.value_and_grad(loss)(fr.Params({"x": TABLES["x"]}, PARAMS.dense["s"]))[1]
    assert_trees_close(grads.tables["x"].to_dense().detach(), plain.tables["x"].to_dense(), **CLOSE)
    assert_trees_close(torch.autograd.grad(value, [table])[0], plain.tables["x"].to_dense(), **CLOSE)
    step = fr.train_step(loss, sparse=fr.optim.sgd(lr=0.1), dense=fr.optim.dense(torch.optim.SGD, lr=0.1))
    new = lambda x, s: step(step.init(fr.Params({"x": x}, s)), None)[0].tables["x"]
    assert_trees_close(new(table.detach(), dense.detach()), TABLES["x"] - 0.1 * plain.tables["x"].to_dense(), **CLOSE)
    moved = lambda x: x - 0.1 * torch.func.grad(lambda y: loss(fr.Params({"x": y}, dense.detach())))(x)
    want = torch.func.vjp(moved, TABLES["x"])[1](torch.ones_like(TABLES["x"]))[0]
    assert_trees_close(torch.autograd.grad(new(table * 1, dense).sum(), [table])[0], want, **CLOSE)
    assert_trees_close(new(table, dense), new(table.detach(), dense.detach()))
    assert not step.init(fr.Params({"x": table}, {"s": dense})).dense["s"].requires_grad
    with pytest.raises(TypeError, match=r"nn.Parameter(.|\n)*x.detach\(\)"):
        fr.optim.sgd(lr=0.1).update(plain.tables, {"x": {}}, {"x": table}, 0, implementation="cpp")


def test_ids_of_torchrec_are_named():
    """The module of TorchRec's class of the same name identifies the class. The error suggests the conversion, which
    succeeds."""
    torchrec = pytest.importorskip("torchrec")
    lengths = torch.tensor([2, 0, 1, 1])
    theirs = torchrec.KeyedJaggedTensor.from_lengths_sync(["a", "b"], torch.tensor([0, 2, 1, 1]), lengths)
    with pytest.raises(TypeError) as e:
        fr.lookup(TABLES, theirs, pooled("x", weighted=False))
    assert "got   torchrec.sparse.jagged_tensor.KeyedJaggedTensor" in str(e.value)
    assert "need  a funcrec.KeyedJaggedTensor" in str(e.value)
    hint = str(e.value).rsplit("try   ", 1)[1]
    ours = eval(hint, {"fr": fr, "ids": theirs})
    assert ours.to_lists() == {"a": [[0, 2], []], "b": [[1], [1]]}
