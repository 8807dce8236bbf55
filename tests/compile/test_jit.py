"""jit gives the values of the plain function, compiles once, reuses donated memory and never reads it again."""

import copy
import dataclasses
import logging

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import funcrec as fr
from funcrec.testing import assert_trees_close

ONE = torch.tensor([1])


def state(n: int = 4) -> dict:
    return {"w": torch.arange(float(n)), "t": torch.zeros(n)}


def queue(x):
    out = x.clone()
    out[1:].copy_(x[:-1])
    return out


def late(s):
    values = s["t"][:1] + 3
    out = {"w": s["w"].index_put((ONE,), values), "t": s["t"]}
    return out, values.mul_(2)


PURE = {
    "arithmetic": lambda s: {"w": s["w"] + 1, "t": s["t"] + s["w"]},
    "swap": lambda s: {"w": s["t"], "t": s["w"]},
    "swap of copies": lambda s: {"w": s["t"].clone(), "t": s["w"].clone()},
    "copy kept beside the update": lambda s: {"w": s["w"] + 1, "t": s["w"].clone()},
    "alias kept beside the update": lambda s: {"w": s["w"] + 1, "t": s["w"].detach()},
    "the same leaf twice": lambda s: {"w": s["w"], "t": s["w"]},
    "powers that do nothing": lambda s: {"w": s["t"].pow(1), "t": s["w"].pow(1)},
    "rows written": lambda s: {
        "w": s["w"].index_put((ONE,), s["t"][:1] + 9),
        "t": s["t"].index_put((ONE,), s["w"][2:3]),
    },
    "rows written crosswise": lambda s: {
        "w": s["t"].index_put((ONE,), s["w"][1:2] + 1),
        "t": s["w"].index_put((ONE,), s["t"][1:2] + 2),
    },
    "two updates of one leaf": lambda s: {
        "w": s["w"].index_put((ONE,), s["t"][:1]),
        "t": s["w"].index_put((ONE,), s["t"][2:3]),
    },
    "reversed": lambda s: {"w": s["w"].flip(0), "t": s["t"] + s["w"].flip(0)},
    "views beside the update": lambda s: ({"w": s["w"] + 1, "t": s["t"]}, s["w"][1:], s["w"].view(2, 2)),
    "old row returned": lambda s: ({"w": s["w"].index_put((ONE,), s["w"][:1] + 9), "t": s["t"]}, s["w"][ONE]),
    "untouched": lambda s: s,
    "rows moved after a write": lambda s: {"w": s["w"].index_put((ONE,), s["t"][:1] + 9).roll(1), "t": s["t"].flip(0)},
    "mean taken off after a write": lambda s: {
        "w": (p := s["w"].index_put((ONE,), s["t"][:1])) - p.mean(),
        "t": s["t"],
    },
    "shifted": lambda s: {"w": torch.slice_scatter(s["w"], s["w"][:-1], 0, 1, 4), "t": s["t"]},
    "rows shifted": lambda s: {"w": s["w"].index_put((torch.arange(1, 4),), s["w"][:-1]), "t": s["t"]},
    "a queue": lambda s: {"w": queue(s["w"]), "t": s["t"]},
    "successor twice": lambda s: ({"w": (p := s["w"].index_put((ONE,), s["t"][:1])), "t": p.clone()}, [p]),
    "values changed later": lambda s: late(s),
}


def assert_pure(fn, make):
    """Check jit(f, donate=...)(s) == jit(f)(s) == f(s)."""
    expected = copy.deepcopy(fn(make()))
    given = make()
    assert_trees_close(fr.jit(fn)(given), expected)
    assert_trees_close(given, make())
    assert_trees_close(fr.jit(fn, donate=("s",))(given), expected)


@pytest.mark.parametrize("fn", PURE.values(), ids=PURE.keys())
def test_donated_equals_undonated_equals_eager(fn, interpreted):
    """jit(f, donate=...)(s) == jit(f)(s) == f(s), however outputs and donated leaves share memory, for staged
    graphs."""
    assert_pure(fn, state)


