"""debug_print: print values from inside of jitted, mapped and differentiated functions.

    lines of jit(f)(x) = lines of f(x);      lines of one call under vmap = its lines for x[0], x[1], ...

A program prints by an operation, which takes the token of the print before it (`core._prints`). So prints keep their
order, and no pass removes one.
"""

import itertools
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from funcrec.compile._parts import first_token, is_staging
from funcrec.core import (
    Problem,
    check,
    describe,
    fail,
    is_quiet,
    outside_transforms,
    tokens,
    tree_leaves,
    typed,
    vmaps_above,
)

CALL, FORMAT = "funcrec.debug_print", string.Formatter()
LIBRARY = torch.library.Library("funcrec_debug", "DEF")
LIBRARY.define("print(str text, Tensor[] values, int levels, Tensor after) -> Tensor")


@torch.library.impl(LIBRARY, "print", "CompositeExplicitAutograd")
def _print(text: str, values: list[Tensor], levels: int, after: Tensor) -> Tensor:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        what, need = "a print cannot be recorded.", "a program without donation"
        fail("funcrec.jit", what, got="a CUDA graph", need=need, hint="fr.jit without donate=", kind=RuntimeError)
    show(text, values, levels)
    return torch.zeros_like(after)


@torch.library.register_fake("funcrec_debug::print", lib=LIBRARY)
def _token(text: str, values: list[Tensor], levels: int, after: Tensor) -> Tensor:
    return torch.empty_like(after)


@typed
def debug_print(text: str, *args: Any, **kwargs: Any) -> None:
    """Print `text.format(*args, **kwargs)` each time that the call runs, also inside of jitted functions.

    Python's `print` in a jitted function runs while the function is compiled, and never again.

    Args:
      text: a format as in `str.format`: "loss {:.3f}", "{x}", "{batch.label}", "{x.shape}".
      args, kwargs: tensors, and other values. Values without tensors are part of a program, as they are for `fr.jit`.

    Raises:
      ValueError: `text` is not a format of these values, or formats several numbers as one ("{:.3f}" of f[3]).
      TypeError: a field of `text` is a tree with tensors: name its tensors, "{batch.label}".

    Law: `fr.jit(f)` prints the lines of f, in their order, also from the body of `scan`, `cond` and `while_loop`. Under
      vmap a call prints a line for each member, in order, and one line if nothing that it prints is mapped; so does
      each emulated rank. Under grad and jvp it prints the values, once. `value_and_grad`, `of_rows`, `remat` and
      `per_example_grads`, which call a loss more often, print once. `eval_shape` prints nothing.

    A `cond` over a mapped predicate runs both branches, and both print. These raise: an export, a step that prints in
    `fr.pipeline`, and a donating program on CUDA, which is recorded.

    Cost: a program waits for the values, and copies those on a device to the host.

    Example:
      >>> import torch, funcrec as fr
      >>> @fr.jit
      ... def f(x):
      ...     fr.debug_print("{x} sums to {:.1f}", x.sum(), x=x)
      ...     return x.sum()
      >>> _ = torch.func.vmap(f)(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
      tensor([1., 2.]) sums to 3.0
      tensor([3., 4.]) sums to 7.0
      >>> _ = torch.func.grad(f)(torch.ones(2))
      tensor([1., 1.]) sums to 2.0

    Source: jax.debug.print.
    """
    template, values, problems = parsed(text, args, kwargs)
    check(CALL, problems)
    if is_quiet.get():
        return
    if torch.compiler.is_exporting():
        what, need = "an exported program does not print.", "a function without debug_print"
        fail(CALL, what, got="torch.export", need=need, hint="debug_print of the answers", kind=TypeError)
    keys = torch._C._TorchDispatchModeKey
    if not is_staging():
        if torch._C._get_dispatch_mode(keys.FAKE) is None:  # Shapes alone have nothing to print.
            show(template, *spread(values))
        return
    before = tokens.get()
    if before is None:
        what, need = "a program of another tracer does not print.", "fr.jit"
        fail(CALL, what, got="torch's make_fx", need=need, hint="fr.jit(f)", kind=TypeError)
    with outside_transforms():
        after = before[-1] if before else first_token()
        plain, levels = spread(values)
        before.append(torch.ops.funcrec_debug.print(template, plain, levels, after))


