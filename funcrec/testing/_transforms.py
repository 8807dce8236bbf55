"""check_transforms: any function of floats under every transform, against central differences.

for every float input x and every mode m: m(t -> Σ c · f(x + t · v)) = its difference, or it raises
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from funcrec.core import Problem, check, describe, fail, own_errors, paths, tree_flatten, tree_unflatten, typed
from funcrec.testing._modes import COMPILED, EVERY, RAISED, RIGHT, Case, sweep

CALL = "funcrec.testing.check_transforms"
TRANSFORMS = tuple(EVERY)  # the names of all modes
UNCOMPILED = tuple(m for m in EVERY if m not in COMPILED)
CHECKED = tuple(m for m in UNCOMPILED if m != "functionalize")  # torch has none for functions with rules of their own


@typed
def check_transforms(
    f: Callable[..., Any], *args: Any, modes: Sequence[str] = CHECKED, may_raise: Sequence[str] = ()
) -> None:
    """Assert that a function has the right derivative in every mode, by each of its float inputs.

    A function that drops a gradient in some mode (a kernel without a rule, a `detach`, a value that is read) has a zero
    derivative there, and fails. An error that the function raises fails, too, unless it may raise.

    Args:
      f: a pure function of trees, which returns a tree. It is called with f64 floats, near those of `args`.
      args: its arguments. Each float tensor f[...] among their leaves is an input; all others stay as they are.
      modes: among `TRANSFORMS`: "grad", "autograd", "jvp", "dual", "vmap", "grad of grad", "linearize", "make_fx", ...;
        all by default, but for those that compile ("jit", "jit, donated", "jit of grad", "jit of jvp", "export"), and
        "functionalize", which torch does not have for a function with rules of its own.
      may_raise: the modes in which f may raise, as long as it is not silently wrong.

    Raises:
      AssertionError: with each input and mode that is wrong, the number that came out, and the difference.

    Example:
      >>> import torch, funcrec as fr
      >>> from funcrec.testing import check_transforms
      >>> bags = fr.JaggedTensor.from_lists([[1.0, 2.0], [], [3.0]])
      >>> check_transforms(lambda x: fr.bag_reduce(x, "logsumexp")[[0, 2]], bags)
      >>> check_transforms(lambda x: x.detach() ** 2, torch.ones(2), modes=["grad"])
      Traceback (most recent call last):
      AssertionError: funcrec.testing.check_transforms: `f` is wrong under some transforms.
        got   args[0] under grad: got 0, difference 5.4987428
        need  derivatives that agree with central differences
        try   no detach, item or in-place write in f; torch.autograd.Function with jvp and vmap for a kernel
    """
    check(CALL, mode_problems(may_raise, "may_raise"))
    found = transform_cells(f, *args, modes=modes)
    wrong = [f"{path} under {mode}: {o}" for (path, mode), o in found.items() if not _may(o, mode, may_raise)]
    if wrong:
        hint = "no detach, item or in-place write in f; torch.autograd.Function with jvp and vmap for a kernel"
        what, need = "`f` is wrong under some transforms.", "derivatives that agree with central differences"
        fail(CALL, what, got="\n        ".join(wrong), need=need, hint=hint, kind=AssertionError)


@typed
def transform_cells(f: Callable[..., Any], *args: Any, modes: Sequence[str] = CHECKED) -> dict[tuple[str, str], str]:
    """Return {(path of a float input, mode): outcome}: "right", "raised: ..." or the two numbers that differ.

    The arguments are those of `check_transforms`. `python -m funcrec.testing.transforms` prints such cells.

    Example:
      >>> import torch
      >>> from funcrec.testing import transform_cells
      >>> transform_cells(lambda x: x.sin(), torch.ones(2), modes=["grad", "vmap"])
      {('args[0]', 'grad'): 'right', ('args[0]', 'vmap'): 'right'}
    """
    check(CALL, mode_problems(modes))
    return sweep(case_of(f, *args), tuple(modes))


def case_of(f: Callable, *args: Any) -> Case:
    """Return the case of a function, whose inputs are the float tensors among the leaves of its arguments."""
    inputs = {path: x for path, x in _at(args) if isinstance(x, Tensor) and x.is_floating_point()}
    check(CALL, input_problems(inputs, args))
    leaves, structure = tree_flatten(args)
    names = [path for path, _ in _at(args)]

    def call(**own: Tensor) -> Any:
        return f(*tree_unflatten([own.get(n, x) for n, x in zip(names, leaves, strict=True)], structure))

    with own_errors(CALL, f, *args, need="the arguments that it takes, with f64 floats"):
        call(**{n: x.detach().double() for n, x in inputs.items()})
    return Case(getattr(f, "__name__", "f"), call, {n: x.detach().double() for n, x in inputs.items()})


def _at(args: tuple) -> list[tuple[str, Any]]:
    return [(f"args{path}" if path.startswith("[") else f"args.{path}", x) for path, x in paths(args)]


def _may(outcome: str, mode: str, may_raise: Sequence[str]) -> bool:
    return outcome == RIGHT or (outcome.startswith(RAISED) and mode in may_raise)


def mode_problems(modes: Sequence[str], name: str = "modes") -> Iterator[Problem]:
    unknown = [m for m in modes if m not in EVERY]
    if unknown:
        yield Problem(f"`{name}` has no transform's name.", f"{unknown}", f"among {list(EVERY)}", f'{name}=["vmap"]')


def input_problems(inputs: Mapping[str, Tensor], args: tuple) -> Iterator[Problem]:
    if not inputs:
        hint = "check_transforms(f, torch.ones(3))"
        yield Problem("`args` have no float tensor.", describe(args), "f[...]", hint, TypeError)
    for path, x in inputs.items():
        if x.is_meta:
            yield Problem(f"`{path}` has no values.", describe(x), "a tensor with values", kind=TypeError)
