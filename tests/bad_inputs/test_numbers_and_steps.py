"""Errors for hyper-parameters that are tensors, for steps that return no pair, and inside a user's own function."""

import pytest
import torch

import funcrec as fr
import funcrec.testing
from funcrec import optim
from funcrec.optim._builtin import BUILTIN
from funcrec.optim.write import examples

IDS = fr.KeyedJaggedTensor.from_lists({"x": [[0], [1, 2]]})
FEATURES = (fr.FeatureConfig("x", table="t"),)
TABLES = fr.init(fr.key(0), (fr.TableConfig("t", 5, 3),))
GRADS = {"t": fr.RowGrads.from_entries(torch.tensor([0, 1]), torch.ones(2, 3), num_embeddings=5)}


def numbers_of(rule: str) -> dict:
    """Return {hyper-parameter: a value} for the hyper-parameters that are numbers."""
    return {n: x for n, x in examples(rule)[-1].items() if isinstance(x, float)}


@pytest.mark.parametrize("rule", BUILTIN)
def test_a_number_may_be_a_tensor_of_one_and_no_other(rule):
    """A hyper-parameter that is a tensor must be one float, f[]. Otherwise the error has its shape or dtype."""
    make, needed = getattr(optim, rule), examples(rule)[-1]
    for name, number in numbers_of(rule).items():
        assert make(**{**needed, name: torch.tensor(number)}).init(TABLES).keys() == TABLES.keys()
        for wrong, told in (
            (torch.full((3,), number), "f32[3]"),
            (torch.full((1, 1), number), "f32[1, 1]"),
            (torch.ones(()) > 0, "bool[]"),
        ):
            with pytest.raises((TypeError, ValueError)) as error:
                make(**{**needed, name: wrong})
            text = str(error.value)
            assert (
                text.startswith(f"funcrec.optim.{rule}: `{name}`")
                and told in text
                and "f[]" in text
                and "  try   " in text
            )


@pytest.mark.parametrize("rate", [torch.ones(3), torch.ones((), dtype=torch.complex64), "fast", None, -1.0], ids=str)
def test_what_a_function_of_the_step_gives_is_a_rate(rate):
    """A learning rate that a function of the step returns is checked like a given learning rate."""
    for opt, args in (
        (optim.sgd(lr=lambda step: rate), (GRADS, {"t": {}}, TABLES)),
        (optim.dense(torch.optim.SGD, lr=lambda step: rate), (torch.ones(2), {}, torch.ones(2))),
    ):
        with pytest.raises(
            (TypeError, ValueError),
            match=r"`lr\(step\)` is (not a number|out of range)[\s\S]*\n  need  a finite number >= 0",
        ):
            opt.update(*args, 0)


def test_a_tensor_among_the_numbers_of_a_dense_optimizer_is_one():
    """`dense` accepts only tensors of one number, as row optimizers do."""
    with pytest.raises(ValueError, match=r"`weight_decay` is not one number[\s\S]*f32\[3\]"):
        optim.dense(torch.optim.SGD, lr=0.1, weight_decay=torch.ones(3))
    with pytest.raises(ValueError, match=r"`lr`[\s\S]*f32\[3\]"):
        optim.dense(torch.optim.SGD, lr=torch.ones(3))


@pytest.mark.parametrize(
    ("out", "got"),
    [(torch.ones(2), r"f32\[2\]"), (None, "NoneType"), ((1, 2, 3), "3 values")],
    ids=["tensor", "None", "3"],
)
def test_scan_names_a_step_that_returns_no_pair(out, got):
    """A step must return (state, metrics). Any other result raises."""
    with pytest.raises(TypeError, match=rf"`step` returned no pair\.\n  got   {got}\n  need  \(state, metrics\)"):
        fr.scan(lambda state, x: out, torch.ones(()), torch.ones(3))


@pytest.mark.parametrize("number", [2**63, 2**70, -(2**63) - 1])
def test_scan_names_a_metric_that_no_i64_holds(number):
    """Integers in metrics become i64. Integers outside i64 raise. All other integers keep their values."""
    with pytest.raises(ValueError, match=r"`metrics\['m'\]` is too large for i64[\s\S]*" + str(number)):
        fr.scan(lambda state, x: (state, {"m": number}), torch.ones(()), torch.ones(2))
    last = fr.scan(lambda state, x: (state, 2**63 - 1), torch.ones(()), torch.ones(2))[1]
    assert last.tolist() == [2**63 - 1] * 2


