"""Donated calls: whole or gone whatever interrupts them, and nobody else sees their writes."""

import copy
import ctypes
import pickle
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from funcrec.kernels import ops
from funcrec.kernels.cpp import _native

import funcrec as fr
from funcrec import _mesh
from funcrec.testing import assert_trees_close

sys.path.insert(0, str(Path(__file__).parent))
import interrupts
from interrupts import AtEvent, AtOperation, Interrupt, Trial

ONE = torch.tensor([1])


def put(s):
    """Row 1 of w grows by one, in place; t is new."""
    return {"w": s["w"].index_put((ONE,), s["w"][1:2] + 1), "t": s["t"] + 1}


@pytest.fixture
def interpreted(monkeypatch):
    """The staged graph is run as it stands: what is written matters here, not the code."""
    monkeypatch.setattr("funcrec._compile.compile_graph", lambda graph, arguments: graph)


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


# -- interrupts --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trial():
    return Trial()


def test_interrupted_at_random_moments(trial):
    """A signal at any moment of a donated step leaves the state whole or gone, every switch as it was, and the next call right."""
    ends = interrupts.at_random(trial, 150)
    assert ends["whole"] + ends["gone"] > 30 and sum(ends.values()) == 150


@pytest.mark.parametrize("follows", [True, False])
@pytest.mark.parametrize("moment", [AtEvent, AtOperation])
def test_interrupted_at_every_moment(trial, moment, follows):
    """So does an exception wherever CPython may see a signal: all of these moments in turn (here every third)."""
    ends = interrupts.at_every(trial, moment, follows, step=3)
    assert ends["whole"] > 100 and ends["gone"] > 20


def test_interrupted_from_another_thread(trial):
    """So does an exception that another thread sets."""

    class Asynchronous:
        def __init__(self, after_s):
            me = ctypes.c_ulong(threading.get_ident())
            raise_here = lambda: ctypes.pythonapi.PyThreadState_SetAsyncExc(me, ctypes.py_object(Interrupt))
            self.timer = threading.Timer(after_s, raise_here)

        def __enter__(self):
            self.timer.start()

        def __exit__(self, *_):
            self.timer.join()
            for _ in range(100):
                time.sleep(0)  # what comes late comes here

    ends = [trial.run(Asynchronous(1.5 * trial.lasts_s * i / 40)) for i in range(40)]
    assert len(ends) == 40


def test_a_kernel_that_fails(trial, monkeypatch):
    """A kernel without memory leaves the state whole before the writes, and gone in them; the error says which."""
    run, ends = _native._entry, []
    for k in range(20):
        left = [k]

        def entry(name, left=left):
            left[0] -= 1
            return run(name) if left[0] >= 0 else lambda packed: 1  # "no memory"

        state, _ = trial.fast(fr.copy(trial.first), trial.batches[0])
        with monkeypatch.context() as patched:
            patched.setattr(_native, "_entry", entry)
            try:
                trial.fast(state, trial.batches[1])
            except MemoryError as error:
                (gone,) = {interrupts.is_gone(x) for x in torch.utils._pytree.tree_leaves(state)}
                assert ("is gone" in "".join(getattr(error, "__notes__", ""))) == gone
                ends.append(gone)
        if left[0] >= 0:
            break
    assert set(ends) == {True, False} and left[0] >= 0


def test_a_write_that_fails(interpreted):
    """A row outside its leaf: the state is gone, not torn, and the error says so."""
    at = torch.tensor([1, 9])
    fn = lambda s, at: {"w": s["w"].index_put((at,), s["t"]), "t": s["t"] + 1}
    step, given = fr.jit(fn, donate=("s",)), state()
    with pytest.raises((IndexError, RuntimeError)) as caught:
        step(given, at)
    assert "which is gone" in "".join(caught.value.__notes__)
    for x in given.values():
        with pytest.raises(fr.DonatedError):
            x + 1


def in_using():
    with ops.using("reference"):
        ops.gather_rows(torch.eye(2), torch.tensor([1]))


