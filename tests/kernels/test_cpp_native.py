"""The compiled object itself: instruction sets, threads, forks, guard pages, and the errors of a missing object."""

import os
import subprocess
import sys
import threading

import pytest
import torch
from funcrec.kernels import cpp
from funcrec.kernels.cpp import _native

SETS = _native.usable()
pytestmark = pytest.mark.skipif(not SETS, reason="the C++ kernels are not built")
DIMS = (1, 3, 4, 7, 10, 16, 20, 33, 64, 100, 128, 257)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@pytest.fixture
def fresh():
    """Forget the loaded object before and after the test."""

    def forget():
        _native.library.cache_clear()
        _native._entry.cache_clear()

    forget()
    yield
    forget()


@pytest.fixture
def threads():
    """Set torch's number of threads, and restore the number after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def inputs(num_bags: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple:
    """Return a table and a feature for every width, with bags of 0 to 9 ids, some of them outside the table. Every
    second feature has weights."""
    generator = torch.Generator().manual_seed(seed)
    tables = [torch.randn(50, dim, generator=generator).to(dtype) for dim in DIMS]
    lengths = torch.randint(0, 10, (num_bags * len(DIMS),), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    rows = torch.randint(-2, 53, (int(offsets[-1]),), generator=generator)
    weights = torch.randn(rows.shape[0], generator=generator)
    features, column = [], 0
    for k, dim in enumerate(DIMS):
        features += [k, 0, k * num_bags, 5 * (k % 3 == 0), k % 2, k % 2, column]
        column += dim
    return tables, [rows], offsets, weights, features, num_bags


def all_outputs() -> list:
    """Return the outputs of every function of lookups and jagged buffers. The inputs are large enough for several
    threads."""
    tables, (rows,), offsets, weights, features, num_bags = given = inputs(300)
    out = cpp.pooled_lookup(*given)
    bags = offsets[: num_bags + 1]
    ids = rows.clamp(min=0)[: int(bags[-1])].repeat(20)
    many = torch.arange(0, ids.shape[0] + 1, 3)
    padded = cpp.to_padded(tables[8][rows.clamp(0, 49)], bags, 7, -1.0)
    return [
        out,
        cpp.pooled_lookup_weights(out, tables, [rows], offsets, weights, features),
        cpp.gather_rows(tables[8], rows),
        *cpp.take_ranges(ids, bags[:-1], bags.diff(), 2000),
        padded,
        cpp.from_padded(padded, bags, 1500),
        *cpp.bucketize(ids, many, torch.randn(ids.shape[0], generator=torch.Generator().manual_seed(1)), 7, 8),
        *cpp.owner_blocks(
            ids, many, [0, 0, 50, 17, 3, 1, 0, 2, 0, 1, 2], [0, 0, 0], many.shape[0] - 1, 3, 900, False, True
        ),
    ]


def run_python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=50, env={**os.environ, **environment}
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stderr[-2000:]}"
    return done.stdout.strip()


def bits(tensors: list) -> list:
    return [x.contiguous().view(-1).view(torch.uint8) for x in tensors]


def same_bits(a: list, b: list) -> bool:
    return all(torch.equal(x, y) for x, y in zip(bits(a), bits(b), strict=True))


@pytest.mark.parametrize("name", SETS)
def test_instruction_sets_agree(name, fresh, monkeypatch):
    """Every instruction set gives the same bits where no sum crosses columns. Dot products are close."""
    ours = all_outputs()
    monkeypatch.setenv("FUNCREC_CPU", name)
    _native.library.cache_clear()
    _native._entry.cache_clear()
    theirs = all_outputs()
    assert f"_{name}." in _native.library()._name
    torch.testing.assert_close(theirs[1], ours[1])
    del ours[1], theirs[1]
    assert same_bits(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lookup_is_the_sum_of_rows(dtype):
    """A bag's output is the sum of the bag's rows in order, each row times its weight. A mean divides the sum by the
    length."""
    tables, (rows,), offsets, weights, features, num_bags = inputs(9, dtype)
    out = cpp.pooled_lookup(tables, [rows], offsets, weights, features, num_bags)
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    for k in range(len(DIMS)):
        table, _, first, max_length, mean, weighted, column = features[7 * k : 7 * k + 7]
        for b in range(num_bags):
            positions = range(int(offsets[first + b]), int(offsets[first + b + 1]))
            positions = positions[:max_length] if max_length else positions
            total = torch.zeros(DIMS[k], dtype=acc)
            for i in positions:
                row = int(rows[i])
                term = tables[table][row].to(acc) if 0 <= row < 50 else torch.zeros(DIMS[k], dtype=acc)
                total = total + (term * weights[i].to(acc) if weighted else term)
            total = total / max(1, len(positions)) if mean else total
            assert torch.equal(out[b, column : column + DIMS[k]], total)


@pytest.mark.parametrize("number", [2, 3, 8])
@pytest.mark.parametrize("openmp", [True, False], ids=["openmp", "own pool"])
def test_threads_change_no_bit(number, openmp, threads):
    """Any number of threads gives the bits of one thread, on torch's OpenMP threads and on the object's own pool."""
    alone = all_outputs()
    threads(number)
    _native.library().funcrec_start(_native._gomp_parallel() if openmp else 0)
    try:
        assert same_bits(alone, all_outputs())
    finally:
        _native.library().funcrec_start(_native._gomp_parallel())


def test_streamed_outputs_are_the_same():
    """An output so large that the kernel writes it past the caches has the bits of lookups in small parts."""
    table, rows = torch.randn(100, 64), torch.randint(-1, 101, (2**16,))
    offsets = torch.arange(2**16 + 1)
    features = [0, 0, 0, 0, 0, 0, 0]
    whole = cpp.pooled_lookup([table], [rows], offsets, None, features, 2**16)
    parts = [cpp.pooled_lookup([table], [rows], offsets[b:], None, features, 1024) for b in range(0, 2**16, 1024)]
    assert torch.equal(whole, torch.cat(parts))


def test_python_threads_may_call_at_once(threads):
    """Calls from several Python threads do not disturb each other."""
    threads(2)
    expected, wrong = all_outputs(), []

    def work():
        wrong.extend(1 for _ in range(5) if not same_bits(expected, all_outputs()))

    workers = [threading.Thread(target=work) for _ in range(4)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert not wrong


FORK = """
import os, torch
from funcrec.kernels import cpp
torch.set_num_threads(2)
table, rows, offsets = torch.randn(1000, 64), torch.randint(0, 1000, (4096,)), torch.arange(4097)
look = lambda: cpp.pooled_lookup([table], [rows], offsets, None, [0] * 7, 4096)
expected = look()
child = os.fork()
if child == 0:
    grandchild = os.fork()
    first, second = look(), look()
    torch.set_num_threads(1)  # torch's own loops would wait for OpenMP threads that the child does not have
    ok = torch.equal(first, expected) and torch.equal(second, expected)
    if grandchild:
        ok = ok and os.waitpid(grandchild, 0)[1] == 0
    os._exit(0 if ok else 1)
