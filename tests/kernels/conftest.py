"""Choose the implementations that each test runs with.

A test asks with `@pytest.mark.needs(*operations)`, and takes the arguments implementation, case, operation, known,
device and ask. The tests of Triton alone take call, ids, ascending, bags, assert_sums and no_host_reads.

Without a CUDA device Triton's kernels run in its interpreter. TRITON_INTERPRET must be set before triton is imported.
"""

import contextlib
import importlib.util
import itertools
import os
from typing import NamedTuple

import pytest
import torch
from funcrec.kernels import library, ops
from programs.interpreter import hastened
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
# the package that an implementation needs in addition to torch
MODULES = {"triton": "triton", "fbgemm": "fbgemm_gpu"}
INSTALLED = [name for name in ops.IMPLEMENTATIONS if importlib.util.find_spec(MODULES.get(name, "torch"))]
DEVICES = {"triton": "cuda"} if CUDA else {}


class Known(NamedTuple):
    """What an implementation supports. The implementation raises for everything else.

    dtypes, dims: those of tables. padded: dtypes of to_padded and from_padded. slow: whether the implementation must
    have few tests.
    """

    dtypes: tuple[torch.dtype, ...] = FLOATS
    dims: tuple[int, ...] = (1, 3, 16, 64, 130)
    padded: tuple[torch.dtype, ...] = (*FLOATS, torch.int32, torch.int64, torch.bool)
    rules: frozenset[str] = frozenset(ops.RULES)
    unsupported: frozenset[str] = frozenset()  # hyper-parameters that must be 0, or "key" if no key is allowed
    slow: bool = False


SUPPORTS = {
    "fbgemm": Known(
        dtypes=(torch.float32, torch.float16),
        dims=(4, 16, 64, 132),
        padded=(torch.float32, torch.float16, torch.bfloat16),
        rules=frozenset({"sgd", "adagrad", "rowwise_adagrad"}),
        unsupported=frozenset({"weight_decay", "max_norm", "key"}),
    ),
    "triton": Known(slow=not CUDA),
}


def pytest_configure(config):
    config.addinivalue_line(
        "markers",
        "needs(*operations, slow=n, without=name): every implementation that has the "
        "operations; a slow one gets each n-th",
    )


def pytest_generate_tests(metafunc):
    """Parametrize `implementation`. A test that takes `case` also gets the module's CASES. A test that takes
    `operation` gets the operations that the implementation has."""
    needs = metafunc.definition.get_closest_marker("needs")
    if needs is None:
        return
    have = [i for i in INSTALLED if all(ops.has(n, i) for n in needs.args) and i != needs.kwargs.get("without")]
    step = lambda i: needs.kwargs.get("slow", 1) if SUPPORTS.get(i, Known()).slow else 1
    if "case" in metafunc.fixturenames:
        found = [(i, case) for i in have for case in reversed(metafunc.module.CASES[:: -step(i)])]
        metafunc.parametrize(("implementation", "case"), found)
    elif "operation" in metafunc.fixturenames:
        all_of = lambda i: [n for n in library.SCHEMAS if not n.endswith("_") and ops.has(n, i)]
        metafunc.parametrize(("implementation", "operation"), [(i, n) for i in have for n in all_of(i)[:: step(i)]])
    else:
        metafunc.parametrize("implementation", have)


@pytest.fixture(scope="session", autouse=True)
def fast_interpreter():
    """Triton's interpreter, where the tests use it, takes a fraction of its time."""
    with hastened() if "triton" in INSTALLED and not CUDA else contextlib.nullcontext():
        yield


@pytest.fixture
def known(implementation) -> Known:
    return SUPPORTS.get(implementation, Known())


@pytest.fixture
def device(implementation) -> str:
    return DEVICES.get(implementation, "cpu")