def in_bind():
    with _mesh.bind([]), _mesh.bind([_mesh.Axis("data", 2, torch.zeros(2))]):
        _mesh.bound_names()


SWITCHED = {"checked": fr.checked(lambda: torch.ones(2).sum()), "using": in_using, "bind": in_bind}


@pytest.mark.parametrize("moment", [AtEvent, AtOperation])
@pytest.mark.parametrize("call", SWITCHED.values(), ids=SWITCHED)
def test_switches_of_the_package(call, moment):
    """Wherever a call that sets a switch is interrupted, the switch is as it was when the exception is dealt with."""
    before, count = interrupts.switches(), 0
    while True:
        now = moment(count)
        try:
            with now:
                call()
        except Interrupt:
            pass
        assert interrupts.switches() == before
        if now.left >= 0:
            break
        count += 1
    assert count > 3


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
    """A view, an array or any other window on a donated table shows what it showed, and the call's result is right; it is said once."""
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
    """An average of the states is the one of undonated steps."""
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
    """A table in an array's, a file's or a buffer's memory is copied at its first donated call, and stays in place from then on."""
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
    """Old names, numpy arrays and views that are gone again cost no copy."""
    given = {"w": make(), "t": torch.zeros(2)}
    first, at = given, given["w"].data_ptr()
    for _ in range(4):
        before, given = given, step(given)
        assert given["w"].data_ptr() == at
        given["w"].numpy(), given["w"][1:], given["w"].detach()
    assert interrupts.is_gone(first["w"]) and interrupts.is_gone(before["w"])
    given["t"] = given["t"].clone()  # the leaves are looked at anew
    assert step(given)["w"].data_ptr() == at


def test_parts_of_one_memory_are_written_in_place(interpreted, no_warning):
    """Leaves that are parts of one tensor, which nobody has any more, stay where they are; while somebody has it, they are copied."""
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
    """A table that `init` put into large pages is not copied by the steps that it is donated to, whatever old names remain."""
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
    """DonatedError for whatever is done with a donated tensor, whether its memory lives on in the result or not."""
    given = state()
    step(given)
    for x in given.values():
        with pytest.raises(fr.DonatedError, match=r"was donated to call 1 of `put`"):
            use(x)


def test_torch_tensor_of_what_is_gone(step):
    """torch.tensor and grad, which ask nobody, find no memory in a donated tensor that was written to."""
    given = state()
    out = step(given)
    for use in (torch.tensor, lambda x: torch.tensor(x, dtype=torch.float32), torch.func.grad(torch.sum)):
        with pytest.raises(RuntimeError), warnings.catch_warnings(action="ignore"):
            use(given["w"])
    assert_trees_close(out, put(state()))


def test_what_is_gone_has_a_repr(step):
    """A donated tensor can be printed in a message."""
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
    "of another class": (of_another_class, TypeError, r"`s\['w'\]` is no plain tensor"),
    "sparse": (
        lambda: fr.jit(put, donate=("s",))({"w": torch.eye(2).to_sparse(), "t": torch.ones(2)}),
        TypeError,
        r"`s\['w'\]` is no plain tensor",
    ),
    "requires grad": (
        lambda: fr.jit(put, donate=("s",))({"w": torch.ones(4, requires_grad=True), "t": torch.ones(2)}),
        (TypeError, ValueError),
        "grad",
    ),
}


@pytest.mark.parametrize("call, kind, fragment", BAD.values(), ids=BAD)
def test_bad_input(call, kind, fragment):
    """Each fault is told before any work."""
    with pytest.raises(kind, match=fragment):
        call()