def test_compiled_donated_equals_undonated_equals_eager():
    """The law above for compiled code, of all functions in one program."""
    assert_pure(lambda s: {n: fn(s[n]) for n, fn in PURE.items()}, lambda: {n: state() for n in PURE})


def test_leaves_that_change_places_are_updated_in_place():
    """An updated leaf takes the memory of the old leaf, whatever the order of arguments and outputs."""
    fn = lambda a, b: (b.index_put((ONE,), a[:1] + 1), a.index_put((ONE,), b[:1] + 2))
    a, b = torch.arange(4.0), torch.arange(4.0) * 10
    at, expected = (b.data_ptr(), a.data_ptr()), fn(a.clone(), b.clone())
    got = fr.jit(fn, donate=("a", "b"))(a, b)
    assert_trees_close(got, expected)
    assert tuple(x.data_ptr() for x in got) == at


def test_what_a_donated_call_returns_shares_nothing():
    """A batch that becomes state is copied, and so are outputs that view each other. The next call therefore takes no
    memory that other tensors hold."""
    step = fr.jit(lambda s, x: ({"w": x, "t": s["w"] + 1}, s["w"].view(2, 2)), donate=("s",))
    batch = torch.ones(4)
    given, aux = step(state(), batch)
    given, _ = step(given, batch)
    assert_trees_close(batch, torch.ones(4))
    assert_trees_close(aux, torch.arange(4.0).view(2, 2))
    assert_trees_close(given, {"w": torch.ones(4), "t": torch.full((4,), 2.0)})


def test_constants_are_never_donated():
    """A tensor that the function closes over and returns is copied. Later calls write to the copy."""
    constant = torch.ones(4)
    fn = lambda s: {"w": constant, "t": s["w"].index_put((ONE,), s["t"][:1] + 7)}
    step, given, expected = fr.jit(fn, donate=("s",)), state(), state()
    for _ in range(3):
        given, expected = step(given), fn(expected)
        assert_trees_close(given, expected)
    assert_trees_close(constant, torch.ones(4))


def test_casts_round_as_in_eager_mode():
    """A cast to bf16 inside a compiled function rounds as in eager mode."""
    fn = lambda x: (x * 1.1).bfloat16().float() * 3
    x = torch.linspace(-1, 1, 999)
    assert_trees_close(fr.jit(fn)(x), fn(x))


def test_an_error_of_compiled_code_is_its_own():
    """An error in compiled code is raised unchanged. The error is not its own cause."""
    with pytest.raises(IndexError, match="out of bounds") as raised:
        fr.jit(lambda x, at: x[at] * 2)(torch.ones(3), torch.tensor([7]))
    assert raised.value.__cause__ is None


def test_shapes_that_do_not_fit_raise_and_nothing_is_logged():
    """Shapes that do not fit raise an error with torch's words. For this call only, torch's long message before the
    error is left out."""
    log, seen = logging.getLogger("torch._subclasses.fake_tensor"), []
    handler = logging.Handler()
    handler.emit = seen.append
    log.addHandler(handler)
    try:
        with pytest.raises(RuntimeError, match=r"same reduction dim, but got \[2, 3\] X \[4, 5\]"):
            fr.jit(lambda a, b: a @ b)(torch.ones(2, 3), torch.ones(4, 5))
        assert not seen
        with FakeTensorMode(), pytest.raises(RuntimeError):
            torch.ones(2, 3) @ torch.ones(4, 5)
        assert len(seen) == 1
    finally:
        log.removeHandler(handler)


def test_a_torch_that_compiles_wrong_code_is_refused(monkeypatch):
    """A call raises for a torch version that is known to compile wrong code for CPUs. The tests below fail with torch
    2.11."""
    monkeypatch.setattr(torch, "__version__", "2.12.1+cpu")
    with pytest.raises(RuntimeError, match=r"to be wrong.\n *got +torch 2.12.1\+cpu\n *need +torch 2.13 or"):
        fr.jit(lambda x: x.sin() * 17 + 3)(torch.ones(5))


