"""jit reads closed-over tensors in every call, differentiates tracked tensors, and never writes to closed-over
tensors."""

import numpy as np
import pytest
import torch

import funcrec as fr
from funcrec.testing import assert_trees_close

pytestmark = pytest.mark.usefixtures("interpreted")

X = torch.tensor([2.0, 3.0])


# -- read in every call ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 3, 100])
def test_closed_over_tensors_are_read_in_every_call(n, monkeypatch):
    """A closed-over tensor that changes between calls gives its new values, however small the tensor is. The same holds
    for tensors in lists and dicts."""
    monkeypatch.undo()
    w, held = torch.ones(n), {"a": [torch.ones(n)]}
    jitted = fr.jit(lambda x: x * w + held["a"][0])
    for i in range(3):
        w.fill_(i)
        held["a"][0].fill_(10 * i)
        assert_trees_close(jitted(torch.ones(n)), torch.full((n,), 11.0 * i))
    assert jitted.num_compiled() == 1


def test_numbers_written_in_the_function_stay():
    """A tensor that the function makes from numbers belongs to the function. The function may write to such a
    tensor."""

    def fn(x):
        y = torch.tensor([1.0, 2.0])
        y += x
        return y

    jitted = fr.jit(fn)
    for _ in range(3):
        assert_trees_close(jitted(X), X + torch.tensor([1.0, 2.0]))


def test_closed_over_tensors_of_another_form_are_seen():
    """When a closed-over tensor gets another shape, dtype or memory, the function is compiled again."""
    w = torch.ones(2)
    jitted = fr.jit(lambda x: x.sum() + w)
    for change in (
        lambda: None,
        lambda: w.resize_(3).fill_(2),
        lambda: setattr(w, "data", torch.ones(2, dtype=torch.float64)),
    ):
        change()
        for _ in range(2):
            assert_trees_close(jitted(X), X.sum() + w)
    assert jitted.num_compiled() == 3


def test_one_tensor_closed_over_and_given():
    """A tensor may be both closed over and an argument, or two arguments. The function reads it correctly in each
    place."""
    w = torch.ones(2)
    jitted = fr.jit(lambda x, y: x * w + w * y)
    for x, y in ((w, w), (X, w), (w, X), (X, X)):
        for _ in range(2):
            assert_trees_close(jitted(x, y), x * w + w * y)
    assert jitted.num_compiled() == 1


def test_what_is_closed_over_can_be_returned_and_not_donated():
    """A function may return a closed-over tensor. A call cannot donate memory that the function closes over."""
    w = torch.ones(2)
    assert_trees_close(fr.jit(lambda x: (w, x))(X), (w, X))
    step = fr.jit(lambda s: {"w": s["w"] + w}, donate=("s",))
    with pytest.raises(ValueError, match="is given twice"):
        step({"w": w.view(2)})
    state = step(step({"w": X.clone()}))
    assert_trees_close(state["w"], X + 2)
    fr.jit(lambda s: s + 1, donate=("s",))(w)
    for _ in range(2):
        with pytest.raises(fr.DonatedError):
            step(state)


@pytest.mark.parametrize(
    "read",
    [lambda w: w.item(), lambda w: float(w), lambda w: bool(w), lambda w: w.tolist(), lambda w: w.numpy().sum(),
        lambda w: 1 if w > 0 else 0],
)  # fmt: skip
def test_host_reads_of_what_is_closed_over_are_refused(read):
    """A read of a closed-over value on the host raises, as it does for arguments, because the value would be compiled
    in."""
    w = torch.tensor(2.0)
    with pytest.raises((TypeError, RuntimeError)):
        fr.jit(lambda x: x * read(w))(X)
    with pytest.raises((TypeError, RuntimeError)):
        fr.jit(lambda x, w: x * read(w))(X, w)


# -- tracked -----------------------------------------------------------------------------------------------------


def test_autograd_sees_through():
    """Gradients equal those of eager mode, for arguments that require grad and for closed-over nn.Parameters. This
    holds for leaves, views and results, and for second derivatives."""
    w = torch.nn.Parameter(torch.tensor([5.0, 7.0]))
    fn = lambda x: (x**3 * w).sum()
    jitted = fr.jit(fn)
    for x in (X.clone().requires_grad_(), X.clone().requires_grad_()[:], X.clone().requires_grad_() * 2):
        assert_trees_close(torch.autograd.grad(jitted(x), (x, w)), torch.autograd.grad(fn(x), (x, w)))
        (first,) = torch.autograd.grad(jitted(x), x, create_graph=True)
        assert_trees_close(torch.autograd.grad(first.sum(), x)[0], 6 * x * w)
    assert_trees_close(torch.autograd.grad(jitted(X), (w,)), (X**3,))
    with torch.no_grad():
        got = jitted(X)
    assert not got.requires_grad and jitted.num_compiled() == 1


