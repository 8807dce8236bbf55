"""Calls whose tensors C++ describes (csrc/objects.h), because in Python one attribute of a tensor costs about 0.3 µs.

    ran(plan, tensors)          plan: a call without its tensors, which a caller keeps; a plan keeps no tensor

`ran` does not run an unusual call (another dtype, device or layout, a short buffer). The caller then describes the
tensors in Python, which converts them or raises.
"""

import ctypes
import functools
import math
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from funcrec.kernels.cpp import _native
from torch import Tensor

ROWS, INTS, OUT, REALS, NUMBER, FLAT, MATRIX, INSIDE = range(8)  # Slot::Form of csrc/objects.h
KINDS = {  # {dtype: DLPack's number of it, code << 8 | bits}
    torch.uint8: 1 << 8 | 8, torch.float32: 2 << 8 | 32, torch.float64: 2 << 8 | 64, torch.float16: 2 << 8 | 16,
    torch.bfloat16: 4 << 8 | 16, torch.int64: 64, torch.int32: 32,
}  # fmt: skip
LOOK_CLOSER = 4
MOST = 16  # the most plans that `find` keeps for an operation


class Slot(NamedTuple):
    """A place in the array of a call that describes a tensor.

    Forms: ROWS, any number of rows of `size` columns; INTS, i32 or i64 [N] with N >= size; OUT, rows that only their
    address describes; REALS, [N] where N is at least the array's number at `size`; NUMBER, one number; FLAT, any shape;
    MATRIX, rows of `size` columns at any distance; INSIDE, no tensor, but the address of the array's number at `size`.
    """

    place: int
    form: int
    size: int
    dtype: torch.dtype = torch.uint8


class Plan(NamedTuple):
    """A call without its tensors.

    static: the arguments that made the plan, which `find` compares. name: the name of the entry point. numbers: the
    packed slots and array. shape: the shape of the output. is_large: whether the output is large enough for huge pages.
    """

    static: tuple
    name: str
    numbers: bytes
    shape: tuple[int, ...]
    is_large: bool


def plan_of(
    static: tuple,
    name: str,
    array: Sequence[int],
    slots: Sequence[Slot],
    shape: tuple[int, ...] = (),
    verdicts: int = 0,
) -> Plan:
    """Return a plan of a call.

    array: the numbers of the call, first the number of threads, with any numbers at the places of the slots.
    verdicts: how many of the array's last numbers are -1, and stay so unless the call refuses its arguments.
    """
    flat = [n for s in slots for n in (*s[:3], KINDS[s.dtype])]
    packed = len(slots), len(array), verdicts, *flat, *array
    is_large = 8 * math.prod(shape) >= _native.MIN_ADVISED
    return Plan(static, name, struct.pack(f"{len(packed)}q", *packed), shape, is_large)


def find(plans: list[Plan], static: tuple, make: Callable[..., Plan | None]) -> Plan | None:
    """Return the plan in `plans` with equal static arguments, or make(*static), which then replaces the oldest plan.

    Lists that hold the same objects, such as lists that a caller keeps, compare equal without a look at each number.
    """
    for plan in plans:
        if plan.static == static:
            return plan
    plan = make(*static)
    if plan is not None:
        plans[:] = [plan, *plans[: MOST - 1]]
    return plan


def are_usual(tensors: Sequence[Tensor]) -> bool:
    """Return whether a plan may fit the tensors. To make a plan takes longer than a call."""
    return all(type(x) is Tensor and x.is_cpu and x.dtype in KINDS for x in tensors)


def forgotten(plans: list[Plan], plan: Plan) -> None:
    """Take a plan that does not fit its caller's tensors from the list."""
    plans[:] = [x for x in plans if x is not plan]


def ran(plan: Plan, tensors: list[Tensor]) -> bool:
    """Return True after running the call, or return False without running it."""
    run, entry = _runner(_native.library()._name, plan.name)
    if run is None:
        return False
    status = run(entry, tensors, plan.numbers, torch.get_num_threads())
    if status == LOOK_CLOSER:
        return False
    _native.finish(plan.name, status)
    return True


@functools.lru_cache(maxsize=64)
def _runner(path: str, name: str) -> tuple[Callable | None, int]:
    """Return the function funcrec_planned of the compiled object, and the address of one of the object's entry points.

    Return None for the function if the object is older, or torch lacks DLPack's functions.
    """
    loaded, capsule = ctypes.PyDLL(path), getattr(Tensor, "__dlpack_c_exchange_api__", None)  # PyDLL keeps the GIL.
    if capsule is None or not hasattr(loaded, "funcrec_planned"):
        return None, 0
    python = ctypes.pythonapi
    pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", python))
    table = pointer(capsule, b"dlpack_exchange_api")
    borrow = ctypes.cast(table, ctypes.POINTER(ctypes.c_void_p))[5]  # after a version, an older table, three functions
    if ctypes.cast(table, ctypes.POINTER(ctypes.c_uint32))[0] != 1 or not borrow:
        return None, 0
    address = lambda function: ctypes.cast(function, ctypes.c_void_p).value or 0
    names = "PyList_GetItem", "PyObject_Type", "Py_DecRef", "PyErr_Clear", "PyEval_SaveThread", "PyEval_RestoreThread"
    given = id(Tensor), borrow, *(address(getattr(python, n)) for n in names)
    loaded.funcrec_python(struct.pack(f"{len(given)}q", *given))
    run = loaded.funcrec_planned
    run.argtypes = [ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p, ctypes.c_int64]
    run.restype = ctypes.c_int64
    return run, address(getattr(loaded, f"funcrec_{name}"))