WRITES = {
    "index_put": lambda x, at, rows: x.index_put((at,), rows, accumulate=True),
    "index_add": lambda x, at, rows: x.index_add(0, at, rows),
    "scatter_add": lambda x, at, rows: x.scatter_add(0, at[:, None].expand(rows.shape), rows),
    "scatter_reduce": lambda x, at, rows: x.scatter_reduce(0, at[:, None].expand(rows.shape), rows, "amax"),
}


def test_written_rows_are_read_after_the_write():
    """Scattered rows are read after the write, even by a loop that code of another shape shares."""

    def fn(write, x, wide, at, rows):
        y = x.cos()
        return wide[:, :3] * y, write(x.new_zeros(7, 3), at, rows)[:6] * y

    x, rows, wide = (torch.linspace(-1, 2, a * b).reshape(a, b) for a, b in ((6, 3), (12, 3), (6, 5)))
    given = {n: [v.clone() for v in (x, wide, torch.arange(12) * 5 % 7, rows)] for n in WRITES}
    each = lambda given: {n: fn(WRITES[n], *xs) for n, xs in given.items()}  # no two share an input or a loop
    assert_trees_close(fr.jit(each)(given), each(given), rtol=1e-6, atol=1e-6)


def test_parts_of_a_cat_outlive_a_write_to_it():
    """A write to the result of cat does not change the parts of the cat, even though they may share its memory."""

    def fn(x, wide, at):
        part = wide[:, 1:4].index_add(0, at[:6] % 6, wide[:, :3])
        put = torch.cat([wide[:, :3], part]).index_put((at,), torch.cat([part, wide[:, :3]]), accumulate=True)
        return torch.cat([put[5:11], part.index_put((at[:3] % 6,), x[:3])])

    x, wide = (torch.linspace(-1, 2, 6 * n).sin().reshape(6, n) for n in (3, 5))
    at = torch.arange(12) * 5 % 12
    assert_trees_close(fr.jit(fn)(x, wide, at), fn(x, wide, at), rtol=1e-6, atol=1e-6)


def test_one_tensor_in_two_places_is_two_arguments():
    """A first call with one tensor in two arguments does not tie the two arguments together for later calls."""
    subtract = fr.jit(lambda a, b: a - 2 * b)
    x, y = torch.tensor(1.0), torch.tensor(5.0)
    assert float(subtract(x, x)) == -1
    assert float(subtract(x, y)) == -9


def test_donated_counters_count():
    """A donated counter of any dtype counts every call, even when other leaves are computed from the counter."""
    of_one = lambda s: {"t": s["t"] + 1, "w": s["w"] + (s["t"].sum() + 1).float()}
    step = fr.jit(lambda s: {n: of_one(own) for n, own in s.items()}, donate=("s",))
    dtypes = (torch.float64, torch.float32, torch.int64, torch.int32)
    counters = {f"{d} {shape}": torch.zeros(shape, dtype=d) for d in dtypes for shape in ((), (1,), (3,))}
    given = {n: {"t": t.clone(), "w": torch.zeros(5)} for n, t in counters.items()}
    for _ in range(3):
        given = step(given)
    for n, t in counters.items():
        assert_trees_close(given[n]["t"], t + 3)
        assert_trees_close(given[n]["w"], torch.full((5,), 3.0 + 3 * t.numel()))


def test_rows_of_donated_leaves_are_written_in_place():
    """A donated leaf whose rows are replaced, even through views, stays at its address. So does a leaf that is returned
    unchanged."""
    step = fr.jit(
        lambda s, x: {
            "w": s["w"].index_put((ONE,), x[None]).index_put((ONE + 1,), x[None], accumulate=True),
            "t": s["t"][:, None].index_put((ONE,), s["t"][:1, None] + x).reshape(4),
            "same": s["same"],
        },
        donate=("s",),
    )
    given = {**state(), "same": torch.ones(3)}
    at = {k: v.data_ptr() for k, v in given.items()}
    for _ in range(3):
        given = step(given, torch.tensor(2.0))
        assert {k: v.data_ptr() for k, v in given.items()} == at