@pytest.mark.parametrize("is_tracked", [False, True])
def test_requires_grad_that_is_set_later_is_seen(is_tracked):
    """requires_grad of a closed-over tensor or of an argument counts in each call, even when it is set or unset after
    the compilation."""
    w = torch.ones(2, requires_grad=is_tracked)
    jitted = fr.jit(lambda x: x * w)
    for i in range(6):
        w.requires_grad_(is_tracked == (i % 3 != 2))
        assert jitted(X).requires_grad == w.requires_grad
        x = X.clone().requires_grad_(i % 2 == 0)
        assert jitted(x).requires_grad == (w.requires_grad or x.requires_grad)
    assert jitted.num_compiled() <= 2


def test_donated_calls_that_autograd_follows_raise():
    """A donating call raises before any work if an argument, donated or not, or a closed-over tensor requires grad. The
    call takes nothing."""
    w = torch.ones(2)
    step = fr.jit(lambda s, x: s + x * w, donate=("s",))
    for s, x, closed in ((True, False, False), (False, True, False), (False, False, True)):
        given = [X.clone().requires_grad_(s), X.clone().requires_grad_(x)]
        w.requires_grad_(closed)
        for _ in range(2):
            with pytest.raises(TypeError, match=r"followed by autograd(.|\n)*detach"):
                step(*given)
        with torch.no_grad():
            assert_trees_close(given[0] + given[1], 2 * X)
            assert_trees_close(step(given[0].detach(), given[1]), X + X * w)


def test_programs_see_requires_grad():
    """A program can read whether its argument requires grad, even under no_grad."""
    program = lambda x: x + x.requires_grad
    jitted = fr.jit(program)
    with torch.no_grad():
        for is_set in (False, True, True, False):
            x = X.clone().requires_grad_(is_set)
            assert_trees_close(jitted(x), program(x).detach())


def test_gradients_inside_are_compiled():
    """torch.autograd.grad and torch.func.grad inside a jitted function differentiate by arguments and by closed-over
    tensors."""
    w = torch.tensor([5.0, 7.0])

    def fn(x):
        y = x.detach().requires_grad_()
        with torch.enable_grad():
            (d,) = torch.autograd.grad((y**2 * w).sum(), y)
        return d + torch.func.grad(lambda v: (v**3 * w).sum())(x)

    with torch.no_grad():
        assert_trees_close(fr.jit(fn)(X), fn(X))
    assert_trees_close(fr.jit(fn)(X), fn(X))


# -- traced ------------------------------------------------------------------------------------------------------

W = torch.tensor([5.0, 7.0])
jitted_of = lambda w: fr.jit(lambda x: torch.sin(x * w))
TRACED = {
    "grad": lambda of: torch.func.grad(lambda w: of(w)(X).sum())(W),
    "vmap": lambda of: torch.func.vmap(lambda w: of(w)(X))(torch.stack([W, W + 1])),
    "jvp": lambda of: torch.func.jvp(lambda w: of(w)(X), (W,), (torch.ones(2),)),
    "hessian": lambda of: torch.func.hessian(lambda w: of(w)(X).sum())(W),
    "vmap of grad": lambda of: torch.func.vmap(torch.func.grad(lambda w: of(w)(X).sum()))(torch.stack([W, W + 1])),
    "vjp": lambda of: torch.func.vjp(lambda w: of(w)(X), W)[1](torch.ones(2)),
    "jit": lambda of: fr.jit(lambda w: of(w)(X))(W),
    "dual": lambda of: _dual(of),
}


def _dual(of):
    with torch.autograd.forward_ad.dual_level():
        w = torch.autograd.forward_ad.make_dual(W, torch.ones(2))
        return tuple(torch.autograd.forward_ad.unpack_dual(of(w)(X)))


@pytest.mark.parametrize("name", TRACED)
def test_transforms_see_through_to_what_is_closed_over(name):
    """A transform of a function that calls a jitted function applies to closed-over tensors as it does to arguments."""
    assert_trees_close(TRACED[name](jitted_of), TRACED[name](lambda w: lambda x: torch.sin(x * w)), rtol=1e-6)


