"""Edge cases of calls of jit: threads, many shapes, pickles, forms of tensors, kinds of functions, and failures."""

import copy
import functools
import pickle
import threading
import warnings

import pytest
import torch
from programs import training_step

import funcrec as fr
from funcrec.testing import assert_trees_close

X = torch.tensor([2.0, 3.0])


def together(*calls):
    """Return the results of the calls. Each call runs in its own thread, and all calls start at one time."""
    barrier, out = threading.Barrier(len(calls)), [None] * len(calls)

    def run(i, call):
        barrier.wait()
        try:
            out[i] = call()
        except BaseException as error:
            out[i] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(calls)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    return out


# -- threads -----------------------------------------------------------------------------------------------------


def test_first_compilations_in_threads():
    """Threads that compile one function and other functions at once get the right values. Each form is compiled once.
    torch can compile afterwards."""
    one, other = fr.jit(lambda x: x.sin() * 2), fr.jit(lambda x: x.cos() + x)
    a, b = torch.ones(3), torch.ones(4)
    got = together(*(lambda: one(a), lambda: one(b)) * 2, *(lambda: other(a),) * 2)
    assert_trees_close(got, [*(a.sin() * 2, b.sin() * 2) * 2, *(a.cos() + a,) * 2], rtol=1e-6)
    assert one.num_compiled() == 2 and other.num_compiled() == 1
    assert_trees_close(torch.compile(lambda x: x.sin() + 1)(X), X.sin() + 1, rtol=1e-6)


def test_threads_with_states_of_their_own(interpreted):
    """Threads that call one donating function, each thread with its own state, get their own sums."""
    step = fr.jit(
        lambda s, x: {"t": s["t"].index_put((torch.tensor([0]),), s["t"][:1] + x), "n": s["n"] + 1}, donate=("s",)
    )

    def drive(x):
        state = {"t": torch.zeros(3), "n": torch.tensor(0)}
        for _ in range(200):
            state = step(state, torch.tensor([x]))
        return state

    got = together(*(functools.partial(drive, float(i)) for i in range(4)))
    assert_trees_close(got, [{"t": torch.tensor([200.0 * i, 0, 0]), "n": torch.tensor(200)} for i in range(4)])


def test_one_state_given_by_two_threads_is_taken_once(interpreted):
    """When two threads donate one value, one call takes the value. The other call raises DonatedError."""
    step = fr.jit(lambda s: s + 1, donate=("s",))
    for _ in range(50):
        state = torch.zeros(2)
        got = together(lambda: step(state), lambda: step(state))  # noqa: B023
        assert sorted(isinstance(x, fr.DonatedError) for x in got) == [False, True]


def test_grad_mode_of_threads(interpreted):
    """Surroundings belong to the calling thread. A thread with autograd and a thread without autograd do not mix."""
    w = torch.ones(2, requires_grad=True)
    f = fr.jit(lambda x: x * w)

    def many(place):
        with place():
            return [f(X).requires_grad for _ in range(50)]

    follows, does_not = together(lambda: many(torch.enable_grad), lambda: many(torch.no_grad))
    assert all(follows) and not any(does_not)


def test_programs_know_who_requires_grad(interpreted):
    """A function may read requires_grad. Without grad mode, too, each value of it has a program of its own."""
    f, w = fr.jit(lambda x: x * 2 if x.requires_grad else x * 3), X.clone().requires_grad_()
    with torch.no_grad():
        assert_trees_close([f(x) for x in (w, X, w, X)], [2 * X, 3 * X, 2 * X, 3 * X])
    assert f.num_compiled() == 2


# -- many forms --------------------------------------------------------------------------------------------------

