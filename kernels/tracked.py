"""Find out whether the caller wants a derivative of a value. funcrec differentiates a tracked value, or refuses it.

A tensor is tracked if plain autograd, a level of torch.func (grad, vjp, jvp, in any nesting and under vmap), or a
forward tangent follows it. Integers and booleans are never tracked.
"""

import contextlib
import operator
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._C._functorch import (
    TransformType,
    get_interpreter_stack,
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    is_gradtrackingtensor,
    maybe_get_level,
    peek_interpreter_stack,
)
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

# {id of a tensor: its stand-in} while a function runs again, with other tensors for those that it closes over
stand_ins: ContextVar[dict[int, Tensor]] = ContextVar("funcrec_stand_ins", default={})  # noqa: B039 (never written to)
_PLAIN, _is_cpu = frozenset((Tensor, torch.nn.Parameter)), operator.attrgetter("is_cpu")


def stand_in(x: Tensor) -> Tensor:
    """Return the tensor that operations get in place of x, which is x unless a function runs again."""
    return x if torch.compiler.is_dynamo_compiling() else stand_ins.get().get(id(x), x)


def is_transforming() -> bool:
    """Return whether a transform of torch.func runs, or a forward level is open."""
    return peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def is_tracked(x: Tensor) -> bool:
    """Return whether a derivative of x is wanted, at any level."""
    x = stand_in(x)
    if not (x.is_floating_point() or x.is_complex()):
        return False
    if torch.compiler.is_dynamo_compiling():
        return is_gradtrackingtensor(x) or (x.requires_grad and torch.is_grad_enabled())
    if not is_transforming():
        return x.requires_grad and torch.is_grad_enabled()
    with torch._C.DisableTorchFunction():  # A tensor inside x may have a stand-in of its own.
        return _is_tracked_at_a_level(x)


def _is_tracked_at_a_level(x: Tensor) -> bool:
    stack = get_interpreter_stack() or ()
    jvps = {i.level() for i in stack if i.key() == TransformType.Jvp}
    current = stack[-1].level() if stack else 0
    while is_functorch_wrapped_tensor(x):
        if is_gradtrackingtensor(x):
            level = maybe_get_level(x)
            if x.requires_grad and (level != current or torch.is_grad_enabled()):
                return True
            if level in jvps and _has_tangent_at(x, level):
                return True
        x = get_unwrapped(x)
    return (x.requires_grad and torch.is_grad_enabled()) or (forward_ad._current_level >= 0 and _has_tangent(x))


def is_in_derivative() -> bool:
    """Return whether a grad or jvp runs, or a forward level is open, whichever tensors they track."""
    derivatives = (TransformType.Grad, TransformType.Jvp)
    return forward_ad._current_level >= 0 or any(i.key() in derivatives for i in get_interpreter_stack() or ())


def is_in_jvp() -> bool:
    """Return whether a jvp of torch.func runs, at any level."""
    return any(i.key() == TransformType.Jvp for i in get_interpreter_stack() or ())


def any_tracked(tensors: Iterable[Any]) -> bool:
    """Return whether any of the tensors is tracked; other values count as untracked."""
    if not torch.compiler.is_dynamo_compiling() and not is_transforming():
        return torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors)
    return any(isinstance(x, Tensor) and is_tracked(x) for x in tensors)


def is_forward() -> bool:
    """Return whether a forward level is open. Then outputs carry tangents, and tangents of integers are zeros."""
    return forward_ad._current_level >= 0


def is_differentiating() -> bool:
    """Return whether any tensor can be tracked now."""
    return torch.is_grad_enabled() or forward_ad._current_level >= 0


def is_tracked_here(x: object) -> bool:
    """Return whether the current level wants the derivative of x, an argument of an operator's autograd kernel.

    Each level calls that kernel in turn.
    """
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return False
    return (x.requires_grad and torch.is_grad_enabled()) or (forward_ad._current_level >= 0 and _has_tangent(x))


def is_bare(tensors: Sequence[Tensor]) -> bool:
    """Return whether all tensors are plain and on the CPU, and nothing observes the call of an operator.

    A lazy negative, such as the imaginary part of a conjugate, is not plain: its memory has the other sign.
    """
    usual = is_quiet() and _PLAIN.issuperset(map(type, tensors)) and all(map(_is_cpu, tensors))
    return usual and not any(map(Tensor.is_neg, tensors))


def is_quiet() -> bool:
    """Return whether no transform, mode, tracer, compiler or profiler has to see a call."""
    return not (
        torch.compiler.is_compiling()
        or is_transforming()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._dispatch_tls_is_dispatch_key_included(DispatchKey.PreDispatch)
        or torch._C._is_tracing()
        or torch.autograd._profiler_enabled()  # pyright: ignore[reportPrivateImportUsage]
    )


def is_transformed(x: Tensor) -> bool:
    """Return whether x is tracked, or a vmap batches x."""
    return is_tracked(x) or is_functorch_wrapped_tensor(stand_in(x))


def is_followed(x: Tensor) -> bool:
    """Return whether a transform, or a graph being traced, sees x, so that x stands for more than its value."""
    return is_transformed(x) or isinstance(x, FakeTensor)


def is_concrete(x: Tensor) -> bool:
    """Return whether code can read x's values without waiting for a device or breaking a trace."""
    x = stand_in(x)
    if x.device.type != "cpu" or torch.compiler.is_dynamo_compiling():
        return False
    plain = type(x) in _PLAIN
    return plain and not is_functorch_wrapped_tensor(x) and not is_recorded()


def is_recorded() -> bool:
    """Return whether a mode of torch follows operators, whose tensors may have no values.

    A mode with the attribute `keeps_values` runs each operator at once (`funcrec.invariance`).
    """
    modes = map(torch._C._get_dispatch_stack_at, range(torch._C._len_torch_dispatch_stack()))
    return not all(getattr(mode, "keeps_values", False) for mode in modes)


def vmaps_of(tensors: Iterable[Any]) -> frozenset[int]:
    """Return the levels of vmap at which a tensor differs from member to member."""
    levels = set()
    for x in map(stand_in, tensors) if is_transforming() else ():
        while isinstance(x, Tensor) and is_functorch_wrapped_tensor(x):
            if is_batchedtensor(x):
                levels.add(maybe_get_level(x))
            x = get_unwrapped(x)
    return frozenset(levels)


def plain(x: Tensor) -> Tensor | None:
    """Return the tensor inside all levels around x (a whole batch under vmap), or None if it has no value to read."""
    x = stand_in(x)
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return None if isinstance(x, FakeTensor) or x.is_meta else x


def _has_tangent_at(x: Tensor, level: int) -> bool:
    """Return whether x has a tangent at a level of jvp.

    Only that level can answer, so the function leaves the levels inside it meanwhile. A tensor made inside those levels
    belongs to every level, but no outer level tracks it.
    """
    with contextlib.ExitStack() as inside:
        while peek_interpreter_stack().level() > level:
            inside.enter_context(temporarily_pop_interpreter_stack())
        return _has_tangent(x)


def _has_tangent(x: Tensor) -> bool:
    with torch._C._DisableFuncTorch() if not is_functorch_wrapped_tensor(x) else contextlib.nullcontext():
        return torch._VF._unpack_dual(x, level=0)[1] is not None