def test_one_jitted_function_inside_and_outside_of_a_transform():
    """One jitted function can be called plainly, then inside a transform over a closed-over tensor, then plainly
    again."""
    held = {"w": W}
    jitted = fr.jit(lambda x: (x * held["w"]).sum())

    def loss(w):
        held["w"] = w
        try:
            return jitted(X)
        finally:
            held["w"] = W

    for _ in range(2):
        assert float(jitted(X)) == 31
        assert_trees_close(torch.func.grad(loss)(W), X)
    assert jitted.num_compiled() == 1


def test_axis_index_inside_jit_inside_shard_map():
    """A jitted function that reads only the axis index, and takes unsharded arguments, is right on every rank."""
    for n in (2, 4):
        got = fr.shard_map(
            lambda: fr.jit(lambda x: x + fr.axis_index("a"))(torch.zeros(1)),
            mesh=fr.Mesh.emulated(a=n), in_specs=(), out_specs=fr.P("a"),
        )()  # fmt: skip
        assert_trees_close(got, torch.arange(float(n)))


# -- written to --------------------------------------------------------------------------------------------------


def _setitem(w, x):
    w[0] = x[0]


def _iadd(w, x):
    w += x


WRITES = {
    "add_": lambda w, x: w.add_(x), "add_ of a number": lambda w, x: w.add_(1), "a view": lambda w, x: w[:1].zero_(),
    "a view of a view": lambda w, x: w.view(1, 2)[0].mul_(2),
    ".data": lambda w, x: w.data.add_(1), "detach": lambda w, x: w.detach().copy_(x), "out=": lambda w,
    x: torch.add(x, 1, out=w),
    "out= of a view": lambda w, x: torch.sin(x, out=w[:]), "setitem": _setitem, "iadd": _iadd, "index_put_": lambda w,
    x: w.index_put_((torch.tensor([0]),), x[:1]),
    "foreach": lambda w, x: torch._foreach_add_([w, w.clone()], 1.0), "split": lambda w, x: w.split(1)[1].zero_(),
    "transposed": lambda w, x: w.view(1, 2).t().zero_(),
    "t_": lambda w, x: w.unsqueeze_(0), "resize_": lambda w, x: w.resize_(2, 1), "set data": lambda w,
    x: setattr(w, "data", x), "requires_grad_": lambda w, x: w.requires_grad_(),
}  # fmt: skip


@pytest.mark.parametrize("donate", [(), ("x",)])
@pytest.mark.parametrize("place", ["closed over", "in a dict", "argument"])
@pytest.mark.parametrize("name", WRITES)
def test_writes_are_refused_and_not_made(name, place, donate):
    """A function that writes to a closed-over tensor or to an argument raises. The write does not happen."""
    w = torch.tensor([5.0, 7.0])
    held = {"w": [w]}
    fn = {
        "closed over": lambda x: (WRITES[name](w, x), x * w)[1],
        "in a dict": lambda x: (WRITES[name](held["w"][0], x), x * w)[1],
        "argument": lambda x: (WRITES[name](x[0], x[1]), x[0] * x[1])[1],
    }[place]
    if place == "argument" and name in ("set data", "requires_grad_", "t_", "resize_"):
        # these programs change the argument's stand-in, not the argument
        return
    given = (w, X.clone()) if place == "argument" else X.clone()
    jitted = fr.jit(fn, donate=donate)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"the function (writes to|changes)"):
            jitted(given)
    assert_trees_close(w, torch.tensor([5.0, 7.0]))
    assert not w.requires_grad and jitted.num_compiled() == 0


def test_backward_inside_is_refused():
    """`.backward()` that would leave gradients in closed-over tensors raises. No gradients remain."""
    w = torch.nn.Parameter(torch.ones(2))

    def fn(x):
        with torch.enable_grad():
            (x * w).sum().backward()
        return x * 2

    with torch.no_grad(), pytest.raises(ValueError, match="leaves a gradient"):
        fr.jit(fn)(X)
    assert w.grad is None


@pytest.mark.parametrize("read", [
    lambda w: w.numpy()[0].item(), lambda w: np.asarray(w)[0].item(), torch.from_dlpack, lambda w: w.data_ptr(),
    lambda w: w.untyped_storage()[0],
])  # fmt: skip
def test_memory_is_not_read_while_a_program_is_staged(read):
    """While a program is staged, a tensor's memory has no values. A read of that memory therefore raises."""
    w = torch.ones(2)
    for f in (lambda x: x * read(w), lambda x: x * read(x), lambda x: x * read(torch.ones(2) * 2)):
        with pytest.raises(TypeError, match="reads a tensor's value on the host"):
            fr.jit(f)(torch.ones(2))
