"""Make the call of a program raise the errors of its compiled loops, on one thread or several.

    jit(f)(x) raises where f(x) raises: an index out of bounds, an integer divided by 0, counts with a wrong sum

Inductor checks each index within a loop, and the loop throws. A C++ exception that leaves a loop on several OpenMP
threads ends the process.
Upstream: https://github.com/pytorch/pytorch/issues/195402.
"""

import re
from collections.abc import Callable
from typing import Any

import torch

RAISES = ("TORCH_CHECK(", "throw ", "_integral(")  # marks of checks, and of divisions of integers
KEPT = """
struct Failure {
  std::atomic<bool> is_taken{false};
  std::exception_ptr first;
  void keep() { if (!is_taken.exchange(true)) first = std::current_exception(); }
  void raise() { if (first) std::rethrow_exception(first); }
} failure;
"""
CHECKED = re.compile(r"index out of bounds: 0 <= \w+ < (\d+)L?")
# For divisions by 0, Inductor's own lines use a global pointer to a flag of the call. Other threads overwrite it.
FLAG = "inductor_cpu_integer_div_error"


def raising() -> list[tuple[Any, str, Callable]]:
    """Return (owner, name, make) for functions f of Inductor. With make(f) in place of each f, loops raise."""
    from torch._inductor import compile_fx
    from torch._inductor.codegen.cpp import CppKernelProxy, KernelGroup

    return [
        (CppKernelProxy, "gen_body", with_catch),
        (KernelGroup, "codegen_group", with_rethrow),
        (compile_fx, "select_decomp_table", with_own_checks),
    ]


def with_catch(gen_body: Callable) -> Callable:
    """Return a `gen_body` whose loops keep an error that the body throws, and go on with the next element."""

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
    """Return a `codegen_group` whose function throws, after all its loops, the first error that a loop kept."""

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
    """Return a function that returns Inductor's decompositions without that of repeat_interleave.

    That decomposition skips checks of the counts. With negative counts, or counts whose sum is not the given size, the
    decomposition would repeat the wrong number of rows.
    """
    return lambda: {k: f for k, f in table().items() if k is not torch.ops.aten.repeat_interleave.Tensor}