@pytest.fixture
def ask(implementation, device):
    """Return a function ask(name, *args) that calls ops.<name> on the implementation's device. The result of ask is on
    the CPU."""
    move = lambda x, to: tree_map(lambda y: y.to(to) if isinstance(y, Tensor) else y, x)
    call = lambda name, *args, **how: getattr(ops, name)(*move(args, device), **how, implementation=implementation)
    return lambda *args, **how: move(call(*args, **how), "cpu")


# -- for Triton's own tests ---------------------------------------------------------------------------------------

OUTSIDE = (-1, -(2**31), 2**31 - 1, -(2**63), 2**63 - 1, 2**40)


@pytest.fixture
def call():
    """Return a function call(name, *args) that runs an operation of Triton on a device where it can run. The result is
    on the CPU."""
    from funcrec.kernels import triton as kernels

    move = lambda to: lambda x: x.to(to) if isinstance(x, Tensor) else x
    place = "cuda" if CUDA else "cpu"
    return lambda name, *args: tree_map(move("cpu"), getattr(kernels, name)(*tree_map(move(place), args)))


@pytest.fixture
def ids():
    """Return a function ids(n, num_rows) that draws ids with repeats. One id in eight is outside the table."""

    def draw(n: int, num_rows: int, dtype: torch.dtype = torch.int64) -> Tensor:
        fits = [x for x in (*OUTSIDE, num_rows) if torch.iinfo(dtype).min <= x <= torch.iinfo(dtype).max]
        pick = torch.tensor(fits)[torch.randint(0, len(fits), (n,))]
        inside = torch.randint(0, max(1, num_rows), (n,))
        return torch.where(torch.rand(n) < (1 / 8 if num_rows else 1), pick, inside).to(dtype)

    return draw


@pytest.fixture
def ascending():
    """Return a function ascending(num_bags, first, end) that draws offsets of num_bags bags, some of them empty. The
    offsets lie between `first` and `end`."""

    def draw(num_bags: int, first: int, end: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(first, end + 1, (num_bags + 1,)).sort().values.to(dtype)

    return draw


@pytest.fixture
def bags():
    """Return a function bags(cuts, first_bag, num_bags, max_length) that lists the positions that each bag reads."""

    def ranges(cuts: list[int], first_bag: int, num_bags: int, max_length: int) -> list[range]:
        part = cuts[first_bag : first_bag + num_bags + 1]
        return [range(a, min(b, a + max_length) if max_length else b) for a, b in itertools.pairwise(part)]

    return ranges


@pytest.fixture
def assert_sums():
    """Return a function assert_sums(got, terms). assert_sums checks that got is Σ terms, with at most one rounding per
    term."""

    def check(got: Tensor, terms: list[Tensor]) -> None:
        want, size = sum(terms, torch.zeros(())), sum((t.abs() for t in terms), torch.zeros(()))
        eps = torch.finfo(got.dtype).eps
        assert ((got.double() - want).abs() <= eps * (len(terms) + 2) * size).all()

    return check


class NoHostReads(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(func) and "nonzero" not in str(func) and "unique" not in str(func), func
        return func(*args, **(kwargs or {}))


@pytest.fixture
def no_host_reads():
    """Return a context in which an operation fails if the operation reads a tensor's value on the host."""
    return NoHostReads


@pytest.fixture
def on_every_level(monkeypatch):
    """Yield a function run(f) that returns {name: f()} for each instruction set of this processor."""
    from funcrec.kernels.cpp import _native

    best = _native.LEVELS[_native.level()]

    def run(f):
        found = {}
        for level, needs in _native.LEVELS.items():
            if (path := _native._path(level)) and needs <= best:
                # rules are compiled for this instruction set
                monkeypatch.setenv("FUNCREC_CPU", level)
                monkeypatch.setattr(_native, "library", lambda path=path: _native._load(path))
                _native._entry.cache_clear()
                found[level] = f()
        return found

    yield run
    monkeypatch.undo()
    _native._entry.cache_clear()
