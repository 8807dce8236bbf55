"""law: an operation of one's own, its brute-force reference, and all tests that follow from the two.

    f(x) = reference(x)        f(x with garbage in its padding) = f(x)        f' = differences of f, in every mode

The tests need hypothesis; the decorator needs it only when they run.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

from torch import Tensor

from funcrec.core import NotNegative, Problem, check, describe, fail, paths, tree_map, typed
from funcrec.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from funcrec.tables import RowGrads
from funcrec.testing._modes import draw
from funcrec.testing._transforms import CHECKED, check_transforms, mode_problems
from funcrec.testing._trees import assert_trees_close, garbage_padding, zero_padding

CALL = "funcrec.testing.law"
MARK = "funcrec_law"
TRIES = 400  # draws among which an example for the transforms is sought

F = TypeVar("F", bound=Callable[..., Any])


class Law(NamedTuple):
    """A function under test, and the arguments of `law`."""

    f: Callable
    draws: tuple
    reference: Callable
    example: tuple | None
    modes: tuple[str, ...]
    may_raise: tuple[str, ...]
    rtol: float
    atol: float


@typed
def law(
    *draws: Any,
    reference: Callable[..., Any],
    example: Sequence[Any] | None = None,
    modes: Sequence[str] = CHECKED,
    may_raise: Sequence[str] = (),
    rtol: NotNegative = 1e-6,
    atol: NotNegative = 1e-6,
) -> Callable[[F], F]:
    """Return a decorator of a function f, which pytest then collects as a test for each law and each transform.

    The tests are `f[value]` (f equals the reference on drawn arguments), `f[padding]` (it reads no padding),
    `f[arguments]` (it writes to no argument), and one for each mode of `check_transforms`: `f[grad]`, `f[jvp]`, ...
    pytest collects them, in modules, where funcrec is installed; `law_tests(f)` returns them. f itself stays as it is,
    so an operation of another library can be put under the same laws: `theirs = law(...)(module.operation)`.

    Args:
      draws: a hypothesis strategy for each argument of f.
      reference: a slow function of the same arguments. It may return lists for tensors: values are compared number by
        number, jagged values as their lists.
      example: the arguments for the transforms; None takes them from `draws`, with an empty bag and a bag of one value
        if these are drawn, and moves each float by a little, to where f has no kink.
      modes: the transforms, among `TRANSFORMS`; () for a function without float arguments.
      may_raise: the modes in which f may raise, as long as it is not silently wrong.
      rtol, atol: |f - reference| <= atol + rtol · |reference|.

    Raises:
      TypeError: if there are no strategies.
      ValueError: if a mode is not a transform.

    Example:
      >>> import torch, funcrec as fr
      >>> from funcrec.testing import law, law_tests, strategies as frs
      >>> @law(frs.jagged_tensors(dtypes=(torch.float64,), weighted=False), reference=lambda x: map(sum, x.to_lists()))
      ... def bag_sums(x):
      ...     return fr.bag_reduce(x, "sum")
      >>> list(law_tests(bag_sums))[:4]
      ['value', 'padding', 'arguments', 'grad']
    """
    check(CALL, draw_problems(draws), mode_problems(modes), mode_problems(may_raise, "may_raise"))

    def decorate(f: F) -> F:
        @functools.wraps(f)
        def same(*args: Any, **kwargs: Any) -> Any:
            return f(*args, **kwargs)

        own = None if example is None else tuple(example)
        setattr(same, MARK, Law(f, draws, reference, own, tuple(modes), tuple(may_raise), rtol, atol))
        return cast(F, same)

    return decorate


@typed
def law_tests(f: Callable[..., Any]) -> dict[str, Callable[[], None]]:
    """Return the tests of a function that `law` decorates, {name: test}; a test takes nothing, and raises if it fails.

    Raises:
      TypeError: if `law` does not decorate the function.

    Example:
      >>> import torch
      >>> from funcrec.testing import law, law_tests, strategies as frs
      >>> twice = law(frs.tensors((3,)), reference=lambda x: [2 * v for v in x.tolist()])(lambda x: x + x)
      >>> law_tests(twice)["value"](), law_tests(twice)["hessian"]()
      (None, None)
    """
    own = vars(f).get(MARK) if hasattr(f, "__dict__") else None
    if own is None:
        need, hint = "a function that `funcrec.testing.law` decorates", "law(strategy, reference=...)(f)"
        fail("funcrec.testing.law_tests", "`f` has no law.", got=describe(f), need=need, hint=hint, kind=TypeError)
    found = functools.cache(lambda: example_of(own))
    tests = {name: functools.partial(drawn_test, own, one) for name, one in DRAWN.items()}

    def in_mode(mode: str) -> None:
        check_transforms(own.f, *found(), modes=[mode], may_raise=own.may_raise)

    tests |= {mode: functools.partial(in_mode, mode) for mode in own.modes}
    # pytest asks a function for its signature, and for the place where it is defined
    return {name: (lambda test=test: test()) for name, test in tests.items()}


# -- the laws of drawn arguments -----------------------------------------------------------------------------------


def drawn_test(own: Law, one: Callable[[Law, tuple], None]) -> None:
    """Run one law on all draws, by the hypothesis profile that is loaded."""
    from hypothesis import given, settings
    from hypothesis import strategies as st

    @settings(deadline=None)
    @given(st.tuples(*own.draws))
    def test(args: tuple[Any, ...]) -> None:
        one(own, args)

    test()


def value(own: Law, args: tuple) -> None:
    got, need = plain(own.f(*args)), plain(own.reference(*args))
    for path, x, y in differences(got, need, own.rtol, own.atol):
        what, hint = f"`f` differs from its reference at `value{path}`.", "rtol=1e-3, where f rounds more than it"
        fail(CALL, what, got=f"{x}", need=f"{y}", hint=hint, kind=AssertionError)


def padding(own: Law, args: tuple) -> None:
    assert_trees_close(zero_padding(own.f(*garbage_padding(args))), zero_padding(own.f(*args)))


def arguments(own: Law, args: tuple[Any, ...]) -> None:
    before = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, args)
    own.f(*args)
    assert_trees_close(args, before)


DRAWN = {"value": value, "padding": padding, "arguments": arguments}


def example_of(own: Law) -> tuple:
    """Return the arguments for the transforms: f64 floats of no round number, without garbage."""
    if own.example is not None:
        return own.example
    from hypothesis import Phase, find, settings
    from hypothesis import strategies as st
    from hypothesis.errors import NoSuchExample

    how = {"max_examples": TRIES, "phases": [Phase.generate], "derandomize": True, "database": None, "deadline": None}
    for is_rich in (is_varied, has_floats, lambda args: True):
        try:
            args = find(st.tuples(*own.draws), is_rich, settings=settings(**how))
            break
        except NoSuchExample:
            continue
    args = zero_padding(args)
    names = iter(path for path, _ in paths(args))
    move = lambda name, x: x.double() + 0.05 + 0.1 * draw(name, x.shape).abs()
    return tree_map(lambda x: moved(next(names), x, move), args)


def moved(name: str, x: Any, move: Callable[[str, Tensor], Tensor]) -> Any:
    return move(name, x) if isinstance(x, Tensor) and x.is_floating_point() else x


def has_floats(args: tuple) -> bool:
    """Return whether there are three numbers or more that are not 0."""
    leaves = [x for _, x in paths(zero_padding(args)) if isinstance(x, Tensor) and x.is_floating_point()]
    return sum(int((x != 0).sum()) for x in leaves) > 2


def is_varied(args: tuple) -> bool:
    """Return whether each jagged value has an empty bag, a bag of one value, and a longer bag."""
    bags = lambda x: isinstance(x, (JaggedTensor, KeyedJaggedTensor))
    found = []
    tree_map(lambda x: found.append(x) if bags(x) else None, args, is_leaf=bags)
    return has_floats(args) and all({0, 1} <= (n := set(x.lengths.tolist())) and max(n) > 1 for x in found)


# -- comparison ----------------------------------------------------------------------------------------------------


def plain(x: Any) -> Any:
    """Return x as numbers, lists and dicts."""
    if isinstance(x, (JaggedTensor, KeyedJaggedTensor)):
        return x.to_lists()
    if isinstance(x, RowGrads):
        return x.to_dense().tolist()
    if isinstance(x, Tensor):
        return x.tolist()
    if isinstance(x, (Mapping, KeyedTensor)):
        return {k: plain(v) for k, v in x.items()}
    return x if isinstance(x, (bool, int, float, str, type(None))) else [plain(v) for v in x]


def differences(got: Any, need: Any, rtol: float, atol: float, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (path, got, need) where two plain values differ. NaN equals NaN."""
    if isinstance(got, Mapping) and isinstance(need, Mapping) and got.keys() == need.keys():
        for k in need:
            yield from differences(got[k], need[k], rtol, atol, f"{path}[{k!r}]")
    elif isinstance(got, list) and isinstance(need, list) and len(got) == len(need):
        for i, (x, y) in enumerate(zip(got, need, strict=True)):
            yield from differences(x, y, rtol, atol, f"{path}[{i}]")
    elif isinstance(got, (int, float)) and isinstance(need, (int, float)):
        if not (math.isclose(got, need, rel_tol=rtol, abs_tol=atol) or (got != got and need != need)):
            yield path, got, need
    elif got != need:
        yield path, got, need


# -- validators ----------------------------------------------------------------------------------------------------


def draw_problems(draws: tuple) -> Iterator[Problem]:
    odd = [f"draws[{i}]: {describe(x)}" for i, x in enumerate(draws) if not callable(getattr(x, "flatmap", None))]
    if odd or not draws:
        need, hint = "a hypothesis strategy for each argument of f", "law(strategies.jagged_tensors(), reference=...)"
        yield Problem("`draws` are not strategies.", ", ".join(odd) or "none", need, hint, TypeError)
