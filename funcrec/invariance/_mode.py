"""The transform `invariant`, which makes the bits of a function depend on the numbers alone.

    invariant(f)(x)[i] has the bits of invariant(f)(x[i : i + 1])[0], for a function f of examples

Each operator that the function reaches has its place in the table (`place_of`), below autograd and vmap.
"""

import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, NoReturn, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from funcrec.core import any_tracked, by_tree, describe, fail, is_in_derivative, own_errors, tree_leaves, typed
from funcrec.invariance._hints import hint_for
from funcrec.invariance._orders import LeftToRight
from funcrec.invariance._replaced import of_one_dtype
from funcrec.invariance._table import OF_SOME, place_of

A = ParamSpec("A")
R = TypeVar("R")
CALL = "funcrec.invariant"


@typed
def invariant(fn: Callable[A, R]) -> Callable[A, R]:
    """Return `fn` with results whose bits depend on the numbers alone.

    Products and sums have a fixed order: up to 256 terms in order, and more terms as two halves. Exponentials,
    logarithms, roots, powers, sigmoid, tanh, erf, sine, cosine, their inverses, and what torch composes of them
    (softmax, gelu, layer norm, attention, losses), are computed from exact operations only. So an example has the same
    prediction alone and in any batch, at any place; members of vmap have the bits of their own runs; and no bit depends
    on threads, on the instruction set, or on torch's libraries.

    Args:
      fn: a pure function of trees: a prediction, or a whole training step with its derivative. Put `invariant` around
        the derivative, and `fr.jit` or `fr.export` around `invariant`.

    Raises:
      TypeError: `fn` reaches an operator whose order of operations is torch's own, such as a convolution, a
        decomposition of a matrix, or a draw of torch's generator, or complex numbers (the message says what to write in
        its place); `fn` returns what computes after the call, such as a generator or a coroutine; something
        outside differentiates the call; or torch.export or torch.jit.trace records it.
      NotImplementedError: a product or a sum on a device without an implementation, such as CUDA; a forward or second
        derivative of attention within bags.

    Law: for a function of examples, invariant(fn) of a batch has in each row the bits of the example alone. Values are
      those of `fn`, up to rounding. The bits of lookups, row updates, interactions and attention within bags
      (`jagged_attention`) are so without `invariant`, too. 16-bit floats are computed in f32, and each operation rounds
      once, a product before its bias. A number without dims has no more digits than its tensor. Zeros
      after the last term change no bit of a sum of up to 256 terms; the order of a longer sum follows the number of its
      terms. `fn` computes in the caller's thread, by torch: threads that it starts, numpy, and functions that it
      returns are not seen.

    On ranks: `psum`, `psum_invariant`, `pmean`, `psum_scatter` and their transposes add floats as a tree of neighbours,
      in the order of the ranks, emulated or real. (16-bit floats are added in f32, and rounded after each axis.) So n
      ranks give one process's bits of a sum over examples, if n is a power of two, and each rank has the same number of
      terms, more than 128. Other sums are right, and repeat their own bits. Lookups in sharded tables send rows,
      as with `exact=True`; `dedup` and a `codec` raise.

    Cost: products have 0.88 to 1.08 of oneDNN's speed for 64 rows and more, and 0.3 to 1.9 times its speed for fewer. A
      compiled step takes 0.99 to 1.08 times the time (DLRM of batch 512, DeepFM), on one thread and two of an AMD EPYC;
      an Intel Xeon took 1.1 to 1.2 times before tiles read their operands in place. A package takes 0.5 to 1.1 times
      the time, because it holds weights turned. Eager calls find each operator by Python, 6 to 12 µs each, so that an
      eager prediction of 64 rows takes 1.7 to 1.9 times as long (DeepFM), of one row three times, and a network of
      three layers for one row 13 times (0.12 ms). Eager elementwise functions are one loop each: in f32, those of large
      tensors take 0.2 to 1.7 times as long as torch's (tanh, exp, log, sigmoid), sines and erfc four times.

    Example:
      >>> import torch, funcrec as fr
      >>> predict = fr.invariant(lambda w, x: torch.sigmoid(x @ w))
      >>> w, x = torch.full((100, 8), 0.1), torch.linspace(-1, 1, 5000).reshape(50, 100)
      >>> torch.equal(predict(w, x)[7:8], predict(w, x[7:8]))
      True

    Source: He et al., "Defeating nondeterminism in LLM inference" (2025), for batch invariance; the order of the sums
      is that of pairwise summation in blocks: Higham, "The accuracy of floating point summation" (1993).
    """

    @functools.wraps(fn)
    def run(*args: A.args, **kwargs: A.kwargs) -> R:
        refuse_followed(tree_leaves((args, kwargs)))
        is_tracing = cast(Any, torch.jit).is_tracing()
        if torch.compiler.is_exporting() or is_tracing:
            need, hint = "fr.export, with `invariant` outermost", "fr.export(fr.invariant(fn), ...)"
            got = "torch.jit.trace" if is_tracing else "torch.export"
            fail(
                CALL, f"{got} records above the call, and would lose it.", got=got, need=need, hint=hint, kind=TypeError
            )
        told = own_errors(CALL, fn, *args, *kwargs.values(), need="arguments of `fn`")
        with told, Invariant(), LeftToRight(refuse), by_tree():
            out = fn(*args, **kwargs)
        leaves = tree_leaves(out)
        refuse_followed(leaves)  # The function may close over what autograd follows.
        refuse_later(leaves)
        return out

    cast(Any, run).invariant_of = fn
    return run


