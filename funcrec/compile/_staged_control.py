"""Branches and loops as parts of a program that is being staged, with their derivatives and their members under vmap.

    d cond(p, f, g, x) = cond(p, df, dg, (x, dx))        d while_loop(c, b, x) = while_loop(c, (b, db), (x, dx))

The functions here take and return flat lists of tensors.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from funcrec.compile._forms_alike import as_tensors, form_problems, next_carry, predicate, run
from funcrec.compile._parts import form_of, part_call, plain_outputs, stage_part
from funcrec.core import check, fail, fast_flatten, is_in_transform, one_level_below, quiet

Flat = Callable[..., list[Tensor]]


class Flattened:
    """A function of trees as a function of tensors, which returns tensors.

    static: the results' leaves, with the class Tensor in place of each tensor; structure: the results' structure. Both
    are known after a call.
    """

    def __init__(self, call: str, fn: Callable[..., Any], leaves: list[Any], structure: Any):
        self.call, self.fn, self.leaves, self.form = call, fn, leaves, structure
        self.__name__ = getattr(fn, "__name__", type(fn).__name__)
        self.static: list = []
        self.structure: Any = None

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        given = iter(tensors)
        args = self.form.unflatten([next(given) if isinstance(x, Tensor) else x for x in self.leaves])
        out, self.structure = fast_flatten(as_tensors(run(self.call, self.fn, *args)))
        self.static = [Tensor if isinstance(x, Tensor) else x for x in out]
        return [x for x in out if isinstance(x, Tensor)]

    def restored(self, tensors: Sequence[Tensor]) -> Any:
        made = iter(tensors)
        return self.structure.unflatten([next(made) if x is Tensor else x for x in self.static])


def is_followed(tensors: Sequence[Tensor]) -> bool:
    """Return whether a transform or autograd follows the call that is being staged."""
    return is_in_transform() or (torch.is_grad_enabled() and any(x.requires_grad for x in tensors))


def cond_flat(pred: Tensor, true_fn: Flat, false_fn: Flat, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the results of the branch that the predicate chooses, in a program that is being staged."""
    if is_followed(tensors):
        outs = [
            plain_outputs("funcrec.cond", n, fn, tensors) for n, fn in (("true_fn", true_fn), ("false_fn", false_fn))
        ]
        check_alike("funcrec.cond", true_fn, false_fn, *outs)
        return list(_Cond.apply(true_fn, false_fn, pred, *tensors))
    parts = [stage_part("funcrec.cond", fn, tensors) for fn in (true_fn, false_fn)]
    check_alike("funcrec.cond", true_fn, false_fn, *(p.outputs for p in parts))
    programs, n, k = [p.program() for p in parts], len(tensors), len(parts[0].captured)

    def choose(inputs: list[Tensor]) -> list[Tensor]:
        chosen, own, rest = bool(inputs[0]), inputs[1 : n + 1], inputs[n + 1 :]
        return programs[0]([], [*own, *rest[:k]]) if chosen else programs[1]([], [*own, *rest[k:]])

    inputs = [pred, *tensors, *parts[0].captured, *parts[1].captured]
    return part_call(f"cond.{n}.{k}", parts, choose, list(map(form_of, parts[0].outputs)), inputs)


def staged_loop(call: str, cond_fn: Callable, body_fn: Callable, carry: Any) -> Any:
    leaves, structure = fast_flatten((carry,))
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    test = Flattened(call, lambda c: predicate(call, cond_fn, c), leaves, structure)
    body = Flattened(call, lambda c: next_carry(call, body_fn, c), leaves, structure)
    return body.restored(loop_flat(test, body, tensors))


