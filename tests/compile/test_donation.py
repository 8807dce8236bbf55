"""After any interrupt, the arguments of a donated call are whole or gone.

No other holder of the memory sees the call's writes."""

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch
from programs import interrupts

import funcrec as fr
from funcrec.testing import assert_trees_close

ONE = torch.tensor([1])


def put(s):
    """Return the state with row 1 of w increased by one, in place. t is new."""
    return {"w": s["w"].index_put((ONE,), s["w"][1:2] + 1), "t": s["t"] + 1}


@pytest.fixture
def step(interpreted):
    return fr.jit(put, donate=("s",))


@pytest.fixture
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def state() -> dict:
    return {"w": torch.arange(4.0), "t": torch.zeros(2)}


# -- other holders -----------------------------------------------------------------------------------------------

HOLDERS = {
    "view": lambda x: x[1:],
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "numpy": lambda x: x.numpy(),
    "memoryview": lambda x: memoryview(x.numpy()),
    "as_tensor of numpy": lambda x: torch.as_tensor(x.numpy()),
    "from_numpy": lambda x: torch.from_numpy(x.numpy()),
    "from_dlpack": torch.from_dlpack,
    "numpy from_dlpack": np.from_dlpack,
    "dlpack capsule": lambda x: torch.utils.dlpack.to_dlpack(x),
    "copy.copy": copy.copy,
    "alias": lambda x: torch.ops.aten.alias(x),
    "view of a view": lambda x: x.view(2, 2)[1],
    "Parameter": torch.nn.Parameter,
    "expanded": lambda x: x.expand(2, 4),
}


def values_of(x) -> torch.Tensor:
    if type(x).__name__ == "PyCapsule":
        x = torch.from_dlpack(x)
    return torch.tensor(np.asarray(x)) if not isinstance(x, torch.Tensor) else x.detach().clone()


@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "returned"])
@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_what_others_hold_keeps_its_values(step, hold, fresh):
    """A view, an array or any other alias of a donated table keeps its values. The result of the call is right. One
    warning reports the copy."""
    given = state() if fresh else step(step(state()))
    held, need = hold(given["w"]), put(given)
    shown = values_of(hold(given["w"]))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        given = step(given)
        assert_trees_close(given, need)
        for _ in range(3):
            given = step(given)
    assert_trees_close(values_of(held), shown)
    said = [str(w.message) for w in told if "is held elsewhere, and was copied" in str(w.message)]
    assert len(said) == 1 and "`s['w']`" in said[0]


def test_a_moving_average_that_begins_with_detach(step):
    """A moving average of donated states that starts with detach equals the average of undonated steps."""
    given, pure = state(), state()
    mean, need = given["w"].detach(), pure["w"].detach()
    with pytest.warns(UserWarning, match="held elsewhere"):
        for _ in range(4):
            given, pure = step(given), put(pure)
            mean, need = 0.5 * mean + 0.5 * given["w"], 0.5 * need + 0.5 * pure["w"]
    assert_trees_close(mean, need)


def numpy_table(tmp_path):
    a = np.arange(4.0, dtype=np.float32)
    return torch.from_numpy(a), a


def file_table(tmp_path):
    a = np.memmap(tmp_path / "table", dtype=np.float32, mode="w+", shape=(4,))
    a[:] = range(4)
    return torch.from_numpy(a), a


def frombuffer_table(tmp_path):
    a = bytearray(np.arange(4.0, dtype=np.float32).tobytes())
    return torch.frombuffer(a, dtype=torch.float32), np.frombuffer(a, dtype=np.float32)


def dlpack_table(tmp_path):
    a = np.arange(4.0, dtype=np.float32)
    return torch.from_dlpack(a), a


@pytest.mark.parametrize("make", [numpy_table, file_table, frombuffer_table, dlpack_table])
def test_memory_of_others_is_never_written(step, make, tmp_path):
    """A table in the memory of an array, a file or a buffer is copied at its first donated call. The copy stays in
    place in later calls."""
    table, array = make(tmp_path)
    given = step({"w": table, "t": torch.zeros(2)})
    at = given["w"].data_ptr()
    for _ in range(3):
        given = step(given)
    assert_trees_close(torch.tensor(array), torch.arange(4.0))
    assert_trees_close(given["w"], torch.tensor([0.0, 5.0, 2.0, 3.0]))
    assert given["w"].data_ptr() == at


def whole_table():
    return torch.arange(4.0)


def view_of_a_temporary():
    return torch.arange(4.0).reshape(2, 2).reshape(4)


def once_seen_by_numpy():
    x = torch.arange(4.0)
    x.numpy()
    return fr.copy(x)


@pytest.mark.parametrize("make", [whole_table, view_of_a_temporary, once_seen_by_numpy])
def test_what_nobody_holds_is_written_in_place(step, no_warning, make):
    """Old names, numpy arrays and views that no longer exist cost no copy."""
    given = {"w": make(), "t": torch.zeros(2)}
    first, at = given, given["w"].data_ptr()
    for _ in range(4):
        before, given = given, step(given)
        assert given["w"].data_ptr() == at
        given["w"].numpy(), given["w"][1:], given["w"].detach()
    assert interrupts.is_gone(first["w"]) and interrupts.is_gone(before["w"])
    # the next call checks the leaves again
    given["t"] = given["t"].clone()
    assert step(given)["w"].data_ptr() == at


