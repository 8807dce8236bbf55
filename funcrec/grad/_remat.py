"""remat: a function whose derivative keeps its arguments alone, and computes the rest again.

    remat(f)(x) = f(x)        d_x = vjp(f, x)(d_y), where x is all that the forward pass keeps

Deep models keep the results of every layer for the backward pass. With `remat` around each layer, one layer's results
exist at a time, for one more forward pass.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from funcrec.core import (
    Run,
    below,
    describe,
    fail,
    first_run,
    is_forward,
    is_in_jvp,
    is_in_transform,
    is_reversed,
    later_run,
    one_level_below,
    outside_transforms,
    own_errors,
    paths,
    pulled_back,
    pushed_forward,
    quiet,
    refuse_draws,
    taken,
    tree_flatten,
    tree_unflatten,
    typed,
    version_of,
)

CALL = "funcrec.remat"
A = ParamSpec("A")
R = TypeVar("R")
Flat = Callable[..., tuple[Tensor, ...]]  # a function of tensors that returns float tensors


@typed
def remat(fn: Callable[A, R]) -> Callable[A, R]:
    """Return `fn` with the same values and derivatives, whose reverse derivative keeps only the arguments.

    Args:
      fn: a pure function of trees that returns a tree, such as a layer or a whole model. It may call lookups, also of
        the tables of a loss inside `value_and_grad`, and exchange values between ranks. A loss whose only layer it is
        keeps as much as before: wrap the layers, not the loss.

    Returns:
      a function of the same arguments. It keeps the tensors of the arguments, and those of the closure that a
      derivative follows. The backward pass runs `fn` once more, and then has its tensors for a moment.

    Raises:
      TypeError: if `fn` draws from torch's generator, or writes to a tensor that it closes over; if a transform inside
        of `fn` (a vmap, a jvp) follows a tensor that `fn` closes over instead of taking it as an argument.
      ValueError: if `fn` writes to its arguments, or runs otherwise when it is computed again.

    Law: values have the bits of `fn`'s, and every derivative is `fn`'s, under every transform of torch.func, by
      autograd, and inside `fr.jit`. Random numbers are made of keys, so they are the same in both runs. Derivatives of
      derivatives compute the inner derivative's own tensors again, too. Under torch.compile and torch.export, `fn` runs
      as it is: torch.compile chooses what it keeps.

    Cost: one more forward pass of `fn` in each backward pass, with its lookups and exchanges. Without `fr.jit` also 1.6
      ms per call, for two runs that are watched. Under `fr.jit` the recomputation waits for the cotangents of the
      result, by a copy of the differentiated arguments.

    Example:
      >>> import torch, funcrec as fr
      >>> layer = fr.remat(lambda w, x: torch.tanh(x @ w))
      >>> loss_fn = lambda w, x: layer(w, layer(w, x)).sum()
      >>> torch.func.grad(loss_fn)(torch.eye(2), torch.zeros(1, 2))
      tensor([[0., 0.],
              [0., 0.]])

    Source: jax.checkpoint (jax.remat); torch.utils.checkpoint, which torch.func does not take.
    """

    @functools.wraps(fn)
    def run(*args: A.args, **kwargs: A.kwargs) -> R:
        followed = is_in_transform() or is_forward() or torch.is_grad_enabled()
        if torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting() or not followed:
            return fn(*args, **kwargs)
        leaves, structure = tree_flatten((args, kwargs))
        at = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        tensors, static = taken([leaves[i] for i in at]), [None if isinstance(x, Tensor) else x for x in leaves]

        def flat(*own: Tensor) -> Any:
            whole = list(static)
            for i, x in zip(at, own, strict=True):
                whole[i] = x
            mine, more = tree_unflatten(whole, structure)
            return cast(Callable, fn)(*mine, **more)

        with own_errors(CALL, fn, *args, *kwargs.values(), need="the arguments that it takes"), pure(args, kwargs):
            found, form, first = first_run(CALL, flat, tensors)
        if any(map(is_reversed, [*tensors, *first.outside])) and any(map(is_float, found)):
            again = Again(flat, first, contextvars.copy_context(), Modes(), found, form, len(tensors))
            results = iter(kept_apart(again, [y for y in found if is_float(y)], [*tensors, *first.outside]))
            found = [next(results) if is_float(y) else y for y in found]
        return tree_unflatten(found, form)

    return run


def is_float(x: object) -> bool:
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


class Again:
    """The function (*tensors, *outside) -> the float results of a flat function, which each call computes anew."""

    def __init__(self, flat: Callable, first: Run, context: contextvars.Context, modes: "Modes", found, form, count):
        self.flat, self.first, self.context, self.modes, self.count = flat, first, context, modes, count
        self.form = form, forms(found)

    def __call__(self, *given: Tensor) -> tuple[Tensor, ...]:
        with self.modes.restored():
            arguments = (self.first, self.flat, given[: self.count], given[self.count :])
            leaves, form = self.context.copy().run(quietly, *arguments)
        if (form, forms(leaves)) != self.form:
            got, need = f"{forms(leaves)}, before {self.form[1]}", "results of one form from the same arguments"
            what = "`fn` is not a function of its arguments: it returned another form when it was computed again."
            fail(CALL, what, got=got, need=need, hint="pass what changes as an argument")
        return tuple(x for x in leaves if is_float(x))


def quietly(*arguments: Any) -> Any:
    """Return later_run(*arguments), which prints nothing: the first run has printed."""
    with quiet():
        return later_run(*arguments)


def forms(leaves: Sequence) -> list[str]:
    return [describe(x) if isinstance(x, Tensor) else type(x).__name__ for x in leaves]


class Modes:
    """torch's modes that change what operations compute, and that a backward pass may not run in."""

    def __init__(self) -> None:
        each = ("cpu", "cuda")
        self.casts = {d: (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in each}
        self.dtype = torch.get_default_dtype()

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        now, before = Modes(), torch.get_default_dtype()
        with contextlib.ExitStack() as entered:
            for device, (is_on, dtype) in self.casts.items():
                if now.casts[device] != (is_on, dtype):
                    entered.enter_context(torch.autocast(device, dtype=dtype, enabled=is_on))
            if before != self.dtype:
                torch.set_default_dtype(self.dtype)
                entered.callback(torch.set_default_dtype, before)
            yield


# -- the derivative ----------------------------------------------------------------------------------------------


def kept_apart(again: Flat, results: Sequence[Tensor], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the results of again(*tensors), computed before, with the derivative that computes them again."""
    copies = (
        is_in_jvp() or is_forward()
    )  # torch writes a view's tangent into its base's, which may be an expanded tensor.
    return _Remat.apply(again, len(results), copies, *(y.view_as(y) for y in results), *tensors)


def applied(again: Flat, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return again(*tensors). If it is differentiated, the derivative computes it again."""
    if not any(map(is_reversed, tensors)):
        return again(*tensors)
    with torch.no_grad():
        results = again(*tensors)
    return kept_apart(again, results, tensors)


class _Remat(torch.autograd.Function):
    """(again, n, copies, *results, *tensors) -> the n results. The derivative is that of again(*tensors)."""

    @staticmethod
    def forward(again, n, copies, *tensors):
        return tuple(y.clone() if copies else y for y in tensors[:n])

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.again, ctx.n, _, *tensors = inputs
        ctx.save_for_backward(*tensors[ctx.n :])
        ctx.save_for_forward(*tensors[ctx.n :])

    @staticmethod
    def backward(ctx, *d_results):
        tensors, again = ctx.saved_tensors, ctx.again
        wanted = [i for i, is_wanted in enumerate(ctx.needs_input_grad[3 + ctx.n :]) if is_wanted]

        def pulled(*given: Tensor) -> tuple[Tensor, ...]:
            own, d = list(given[: len(tensors)]), given[len(tensors) :]

            def of(*xs: Tensor) -> tuple[Tensor, ...]:
                for i, x in zip(wanted, xs, strict=True):
                    own[i] = x
                return again(*own)

            return tuple(pulled_back(of, [own[i] for i in wanted], d))

        inputs = list(tensors)
        for i, x in zip(wanted, in_turn([tensors[i] for i in wanted], d_results), strict=True):
            inputs[i] = x
        found = dict(zip(wanted, applied(pulled, *inputs, *d_results), strict=True))
        return None, None, None, *[None] * ctx.n, *(found.get(i) for i in range(len(tensors)))

    @staticmethod
    def jvp(ctx, _again, _n, _copies, *tangents):
        n, again = ctx.n, ctx.again

        def rule(tensors, ts):
            moving = [i for i, t in enumerate(ts[n:]) if t is not None]
            if not any(is_reversed(x) for x in (*tensors, *ts) if x is not None):  # The results have their tangents.
                return tuple(None if t is None else t.view_as(t) for t in ts[:n])

            def pushed(*given: Tensor) -> tuple[Tensor, ...]:
                own, t = list(given[: len(tensors)]), given[len(tensors) :]

                def of(*xs: Tensor) -> tuple[Tensor, ...]:
                    for i, x in zip(moving, xs, strict=True):
                        own[i] = x
                    return again(*own)

                return pushed_forward(of, [unexpanded(own[i]) for i in moving], t)

            return applied(pushed, *tensors, *(ts[n + i] for i in moving))

        return one_level_below(rule, ctx.saved_tensors, tangents)

    @staticmethod
    def vmap(info, dims, again, n, copies, *tensors):
        size, own = info.batch_size, [None if d is None else 0 for d in dims[3 + n :]]
        first = lambda x, d: x.expand(size, *x.shape) if d is None else x.movedim(d, 0)
        results = [first(y, d) for y, d in zip(tensors[:n], dims[3:], strict=False)]
        mapped = [x if d is None else x.movedim(d, 0) for x, d in zip(tensors[n:], dims[3 + n :], strict=True)]

        def every(*xs: Tensor) -> tuple[Tensor, ...]:
            if all(d is None for d in own):
                return tuple(y.expand(size, *y.shape) for y in again(*xs))
            return torch.func.vmap(again, in_dims=tuple(own))(*xs)

        return _Remat.apply(every, n, copies, *results, *mapped), (0,) * n


def unexpanded(x: Tensor) -> Tensor:
    """Return x, in memory of its own if it is expanded: torch writes a tangent into memory of x's form."""
    return x.contiguous() if 0 in x.stride() else x


def in_turn(xs: Sequence[Tensor], done: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return xs, which in a traced program wait for `done`.

    Otherwise the compiler could compute both runs at once, and keep what the first run computed.
    """
    return _InTurn.apply(len(xs), *xs, *done) if torch._C._len_torch_dispatch_stack() and xs else xs


class _InTurn(torch.autograd.Function):
    """(n, *xs, *done) -> the n tensors xs, after `done`."""

    @staticmethod
    def forward(n, *tensors):
        return tuple(torch.ops.funcrec_tables.after(list(tensors[:n]), list(tensors[n:])))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.n, ctx.count = inputs[0], len(inputs)

    @staticmethod
    def backward(ctx, *d):
        return None, *d, *[None] * (ctx.count - 1 - ctx.n)

    @staticmethod
    def jvp(ctx, _n, *tangents):
        return tuple(tangents[: ctx.n])

    @staticmethod
    def vmap(info, dims, n, *tensors):
        return _InTurn.apply(n, *tensors), dims[1 : 1 + n]


# -- what is refused ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def pure(args: tuple, kwargs: dict) -> Iterator[None]:
    """Return a context that raises if its body writes to the arguments, or draws from torch's generators."""
    named = [(path, below(x)) for path, x in paths((*args, kwargs) if kwargs else args) if isinstance(x, Tensor)]
    versions, drawn = [version_of(x) for _, x in named], states()
    yield
    written = [f"args{path}" for (path, x), version in zip(named, versions, strict=True) if version_of(x) != version]
    if written:
        hint = "`.clone()` first; return what changes"
        fail(CALL, "`fn` writes to its argument.", got=f"an in-place write to {', '.join(written)}",
             need="a pure function", hint=hint)  # fmt: skip
    if states() != drawn:
        refuse_draws(CALL, "a draw without a key")


def states() -> list[bytes]:
    """Return the states of torch's generators. A traced program has none: `jit` refuses draws itself."""
    if torch._C._len_torch_dispatch_stack():
        return []
    with outside_transforms():
        found = [torch.get_rng_state()]
        found += [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
        return [x.numpy().tobytes() for x in found]
