"""Every eager update reads again what a row rule closes over. An update refuses a rule that does what no rule may
do."""

import warnings

import numpy as np
import pytest
import torch

import funcrec as fr


def update_by(rule, **hyper):
    """Return a function that returns the row after one update with the rule."""
    opt = fr.optim.row_optimizer(init=lambda t: {}, rule=rule, lr=1.0, **hyper)
    grads = {"t": fr.RowGrads.from_entries(torch.tensor([0]), torch.ones(1, 2), num_embeddings=1)}
    table = torch.zeros(1, 2)
    return lambda **how: opt.update(grads, {"t": {}}, {"t": table}, 0, **how)[0]["t"][0]


def by_modes(row, grad, slots, hyper):
    scale = 4 if torch.is_inference_mode_enabled() else 2 if torch.is_grad_enabled() else 1
    return row - scale * grad, slots


def by_modes_in_blocks(row, grad, slots, hyper):
    new, _ = by_modes(row, grad, slots, hyper)
    return new + 0 * grad.sort().values, slots


@pytest.mark.parametrize("rule", [by_modes, by_modes_in_blocks])
def test_a_rule_sees_the_modes_of_its_caller(rule, interpreted):
    """A rule that branches on grad mode or inference mode takes the branch of its caller. This holds in the kernel, in
    blocks, in the reference, and in a jitted function."""
    update = update_by(rule)
    jitted = fr.jit(update)
    ways = [lambda how=how: how().tolist() for how in (update, lambda: update(implementation="reference"), jitted)]
    with warnings.catch_warnings(record=rule is by_modes_in_blocks):
        for mode, scale in ((torch.enable_grad, 2), (torch.no_grad, 1), (torch.inference_mode, 4), (torch.no_grad, 1)):
            with mode():
                assert [way() for way in ways] == [[-scale, -scale]] * 3


def test_a_rule_whose_number_changes_says_so_once():
    """A rule is compiled again whenever its Python number changes. At the ninth compilation, one warning says so. The
    warning suggests a tensor, which each update reads."""
    held = [0]
    update = update_by(lambda row, grad, slots, hyper: (row - held[0] * grad, slots))
    with pytest.warns(UserWarning, match="compiled each time(.|\n)*mul(.|\n)*a tensor f") as said:
        for held[0] in range(1, 12):
            assert update().tolist() == [-held[0]] * 2
    assert len(said) == 1