def test_parts_of_one_memory_are_written_in_place(interpreted, no_warning):
    """Leaves that are parts of one tensor stay in place when nothing else holds that tensor. They are copied while
    something else holds the tensor."""
    fn = lambda s: [x.index_put((ONE,), x[1:2] + 1) for x in s]
    step, given = fr.jit(fn, donate=("s",)), list(torch.zeros(3, 4).unbind(0))
    at = [x.data_ptr() for x in given]
    for _ in range(3):
        given = step(given)
    assert [x.data_ptr() for x in given] == at
    assert_trees_close(given[0], torch.tensor([0.0, 3.0, 0.0, 0.0]))
    whole = torch.zeros(3, 4)
    with pytest.warns(UserWarning, match="held elsewhere"):
        step(list(whole.unbind(0)))
    assert_trees_close(whole, torch.zeros(3, 4))


def test_a_large_table_stays_in_place(no_warning, interpreted):
    """Steps do not copy a donated table that `init` put into large pages, whatever old names remain."""
    item = fr.TableConfig("item", 200_000, 8)
    feature = fr.FeatureConfig("item", table="item")
    loss_fn = lambda p, ids: (fr.lookup(p.tables, ids, [feature])["item"] * p.dense).sum()
    step = fr.train_step(loss_fn, sparse=fr.optim.sgd(0.1), dense=fr.optim.dense(torch.optim.SGD, lr=0.1))
    params = fr.Params(fr.init(fr.key(0), [item]), torch.ones(8))
    first = step.init(params)
    at, ids = params.tables["item"].data_ptr(), fr.KeyedJaggedTensor.from_lists({"item": [[1], [2, 3]]})
    fast, given = fr.jit(step, donate=("state",)), first
    for _ in range(3):
        given, _ = fast(given, ids)
        assert given.tables["item"].data_ptr() == at
    for gone in (params, first):
        with pytest.raises(fr.DonatedError):
            gone.tables["item"] + 1


# -- what is gone ------------------------------------------------------------------------------------------------