def loop_flat(test: Flat, body: Flat, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the last carry of a loop, in a program that is being staged."""
    call = "funcrec.while_loop"
    if is_followed(tensors):
        for name, fn in (("cond_fn", test), ("body_fn", body)):
            plain_outputs(call, name, fn, tensors)
        return list(_While.apply(test, body, *tensors))
    parts, n = [stage_part(call, fn, tensors) for fn in (test, body)], len(tensors)
    programs, k = (parts[0].program(), parts[1].program(num_own=n)), len(parts[0].captured)

    def loop(inputs: list[Tensor]) -> list[Tensor]:
        carry, rest = [x.clone() for x in inputs[:n]], inputs[n:]
        while bool(programs[0]([], [*carry, *rest[:k]])[0]):
            carry = list(programs[1](carry, rest[k:]))
        return carry

    return part_call(
        f"while.{n}.{k}", parts, loop, list(map(form_of, tensors)), [*tensors, *parts[0].captured, *parts[1].captured]
    )


def staged_scan(step: Callable, state: Any, batches: Any, order: Sequence[int]) -> tuple[Any, Any]:
    """Return (the last state, the stacked metrics) of `scan`, whose step is one part of the program being staged.

    order: the places of the batches, in the order of the steps.
    """
    call, state = "funcrec.scan", as_tensors(state, torch.float64)
    own, xs = ([x for x in fast_flatten(tree)[0] if isinstance(x, Tensor)] for tree in (state, batches))
    n, (leaves, both) = len(own), fast_flatten((state, batches))

    def one(carry: Any, batch: Any) -> tuple[Any, Any]:
        out = step(carry, batch)
        new = as_tensors(out[0], torch.float64)
        check(call, form_problems("the new state", new, "the state", carry))
        return new, as_tensors(out[1], torch.float64)

    flat = Flattened(call, one, leaves, both)
    part = stage_part(call, flat, [*own, *(x[order[0]] for x in xs)])
    program, k = part.program(num_own=n), len(order)
    forms = [form_of(x, k) for x in part.outputs[n:]]

    def run_all(inputs: list[Tensor]) -> list[Tensor]:
        carry, given, rest = [x.clone() for x in inputs[:n]], inputs[n : n + len(xs)], inputs[n + len(xs) :]
        ys = [torch.empty(shape, dtype=dtype, device=device) for shape, _, dtype, device in forms]
        for i in order:
            out = list(program(carry, [*(x[i] for x in given), *rest]))
            carry = out[:n]
            for y, new in zip(ys, out[n:], strict=True):
                y[i] = new
        return [*carry, *ys]

    made = part_call(
        f"scan.{n}.{list(order)}", [part], run_all, [*map(form_of, own), *forms], [*own, *xs, *part.captured]
    )
    return flat.restored(made)


class _Cond(torch.autograd.Function):
    """The results of one of two branches. The derivative of the branch is again a branch, of the same predicate."""

    @staticmethod
    def forward(true_fn, false_fn, pred, *tensors):
        return tuple(cond_flat(pred, true_fn, false_fn, tensors))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.fns, ctx.are_float = inputs[:2], [is_float(y) for y in output]
        ctx.mark_non_differentiable(*(y for y in output if not is_float(y)))
        ctx.save_for_backward(*inputs[2:])
        ctx.save_for_forward(*inputs[2:])

    @staticmethod
    def backward(ctx, *d_ys):
        pred, *tensors = ctx.saved_tensors
        yes, no = (vjp_of(fn, len(tensors)) for fn in ctx.fns)
        out = iter(cond_flat(pred, yes, no, [*tensors, *(d for d in d_ys if is_float(d))]))
        return None, None, None, *(next(out) if is_float(x) else None for x in tensors)

    @staticmethod
    def jvp(ctx, _true, _false, _pred, *tangents):
        def rule(saved, ts):
            pred, *tensors = saved
            moved = [t for x, t in zip(tensors, filled(tensors, ts), strict=True) if is_float(x)]
            yes, no = (jvp_of(fn, len(tensors)) for fn in ctx.fns)
            return placed_at(cond_flat(pred, yes, no, [*tensors, *moved]), ctx.are_float)

        return one_level_below(rule, ctx.saved_tensors, tangents)

    @staticmethod
    def vmap(info, in_dims, true_fn, false_fn, pred, *tensors):
        yes, no = map(mapped, (true_fn, false_fn))
        # vmap does not map the predicate: `cond` runs both branches of one that it maps.
        out = cond_flat(pred, yes, no, members(tensors, in_dims[3:], info.batch_size))
        return tuple(out), (0,) * len(out)


class _While(torch.autograd.Function):
    """The last carry of a loop. The tangents are carried along, and the members of a vmap run until all are done."""

    @staticmethod
    def forward(test, body, *tensors):
        return tuple(loop_flat(test, body, tensors))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.fns = inputs[:2]
        ctx.mark_non_differentiable(*(y for y in output if not is_float(y)))
        ctx.save_for_forward(*inputs[2:])

    @staticmethod
    def backward(ctx, *d_ys):
        what = "a loop in a program has no reverse derivative: its number of steps is not known."
        got, need = "grad or vjp of while_loop inside of fr.jit", "forward mode, or a number of steps that is an int"
        hint = "torch.func.jvp or jacfwd; fr.fori_loop(0, n, ...) or fr.scan; or the derivative outside of fr.jit"
        fail("funcrec.while_loop", what, got=got, need=need, hint=hint, kind=TypeError)

    @staticmethod
    def jvp(ctx, _test, _body, *tangents):
        def rule(tensors, ts):
            n, (test, body) = len(tensors), map(silent, ctx.fns)
            moved = [t for x, t in zip(tensors, filled(tensors, ts), strict=True) if is_float(x)]
            both = lambda *xs: [*body(*xs[:n]), *jvp_of(body, n)(*xs)]
            out = loop_flat(lambda *xs: test(*xs[:n]), both, [*tensors, *moved])
            return placed_at(out[n:], [is_float(x) for x in tensors])

        return one_level_below(rule, ctx.saved_tensors, tangents)

    @staticmethod
    def vmap(info, in_dims, test, body, *tensors):
        tests, bodies = mapped(test), mapped(body)
        going = lambda *xs: [tests(*xs)[0].any()]
        step = lambda *xs: [where(silent(tests)(*xs)[0], new, x) for new, x in zip(bodies(*xs), xs, strict=True)]
        out = loop_flat(going, step, members(tensors, in_dims[2:], info.batch_size))
        return tuple(out), (0,) * len(out)


def silent(fn: Flat) -> Flat:
    """Return the function without its prints, for a further call of it: it prints where its results are made."""

    def run_quietly(*xs: Tensor) -> list[Tensor]:
        with quiet():
            return fn(*xs)

    return run_quietly


def is_float(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def vjp_of(fn: Flat, n: int) -> Flat:
    """Return (*tensors, *cotangents of float results) -> the cotangents of the float ones of n tensors."""

    def pulled(*given: Tensor) -> list[Tensor]:
        of_floats, floats = at_floats(fn, given[:n])
        return list(torch.func.vjp(of_floats, *floats)[1](tuple(given[n:])))

    return pulled


def jvp_of(fn: Flat, n: int) -> Flat:
    """Return (*tensors, *tangents of the float ones of n tensors) -> the tangents of float results."""

    def pushed(*given: Tensor) -> list[Tensor]:
        of_floats, floats = at_floats(fn, given[:n])
        return list(torch.func.jvp(of_floats, tuple(floats), tuple(given[n:]))[1])

    return pushed


def at_floats(fn: Flat, tensors: Sequence[Tensor]) -> tuple[Callable, list[Tensor]]:
    """Return fn as a function of the float tensors alone, which returns its float results; and these tensors."""
    places = [i for i, x in enumerate(tensors) if is_float(x)]

    def of_floats(*floats: Tensor) -> tuple[Tensor, ...]:
        whole = dict(enumerate(tensors)) | dict(zip(places, floats, strict=True))
        return tuple(y for y in silent(fn)(*whole.values()) if is_float(y))

    return of_floats, [tensors[i] for i in places]


def filled(tensors: Sequence[Tensor], tangents: Sequence[Tensor | None]) -> list[Tensor]:
    """Return the tangents, with zeros for those that are absent."""
    return [torch.zeros_like(x) if t is None else t for x, t in zip(tensors, tangents, strict=True)]


def placed_at(values: Sequence[Tensor], there: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Return a tuple with the values where `there` is True, and None elsewhere."""
    made = iter(values)
    return tuple(next(made) if own else None for own in there)


def members(tensors: Sequence[Tensor], dims: Sequence[int | None], size: int) -> list[Tensor]:
    """Return the tensors with the members of a vmap along dimension 0."""
    every = lambda x, d: x.expand(size, *x.shape) if d is None else x.movedim(d, 0)
    return [every(x, d) for x, d in zip(tensors, dims, strict=True)]


def mapped(fn: Flat) -> Flat:
    """Return the function of the members of a vmap, along dimension 0."""

    def run_all(*xs: Tensor) -> list[Tensor]:
        return list(torch.func.vmap(lambda *own: tuple(fn(*own)), randomness="error")(*xs))

    return run_all


def where(pred: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return torch.where(pred.view(-1, *[1] * (x.dim() - 1)), x, y)


def check_alike(call: str, true_fn: Flat, false_fn: Flat, taken: Sequence[Tensor], other: Sequence[Tensor]) -> None:
    """Raise if the results of two branches differ in structure or form."""
    one, two = list(taken), list(other)
    if isinstance(true_fn, Flattened) and isinstance(false_fn, Flattened):
        one, two = true_fn.restored(taken), false_fn.restored(other)
    check(call, form_problems("one result", one, "the other", two))