class Doubled(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Undoubled(Doubled):
    generate_vmap_rule = False


def test_an_autograd_function_in_a_rule_runs():
    """A rule with an autograd.Function that has a vmap warns and runs in blocks."""
    with pytest.warns(UserWarning, match="not a part of the kernel"):
        assert update_by(lambda row, grad, s, h: (row - Doubled.apply(grad), s))().tolist() == [-2, -2]


REFUSED = {
    "torch.rand": (lambda r, g, s, h: (r - torch.rand(2) * g, s), TypeError, "`rule` draws from torch's generator"),
    "if": (lambda r, g, s, h: (r if g.sum() > 0 else g, s), TypeError, "try   torch.where"),
    "float()": (lambda r, g, s, h: (r - float(g.sum()), s), TypeError, "`rule` reads a tensor's value on the host"),
    "g[mask]": (lambda r, g, s, h: (r - g[g > 0].sum(), s), TypeError, r"in place of x\[mask\]"),
    "numpy": (lambda r, g, s, h: (r - torch.from_numpy(g.numpy()), s), TypeError, "memory on the host"),
    "autograd.Function": (lambda r, g, s, h: (r - Undoubled.apply(g), s), TypeError, "generate_vmap_rule = True"),
    "a name": (lambda r, g, s, h: (r - h.learning_rate * g, s), AttributeError,
        r"no 'learning_rate'(.|\n)*one of \['lr', 'step', 'repeats', 'rho'\](.|\n)*hyper.lr"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_rule_may_not_do_is_said_in_four_parts(name):
    """Operations that no transform can run raise an error with got, need and try. So does a name that `hyper` does not
    have."""
    rule, kind, match = REFUSED[name]
    with pytest.raises(kind, match=match) as error:
        update_by(rule, rho=0.5)()
    assert all(f"\n  {part}" in str(error.value) for part in ("got   ", "need  ", "try   "))


@pytest.mark.parametrize("rule", [lambda r, g, s: (r, s), lambda r, g, s, h: (r - s["m"], s)])
def test_an_error_of_a_rule_s_own_tells_what_it_was_given(rule):
    """An error inside a rule keeps its type and text. A note adds the rule's arguments and the names of `hyper`."""
    with pytest.raises((TypeError, KeyError)) as error:
        update_by(rule)()
    assert "hyper's lr, step, repeats" in error.value.__notes__[0]


def test_closed_over_tensors_are_read_in_every_update():
    """A tensor that a rule closes over counts with its value at the time of the update."""
    scale = torch.tensor(1.0)
    opt = fr.optim.row_optimizer(init=lambda t: {}, rule=lambda row, grad, s, h: (row - scale * grad, s))
    grads, table = (
        {"t": fr.RowGrads.from_entries(torch.tensor([1]), torch.ones(1, 2), num_embeddings=2)},
        torch.zeros(2, 2),
    )
    step = fr.jit(lambda table: opt.update(grads, {"t": {}}, {"t": table}, 0)[0]["t"])
    for value in (1.0, 3.0):
        scale.fill_(value)
        for update in (step, lambda table: opt.update(grads, {"t": {}}, {"t": table}, 0)[0]["t"]):
            assert update(table)[1].tolist() == [-value, -value]


@pytest.mark.parametrize("rule", ["tensor", "number", "branch", "blocks"])
def test_what_a_rule_closes_over_is_read_anew_in_every_eager_update(rule, interpreted):
    """Another tensor, number or branch in a rule's closure counts from the next eager update on. A program that was
    staged before keeps the old value."""
    held = {"c": torch.tensor(1.0), "n": 1.0, "is_twice": False}
    rules = {
        "tensor": lambda row, grad, s, h: (row - held["c"] * grad, s),
        "number": lambda row, grad, s, h: (row - held["n"] * grad, s),
        "branch": lambda row, grad, s, h: (row - grad - grad if held["is_twice"] else row - grad, s),
        "blocks": lambda row, grad, s, h: (row - held["c"] * grad.sort().values, s),
    }
    opt = fr.optim.row_optimizer(init=lambda t: {}, rule=rules[rule])
    tables = {"t": torch.zeros(2, 2), "u": torch.zeros(2, 3)}
    one = lambda t: fr.RowGrads.from_entries(torch.tensor([1]), torch.ones(1, t.shape[1]), num_embeddings=2)
    grads = {n: one(t) for n, t in tables.items()}
    moved = lambda *names: [
        opt.update({n: grads[n] for n in names}, {n: {} for n in names}, {n: tables[n] for n in names}, 0)[0][n][1, 0]
        for n in names
    ]
    compiled = fr.jit(lambda: opt.update({"t": grads["t"]}, {"t": {}}, {"t": tables["t"]}, 0)[0]["t"])
    with warnings.catch_warnings(record=rule == "blocks"):
        assert moved("t") == [-1] and compiled()[1, 0] == -1
        held.update(c=torch.tensor(2.0), n=2.0, is_twice=True)
        assert moved("u", "t") == [-2, -2] and moved("t") == [-2]
        if rule != "blocks":
            assert compiled()[1, 0] == -1
        held["c"].fill_(4.0)
        assert moved("t") == [-4 if rule in ("tensor", "blocks") else -2]


class Scales:
    """A sequence whose repr does not show its values."""

    def __init__(self, *values):
        self.values = [*values]

    def __len__(self):
        return len(self.values)

    def __getitem__(self, i):
        return self.values[i]


class Scale:
    """A number whose repr does not show its value."""

    def __init__(self, value):
        self.value = value

    def __float__(self):
        return float(self.value)


class Which(Scale):
    def __index__(self):
        return int(self.value)


def test_a_number_of_its_own_class_is_read_anew():
    """The next eager update reads again a value that torch reads by __float__ or __index__."""
    scale, which = Scale(1), Which(0)
    for rule in (
        lambda r, g, s, h: (r - torch.tensor(scale, dtype=torch.float32) * g, s),
        lambda r, g, s, h: (r - torch.tensor([1.0, 5.0])[which] * g, s),
    ):
        opt = fr.optim.row_optimizer(init=lambda t: {}, rule=rule)
        grads = {"t": fr.RowGrads.from_entries(torch.tensor([0]), torch.ones(1, 2), num_embeddings=1)}
        update = lambda: opt.update(grads, {"t": {}}, {"t": torch.zeros(1, 2)}, 0)[0]["t"].tolist()  # noqa: B023
        scale.value, which.value = 1, 0
        assert update() == [[-1, -1]]
        scale.value, which.value = 5, 1
        assert update() == [[-5, -5]]


@pytest.mark.parametrize("rule, match", [
    (lambda r, g, s, h: r, "did not return a pair"), (lambda r, g, s, h: None, "did not return a pair"),
    (lambda r, g, s, h: (r - HELD.add_(1) * g, s), "writes to a tensor that it closes over"),
])  # fmt: skip
def test_what_no_rule_may_do_is_refused(rule, match):
    """A rule must return a pair of row and slots. A rule may not write to closed-over tensors."""
    opt = fr.optim.row_optimizer(init=lambda t: {}, rule=rule)
    grads = {"t": fr.RowGrads.from_entries(torch.tensor([0]), torch.ones(1, 2), num_embeddings=1)}
    with pytest.raises((TypeError, ValueError), match=match):
        opt.update(grads, {"t": {}}, {"t": torch.zeros(1, 2)}, 0)


HELD = torch.zeros(())


@pytest.mark.parametrize("held", [Scales(1.0, 1.0), [1.0, 1.0], np.ones(2, np.float32), bytearray(b"\x01\x01")])
def test_numbers_in_a_container_are_read_anew(held):
    """The next eager update reads again the values that a rule turns into a tensor, in any container."""
    opt = fr.optim.row_optimizer(init=lambda t: {}, rule=lambda r, g, s, h: (r - torch.tensor(held) * g, s))
    grads = {"t": fr.RowGrads.from_entries(torch.tensor([0]), torch.ones(1, 2), num_embeddings=1)}
    update = lambda: opt.update(grads, {"t": {}}, {"t": torch.zeros(1, 2)}, 0)[0]["t"].tolist()
    assert update() == [[-1, -1]]
    (held.values if isinstance(held, Scales) else held)[:] = (
        bytes([5, 5]) if isinstance(held, bytearray) else [5.0, 5.0]
    )
    assert update() == [[-5, -5]]


def test_a_tensor_of_another_shape_in_a_rule_is_read_whole():
    """If a closed-over tensor changes its shape, eager and compiled updates read the tensor with the new shape."""
    held = [torch.ones(4)]
    opt = fr.optim.row_optimizer(init=lambda t: {}, rule=lambda row, grad, s, h: (row - held[0] * grad, s))
    grads = {"t": fr.RowGrads.from_entries(torch.tensor([0]), torch.ones(1, 4), num_embeddings=1)}
    update = lambda: opt.update(grads, {"t": {}}, {"t": torch.zeros(1, 4)}, 0)[0]["t"].tolist()
    compiled = fr.jit(lambda t: opt.update(grads, {"t": {}}, {"t": t}, 0)[0]["t"])
    assert update() == compiled(torch.zeros(1, 4)).tolist() == [[-1] * 4]
    held[0].resize_(1).fill_(3.0)
    assert update() == compiled(torch.zeros(1, 4)).tolist() == [[-3] * 4]


@pytest.mark.parametrize("read", [
    lambda w: float(w.numpy()[0]), lambda w: float(np.asarray(w)[0]), lambda w: torch.from_numpy(w.numpy() * 1.0),
    torch.from_dlpack, lambda w: w.tolist()[0],
])  # fmt: skip
def test_memory_that_a_rule_reads_on_the_host_is_read(read):
    """A rule that reads a tensor's memory on the host runs untraced and gives the right value, because a trace on
    shapes has no memory."""
    w = torch.full((2,), 2.0)
    opt = fr.optim.row_optimizer(init=lambda t: {}, rule=lambda r, g, s, h: (r - read(w) * g, s))
    grads = {"t": fr.RowGrads.from_entries(torch.tensor([0]), torch.ones(1, 2), num_embeddings=1)}
    update = lambda: opt.update(grads, {"t": {}}, {"t": torch.zeros(1, 2)}, 0)[0]["t"].tolist()
    with warnings.catch_warnings(record=True):
        assert update() == [[-2, -2]]
        w.fill_(5.0)
        assert update() == [[-5, -5]]