USES = {
    "as_tensor": lambda x: torch.as_tensor(x) + 1,
    "asarray": lambda x: torch.asarray(x) + 1,
    "np.asarray": np.asarray,
    "np.array": np.array,
    "from_numpy": lambda x: torch.from_numpy(x.numpy()),
    "from_dlpack": torch.from_dlpack,
    "np.from_dlpack": np.from_dlpack,
    "data": lambda x: x.data,
    "detach": lambda x: x.detach(),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "fr.copy": fr.copy,
    "pickle": pickle.dumps,
    "format": lambda x: f"{x}",
    "bool": bool,
    "float": float,
    "len": len,
    "iter": list,
    "in": lambda x: 1.0 in x,
    "index": lambda x: x[0],
    "as an index": lambda x: torch.ones(3)[x],
    "assigned": lambda x: torch.ones(4).__setitem__(slice(None), x),
    "written": lambda x: x.add_(1),
    "out": lambda x: torch.add(torch.ones(4), 1, out=x),
    "data_ptr": lambda x: x.data_ptr(),
    "storage": lambda x: x.untyped_storage(),
    "Parameter": torch.nn.Parameter,
    "vmap": lambda x: torch.func.vmap(torch.sin)(x),
    "share": lambda x: x.share_memory_(),
    "save": lambda x: torch.save(x, "/dev/null"),
    "jit": lambda x: fr.jit(lambda y: y + 1)(x),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_every_use_of_what_is_gone_raises(step, use):
    """Every use of a donated tensor raises DonatedError, whether or not the tensor's memory remains in the result."""
    given = state()
    step(given)
    for x in given.values():
        with pytest.raises(fr.DonatedError, match=r"was donated to call 1 of `put`"):
            use(x)


def test_torch_tensor_of_what_is_gone(step):
    """torch.tensor and grad skip all checks. They find no memory in a donated tensor."""
    given = state()
    out = step(given)
    for use in (torch.tensor, lambda x: torch.tensor(x, dtype=torch.float32), torch.func.grad(torch.sum)):
        with pytest.raises(RuntimeError), warnings.catch_warnings(action="ignore"):
            use(given["w"])
    assert_trees_close(out, put(state()))


def test_what_is_gone_has_a_repr(step):
    """A donated tensor has a repr for messages."""
    given = state()
    step(given)
    assert repr(given) == "{'w': <donated tensor>, 't': <donated tensor>}"


# -- forms of leaves ---------------------------------------------------------------------------------------------


def twice():
    x = torch.ones(4)
    fr.jit(lambda a, b: (put({"w": a, "t": b}), b), donate=("a",))(x, x)


def overlapping():
    x = torch.ones(6)
    fr.jit(lambda a, b: (a + 1, b + 1), donate=("a", "b"))(x[:4], x[2:])


def of_another_class():
    class Mine(torch.Tensor):
        pass

    fr.jit(put, donate=("s",))({"w": torch.ones(4).as_subclass(Mine), "t": torch.ones(2)})


BAD = {
    "twice": (twice, ValueError, "memory of donated `a` is given twice"),
    "overlapping": (overlapping, ValueError, "is given twice"),
    "of another class": (of_another_class, TypeError, r"`s\['w'\]` is not a plain tensor"),
    "sparse": (
        lambda: fr.jit(put, donate=("s",))({"w": torch.eye(2).to_sparse(), "t": torch.ones(2)}),
        TypeError,
        r"`s\['w'\]` is not a plain tensor",
    ),
    "requires grad": (
        lambda: fr.jit(put, donate=("s",))({"w": torch.ones(4, requires_grad=True), "t": torch.ones(2)}),
        (TypeError, ValueError),
        "grad",
    ),
}


@pytest.mark.parametrize("call, kind, fragment", BAD.values(), ids=BAD)
def test_bad_input(call, kind, fragment):
    """Each invalid argument raises before any work."""
    with pytest.raises(kind, match=fragment):
        call()


def test_a_leaf_that_begins_to_require_grad(step):
    """A state that a call returned may not require grad in the next call."""
    given = step(step(state()))
    given["w"].requires_grad_()
    with pytest.raises((TypeError, ValueError), match="grad"):
        step(given)


FORMS = {
    "expanded": lambda: torch.ones(1).expand(4),
    "transposed": lambda: torch.arange(8.0).reshape(4, 2).t()[0],
    "stepped": lambda: torch.arange(8.0)[::2],
    "bf16": lambda: torch.arange(4.0).bfloat16(),
    "f64": lambda: torch.arange(4.0).double(),
}


@pytest.mark.parametrize("make", FORMS.values(), ids=FORMS)
def test_leaves_of_any_form(step, make):
    """Donated equals undonated for leaves of any strides and dtype."""
    given = {"w": make(), "t": torch.zeros(2)}
    need = put(put({"w": make(), "t": torch.zeros(2)}))
    assert_trees_close(step(step(given)), need)


def test_two_updates_of_a_leaf_that_is_not_returned(interpreted, no_warning):
    """Two updates, each of one more table, begin with the same rows of b: neither sees what the other one wrote."""
    ids = fr.KeyedJaggedTensor.from_lists({n: [[1, 2], [3]] for n in "abc"})
    sparse = fr.optim.momentum(0.5)

    def updated(state, names):
        tables, slots = ({n: x[n] for n in names} for x in state)
        loss = lambda p: fr.lookup(p.tables, ids, [fr.FeatureConfig(n, n) for n in names]).values.square().sum()
        return sparse.update(fr.value_and_grad(loss)(fr.Params(tables, ()))[1].tables, slots, tables, 0)[0]

    def both(state):
        return updated(state, "ab")["a"], updated(state, "bc")["c"]

    def make():
        tables = {n: torch.arange(12.0).view(6, 2) + i for i, n in enumerate("abc")}
        return tables, sparse.init(tables)

    assert_trees_close(fr.jit(both, donate=("state",))(make()), both(make()), rtol=0, atol=0)


def test_empty_leaves(interpreted, no_warning):
    """Leaves without elements go through donated calls."""
    fn = lambda s: {
        "w": s["w"].index_put((torch.zeros(0, dtype=torch.int64),), s["w"]),
        "t": s["t"] + 1,
        "same": s["same"],
    }
    step, given = fr.jit(fn, donate=("s",)), {"w": torch.zeros(0, 2), "t": torch.zeros(0), "same": torch.zeros(2, 0)}
    for _ in range(3):
        given = step(given)
    assert {k: tuple(x.shape) for k, x in given.items()} == {"w": (0, 2), "t": (0,), "same": (2, 0)}


def test_a_leaf_under_two_names(interpreted, no_warning):
    """A donated leaf that is returned twice becomes two tensors. A write to one tensor does not change the other."""
    fn = lambda s: {"w": (p := s["w"].index_put((ONE,), s["w"][1:2] + 1)), "t": p}
    step, given, need = fr.jit(fn, donate=("s",)), {"w": torch.arange(4.0), "t": torch.zeros(4)}, None
    need = {"w": torch.arange(4.0), "t": torch.zeros(4)}
    for _ in range(3):
        given, need = step(given), fn(need)
        assert_trees_close(given, need)


def test_donation_inside_transforms_takes_nothing(interpreted):
    """Under vmap, grad, jvp and another jit, a donating function runs as the plain function. Its argument stays
    valid."""
    step = fr.jit(lambda s: s * s, donate=("s",))
    x = torch.arange(3.0)
    assert_trees_close(torch.func.vmap(step)(x), x * x)
    assert_trees_close(torch.func.grad(lambda y: step(y).sum())(x), 2 * x)
    assert_trees_close(torch.func.jvp(step, (x,), (torch.ones(3),))[1], 2 * x)
    assert_trees_close(fr.jit(lambda y: step(y) + y)(x), x * x + x)
    assert_trees_close(x, torch.arange(3.0))