def spread(values: Sequence[Tensor]) -> tuple[list[Tensor], int]:
    """Return the values below all transforms, with the members of all vmaps along the first dimensions, and the number
    of these dimensions."""
    found = [vmaps_above(x, 0) for x in values]
    sizes = {level: size for _, maps in found for level, _, size in maps}
    with outside_transforms():
        return [with_members(x.detach(), {v: dim for v, dim, _ in maps}, sizes) for x, maps in found], len(sizes)


def with_members(x: Tensor, dims: Mapping[int, int], sizes: Mapping[int, int]) -> Tensor:
    """Return x with a first dimension for each vmap, the outermost first.

    dims: {level of a vmap: the dimension that it maps, once those of outer vmaps are taken out}.
    """
    for k, level in enumerate(sorted(sizes)):
        if level in dims:
            x = x.movedim(dims[level] + k, k)
        else:
            x = x.unsqueeze(k).expand(*x.shape[:k], sizes[level], *x.shape[k:])
    return x


def show(text: str, values: Sequence[Tensor], levels: int) -> None:
    with outside_transforms(), _disable_current_modes():
        sizes = values[0].shape[:levels] if levels else ()
        for member in itertools.product(*map(range, sizes)):
            print(text.format(*(x[member] for x in values)))


def parsed(text: str, args: tuple, kwargs: dict[str, Any]) -> tuple[str, list[Tensor], list[Problem]]:
    """Return a format with a number for each field that is a tensor, these tensors, and what is wrong."""
    out, values, problems, place = [], [], [], itertools.count()
    try:
        for literal, field, spec, conversion in FORMAT.parse(text):
            out.append(escaped(literal))
            if field is None:
                continue
            value = value_of(field, place, args, kwargs)
            spec = "".join(
                part + ("" if inner is None else f"{value_of(inner, place, args, kwargs)}")
                for part, inner, *_ in FORMAT.parse(spec or "")
            )
            problems += field_problems(field, value, spec, conversion)
            if isinstance(value, Tensor):
                out.append(f"{{{len(values)}{'!' + conversion if conversion else ''}{':' + spec if spec else ''}}}")
                values.append(value)
            elif not problems:
                out.append(escaped(FORMAT.format_field(FORMAT.convert_field(value, conversion), spec)))
    except (ValueError, IndexError, KeyError, AttributeError, TypeError) as error:
        problems.append(Problem("`text` is not a format of these values.", f"{error!r}", "as in str.format", '"{}"'))
    return "".join(out), values, problems


def value_of(field: str, place: Iterator[int], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return the value of a field. A field without a number or a name is the next place."""
    return FORMAT.get_field(f"{next(place)}{field}" if field[:1] in ("", ".", "[") else field, args, kwargs)[0]


def escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


# -- validators --------------------------------------------------------------------------------------------------


def field_problems(field: str, x: Any, spec: str, conversion: str | None) -> Iterator[Problem]:
    if isinstance(x, Tensor) and spec and not conversion and x.dim():
        what, hint = f"`text` formats field {field!r} as one number.", "{}, or one element of it"
        yield Problem(what, f"{{{field}:{spec}}} of {describe(x)}", "a tensor without dimensions", hint)
    elif isinstance(x, Tensor) and spec and not conversion:  # the error of a format that does not fit
        format(0.0 if x.is_floating_point() else 0j if x.is_complex() else 0, spec)
    elif not isinstance(x, Tensor) and any(isinstance(leaf, Tensor) for leaf in tree_leaves(x)):
        need, hint = "tensors, and values without tensors", "{batch.label}"
        yield Problem(f"field {field!r} of `text` is a tree with tensors.", describe(x), need, hint, TypeError)