MANY = {
    "shapes": (lambda f, i: f({"ids": torch.ones(i + 1)}, 1.0),
        r"`x\['ids'\]`: f32\[9\], then f32\[10\](.|\n)*pad_to_bucket"),
    "numbers": (lambda f, i: f({"ids": X}, i / 8), r"`lr`: float 1.0, then float 1.125(.|\n)*pass it as a tensor"),
    "structures": (lambda f, i: f({"ids": X, str(i): X}, 1.0), r"another structure(.|\n)*the same keys"),
    "surroundings": (lambda f, i: _in_mesh(f, i), r"the mesh of `with mesh:`: (.|\n)*one and the same surroundings"),
}  # fmt: skip


def _in_mesh(f, i):
    with fr.Mesh.emulated(a=i + 1):
        return f({"ids": X}, 1.0)


@pytest.mark.parametrize("name", MANY)
def test_many_compilations_are_told_once(name, interpreted):
    """At the tenth compilation, one warning at the caller's line says what differed and what to do."""
    call, text = MANY[name]
    f = fr.jit(lambda x, lr: x["ids"] * lr)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for i in range(9):
            call(f, i)
        assert not told
        for i in range(9, 15):
            call(f, i)
    assert len(told) == 1 and told[0].filename == __file__
    with pytest.warns(UserWarning, match=text):
        warnings.warn(told[0].message, stacklevel=1)


def test_compilations_are_bounded(interpreted, monkeypatch):
    """The least used compilations are dropped, and made again on demand. num_compiled counts all compilations."""
    monkeypatch.setattr("funcrec.compile._jit.MOST", 4)
    f = fr.jit(lambda x, n: x * n)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for n in range(20):
            assert_trees_close(f(X, n), X * n)
            assert_trees_close(f(X, 0), X * 0)
    assert len(f.compiled) == 4 and len(f.seen) == 1 and f.num_compiled() == 20
    f(X, 1)
    assert f.num_compiled() == 21


# -- pickles -----------------------------------------------------------------------------------------------------


def test_jitted_functions_pickle(interpreted):
    """A jitted function, made by a call or by a decorator, pickles as its function and options. A copy compiles
    separately."""
    step = fr.jit(training_step.add, donate=("state",))
    step(X.clone(), X)
    for again in (pickle.loads(pickle.dumps(step)), copy.deepcopy(step)):
        assert again.num_compiled() == 0
        given = X.clone()
        assert_trees_close(again(given, X), X * 2)
        with pytest.raises(fr.DonatedError):
            given + 1
    assert pickle.loads(pickle.dumps(training_step.decorated)) is training_step.decorated
    assert_trees_close(training_step.decorated(X), X * 3)
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(fr.jit(lambda x: x))


def test_steps_pickle():
    """A TrainStep and its jitted form pickle, on one process and on a mesh. The loaded step gives the same bits."""
    for step in (training_step.plain(), training_step.on_mesh()):
        again = pickle.loads(pickle.dumps(step))
        state, ids = training_step.state_of(step), training_step.IDS
        assert_trees_close(training_step.state_of(again), state)
        assert_trees_close(again(state, ids), step(state, ids))
        assert pickle.loads(pickle.dumps(fr.jit(step, donate=("state",)))).donate == ("state",)
    local = fr.train_step(
        lambda p, b: p.dense.sum(), sparse=fr.optim.sgd(), dense=fr.optim.dense(torch.optim.SGD, lr=0.1)
    )
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(local)


# -- torch.compile -----------------------------------------------------------------------------------------------


def test_torch_compile_sees_through():
    """torch.compile of a step, or of a function that calls a jitted function, compiles the plain function and gives its
    values. This holds with and without donation."""
    step = training_step.plain()
    state, ids = training_step.state_of(step), training_step.IDS
    (new, metrics), (got, told) = step(state, ids), torch.compile(step, backend="aot_eager")(state, ids)
    assert_trees_close((got.dense, got.tables, told), (new.dense, new.tables, metrics), rtol=1e-5, atol=1e-6)
    inner = fr.jit(lambda s, x: s * x, donate=("s",))
    assert_trees_close(torch.compile(fr.jit(lambda s: inner(s, X) + 1), fullgraph=True)(X), X * X + 1)


# -- kinds of functions ------------------------------------------------------------------------------------------


