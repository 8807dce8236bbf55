"""jit: a pure function staged once per shape, compiled, and with donated arguments updated in place.

    jit(f)(x) = f(x);     jit(f, donate=("s",))(s, x) = f(s, x), written into the memory of s

A call is flattened to tensors; `make_fx` runs the function once on shapes and records its operations; Inductor turns the
flat graph into code. Where an output is a donated leaf with some rows replaced, the code returns the rows, and
they are written into the leaf: no table is copied. Floor 3.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from funcrec import _checks as checks
from funcrec._compile import Compiled, compile_function, leaf_key
from funcrec._donation import refuse_donated
from funcrec._errors import fail
from funcrec._replay import bring
from funcrec._tree import fast_flatten
from funcrec.kernels import ops


def jit(fn: Callable, *, donate: Sequence[str] = ()) -> Callable:
    """Compile a pure function of pytrees.

    Args:
      fn: takes and returns pytrees of tensors. It reads no tensor's value on the host and writes to no argument.
        Python numbers, strings and other hashable leaves are static: a new value means a new compilation.
      donate: names of parameters that the call may use up. An output that is a donated leaf with rows replaced
        (`index_put`, as every row optimizer does) takes the leaf's memory; a leaf that is returned as it is stays where
        it is; all other outputs are new, and the old leaf's memory is given up.

    Returns: a function of the same arguments. `fn.num_compiled()` tells for how many shapes it was compiled.

    Raises: DonatedError when a value is used after it was donated, naming the argument and the call that took it.
      ValueError for an unknown name, donated memory given twice, or a function that writes to its argument. TypeError for a function that reads values on the host.

    Law: the same values as `fn`; arguments that are not donated keep every bit; the second call with the same shapes
    compiles nothing.

    Example:
      >>> import torch, funcrec as fr
      >>> step = fr.jit(lambda state, x: state + x, donate=("state",))
      >>> old = torch.zeros(2)
      >>> new = step(old, torch.ones(2))
      >>> new
      tensor([1., 1.])
      >>> old + 1  # doctest: +ELLIPSIS
      Traceback (most recent call last):
      ...
      funcrec._errors.DonatedError: ...
    """
    name = getattr(fn, "__name__", type(fn).__name__)
    signature = inspect.signature(fn)
    donate = (donate,) if isinstance(donate, str) else tuple(donate)
    unknown = [d for d in donate if d not in signature.parameters]
    if unknown:
        need = f"among {list(signature.parameters)}"
        fail(f"funcrec.jit({name})", "`donate` names no parameter.", got=f"{unknown}", need=need)
    positional = tuple(signature.parameters) if _all_positional(signature) else None
    compiled: dict[Any, Compiled] = {}
    recent: dict[Any, Compiled] = {}  # the last one used for each structure: most calls repeat its shapes
    calls = 0

    @functools.wraps(fn)
    def run(*args, **kwargs):
        nonlocal calls
        if not kwargs and positional is not None and len(args) == len(positional):
            names, arguments = positional, args
        else:
            bound = signature.bind(*args, **kwargs)
            names, arguments = tuple(bound.arguments), tuple(bound.arguments.values())
        leaves, structure = fast_flatten(arguments)
        if donate and torch.cuda.is_initialized():
            leaves = bring_to_cuda(leaves)
        calls += 1
        when, here = (name, calls), (names, structure, *_surroundings())
        entry = recent.get(here)
        if entry is not None and torch._C._functorch.peek_interpreter_stack() is None and entry.follows(leaves):
            return entry(leaves, when)
        refuse_donated(leaves)
        if checks.is_checking() or torch.compiler.is_compiling() or any(map(_is_traced, leaves)):
            return fn(*args, **kwargs)
        key = (here, tuple(map(leaf_key, leaves)))
        entry = compiled.get(key)
        if entry is None:
            entry = compiled[key] = compile_function(fn, name, signature, names, leaves, structure, donate)
        recent[here] = entry
        entry.admit(leaves)
        return entry(leaves, when)

    run.num_compiled = lambda: len(compiled)
    return run


def _all_positional(signature: inspect.Signature) -> bool:
    return all(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in signature.parameters.values())


def bring_to_cuda(leaves: list) -> list:
    """The leaves, those on the host brought to the one CUDA device that others are on."""
    devices = {x.device for x in leaves if isinstance(x, Tensor)}
    on_cuda = [d for d in devices if d.type == "cuda"]
    return bring(leaves, on_cuda[0]) if len(devices) > 1 and len(on_cuda) == 1 else leaves


def _surroundings() -> tuple:
    """What the compiled code depends on besides its arguments."""
    return ops.ambient(), checks.is_checking(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()


def _is_traced(x: object) -> bool:
    if not isinstance(x, Tensor):
        return False
    return torch._C._functorch.is_functorch_wrapped_tensor(x) or isinstance(x, FakeTensor)
