"""cond, while_loop, fori_loop and scan's body as a part of a program: Python's own `if` and `while` are the oracles."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from programs.as_staged import staged_only
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import funcrec as fr
from funcrec.testing import assert_trees_close

grad, jvp, vmap = torch.func.grad, torch.func.jvp, torch.func.vmap
X = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)


def branches(x):
    return fr.cond(x.sum() > 0, lambda x: (x.sin() * x).sum(), lambda x: x.cos().sum(), x)


def branch_of_python(x):
    return (x.sin() * x).sum() if bool(x.detach().sum() > 0) else x.cos().sum()


def loop(x):
    """Return the sum of x grown until its norm is large, with the number of steps as a factor."""
    steps, x = fr.while_loop(lambda c: c[1].abs().sum() < 30, lambda c: (c[0] + 1, c[1] * 1.5 + 0.1), (0, x))
    return x.square().sum() * steps


def loop_of_python(x):
    steps = 0
    while bool(x.detach().abs().sum() < 30):
        steps, x = steps + 1, x * 1.5 + 0.1
    return x.square().sum() * steps


TRANSFORMS = {
    "value": lambda f: f,
    "grad": grad,
    "grad of grad": lambda f: grad(lambda x: grad(f)(x).square().sum()),
    "jvp": lambda f: lambda x: jvp(f, (x,), (x + 1,))[1],
    "jvp of jvp": lambda f: lambda x: jvp(lambda z: jvp(f, (z,), (z * z,))[1], (x,), (x + 1,))[1],
    "jacfwd of jacrev": lambda f: torch.func.jacfwd(torch.func.jacrev(f)),
    "jacrev of jacfwd": lambda f: torch.func.jacrev(torch.func.jacfwd(f)),
    "autograd": lambda f: lambda x: torch.autograd.grad(f(z := x.clone().requires_grad_()), z)[0],
}
FORWARD = ("value", "jvp", "jvp of jvp")
CASES = [("cond", branches, branch_of_python, TRANSFORMS), ("while_loop", loop, loop_of_python, TRANSFORMS)]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("name, f, need", [c[:3] for c in CASES], ids=[c[0] for c in CASES])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_eager(name, f, need, transform, sign):
    """Every derivative is that of the branch, or of the steps, that Python would run."""
    own = TRANSFORMS[transform]
    torch.testing.assert_close(own(f)(sign * X), own(need)(sign * X), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name, f, need", [c[:3] for c in CASES], ids=[c[0] for c in CASES])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_staged(name, f, need, transform):
    """Inside a jitted function the values decide when the program runs: one program serves both branches, and any
    number of steps. A loop's reverse derivative raises there; outside of `jit` it holds."""
    own = TRANSFORMS[transform]
    with staged_only():
        inside = fr.jit(own(f))
        if name == "while_loop" and transform not in FORWARD:
            with pytest.raises(TypeError, match="a loop in a program has no reverse derivative"):
                inside(X)
        else:
            for x in (X, -X, 3 * X):
                torch.testing.assert_close(inside(x), own(need)(x), rtol=1e-10, atol=1e-12)
            assert inside.num_compiled() == 1
        if transform != "autograd":
            torch.testing.assert_close(own(fr.jit(f))(-X), own(need)(-X), rtol=1e-10, atol=1e-12)