def test_stacked_gradients_given_to_an_optimizer_are_told_of_vmap():
    """Row gradients stacked by vmap raise. The error suggests a map of the update, which succeeds."""
    stacked = torch.func.vmap(lambda k: {n: g.scale(k) for n, g in GRADS.items()})(torch.tensor([1.0, 2.0]))
    opt = optim.adagrad(lr=0.1)
    with pytest.raises(
        TypeError,
        match=r"`row_grads\['t'\]` is stacked[\s\S]*torch\.func\.vmap\(optimizer\.update, in_dims=\(0, 0, 0, None\)\)",
    ):
        opt.update(stacked, opt.init(TABLES), TABLES, 0)
    copies = lambda tree: torch.utils._pytree.tree_map(lambda x: torch.stack([x, x]), tree)
    made = torch.func.vmap(opt.update, in_dims=(0, 0, 0, None))(stacked, copies(opt.init(TABLES)), copies(TABLES), 0)
    assert torch.equal(made[0]["t"][0], opt.update(GRADS, opt.init(TABLES), TABLES, 0)[0]["t"])


def test_a_mask_given_as_rows_is_told_of_nonzero():
    """A boolean mask raises where rows are needed. The error suggests nonzero, which succeeds."""
    data = fr.data.random_rows(fr.key(0), {"x": 5}, num_rows=8)
    mask = torch.arange(8) % 2 == 0
    for call in (lambda rows: next(fr.data.batches(data, rows, 2))[1], lambda rows: fr.data.take(data, rows)):
        with pytest.raises(TypeError, match=r"got   bool\[8\][\s\S]*try   rows\.nonzero\(\)\[:, 0\]"):
            call(mask)
        assert call(mask.nonzero()[:, 0]).label.shape[0] in (2, 4)


@pytest.mark.parametrize("transform", ["grad", "grad_and_value", "jvp", "vmap"])
def test_a_transform_of_torch_over_the_tables_of_a_loss_says_what_to_write(transform):
    """In a differentiated loss, tables are not tensors. torch's transforms of tables therefore raise. The error
    suggests fr.value_and_grad, which succeeds there."""
    squares = lambda tables: fr.lookup(tables, IDS, FEATURES).values.square().sum()
    calls = {
        "grad": lambda tables: torch.func.grad(squares)(tables),
        "grad_and_value": lambda tables: torch.func.grad_and_value(squares)(tables),
        "jvp": lambda tables: torch.func.jvp(squares, (tables,), (TABLES,)),
        "vmap": lambda tables: torch.func.vmap(squares)(tables),
    }

    def loss_fn(params):
        calls[transform](params.tables)
        return params.dense.sum()

    params = fr.Params(TABLES, torch.ones(1))
    with pytest.raises(
        TypeError,
        match=r"^funcrec\.value_and_grad: a transform of torch was given tables[\s\S]*try   fr\.value_and_grad\(f\)",
    ):
        fr.value_and_grad(loss_fn)(params)
    inner = fr.value_and_grad(lambda p: squares(p.tables))
    right = fr.value_and_grad(lambda p: inner(p)[1].tables["t"].to_dense().square().sum())(params)[1]
    w = TABLES["t"].double()
    weight = torch.zeros(5, 2, dtype=torch.float64).index_put(
        (torch.tensor([0, 1, 2]), torch.tensor([0, 1, 1])), torch.ones(()).double()
    )
    reference = torch.func.grad(lambda w: torch.func.grad(lambda w: (weight.T @ w).square().sum())(w).square().sum())(w)
    assert torch.allclose(right.tables["t"].to_dense().double(), reference, rtol=1e-5)


def test_an_error_of_the_users_own_function_says_what_it_was_given():
    """An error inside a step, or inside a map given to a check, keeps its type. A note shows the arguments."""
    with pytest.raises(AttributeError) as error:
        fr.scan(lambda state, x: (state.missing, {}), torch.ones(2), torch.ones(3, 4))
    assert "funcrec.scan" in error.value.__notes__[0] and "got   f32[2], f32[4]" in error.value.__notes__[0]
    with pytest.raises(RuntimeError) as error:
        fr.testing.check_adjoint(lambda x: x @ x, lambda y: y, torch.ones(2, 3))
    assert "funcrec.testing.check_adjoint" in error.value.__notes__[0] and "got   f32[2, 3]" in error.value.__notes__[0]