def test_second_call_compiles_nothing(interpreted):
    """The same shapes are compiled once: positional, by keyword, donated or not, with fresh or returned values."""
    for donate in ((), ("s",)):
        step = fr.jit(lambda s, x, scale=2.0: {"w": s["w"] + x * scale, "t": s["t"]}, donate=donate)
        given = step(state(), torch.ones(4))
        given = step(given, torch.ones(4))
        given = step(s=given, x=torch.ones(4))
        assert step.num_compiled() == 1
        step(given, torch.ones(4), 3.0)
        assert step.num_compiled() == 2, "a Python number is static"
        assert_trees_close(step(state(), torch.ones(4)), {"w": torch.arange(4.0) + 2, "t": torch.zeros(4)})


def test_new_shapes_compile_anew(interpreted):
    """Each shape has its own code. A large number of shapes raises no error."""
    double = fr.jit(lambda x: x * 2)
    for n in range(1, 13):
        assert_trees_close(double(torch.ones(n)), torch.full((n,), 2.0))
    assert double.num_compiled() == 12


def test_use_after_donation_names_argument_and_call():
    """For every use of a donated argument, DonatedError names the argument and the call that took the argument."""
    step = fr.jit(lambda state: {"w": state["w"] + 1}, donate=("state",))
    first = {"w": torch.zeros(3)}
    second = step(first)
    third = step(second)
    for gone, call in ((first, 1), (second, 2)):
        for use in (
            lambda x: x["w"] + 1,
            lambda x: x["w"].shape,
            lambda x: torch.cat([torch.zeros(1), x["w"]]),
            lambda x: x["w"].tolist(),
            step,
        ):
            with pytest.raises(fr.DonatedError, match=rf"`state\['w'\]` was donated to call {call} of `<lambda>`"):
                use(gone)
    assert_trees_close(third, {"w": torch.full((3,), 2.0)})
    assert "donated" in repr(first)


def test_each_donated_leaf_is_named_by_its_own_path():
    """Of many leaves, each error names the leaf that is used, also after other leaves are freed and others made."""
    step = fr.jit(lambda state: {n: x + 1 for n, x in state.items()}, donate=("state",))
    first = {f"w{i}": torch.zeros(3) for i in range(20)}
    second = step(first)
    for n in [*first][::2]:
        del first[n]
    third = step(second)
    for given, call in ((first, 1), (second, 2)):
        for n, x in given.items():
            with pytest.raises(fr.DonatedError, match=rf"`state\['{n}'\]` was donated to call {call} of"):
                x.sum()
    assert_trees_close(third, {n: torch.full((3,), 2.0) for n in second})


def test_a_failed_call_donates_nothing():
    """An argument of the wrong shape leaves the donated state whole."""
    step = fr.jit(lambda s, x: {"w": s["w"] + x}, donate=("s",))
    given = {"w": torch.zeros(3)}
    with pytest.raises(RuntimeError):
        step(given, torch.zeros(2))
    assert_trees_close(step(given, torch.ones(3)), {"w": torch.ones(3)})


def test_pytrees_of_values_keywords_and_aux():
    """KeyedJaggedTensor, Params, RowGrads, None, strings and numbers can be arguments and results."""
    ids = fr.KeyedJaggedTensor.from_lists({"a": [[0, 1], []]}, weights={"a": [[1.0, 2.0], []]})
    feature = fr.FeatureConfig("a", table="t", weighted=True)

    def fn(params, *, ids, tag):
        loss, grads = fr.value_and_grad(lambda p, i: (fr.lookup(p.tables, i, [feature])["a"] * p.dense).sum())(
            params, ids
        )
        return grads, {"loss": loss, "tag": tag, "none": None, "ids": ids.permute(["a"])}

    params = fr.Params({"t": torch.randn(3, 2)}, torch.tensor(2.0))
    assert_trees_close(fr.jit(fn)(params, ids=ids, tag="x"), fn(params, ids=ids, tag="x"), rtol=1e-6)