@settings(max_examples=2)
@example(rows=[0.5, -1.0, 2.0, -0.02])
@given(rows=st.lists(st.floats(-2, 2).filter(lambda x: abs(x) > 0.01), min_size=1, max_size=4))
def test_members(rows):
    """Under vmap each member takes its own branch, and runs until it is done, as it would alone."""
    xs = torch.tensor(rows, dtype=torch.float64)[:, None] * X
    with staged_only():
        for f, need in ((branches, branch_of_python), (loop, loop_of_python)):
            for own in (lambda f: f, TRANSFORMS["jvp"]):
                want = torch.stack([own(need)(x) for x in xs])
                torch.testing.assert_close(vmap(own(f))(xs), want, rtol=1e-10, atol=1e-12)
                torch.testing.assert_close(fr.jit(vmap(own(f)))(xs), want, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(vmap(grad(f))(xs), torch.stack([grad(need)(x) for x in xs]))


@pytest.mark.parametrize("pred", [True, False])
def test_one_predicate_for_all_members(pred):
    """A predicate that vmap does not map chooses one branch, for values and gradients, by rows and by the whole."""
    f = lambda p, x: fr.cond(p, torch.sin, torch.cos, x)
    xs, p = torch.stack([X, 2 * X]), torch.tensor(pred)
    value, slope = (xs.sin(), xs.cos()) if pred else (xs.cos(), -xs.sin())
    with staged_only():
        for wrap in (lambda f: f, fr.jit):
            torch.testing.assert_close(wrap(vmap(f, in_dims=(None, 0)))(p, xs), value)
            by_row = vmap(grad(lambda p, x: f(p, x).sum(), argnums=1), in_dims=(None, 0))
            torch.testing.assert_close(wrap(by_row)(p, xs), slope)
            whole = grad(lambda xs: vmap(f, in_dims=(None, 0))(p, xs).sum())
            torch.testing.assert_close(wrap(whole)(xs), slope)
            nested = vmap(vmap(f, in_dims=(None, 0)), in_dims=(0, 0))
            both = torch.tensor([pred, not pred])
            other = xs.cos() if pred else xs.sin()
            torch.testing.assert_close(wrap(nested)(both, torch.stack([xs, xs])), torch.stack([value, other]))


def test_a_branch_that_does_not_run_makes_no_nan():
    """A derivative that is not finite in the other branch does not reach the result, staged or not."""
    f = lambda x: fr.cond(x.sum() > 0, lambda x: x.sqrt().sum(), lambda x: (x * 2).sum(), x)
    with staged_only():
        for own in (grad(f), fr.jit(grad(f))):
            assert own(torch.zeros(2)).tolist() == [2, 2]


def test_closures_and_trees():
    """Branches and bodies close over tensors, at any depth, and take and return trees with numbers and strings. A
    program reads what it closes over at each call."""
    held = torch.ones(3, dtype=torch.float64)

    def f(p, x):
        y = x.exp()
        one, two = lambda t: {"y": t["x"] * y + held, "n": 1, "s": "a"}, lambda t: {"y": y, "n": 2, "s": "a"}
        out = fr.cond(p, one, two, {"x": x, "k": 3})
        nested = fr.while_loop(lambda c: c.sum() < 50, lambda c: fr.cond(p, lambda: c * 2 + held, lambda: c + y), x)
        return out, nested

    with staged_only():
        fast = fr.jit(f)
        for p in (True, False, True):
            assert_trees_close(fast(torch.tensor(p), X), f(torch.tensor(p), X))
        held.mul_(2)
        assert_trees_close(fast(torch.tensor(True), X), f(torch.tensor(True), X))


def test_results_have_their_own_memory():
    """A branch may return its argument: the result shares no memory with it, whatever its strides."""
    x = torch.arange(6.0).view(2, 3)
    with staged_only():
        f = fr.jit(lambda p, x: fr.cond(p, lambda x: (x, x), lambda x: (x.t().reshape(2, 3), x + 1), x))
        one, two = f(torch.tensor(True), x)
        one.add_(1)
        assert torch.equal(two, torch.arange(6.0).view(2, 3)) and torch.equal(x, two)
        g = fr.jit(lambda x: fr.while_loop(lambda c: c.sum() < 100, lambda c: (c + 1).t().contiguous().t(), x))
        assert torch.equal(g(x), fr.while_loop(lambda c: c.sum() < 100, lambda c: c + 1, x)) and x.sum() == 15


def test_fori_loop():
    """Bounds may be ints or tensors, and an empty range returns the first carry. With ints, reverse mode holds in a
    program."""
    f = lambda a, b, x: fr.fori_loop(a, b, lambda i, c: c * i.sin() + x, x)
    with staged_only():
        for a, b in ((0, 4), (2, 5), (3, 3), (4, 1)):
            need = X
            for i in range(a, b):
                need = need * torch.tensor(i).sin() + X
            torch.testing.assert_close(f(a, b, X), need)
            torch.testing.assert_close(fr.jit(f)(torch.tensor(a), torch.tensor(b), X), need)
        slope = grad(lambda x: f(0, 4, x).sum())
        torch.testing.assert_close(fr.jit(slope)(X), slope(X))


def test_bools_of_python():
    """A loop also ends by a bool of Python, such as one that counts steps outside of the carry."""
    left = iter([True, True, False])
    assert fr.while_loop(lambda c: next(left), lambda c: c + 1, 0) == 2


def test_torch_compile():
    """torch.compile makes branches and loops parts of one graph, with the values of Python's own."""
    count = lambda n, x: fr.fori_loop(0, n, lambda i, c: c * i.sin() + x, x.clone())
    for f, *args in ((branches, X), (branches, -X), (loop, X), (count, torch.tensor(3), X)):
        torch.testing.assert_close(torch.compile(f, fullgraph=True, backend="eager")(*args), f(*args))


def test_loops_and_branches_of_constants():
    """A carry, a predicate and arguments that are numbers, or constants of the jitted function, are inputs as others
    are: a program of them is staged, and not run while it is staged."""
    step = lambda c, _: (c + 1, c)
    with staged_only():
        for zero in (lambda x: 0, lambda x: torch.tensor(0), lambda x: x.new_tensor(0)):
            loop = lambda x: fr.while_loop(lambda c: c < 5, lambda c: c + 1, zero(x))  # noqa: B023
            assert fr.jit(loop)(X) == 5
            scanned = fr.jit(lambda x: fr.scan(step, zero(x), length=3, unroll=False))(X)  # noqa: B023
            assert scanned[0] == 3 and scanned[1].tolist() == [0, 1, 2]
        assert fr.jit(lambda x: fr.cond(torch.tensor(True), lambda a: a + 1, lambda a: a, 1))(X) == 2


def test_shapes_and_other_tracers():
    """eval_shape gives forms. torch's tracers stage both branches, or refuse a loop. Other modes of torch see Python's
    own loop."""
    assert fr.eval_shape(branches, X).shape == () and fr.eval_shape(loop, X).dtype == torch.float64
    torch.testing.assert_close(make_fx(branches, tracing_mode="fake")(X)(-X), branches(-X))
    with FlopCounterMode(display=False):
        torch.testing.assert_close(loop(X), loop_of_python(X))

    class Net(torch.nn.Module):
        def __init__(self, f):
            super().__init__()
            self.f = f

        def forward(self, x):
            return self.f(x)

    torch.testing.assert_close(torch.export.export(Net(branches), (X,), strict=False).module()(-X), branches(-X))
    with pytest.raises(TypeError, match="an exported program does not hold a loop"):
        torch.export.export(Net(loop), (X,), strict=False)


def test_ranks():
    """Emulated ranks take their own branches. A loop with exchanges runs as often as its common predicate says."""
    mesh = fr.Mesh.emulated(d=2)
    mapped = lambda f: fr.shard_map(f, mesh=mesh, in_specs=fr.P("d"), out_specs=fr.P("d"))
    x = torch.tensor([1.0, -2.0])
    f = mapped(lambda x: fr.cond(x.sum() > 0, torch.sin, torch.cos, x))
    need = torch.stack([x[0].sin(), x[1].cos()])
    with staged_only():
        torch.testing.assert_close(f(x), need)
        torch.testing.assert_close(fr.jit(f)(x), need)
    grown = mapped(lambda x: fr.while_loop(lambda c: fr.psum(c, "d").sum() < 9, lambda c: c + fr.pmean(c, "d"), x))
    torch.testing.assert_close(grown(torch.tensor([1.0, 2.0])), torch.tensor([5.5, 6.5]))


def test_lookups():
    """A loop's body looks up rows. A loss chooses by a value between functions of looked up rows."""
    item, clicked = fr.TableConfig("item", 11, 3), fr.FeatureConfig("clicked", table="item")
    ids = fr.KeyedJaggedTensor.from_lists({"clicked": [[1, 2], [3]]})
    params = fr.Params(fr.init(fr.key(0), [item]), torch.tensor(2.0))
    read = lambda tables: fr.lookup(tables, ids, [clicked])["clicked"]
    body = lambda t: fr.while_loop(lambda c: c < 50, lambda c: c + read(t).square().sum() + 1, torch.tensor(0.0))
    chosen = lambda p: fr.cond(p.dense > 1, lambda a, d: a.square().sum() * d, lambda a, d: a.sum() * d, read(p.tables),
        p.dense)  # fmt: skip
    with staged_only():
        torch.testing.assert_close(fr.jit(body)(params.tables), body(params.tables))
        got = fr.jit(fr.value_and_grad(chosen))(params)
    need = fr.value_and_grad(lambda p: read(p.tables).square().sum() * p.dense)(params)
    assert_trees_close(got[1].tables["item"].to_dense(), need[1].tables["item"].to_dense())
    assert_trees_close(got[1].dense, need[1].dense)


def while_of(body, x=X, test=lambda c: c.sum() < 50):
    return lambda: fr.jit(lambda x: fr.while_loop(test, body, x))(x)


HELD = torch.ones(3, dtype=torch.float64), torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
REFUSED = {
    "pred of a float": (lambda: fr.cond(torch.tensor(1.0), abs, abs, 1), TypeError, "`pred` is not one bool"),
    "pred of two": (lambda: fr.cond(X > 0, torch.sin, torch.cos, X), TypeError, "`pred` is not one bool"),
    "test of a number": (lambda: fr.while_loop(lambda c: 1, abs, X), TypeError, "`cond_fn\\(carry\\)` is not one bool"),
    "body of a dtype": (while_of(lambda c: c.float()), TypeError, "another dtype than the carry"),
    "body of a shape": (lambda: fr.while_loop(lambda c: c.sum() < 9, lambda c: c[:2], X), ValueError, "another shape"),
    "body of a tree": (lambda: fr.while_loop(lambda c: c.sum() < 9, lambda c: (c,), X), TypeError, "another structure"),
    "branches of dtypes": (
        lambda: fr.jit(lambda x: fr.cond(x.sum() > 0, lambda x: x.float(), lambda x: x, x))(X), TypeError,
        "one result has another dtype than the other"),
    "branches of shapes": (
        lambda: vmap(lambda x: fr.cond(x > 0, lambda x: x[None], lambda x: x, x))(X), ValueError,
        "one result.* has another shape than the other"),
    "a draw": (while_of(lambda c: c + torch.rand(3)), TypeError, "draws from torch's generator"),
    "a write": (while_of(lambda c: c.add_(1)), ValueError, "writes to a tensor that it was given"),
    "a read": (while_of(lambda c: c + c.sum().item()), TypeError, "reads a tensor's value on the host"),
    "a closure under grad": (
        lambda: fr.jit(grad(lambda x: fr.cond(x.sum() > 0, lambda: x.sin(), lambda: x).sum()))(X), TypeError,
        "`true_fn` closes over a tensor that a transform maps or differentiates"),
    "a closure under vmap": (
        lambda: fr.jit(vmap(lambda x: fr.while_loop(lambda c: c < x, lambda c: c + 1, 0.0)))(X), TypeError,
        "`cond_fn` closes over a tensor that a transform maps or differentiates"),
    "a body of fori_loop": (
        lambda: fr.fori_loop(0, torch.tensor(3), lambda i, c: {"a": c["a"] * 0.5}, {"a": torch.tensor(1)}), TypeError,
        r"funcrec.fori_loop: body_fn\(carry\)\['a'\] has another dtype than the carry\['a'\]"),
    "branches of other texts": (
        lambda: vmap(lambda x: fr.cond(x > 0, lambda: (x, "a"), lambda: (x, "b"))[0])(X), TypeError,
        r"one result\[1\] is not the other\[1\]"),
    "a closure that requires grad": (
        lambda: fr.jit(lambda x: fr.cond(x.sum() > 0, lambda x: x + HELD[0] + HELD[1], torch.cos, x))(X), TypeError,
        r"closes over a tensor that requires grad.\n  got   f64\[2, 3\]"),
    "a closure that is gone": (
        lambda: fr.jit(lambda x: (lambda own: fr.cond(x.sum() > 0, lambda: own.pop() + 1, lambda: x))([x * 2]))(X),
        TypeError, "the function reads a tensor that is gone"),
    "a large bound": (lambda: fr.fori_loop(0, 2**64, lambda i, c: c, X), ValueError, "`upper` is out of range"),
    "a bound of a float": (lambda: fr.fori_loop(0, 1.5, abs, X), TypeError, "`upper` is not an integer"),
}  # fmt: skip


@pytest.mark.parametrize("call, kind, words", REFUSED.values(), ids=REFUSED)
def test_refused(call, kind, words):
    """What cannot be done raises, and says what to do."""
    with staged_only(), pytest.raises(kind, match=words):
        call()


def test_compiled():
    """Compiled by Inductor, a branch within a loop gives the eager values for any number of steps."""
    body = lambda c: fr.cond(c.sum() > 10, lambda c: c * 1.1 + 1, lambda c: c * c + 1, c)
    f = lambda x: fr.while_loop(lambda c: c.sum() < 50, body, x)
    fast = fr.jit(f)
    for x in (X, X * 3, X + 100):
        torch.testing.assert_close(fast(x), f(x))
    assert fast.num_compiled() == 1