def test_a_leaf_that_begins_to_require_grad(step):
    """Also a state that a call returned may not require grad."""
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
    """Donated = undonated for leaves of any strides and dtype, and what they were views of keeps its values."""
    given = {"w": make(), "t": torch.zeros(2)}
    need = put(put({"w": make(), "t": torch.zeros(2)}))
    assert_trees_close(step(step(given)), need)


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
    """A donated leaf that comes back twice is two tensors: what is written to one is not seen in the other."""
    fn = lambda s: {"w": (p := s["w"].index_put((ONE,), s["w"][1:2] + 1)), "t": p}
    step, given, need = fr.jit(fn, donate=("s",)), {"w": torch.arange(4.0), "t": torch.zeros(4)}, None
    need = {"w": torch.arange(4.0), "t": torch.zeros(4)}
    for _ in range(3):
        given, need = step(given), fn(need)
        assert_trees_close(given, need)


@pytest.mark.filterwarnings("ignore:funcrec.jit")  # a thread's operation holds what another takes
def test_two_threads_with_one_state(interpreted):
    """Of threads that give the same state to a call one has it, and the others are told that it is gone; it is written to once."""
    step, rounds = fr.jit(put, donate=("s",)), 50
    step(state())
    for _ in range(rounds):
        given, ends, start = state(), [], threading.Barrier(3)

        def call(given=given, ends=ends, start=start):
            start.wait()
            try:
                ends.append(step(given))
            except fr.DonatedError as error:
                ends.append(error)

        threads = [threading.Thread(target=call) for _ in range(3)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        (out,) = [x for x in ends if isinstance(x, dict)]
        assert len(ends) == 3
        assert_trees_close(out, put(state()))


def test_threads_with_a_state_each(interpreted):
    """One jitted function serves several threads, each with a state of its own."""
    step, results = fr.jit(put, donate=("s",)), {}
    step(state())

    def train(k):
        given = {"w": torch.arange(4.0) + k, "t": torch.zeros(2)}
        for _ in range(50):
            given = step(given)
        results[k] = given

    threads = [threading.Thread(target=train, args=(k,)) for k in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for k in range(3):
        need = torch.arange(4.0) + k
        need[1] += 50
        assert_trees_close(results[k]["w"], need)


def test_donation_inside_transforms_takes_nothing(interpreted):
    """Under vmap, grad, jvp and another jit the function is its plain self, and what it was given stays."""
    step = fr.jit(lambda s: s * s, donate=("s",))
    x = torch.arange(3.0)
    assert_trees_close(torch.func.vmap(step)(x), x * x)
    assert_trees_close(torch.func.grad(lambda y: step(y).sum())(x), 2 * x)
    assert_trees_close(torch.func.jvp(step, (x,), (torch.ones(3),))[1], 2 * x)
    assert_trees_close(fr.jit(lambda y: step(y) + y)(x), x * x + x)
    assert_trees_close(x, torch.arange(3.0))


# -- copies ------------------------------------------------------------------------------------------------------


def test_a_copy_has_memory_of_its_own():
    """fr.copy gives equal tensors of the same form in other memory, in the same tree."""
    ids = fr.KeyedJaggedTensor.from_lists({"a": [[0, 1], []]})
    tree = {"x": torch.arange(6.0).reshape(2, 3), "ids": ids, "n": 3, "none": None, "t": (torch.ones(2, 3).t(), "text")}
    got = fr.copy(tree)
    assert_trees_close(got, tree)
    old, new = (torch.utils._pytree.tree_leaves(t) for t in (tree, got))
    for a, b in zip(old, new, strict=True):
        if isinstance(a, torch.Tensor):
            assert a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr() and a.stride() == b.stride()


def test_a_copy_is_differentiable():
    """The copy's derivative is the identity's, also of a table's."""
    x = torch.arange(4.0).reshape(2, 2).requires_grad_()
    (d,) = torch.autograd.grad(fr.copy(x).square().sum(), x)
    assert_trees_close(d, 2 * x.detach())
    assert_trees_close(torch.func.grad(lambda y: fr.copy(y).square().sum())(x.detach()), 2 * x.detach())
    assert_trees_close(torch.func.vmap(lambda y: fr.copy(y))(x.detach()), x.detach())
    assert_trees_close(torch.func.jvp(fr.copy, (x.detach(),), (torch.ones(2, 2),))[1], torch.ones(2, 2))