def test_jit_inside_transforms_and_jit():
    """Under vmap, grad or another jit, a jitted function runs as the plain function."""
    square = fr.jit(lambda x: x * x)
    x = torch.arange(3.0)
    assert_trees_close(torch.func.vmap(square)(x), x * x)
    assert_trees_close(torch.func.grad(lambda y: square(y).sum())(x), 2 * x)
    assert_trees_close(fr.jit(lambda y: square(y) + 1)(x), x * x + 1)


def test_checked_runs_uncompiled_and_keeps_donated_state():
    """checked(jit(f, donate)) reports invalid values and takes nothing."""
    feature = fr.FeatureConfig("a", table="t")
    step = fr.jit(lambda tables, ids: (tables, fr.lookup(tables, ids, [feature]).values), donate=("tables",))
    tables = {"t": torch.ones(2, 1)}
    with pytest.raises(fr.CheckError, match="id 5 in bag 1"):
        fr.checked(step)(tables, fr.KeyedJaggedTensor.from_lists({"a": [[0], [5]]}))
    fr.checked(step)(tables, fr.KeyedJaggedTensor.from_lists({"a": [[0], [1]]}))
    assert_trees_close(tables, {"t": torch.ones(2, 1)})


class _Unhashable:
    __hash__ = None


@dataclasses.dataclass(frozen=True)
class _Plain:
    x: torch.Tensor


BAD = {
    "unknown name": (lambda: fr.jit(lambda s: s, donate=("state",)), ValueError, "names no parameter"),
    "writes to its argument": (
        lambda: fr.jit(lambda x: x.add_(1))(torch.ones(2)),
        ValueError,
        "writes to its argument",
    ),
    "item": (lambda: fr.jit(lambda x: x.sum().item())(torch.ones(2)), TypeError, "on the host"),
    "branch": (lambda: fr.jit(lambda x: x if x.sum() > 0 else -x)(torch.ones(2)), TypeError, "on the host"),
    "unique": (lambda: fr.jit(torch.unique)(torch.ones(2)), TypeError, "on the host"),
    "nonzero": (lambda: fr.jit(lambda x: x.nonzero())(torch.ones(2)), TypeError, "on the host"),
    "shared": (lambda: _share(), ValueError, "given twice"),
    "unhashable leaf": (lambda: fr.jit(lambda x: x)(_Unhashable()), TypeError, "neither a tensor nor a plain"),
    "class that is not a pytree": (
        lambda: fr.jit(lambda x: x)(_Plain(torch.ones(1))),
        TypeError,
        "fr.pytree for a class",
    ),
    "such a class comes out": (lambda: fr.jit(lambda x: _Plain(x))(torch.ones(1)), TypeError, "fr.pytree for a class"),
    "too many": (lambda: fr.jit(_share)(1, 2), TypeError, r"jit\(_share\): the arguments are not those that it"),
    "missing": (lambda: fr.jit(lambda x, y: x)(torch.ones(1)), TypeError, "missing a required argument: 'y'"),
    "module": (lambda: fr.jit(lambda m, x: m(x))(torch.nn.Linear(1, 1), torch.ones(1)), TypeError, "neither a tensor"),
}


def _share():
    x = torch.ones(3)
    fr.jit(lambda a, b: (a + b, b), donate=("a",))(x, x)


@pytest.mark.parametrize("call, kind, fragment", BAD.values(), ids=BAD.keys())
def test_bad_input(call, kind, fragment):
    """Each invalid argument raises before any work."""
    with pytest.raises(kind, match=fragment):
        call()


def test_attributes_of_a_function_do_not_hide_those_of_its_program():
    """A function's attributes are also attributes of its jitted form, except names that the jitted form defines
    itself."""

    def double(x):
        return 2 * x

    double.look, double.lower, double.note = None, 3, "mine"
    jitted = fr.jit(double)
    assert jitted(torch.ones(2)).tolist() == [2, 2] and jitted.note == "mine" and callable(jitted.lower)
