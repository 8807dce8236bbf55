"""Whether a derivative of a value is wanted: what is tracked is differentiated, or refused.

A tensor is tracked if plain autograd, a level of torch.func (grad, vjp, jvp, under any nesting and vmap), or a forward
tangent follows it. Integers and booleans never are.
"""

import contextlib
import operator
from collections.abc import Iterable, Sequence

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

_PLAIN, _is_cpu = frozenset((Tensor, torch.nn.Parameter)), operator.attrgetter("is_cpu")


def is_transforming() -> bool:
    """Whether some transform of torch.func runs, or a forward level is open."""
    return peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def is_tracked(x: Tensor) -> bool:
    """Whether a derivative of x is wanted, at any level."""
    if not (x.is_floating_point() or x.is_complex()):
        return False
    if torch.compiler.is_dynamo_compiling():
        return is_gradtrackingtensor(x) or (x.requires_grad and torch.is_grad_enabled())
    if not is_transforming():
        return x.requires_grad and torch.is_grad_enabled()
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
    """Whether a grad or jvp runs, or a forward level is open, whatever it follows."""
    derivatives = (TransformType.Grad, TransformType.Jvp)
    return forward_ad._current_level >= 0 or any(i.key() in derivatives for i in get_interpreter_stack() or ())


def any_tracked(tensors: Iterable) -> bool:
    """Whether one of them is; what is no tensor is not."""
    if not torch.compiler.is_dynamo_compiling() and not is_transforming():
        return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tensors)
    return any(isinstance(x, Tensor) and is_tracked(x) for x in tensors)


def is_forward() -> bool:
    """Whether a forward level is open: what is returned from it comes with tangents, in which integers are zeros."""
    return forward_ad._current_level >= 0


def is_differentiating() -> bool:
    """Whether anything can be tracked at all."""
    return torch.is_grad_enabled() or forward_ad._current_level >= 0


def is_tracked_here(x: object) -> bool:
    """Of an argument of an operator's autograd kernel, which each level
    calls in turn: whether this level wants its derivative."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return False
    return (x.requires_grad and torch.is_grad_enabled()) or (forward_ad._current_level >= 0 and _has_tangent(x))


def is_bare(tensors: Sequence[Tensor]) -> bool:
    """Whether an operator called with these would only run: they are plain, on the CPU, and nobody looks on."""
    return is_quiet() and _PLAIN.issuperset(map(type, tensors)) and all(map(_is_cpu, tensors))


def is_quiet() -> bool:
    """Whether no transform, mode, tracer, compiler or profiler has to see a call."""
    return not (
        torch.compiler.is_compiling()
        or is_transforming()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._dispatch_tls_is_dispatch_key_included(DispatchKey.PreDispatch)
        or torch._C._is_tracing()
        or torch.autograd._profiler_enabled()
    )


def is_transformed(x: Tensor) -> bool:
    """Whether x is tracked, or one of a batch of vmap's."""
    return is_tracked(x) or is_functorch_wrapped_tensor(x)


def is_followed(x: Tensor) -> bool:
    """Whether a transform sees x, or a graph that is being staged: x stands for more than its value."""
    return is_transformed(x) or isinstance(x, FakeTensor)


def vmaps_of(tensors: Iterable) -> frozenset[int]:
    """The levels of vmap at which one of the tensors differs from member to member."""
    levels = set()
    for x in tensors if is_transforming() else ():
        while isinstance(x, Tensor) and is_functorch_wrapped_tensor(x):
            if is_batchedtensor(x):
                levels.add(maybe_get_level(x))
            x = get_unwrapped(x)
    return frozenset(levels)


def plain(x: Tensor) -> Tensor | None:
    """What the levels around x hold, of a whole batch under vmap; None where there is no value to be read."""
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return None if isinstance(x, FakeTensor) or x.is_meta else x


def _has_tangent_at(x: Tensor, level: int) -> bool:
    """Whether it has a tangent at a level of jvp, which that level alone can tell: those inside it are left for the
    question. What is made inside them is a tensor of every level, and none of the outer ones follows it."""
    with contextlib.ExitStack() as inside:
        while peek_interpreter_stack().level() > level:
            inside.enter_context(temporarily_pop_interpreter_stack())
        return _has_tangent(x)


def _has_tangent(x: Tensor) -> bool:
    with torch._C._DisableFuncTorch() if not is_functorch_wrapped_tensor(x) else contextlib.nullcontext():
        return torch._VF._unpack_dual(x, level=0)[1] is not None
