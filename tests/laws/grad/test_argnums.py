"""value_and_grad by any argument: trees of floats, Params, several of them, and a table that is tied to a matrix."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from programs.as_staged import staged_only

import funcrec as fr
from funcrec.testing import assert_trees_close

ITEM, CLICKED = fr.TableConfig("item", 6, 2), fr.FeatureConfig("clicked", table="item")
IDS = fr.KeyedJaggedTensor.from_lists({"clicked": [[1, 2, 2], [5]]})
TABLES = fr.init(fr.key(0), [ITEM])
TREE = {"w": torch.tensor([1.0, -2.0]), "b": [torch.tensor(0.5)]}


def dense_loss(tree, x, scale):
    return ((x * tree["w"]).sin() + tree["b"][0]).square().sum() * scale


def loss(params, x, tree):
    rows = fr.lookup(params.tables, IDS, [CLICKED])["clicked"]
    return (rows * params.dense * tree["w"] + x).square().sum()


@settings(max_examples=10)
@given(numbers=st.sampled_from([0, 1, (0,), (0, 1), (1, 0), (2, 0, 1)]), seed=st.integers(0, 10**6))
def test_trees_of_floats(numbers, seed):
    """Gradients by trees of floats are those of torch.func.grad_and_value, in the form of `argnums`."""
    x = torch.randn(3, 2, generator=torch.Generator().manual_seed(seed))
    args = (TREE, x, torch.tensor(1.5))
    value, grads = fr.value_and_grad(dense_loss, argnums=numbers)(*args)
    need, want = torch.func.grad_and_value(dense_loss, argnums=numbers)(*args)
    assert_trees_close((grads, value), (need, want))


def test_a_plain_dict_by_default():
    """A dict in place of Params gets a dict of gradients; aux, keywords, and other arguments are passed on."""
    with_aux = lambda tree, *, x: (dense_loss(tree, x, 1.0), {"n": 3, "x": x})
    (value, aux), grads = fr.value_and_grad(with_aux, has_aux=True)(TREE, x=torch.ones(2))
    need = torch.func.grad(lambda t: dense_loss(t, torch.ones(2), 1.0))(TREE)
    assert_trees_close(grads, need)
    assert aux["n"] == 3 and value == dense_loss(TREE, torch.ones(2), 1.0)
    assert fr.value_and_grad(lambda t: torch.tensor(1.0))({})[1] == {}


def test_params_among_the_arguments():
    """Params by another place than the first have rows for tables, next to the gradients of other trees."""
    params, x = fr.Params(TABLES, torch.tensor(2.0)), torch.ones(2, 2)
    whole = lambda tree, p: loss(p, x, tree)
    value, (d_tree, d_params) = fr.value_and_grad(whole, argnums=(0, 1))(TREE, params)
    one, own = fr.value_and_grad(loss)(params, x, TREE)
    assert_trees_close((value, d_params), (one, own))
    assert_trees_close(d_tree, torch.func.grad(whole)(TREE, params))
    assert_trees_close(fr.value_and_grad(whole, argnums=1)(TREE, params)[1], own)
    assert_trees_close(fr.value_and_grad(whole, argnums=0)(TREE, params)[1], d_tree)


def test_transforms():
    """vmap, jvp and jit take the function: members, a Hessian-vector product, and a program."""
    x = torch.ones(2)
    fn = fr.value_and_grad(dense_loss, argnums=(0, 1))
    trees = fr.tree.map(lambda t: torch.stack([t, t + 1]), TREE)
    got = torch.func.vmap(fn, in_dims=(0, None, None))(trees, x, 1.0)
    for i in range(2):
        assert_trees_close(fr.tree.map(lambda t: t[i], got), fn(fr.tree.map(lambda t: t[i], trees), x, 1.0), rtol=1e-6)  # noqa: B023
    hvp = torch.func.jvp(lambda x: fn(TREE, x, 1.0)[1][1], (x,), (x,))[1]
    assert_trees_close(hvp, torch.func.hessian(lambda x: dense_loss(TREE, x, 1.0))(x) @ x, rtol=1e-5)
    with staged_only():
        assert_trees_close(fr.jit(fn)(TREE, x, 1.0), fn(TREE, x, 1.0))


def test_a_tied_table():
    """A table that is looked up and multiplied, as a dense leaf, gets the sum of both gradients; a step trains it."""

    def tied(params, ids):
        table = params.dense["item"]
        rows = fr.lookup({"item": table}, ids, [CLICKED])["clicked"]
        return (rows @ table.T).logsumexp(1).sum()

    params = fr.Params({}, {"item": TABLES["item"]})
    grads = fr.value_and_grad(tied)(params, IDS)[1].dense["item"]
    bags = torch.zeros(2, 6).index_put((torch.tensor([0, 0, 0, 1]), torch.tensor([1, 2, 2, 5])), torch.ones(4), True)
    need = torch.func.grad(lambda t: (bags @ t @ t.T).logsumexp(1).sum())(TABLES["item"])
    torch.testing.assert_close(grads, need)
    step = fr.train_step(tied, dense=fr.optim.dense(torch.optim.SGD, lr=0.5))
    moved = step(step.init(params), IDS)[0].dense["item"]
    torch.testing.assert_close(moved, TABLES["item"] - 0.5 * need)


PARAMS = fr.Params(TABLES, torch.tensor(2.0))
REFUSED = {
    "a jagged value": (
        lambda: fr.value_and_grad(dense_loss)(fr.JaggedTensor.from_lists([[1.0]])), TypeError,
        r"`args\[0\].offsets` cannot be differentiated"),
    "an int": (lambda: fr.value_and_grad(dense_loss)(5), TypeError, r"`args\[0\]` cannot be differentiated"),
    "a dict of ints": (lambda: fr.value_and_grad(dense_loss)({"w": torch.tensor(1)}), TypeError,
        r"`args\[0\]\['w'\]` cannot be differentiated"),
    "no such argument": (lambda: fr.value_and_grad(dense_loss, argnums=3)(TREE), ValueError,
        "`argnums` names no positional argument"),
    "an argument twice": (lambda: fr.value_and_grad(dense_loss, argnums=(0, 0)), ValueError,
        "`argnums` are not places"),
    "no arguments": (lambda: fr.value_and_grad(dense_loss, argnums=()), ValueError, "`argnums` are not places"),
    "a negative one": (lambda: fr.value_and_grad(dense_loss, argnums=-1), ValueError, "`argnums`"),
    "two with tables": (lambda: fr.value_and_grad(lambda a, b: a, argnums=(0, 1))(PARAMS, PARAMS), TypeError,
        "two arguments of `argnums` have tables"),
}  # fmt: skip


@pytest.mark.parametrize("call, kind, words", REFUSED.values(), ids=REFUSED)
def test_refused(call, kind, words):
    """Arguments that cannot be differentiated raise before the loss is called."""
    with pytest.raises(kind, match=words):
        call()
