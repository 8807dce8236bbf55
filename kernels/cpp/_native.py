"""Choose and call the compiled object, and make the numbers that describe tensors to the object.

    call("pooled_lookup", [*table(t), *ints(rows), ...])

Each call passes one array of i64, which `csrc/abi.h` takes apart. `call` puts the number of threads in front of the
array. FUNCREC_CPU=v4|v3|base forces an instruction set.
"""

import ctypes
import functools
import importlib.util
import math
import operator
import os
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from funcrec.kernels.memory import keep_freed_memory
from funcrec.kernels.rules import FORMULAS
from torch import Tensor

ABI = 20  # the number in csrc/abi.h; both rise whenever an entry point comes or its array changes
LEVELS = {"v4": 4, "v3": 3, "base": 0}  # {level, best first: the least value of funcrec_level() that can run it}
DTYPES = {
    torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3, torch.int32: 4, torch.int64: 5,
}  # fmt: skip
INTS, REALS = (torch.int32, torch.int64), (torch.float32, torch.float64)
FLOATS = (*REALS, torch.float16, torch.bfloat16)
_FLOATS, _dtype, _is_cpu = frozenset(FLOATS), operator.attrgetter("dtype"), operator.attrgetter("is_cpu")
ABSENT = (0, 0, -1)
HUGE_PAGE, MADV_HUGEPAGE = 2 << 20, 14
MIN_ADVISED = 4 << 20  # the least bytes of an output that gets huge pages


def call(name: str, numbers: list[int]) -> None:
    """Run the entry point `funcrec_<name>` with torch's number of threads."""
    given = (torch.get_num_threads(), *numbers)
    packed = struct.pack(f"{len(given)}q", *given)  # This takes a quarter of the time of array("q", ...).
    finish(name, _entry(name)(packed))


def finish(name: str, status: int) -> None:
    """Raise the error that an entry point's status stands for, or none for status 0, which is success."""
    if status == 1:
        raise MemoryError(f"funcrec.kernels.cpp.{name}: no memory")
    if status == 3:
        fail(
            name,
            "the numbers do not fit each other.",
            "those of this call",
            "existing lanes, bags and ranks",
            "see ops",
        )
    if status:
        raise RuntimeError(f"funcrec.kernels.cpp.{name}: the compiled function failed with {status}")


def fail(call: str, what: str, got: Any, need: Any, attempt: str, error: type[Exception] = ValueError) -> NoReturn:
    raise error(f"funcrec.kernels.cpp.{call}: {what}\n  got   {got}\n  need  {need}\n  try   {attempt}")


def check(x: Tensor, dims: int, dtypes: Sequence[torch.dtype]) -> int:
    """Return the address of a tensor's numbers. Raise if the compiled object cannot read the numbers in place."""
    at = x.data_ptr() if x.is_cpu else 0
    if x.dtype in dtypes and x.dim() == dims and x.is_cpu and not at % x.itemsize and (at or not x.numel()):
        return at
    got, names = f"{x.dtype}{list(x.shape)} on {x.device}", ", ".join(map(str, dtypes))
    if x.dtype not in dtypes or not x.is_cpu:
        fail("call", "a tensor is of another kind.", got, f"{names} on cpu", f"x.to({dtypes[0]})", TypeError)
    if x.dim() != dims:
        fail("call", "a tensor has another number of dimensions.", got, str(dims), "see its contract in ops")
    if not at:
        fail("call", "a tensor's memory was given away.", got, "memory", "a tensor whose storage was not resized")
    fail("call", "an address is not aligned.", f"{got} at {at}", f"a multiple of {x.itemsize}", "x.clone()")


def table(x: Tensor) -> tuple[int, ...]:
    """Return the description of a table [R, D]: pointer, dtype, R, D."""
    if not x.is_contiguous():
        raise ValueError(
            f"funcrec.kernels.cpp: a table is not contiguous.\n  got   strides {x.stride()} of shape {tuple(x.shape)}\n"
            "  need  one row after the other\n  try   table.contiguous()"
        )
    return check(x, 2, FLOATS), DTYPES[x.dtype], *x.shape