def plain_of(fn: Callable) -> Callable | None:
    """Return f of invariant(f), with chains of products in one order, or None for any other function."""
    plain = getattr(fn, "invariant_of", None)
    if plain is None:
        return None

    @functools.wraps(plain)
    def run(*args: Any, **kwargs: Any) -> Any:
        with LeftToRight(refuse):
            return plain(*args, **kwargs)

    return run


class Invariant(TorchDispatchMode):
    """A mode in which each operator takes its place in the table, or raises."""

    supports_higher_order_operators = True  # such as torch.cond, which it refuses with words
    keeps_values = True  # `funcrec.kernels.tracked`: it records nothing, so values can be read

    def __init__(self) -> None:
        super().__init__()
        self.composing: list[Any] = []  # the operators whose parts run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # the parts of an operator are no calls of the function's own
            return self.placed(func, types, args, kwargs or {})

    def placed(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Return the operator's result, from its place in the table."""
        how, run = place_of(func)
        if how == "exact" or how == "replaced":  # most calls: the time is that of a small operator
            refuse_complex(func, args)
            if kwargs:
                refuse_complex(func, kwargs.values())
            out = run(*args, **kwargs)
            if out is NotImplemented or (isinstance(out, Tensor) and out.is_complex()):
                refuse(func)
            return out
        if isinstance(func, HigherOrderOperator):
            refuse(func)
        tensors = tensors_of((*args, *kwargs.values()))
        refuse_complex(func, tensors)
        if how == "composed" and tensors and not any(map(is_float, tensors)):
            out = func(*args, **kwargs)
            if not any(map(is_float, tree_leaves(out))):
                return out  # integers have one result, in any order
        if func in OF_SOME and not all(x.numel() for x in tensors):
            how, run = "exact", func
        if how == "composed" and func in self.composing:
            how, run = "unknown", func  # torch composes it of itself
        if how == "composed":
            self.composing.append(func)
            args = of_one_dtype(args)
            try:
                with self:  # Each part has its own place.
                    out = run(*args, **kwargs)
            finally:
                self.composing.pop()
        elif how == "in place":
            out = self.written(run, types, args, kwargs)
        else:
            out = run(*args, **kwargs)
        if out is NotImplemented or (how == "unknown" and makes_floats(func, args, kwargs, out)):
            refuse(func)
        if isinstance(out, Tensor) and out.is_complex():
            refuse(func)  # here, as Python has words of its own for a TypeError of x @ y and x + y
        return out

    def written(self, pure: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
        """Return the first argument with the result of the pure operator in its memory."""
        out = self.__torch_dispatch__(pure, types, args, kwargs)
        if not torch.can_cast(out.dtype, args[0].dtype) or out.shape != args[0].shape:
            got, need = f"{out.dtype}{list(out.shape)} into {args[0].dtype}{list(args[0].shape)}", "the same form"
            fail(CALL, f"`{pure}` in place does not fit.", got=got, need=need, hint="a new tensor", kind=TypeError)
        return args[0].copy_(out)


def tensors_of(args: Sequence[Any]) -> list[Tensor]:
    """Return the tensors of an operator's arguments, which are values and lists of values."""
    found = []
    for x in args:
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, list | tuple):
            found += tensors_of(x)
    return found


def refuse_complex(func: Any, values: Iterable[Any]) -> None:
    """Raise if a value is complex, or a list with a complex value: the table has no operators of complex numbers."""
    for x in values:
        if isinstance(x, Tensor):
            if x.is_complex():
                refuse(func)
        elif isinstance(x, list | tuple):
            refuse_complex(func, x)


def makes_floats(func: Any, args: Any, kwargs: Any, out: Any) -> bool:
    """Return whether the operator returned floats, or may have written floats to its arguments."""
    is_pure = isinstance(func, OpOverload) and not func._schema.is_mutable
    return any(map(is_float, tree_leaves(out if is_pure else (args, kwargs, out))))


def is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def refuse(func: Any) -> NoReturn:
    need, hint = "operators with a fixed order of operations", hint_for(func)
    fail(CALL, "an operator has no fixed order here.", got=f"{func}", need=need, hint=hint, kind=TypeError)


def refuse_later(leaves: list[Any]) -> None:
    """Raise if a result is a generator, a coroutine or an iterator: it computes when the mode has ended."""
    for x in leaves:
        if isinstance(x, Iterator | Awaitable | AsyncIterator):
            if isinstance(x, Coroutine):
                x.close()  # nobody will wait for it
            what, need = "a result computes after the call.", "numbers and tensors"
            hint = "fr.invariant around what the result computes, inside"
            fail(CALL, what, got=describe(x), need=need, hint=hint, kind=TypeError)


def refuse_followed(leaves: list[Any]) -> None:
    """Raise if something outside the call differentiates it: the derivative would run without the mode."""
    if is_in_derivative() or any_tracked(leaves):
        need, hint = "values that nothing follows", "fr.invariant(fr.value_and_grad(fn)), around the derivative"
        fail(
            CALL,
            "the call is differentiated from outside.",
            got="a tracked value",
            need=need,
            hint=hint,
            kind=TypeError,
        )
