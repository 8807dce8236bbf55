"""Errors in compiled loops raise where the program is called, on one thread and on several.

    jit(f)(x) raises where f(x) raises: an index out of bounds, an integer divided by 0, counts of another sum

Inductor checks each index within its loop and throws there. A C++ exception that leaves a loop of several OpenMP
threads ends the process.
Upstream: https://github.com/pytorch/pytorch/issues/195402.
"""

import re
from collections.abc import Callable
from typing import Any

import torch

RAISES = ("TORCH_CHECK(", "throw ", "_integral(")  # of checks, and of divisions of integers
KEPT = """
struct Failure {
  std::atomic<bool> is_taken{false};
  std::exception_ptr first;
  void keep() { if (!is_taken.exchange(true)) first = std::current_exception(); }
  void raise() { if (first) std::rethrow_exception(first); }
} failure;
"""
CHECKED = re.compile(r"index out of bounds: 0 <= \w+ < (\d+)L?")
# Inductor's own way for divisions by 0: a global pointer to this call's flag, which calls of other threads replace.
FLAG = "inductor_cpu_integer_div_error"


def raising() -> list[tuple[Any, str, Callable]]:
    """(owner, name, make): Inductor's functions f, and what puts make(f) in their place so that its loops raise."""
    from torch._inductor import compile_fx
    from torch._inductor.codegen.cpp import CppKernelProxy, KernelGroup

    return [
        (CppKernelProxy, "gen_body", with_catch),
        (KernelGroup, "codegen_group", with_rethrow),
        (compile_fx, "select_decomp_table", with_own_checks),
    ]


def with_catch(gen_body: Callable) -> Callable:
    """A loop's body that keeps what it throws and goes on with the next element."""

    def body(self: Any, code: Any) -> None:
        own = type(code)()
        gen_body(self, own)
        if not any(x in own.getrawvalue() for x in RAISES):
            code.splice(own)
            return
        code.writeline("try")
        with code.indent():
            code.splice(own)
        code.writeline("catch (...) { failure.keep(); }")

    return body


def with_rethrow(codegen_group: Callable) -> Callable:
    """A function of loops that throws, after all of them, the first error that one of them kept."""

    def function(self: Any, name: str | None = None) -> str:
        lines = codegen_group(self, name).splitlines()
        text = "\n".join(line for line in lines if FLAG not in line)
        if "failure.keep()" not in text:
            return text
        head, _, rest = text.partition("{\n")
        body, _, tail = CHECKED.sub(r"index out of bounds for a dimension of size \1", rest).rpartition("}")
        return f"{head}{{{KEPT}{body}failure.raise();\n}}{tail}"

    return function


def with_own_checks(table: Callable) -> Callable:
    """Inductor's operators that are written as others, less one that then is not checked: counts that are negative, or
    whose sum is not the size that was given, repeat as many rows as were asked for."""
    return lambda: {k: f for k, f in table().items() if k is not torch.ops.aten.repeat_interleave.Tensor}