def tables(xs: Sequence[Tensor], width: int = 4) -> list[int]:
    """Return the descriptions of tables, `width` numbers for each table: the numbers of `table`, then zeros.

    The function fills the array by columns, which is a sixth faster than table by table.
    """
    if not all(map(Tensor.is_contiguous, xs)):
        return [n for x in xs for n in (*table(x), *[0] * (width - 4))]
    out = [0] * (width * len(xs))
    if xs:
        dtypes = [*map(_dtype, xs)]
        out[::width], out[1::width] = _addresses(xs, dtypes), map(DTYPES.__getitem__, dtypes)
        out[2::width], out[3::width] = zip(*[x.shape for x in xs])
    return out


def _addresses(xs: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[int]:
    """Return the addresses of matrices of floats, after one check of all if every address is a multiple of 8."""
    if all(map(_is_cpu, xs)) and {*map(Tensor.dim, xs)} == {2} and _FLOATS.issuperset(dtypes):
        found = [*map(Tensor.data_ptr, xs)]
        if all(found) and not functools.reduce(operator.or_, found) % 8:
            return found
    return [check(x, 2, FLOATS) for x in xs]


def stacks(xs: Sequence[Tensor]) -> list[int]:
    """Return the descriptions of tables, as `tables` does. A stack [K, R, D] counts as K tables."""
    if not any(x.dim() == 3 for x in xs):
        return tables(xs)
    out = []
    for x in xs:
        if x.dim() != 3 or not x.is_contiguous():
            out += table(x)
            continue
        at, (k, *shape) = check(x, 3, FLOATS), x.shape
        size, described = shape[0] * shape[1] * x.itemsize, (DTYPES[x.dtype], *shape)
        for i in range(k):
            out += (at + i * size, *described)
    return out


def ints(x: Tensor) -> tuple[int, int, int]:
    """Return the description of a contiguous i32|i64[N]: pointer, dtype, N."""
    return check(x, 1, INTS), DTYPES[x.dtype], x.shape[0]


def bounds(x: Tensor) -> tuple[int, int, int]:
    """Return the description of contiguous offsets, i32|i64[B + 1]: pointer, dtype, B + 1."""
    if x.shape == (0,):
        fail("call", "offsets have no boundary.", "an empty tensor", "one more than there are bags", "torch.zeros(1)")
    return ints(x)


def reals(x: Tensor | None) -> tuple[int, int, int]:
    """Return the description of a contiguous f32|f64[N] or None: pointer, dtype, N."""
    return ABSENT if x is None else (check(x, 1, REALS), DTYPES[x.dtype], x.shape[0])


def matrix(x: Tensor) -> tuple[int, ...]:
    """Return the description of a matrix with contiguous rows: pointer, dtype, M, C, stride between rows.

    The matrix is f32|f64|i32|i64[M, C].
    """
    return check(x, 2, (*REALS, *INTS)), DTYPES[x.dtype], *x.shape, x.stride(0)


def real(x: float) -> int:
    """Return the bits of an f64 as an i64."""
    return struct.unpack("q", struct.pack("d", x))[0]


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor for an output.

    Large new memory gets 2 MiB pages, because first writes to many 4 KiB pages cost more.
    """
    out = torch.empty(shape, dtype=dtype)
    if 8 * math.prod(shape) >= MIN_ADVISED and out.nbytes >= MIN_ADVISED:  # the shape is at hand
        _advise_huge_pages(out)
    return out


def _advise_huge_pages(x: Tensor) -> None:
    """Ask the system for 2 MiB pages under the 2 MiB blocks of a contiguous tensor.

    A system without such pages refuses, which is harmless.
    """
    start = -(-x.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    size = (x.data_ptr() + x.nbytes) // HUGE_PAGE * HUGE_PAGE - start
    if sys.platform == "linux" and size > 0:
        _madvise()(start, size, MADV_HUGEPAGE)


@functools.cache
def _madvise() -> Callable:
    function = ctypes.CDLL(None).madvise
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
    return function


@functools.cache
def _entry(name: str) -> Callable:
    function = getattr(library(), f"funcrec_{name}")
    function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_int64
    return function


@functools.cache
def library() -> ctypes.CDLL:
    """Return the object for this processor, loaded at the first call."""
    path = _path(level())
    assert path is not None  # `level` names an object that was built
    keep_freed_memory()
    return _load(path)


def level() -> str:
    """Return the best level of LEVELS that was built and runs here, or the level that FUNCREC_CPU names."""
    forced, found = os.environ.get("FUNCREC_CPU") or None, usable()
    if not found:
        raise RuntimeError(
            "funcrec.kernels.cpp: there is no compiled object.\n"
            f"  got   none of {', '.join('_' + name for name in LEVELS)} in {Path(__file__).parent}\n"
            "  need  the C++ kernels, which are built when funcrec is installed\n"
            '  try   install a C++ compiler (g++ or clang++) and reinstall funcrec, or implementation="reference"'
        )
    if forced is not None and forced not in LEVELS:
        raise ValueError(f"FUNCREC_CPU={forced}: unknown instruction set\n  need  one of {', '.join(LEVELS)}")
    if forced is not None and forced not in found:
        raise ValueError(
            f"FUNCREC_CPU={forced}: cannot be used.\n  got   "
            f"{'another processor' if _path(forced) else 'not built'}"
            f"\n  need  one of {', '.join(found)}"
        )
    return forced or found[0]


def usable() -> list[str]:
    """Return the levels of LEVELS that were built and that run here, best first.

    The object of the lowest level reports the processor's level, because code of a higher level may crash before it can
    report.
    """
    built = {name: path for name in LEVELS if (path := _path(name))}
    best = _load(next(reversed(built.values()))).funcrec_level() if built else 0
    return [name for name in built if LEVELS[name] <= best]


def _path(name: str) -> str | None:
    spec = importlib.util.find_spec(f"{__package__}._{name}")
    return spec.origin if spec else None


def _load(path: str) -> ctypes.CDLL:
    loaded = ctypes.CDLL(path)
    loaded.funcrec_abi.restype = loaded.funcrec_level.restype = ctypes.c_int64
    loaded.funcrec_start.argtypes, loaded.funcrec_start.restype = [ctypes.c_int64], None
    if loaded.funcrec_abi() != ABI:
        raise RuntimeError(
            f"funcrec.kernels.cpp: the compiled object is of another version.\n  got   "
            f"{loaded.funcrec_abi()} in {path}\n"
            f"  need  {ABI}\n  try   reinstall funcrec (pip install -e . for an editable one)"
        )
    loaded.funcrec_formulas.restype = ctypes.c_int64
    if loaded.funcrec_formulas() != FORMULAS:
        raise RuntimeError(
            f"funcrec.kernels.cpp: the compiled object has other rules.\n  got   {path}, built from other formulas\n"
            "  need  one of csrc/formulas.h as it is\n  try   reinstall funcrec (pip install -e . for an editable one)"
        )
    loaded.funcrec_start(_gomp_parallel())
    return loaded


def torch_library() -> ctypes.CDLL:
    """Return torch's own library, which is loaded already. Raise OSError if torch was built in another way."""
    return ctypes.CDLL(os.path.join(torch.__path__[0], "lib", "libtorch_cpu.so"), mode=os.RTLD_NOLOAD | os.RTLD_LAZY)


def _gomp_parallel() -> int:
    """Return the address of GOMP_parallel in the OpenMP runtime that torch uses, or 0 if there is none."""
    try:
        return ctypes.cast(torch_library().GOMP_parallel, ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        return 0