class Scaled:
    def __init__(self):
        self.w = torch.tensor(2.0)

    def times(self, x, /, y=1.0, *more, scale=1, **named):
        return x * self.w * y * scale + sum(more) + sum(named.values())

    __call__ = times

    @classmethod
    def of_class(cls, x):
        return x + 1

    @staticmethod
    def alone(x):
        return x + 2


one, two = Scaled(), functools.partial(Scaled().times, scale=3)
KINDS = {
    "bound method": (one.times, [((X,), {}), ((X, 2.0), {}), ((X, 2.0, X, X), {"scale": 2, "z": X}), ((X,), {"y": X})]),
    "callable object": (one, [((X,), {}), ((X,), {"scale": 2})]), "partial": (two, [((X,), {}), ((X,), {"y": X})]),
    "class method": (Scaled.of_class, [((X,), {})]), "static method": (Scaled.alone, [((X,), {})]),
    "builtin": (torch.add, [((X, X), {}), ((X, 2), {"alpha": 3})]),
    "module": (torch.nn.Linear(2, 1).requires_grad_(False), [((X,), {})]), "jitted": (fr.jit(one.times), [((X,), {})]),
    "no tensor": (lambda n: n + 1, [((3,), {})]),
    "nothing": (lambda: None, [((), {})]), "a constant": (lambda: torch.arange(3), [((), {})]),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_functions(name, interpreted):
    """Jitted methods, partials, callable objects, modules and builtins give the plain call's results, with
    positional, default and keyword arguments."""
    fn, calls = KINDS[name]
    jitted = fr.jit(fn)
    for args, kwargs in calls * 2:
        assert_trees_close(jitted(*args, **kwargs), fn(*args, **kwargs))
    assert jitted.num_compiled() == len(calls)


async def later(x):
    return x


def each(x):
    yield x


REFUSED = {
    "coroutine": (lambda: fr.jit(later), "`fn` is a coroutine"),
    "generator": (lambda: fr.jit(each), "`fn` is a generator"),
    "no function": (lambda: fr.jit(torch.ones(2)), "`fn` is not a function"),
    "a result that is a generator": (lambda: fr.jit(lambda x: (v for v in x))(X), "neither a tensor"),
    "self": (lambda: _method(), "neither a tensor"),
}  # fmt: skip


def _method():
    class Model:
        w = 1
        forward = fr.jit(lambda self, x: x * self.w)

        def __init__(self):
            self.w = 2

    Model().forward(X)


@pytest.mark.parametrize("name", REFUSED)
def test_functions_that_cannot_be_staged(name, interpreted):
    """Coroutines, generators, and methods of objects that can change raise. The error names the kind of function."""
    call, text = REFUSED[name]
    with pytest.raises(TypeError, match=text):
        call()


# -- errors during staging ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["plain", "vmap", "grad", "no_grad", "autocast"])
def test_a_failure_in_staging_leaves_no_trace(kind, place, interpreted):
    """After an exception during the staging of a function, torch's state is as before, and the next call is right."""
    fails = True

    def stop(x):
        if fails:
            raise kind("stop")
        return x * 2

    def fn(x):
        if place == "vmap":
            return torch.func.vmap(stop)(x)
        if place == "grad":
            return torch.func.grad(lambda y: stop(y).sum())(x)
        with (
            torch.no_grad()
            if place == "no_grad"
            else torch.autocast("cpu")
            if place == "autocast"
            else warnings.catch_warnings()
        ):
            return stop(x)

    state = lambda: (
        torch.is_grad_enabled(), torch._C._functorch.peek_interpreter_stack(), torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
        torch.is_autocast_enabled("cpu"), torch.autograd.forward_ad._current_level,
    )  # fmt: skip
    before, jitted, given = state(), fr.jit(fn, donate=("x",)), X.clone()
    for _ in range(2):
        with pytest.raises(kind, match="stop"):
            jitted(given)
        assert state() == before
    fails = False
    need = fn(given)
    assert_trees_close(jitted(given), need)