assert os.waitpid(child, 0)[1] == 0 and torch.equal(look(), expected)
print("same")
"""


def test_forked_children_can_call():
    """A child process gives the same values if it is forked after the threads started. A child of the child does,
    too."""
    assert run_python(FORK) == "same"


GUARDED = """
import ctypes, itertools, mmap, os, torch
from funcrec.kernels import cpp
from funcrec.kernels.cpp import _native
PAGE = mmap.PAGESIZE
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

def guarded(x, at_end):
    "A copy of x that ends (or begins) at a page that cannot be read."
    size = -(-x.nbytes // PAGE) * PAGE
    start = libc.mmap(None, size + 2 * PAGE, 3, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    libc.mprotect(start, PAGE, 0), libc.mprotect(start + PAGE + size, PAGE, 0)
    where = start + PAGE + (size - x.nbytes if at_end else 0)
    y = torch.frombuffer((ctypes.c_char * x.nbytes).from_address(where), dtype=x.dtype).view(x.shape)
    return y.copy_(x)

for os.environ["FUNCREC_CPU"], at_end in itertools.product(_native.usable(), (True, False)):
    _native.library.cache_clear(), _native._entry.cache_clear()
    rows = torch.arange(-70, 70) * 2**20
    rows[::2] = torch.arange(70) % 9 - 1
    rows[:3] = torch.tensor([2**62, -2**62, 6])
    rows, weights = guarded(rows, at_end), guarded(torch.rand(140), at_end)
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        for dim in (1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 48, 65, 127, 128, 129, 200, 256, 300):
            table = guarded(torch.randn(7, dim).to(dtype), at_end)
            offsets = guarded(torch.tensor([0, 1, 1, 40, 100, 140]), at_end)
            for feature in ([0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 7, 1, 1, 0]):
                out = cpp.pooled_lookup([table], [rows], offsets, weights, feature, 5)
                assert not out.isnan().any()
            for bad in ([-5, 900, 3, 140, 2**62, 7], [140, 139, 90, 20, 1, 0]):
                cpp.pooled_lookup([table], [rows], guarded(torch.tensor(bad), at_end), None, [0] * 7, 5)
            d = guarded(torch.randn(5, dim), at_end)
            cpp.pooled_lookup_weights(d, [table], [rows], offsets, weights, [0, 0, 0, 0, 0, 1, 0])
            cpp.gather_rows(table, rows)
            new = guarded(torch.ones(3, dim), at_end)
            cpp.scatter_rows_(table, guarded(torch.tensor([6, 2**40, -1]), at_end), torch.tensor(3), new)
            assert (table[6] == 1).all()
    values, bounds = guarded(torch.randn(50, 3), at_end), guarded(torch.tensor([3, 900, -4, 50]), at_end)
    starts = guarded(torch.tensor([-3, 49, 2**62]), at_end)
    cpp.take_ranges(values, starts, guarded(torch.tensor([5, 9, 4]), at_end), 15)
    cpp.from_padded(cpp.to_padded(values, bounds, 4, 1.0), bounds, 60)
    for numbers in (torch.arange(300), torch.rand(300), torch.rand(300).half()):
        flat, short = guarded(numbers, at_end), guarded(torch.arange(0, 301, 3), at_end)
        taken, _ = cpp.take_ranges(flat, short[:-1].flip(0), short.diff(), 300)
        assert taken.equal(numbers.view(100, 3).flip(0).flatten())
        for length in (1, 3, 8, 9, 40):
            padded = guarded(cpp.to_padded(flat, short, length, 0.0), at_end)
            cut = torch.nn.functional.pad(numbers.view(100, 3)[:, :length], (0, max(length - 3, 0)))
            assert padded.equal(cut)
            assert cpp.from_padded(padded, short, 300).view(100, 3)[:, :length].equal(cut[:, :3])
    wild, lengths = (guarded(torch.tensor(x), at_end) for x in ([-3, 49, 2**62, 0], [5, 9, 4, 60]))
    cpp.take_ranges_transpose(guarded(torch.rand(20, 5), at_end), wild, lengths, 50)
    cpp.bucketize(rows, guarded(torch.tensor([-3, 900, 7, 2**40]), at_end), weights, 3, 2**30)
    bounds = guarded(torch.tensor([-3, 900, 7, 2**40, 1, 40, 900]), at_end)
    for room in (0, 7, 400):
        lanes = [0, 0, 2**40, 2**39, 2, 1, 0, 5, 0, 3, 9, 2**40, 2**40, 1, 1, 0]
        cpp.owner_blocks(rows, bounds, lanes, [0, 1, 1, 0], 3, 2, room, True, room == 7)
print("alive")
"""


def test_nothing_beside_a_buffer_is_read():
    """No id and no offset makes a call of any instruction set read outside its tables, rows, offsets and gradients.
    These tensors lie between unreadable pages."""
    assert run_python(GUARDED) == "alive"


@pytest.mark.parametrize("name", SETS)
def test_outputs_are_written_everywhere(name, fresh, monkeypatch):
    """A call writes every element of its outputs, whatever their memory held before."""
    monkeypatch.setenv("FUNCREC_CPU", name)
    # in these tests, funcrec's torch.empty is filled with NaN or the least integer
    for out in all_outputs():
        assert not (out.isnan().any() if out.is_floating_point() else (out == torch.iinfo(out.dtype).min).any())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", SETS)
def test_rows_of_16_bits_are_rounded_as_torch_rounds(name, dtype, fresh, monkeypatch):
    """An update rounds a 16-bit row as torch's conversion does. The law covers every upper half of an f32, with low
    halves around ties."""
    monkeypatch.setenv("FUNCREC_CPU", name)
    low = torch.tensor([0, 1, 0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x3000, 0x2FFF])
    wide = ((torch.arange(2**16) << 16)[:, None] + low).to(torch.int32).view(torch.float32)
    one, none = torch.ones((), dtype=torch.float64), torch.zeros((), dtype=torch.int64)
    for dim in (64, 11, 1):
        table, n = torch.full((wide.numel() // dim, dim), -0.0, dtype=dtype), wide.numel() // dim
        # -0.0 - 1 · -x is x, also for signed zeros
        grads = -wide.flatten()[: n * dim].view(n, dim)
        cpp.fused_update_(
            [table],
            [],
            [grads],
            [torch.arange(n)],
            [],
            [],
            [0, 0, 0, 0, -1, 0, n, 0, 0, -1],
            one,
            none,
            None,
            "sgd",
            [0.0],
        )
        truth = (-grads).to(dtype)
        assert torch.equal(table.isnan(), truth.isnan())
        assert torch.equal(table.view(torch.int16)[~truth.isnan()], truth.view(torch.int16)[~truth.isnan()])


def test_nothing_at_all_is_fine():
    """A call without tables, features, bags, ids or rows gives empty or zero results."""
    none, offsets = torch.zeros(0, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    assert cpp.pooled_lookup([], [], offsets, None, [], 3).shape == (3, 0)
    assert cpp.pooled_lookup([torch.ones(2, 5)], [none], offsets[:1], None, [0] * 7, 0).shape == (0, 5)
    assert cpp.pooled_lookup([torch.ones(0, 5)], [none], offsets, None, [0] * 7, 3).eq(0).all()
    assert cpp.gather_rows(torch.ones(0, 5), torch.tensor([0, -1])).eq(0).all()
    assert cpp.take_ranges(torch.ones(0, 2), none, none, 3)[0].eq(0).all()
    assert cpp.to_padded(torch.ones(0, 2), offsets, 2, 7.0).eq(7).all()
    assert cpp.from_padded(torch.ones(3, 0, 2), offsets, 2).eq(0).all()
    assert [x.numel() for x in cpp.bucketize(none, offsets, None, 2, 5)] == [0, 6, 0, 0]
    assert [x.tolist() for x in cpp.owner_blocks(none, offsets, [], [], 3, 1, 2, False, True)] == [[[-1, -1]], [0], []]


def test_importing_funcrec_loads_no_object():
    """`import funcrec` does not load the compiled object. The first call loads the object."""
    code = (
        "import funcrec, torch; from funcrec.kernels import cpp; maps = lambda: open('/proc/self/maps').read()\n"
        "before = '/cpp/_' in maps(); cpp.gather_rows(torch.ones(1, 1), torch.zeros(1, dtype=torch.int64))\n"
        "print(before, '/cpp/_' in maps())"
    )
    if not os.path.exists("/proc/self/maps"):
        pytest.skip("the loaded objects are read from /proc")
    assert run_python(code) == "False True"


def test_without_an_object_the_error_says_what_to_do(fresh, monkeypatch):
    """Without a compiled object, the error of a call names the compiler to install and the other implementation."""
    monkeypatch.setattr(_native, "_path", lambda name: None)
    with pytest.raises(RuntimeError, match=r"(?s)no compiled object.*got.*need.*try.*compiler.*reference"):
        cpp.gather_rows(torch.ones(1, 1), torch.zeros(1, dtype=torch.int64))


def test_a_stale_object_is_refused(fresh, monkeypatch):
    """An object of another version is not called. The error says how to reinstall funcrec."""
    monkeypatch.setattr(_native, "ABI", -1)
    with pytest.raises(RuntimeError, match=r"(?s)another version.*need  -1.*reinstall"):
        _native.library()


def test_an_object_of_other_rules_is_refused(fresh, monkeypatch):
    """An object built from formulas that differ from the rules' table is not called."""
    monkeypatch.setattr(_native, "FORMULAS", -1)
    with pytest.raises(RuntimeError, match=r"(?s)other rules.*need.*formulas\.h.*reinstall"):
        _native.library()


def test_an_unknown_instruction_set_is_refused(fresh, monkeypatch):
    """FUNCREC_CPU accepts only names of instruction sets that were built and that run here."""
    monkeypatch.setenv("FUNCREC_CPU", "v5")
    with pytest.raises(ValueError, match=r"FUNCREC_CPU=v5: unknown.*\n.*v4, v3, base"):
        _native.library()
    monkeypatch.setenv("FUNCREC_CPU", "v4")
    monkeypatch.setattr(_native, "_path", lambda name, path=_native._path: path(name) if name == "base" else None)
    with pytest.raises(ValueError, match=r"(?s)cannot be used.*not built.*need  one of base"):
        _native.library()


def test_bad_arguments_are_refused():
    """A table that is not contiguous, too few offsets or weights, a matrix of ids, memory that was given away, and a
    block of 0 rows each raise an error with the reason."""
    rows, offsets = torch.zeros(2, dtype=torch.int64), torch.arange(3)
    with pytest.raises(ValueError, match="not contiguous"):
        cpp.gather_rows(torch.ones(4, 3).t(), rows)
    with pytest.raises(ValueError, match="too few boundaries"):
        cpp.pooled_lookup([torch.ones(2, 2)], [rows], offsets, None, [0] * 7, 3)
    weighted = [0, 0, 0, 0, 0, 1, 0]
    for ids, weights in ((rows, torch.ones(1)), (rows[:1], torch.ones(0)), (rows[:1], None)):
        with pytest.raises(ValueError, match="`weights` is missing or short"):
            cpp.pooled_lookup([torch.ones(2, 2)], [ids], offsets, weights, weighted, 2)
    with pytest.raises(ValueError, match=r"(?s)another number of dimensions.*got   torch.int64\[2, 1\].*need  1\n"):
        cpp.gather_rows(torch.ones(4, 3), rows[:, None])
    gone = torch.ones(4, 3)
    gone.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="memory was given away"):
        cpp.gather_rows(gone, rows)
    with pytest.raises(ValueError, match="block is 0"):
        cpp.bucketize(rows, offsets, None, 2, 0)


@pytest.mark.parametrize("width", [1, 2, 3])
def test_matrices_of_columns_are_read(width):
    """New rows and cotangents that lie column by column give the answers of their copies."""
    table, rows, columns = torch.randn(6, width), torch.tensor([4, 0, 5]), torch.randn(width, 3).t()
    written, need = table.clone(), table.index_copy(0, rows, columns)
    cpp.scatter_rows_(written, rows, torch.tensor(3), columns)
    assert torch.equal(written, need)
    slopes = lambda d: cpp.pooled_lookup_weights(
        d, [table], [rows], torch.arange(4), torch.ones(3), [0, 0, 0, 0, 0, 1, 0]
    )
    assert torch.equal(slopes(columns), slopes(columns.contiguous()))
