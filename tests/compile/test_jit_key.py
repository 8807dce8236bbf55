"""The key of jit holds everything that a staged program can see, or the call raises. No call therefore gets the
compilation of another call."""

import contextlib
import datetime
import enum
import itertools
import math
import numbers
from collections import OrderedDict, defaultdict
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePosixPath

import numpy as np
import optree
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import funcrec as fr
from funcrec.testing import assert_trees_close

pytestmark = pytest.mark.usefixtures("interpreted")


@contextlib.contextmanager
def set_to(setter, value, before):
    setter(value)
    try:
        yield
    finally:
        setter(before)


def half():
    return set_to(lambda d: torch.set_autocast_dtype("cpu", d), torch.float16, torch.get_autocast_dtype("cpu"))


def inner_autocast(x):
    with torch.autocast("cpu"):
        return x @ x


def mapped(x):
    return fr.shard_map(lambda y: y * fr.axis_size("a"), in_specs=fr.P("a"), out_specs=fr.P("a"))(x)


PLAIN = contextlib.nullcontext
mesh = lambda n: lambda: fr.Mesh.emulated(a=n)
precision = torch.set_float32_matmul_precision
fill = lambda value: set_to(lambda v: setattr(torch.utils.deterministic, "fill_uninitialized_memory", v), value, True)

# name: (a program of f32[4, 4], surroundings in which the program gives different results)
SURROUNDINGS = {
    "autocast": (lambda x: x @ x,
        [PLAIN, lambda: torch.autocast("cpu", torch.bfloat16), lambda: torch.autocast("cpu", torch.float16)]),
    "autocast's dtype": (inner_autocast, [PLAIN, half]),
    "default dtype": (lambda x: x.sum() + torch.ones(2),
        [PLAIN, lambda: set_to(torch.set_default_dtype, torch.float64, torch.float32)]),
    "default device": (lambda x: x + torch.ones(1).is_meta,
        [PLAIN, lambda: torch.device("meta"), lambda: torch.device("cpu")]),
    "grad mode": (lambda x: x + torch.is_grad_enabled(), [PLAIN, torch.no_grad]),
    "inference mode": (lambda x: x + torch.is_inference_mode_enabled(), [PLAIN, torch.inference_mode]),
    "ambient mesh": (mapped, [mesh(2), mesh(4)]),
    "precision of products": (
        lambda x: x + (torch.get_float32_matmul_precision() == "high"),
        [lambda p=p: set_to(precision, p, "highest") for p in ("highest", "high", "medium")],
    ),
    "threads": (lambda x: x + torch.get_num_threads(), [PLAIN, lambda: set_to(torch.set_num_threads, 2, 1)]),
    "deterministic": (
        lambda x: x + torch.are_deterministic_algorithms_enabled(),
        [PLAIN, lambda: set_to(torch.use_deterministic_algorithms, True, False)],
    ),
    "deterministic fill": (
        lambda x: x + torch.utils.deterministic.fill_uninitialized_memory,
        [PLAIN, lambda: fill(False)],
    ),
    "attention": (
        lambda x: x + torch.backends.cuda.flash_sdp_enabled(),
        [PLAIN, lambda: sdpa_kernel(SDPBackend.MATH)],
    ),
    "oneDNN": (lambda x: x + torch.backends.mkldnn.enabled,
        [PLAIN, lambda: torch.backends.mkldnn.flags(enabled=False)]),
}  # fmt: skip


@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize("name", SURROUNDINGS)
def test_surroundings_are_part_of_the_key(name, is_reversed):
    """In any surroundings a jitted function equals the plain function, even if it was first compiled in other
    surroundings. The function is compiled once for each surroundings."""
    program, places = SURROUNDINGS[name]
    jitted, x = fr.jit(program), torch.linspace(-1, 2, 16).reshape(4, 4) * 100
    for _ in range(2):
        for place in reversed(places) if is_reversed else places:
            with place():
                got, need = [jitted(x) for _ in range(2)], program(x)
            for y in got:
                assert y.dtype == need.dtype and torch.equal(y, need)
    assert jitted.num_compiled() == len(places)


@pytest.mark.parametrize("name", ["autocast", "default dtype", "inference mode", "default device"])
def test_compiled_code_is_of_its_surroundings(name, monkeypatch):
    """Compiled code also equals the plain function in each of its surroundings."""
    monkeypatch.undo()
    program, places = SURROUNDINGS[name]
    jitted, x = fr.jit(program), torch.linspace(-1, 2, 16).reshape(4, 4) * 100
    for place in places[:2]:
        with place():
            assert_trees_close(jitted(x), program(x), rtol=1e-2)
            assert jitted(x).dtype == program(x).dtype
            assert jitted(x).is_inference() == program(x).is_inference()


def test_autocast_inside_is_applied_once():
    """Code that a program runs outside autocast stays outside autocast, in the graph and at run time."""

    def program(x):
        with torch.autocast("cpu", enabled=False):
            y = x @ x
        return y, y @ x

    x = torch.linspace(-1, 2, 16).reshape(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        jitted = fr.jit(program)
        for _ in range(2):
            for got, need in zip(jitted(x), program(x), strict=True):
                assert got.dtype == need.dtype and torch.equal(got, need)


def test_axes_of_shard_map_are_seen():
    """A jitted function inside shard_map sees the axis of the mesh: its size, this rank's index, and the neighbours."""
    program = fr.jit(lambda x: (x * fr.axis_size("a") + fr.axis_index("a")) + fr.psum(x, "a"))
    for n in (2, 4, 1):
        got = fr.shard_map(program, mesh=fr.Mesh.emulated(a=n), in_specs=fr.P("a"), out_specs=fr.P("a"))(torch.ones(4))
        rank = torch.arange(n).repeat_interleave(4 // n)
        assert_trees_close(got, (n + rank + n).float())


def test_the_order_of_a_dict_is_seen():
    """A program sees the order of a dict's keys. Its result keeps the order of the dicts that the program made."""
    program = lambda d: {f"{i} {k}": v * i for i, (k, v) in enumerate(d.items())}
    jitted, a, b = fr.jit(program), torch.ones(2), torch.full((2,), 5.0)
    for d in ({"a": a, "b": b}, {"b": b, "a": a}, {"a": a, "b": b}):
        assert list(jitted(d)) == list(program(d))
        assert_trees_close(jitted(d), program(d))
    named = fr.jit(lambda **d: program(d))
    assert list(named(a=a, b=b)) == ["0 a", "1 b"] and list(named(b=b, a=a)) == ["0 b", "1 a"]


@fr.pytree(static=("fixed",))
class Value:
    x: torch.Tensor
    fixed: object = None


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Number(enum.IntEnum):
    ONE = 1


class Word(str):
    __hash__ = str.__hash__
    __eq__ = lambda self, other: str.lower(self) == str.lower(other)


class Loud(float):
    __repr__ = lambda self: "loud"


class Marked(int):
    pass


class MarkedPair(tuple):
    pass


class Same:
    __slots__ = ("held",)
    __eq__ = lambda self, other: True
    __hash__ = lambda self: 0
    __repr__ = lambda self: f"Same({self.held!r})"

    def __init__(self, held):
        self.held = held


class Alike(enum.Enum):
    A, B = 1, 2
    __eq__ = lambda self, other: True
    __hash__ = lambda self: 0


class Letters(enum.StrEnum):
    ONE = "1"


def marked(kind, value, mark):
    """Return a value of a user's class with an attribute that `==` does not compare."""
    x = kind(value)
    x.mark = mark
    return x


ONE = torch.ones(2)
utc, paris = (datetime.timezone(datetime.timedelta(hours=h)) for h in (0, 1))
nan = float("nan")
ALIKE = [
    ("1", Word("1"), np.str_("1"), Letters.ONE), (Word("a"), Word("A")), (Loud(1.0), Loud(2.0), 1.0),
    (marked(Marked, 1, 2), marked(Marked, 1, 3), 1),
    (marked(Word, "a", 1), marked(Word, "a", True), marked(Word, "b", 1)),
    (marked(MarkedPair, (1, 2), 1), marked(MarkedPair, (1, 2), 1.0)), (Same(1), Same(2), Same(1.0)), (Alike.A, Alike.B),
    (np.float32(1), np.float64(1), np.int64(1), np.int32(1), np.bool_(True), 1),
    (np.float64(0.0), np.float64(-0.0), 0.0),
    (np.float32(nan), np.float32(-nan), np.float32(1)), (complex(0, nan), complex(0, -nan), complex(-0.0, 0)),
    (np.datetime64(1, "s"), np.datetime64(1000, "ms"), np.datetime64(2, "s")),
    (datetime.datetime(2020, 1, 1, 0, tzinfo=utc), datetime.datetime(2020, 1, 1, 1, tzinfo=paris)),
    (frozenset([8, 0]), frozenset([0, 8])), (frozenset([1]), frozenset([1.0]), frozenset([True])),
    (Decimal("1.0"), Decimal("1.00"), Fraction(1)), (PurePosixPath("a"), PurePosixPath("b"), "a"),
    (int | float, float | int),
    (1, 1.0, True, Number.ONE, complex(1, 0)), (0.0, -0.0, 0, False), (nan, -nan, 0.5), ("1", b"1", 1, None),
    (Colour.RED, Colour.BLUE),
    (torch.float32, torch.float64), (torch.device("cpu"), torch.device("meta")),
    (slice(1), slice(True), slice(0, 1), slice(1.0)),
    ((1, 2), (1.0, 2), (True, 2)), (2**70, 2.0**70, 2**70 + 1), (range(0), range(1, 1)), (int, float), (..., None),
    (math.inf, -math.inf),
]  # fmt: skip


def see(x, s):
    """Return a value that differs for every static value."""
    if type(s) is tuple:
        return sum(see(x, v) for v in s)
    return x + sum(i * ord(c) for i, c in enumerate(shown(s))) / 7


def shown(s):
    sign = [math.copysign(1, v) for v in (s.real, s.imag)] if isinstance(s, numbers.Number) else None
    plain = float.__repr__(s) if isinstance(s, Loud) else repr(s)
    return f"{type(s).__name__} {plain} {getattr(s, 'mark', None)!r} {sign} {getattr(s, 'dtype', None)}"


@pytest.mark.parametrize("values", ALIKE, ids=lambda v: " ".join(map(str, v)))
@pytest.mark.parametrize("place", ["argument", "field", "default"])
def test_static_values_that_compare_equal_are_told_apart(place, values):
    """Each static value has one compilation of its own, as an argument, a static field or a default."""
    give = {
        "argument": lambda f, s: f(torch.zeros(2), s),
        "field": lambda f, s: f(Value(torch.zeros(2), s), None),
        "default": lambda f, s: f(torch.zeros(2), s=s),
    }[place]
    jitted = fr.jit(lambda v, s: see(v.x, v.fixed) if isinstance(v, Value) else see(v, s))
    for s in (*values, *reversed(values)):
        assert_trees_close(give(jitted, s), see(torch.zeros(2), s))
    assert jitted.num_compiled() == len({shown(s) for s in values})


def see_keys(tree):
    """Return a value that differs for all keys of dicts in a tree, and for the order of the keys."""
    if isinstance(tree, dict):
        return sum(see(see_keys(v), k) for k, v in tree.items())
    if isinstance(tree, (tuple, list)):
        return sum(map(see_keys, tree))
    return torch.zeros(2) if tree is None else tree + 0.0


WRAPPED = {
    "a dict": lambda s: {s: ONE}, "a dict of dicts": lambda s: {"a": {s: ONE}, "b": ONE},
    "no leaf": lambda s: {s: None},
    "an empty dict": lambda s: {s: {}}, "a tuple as key": lambda s: {("a", s): ONE},
    "an ordered dict": lambda s: OrderedDict([(s, ONE)]),
    "a default dict": lambda s: defaultdict(list, [(s, ONE)]),
}  # fmt: skip
KEYS = (1, 1.0, True, Number.ONE, "1", Word("1"), np.str_("1"), Letters.ONE, np.int64(1), 0.0, -0.0, 0, False)
KEYS += (nan, -nan, None, torch.float32, Colour.RED, frozenset([1]), frozenset([True]), Word("a"), Word("A"))


@pytest.mark.parametrize("name", WRAPPED)
def test_keys_of_dicts_that_compare_equal_are_told_apart(name):
    """A program is compiled separately for keys of another type or another sign of zero. A second call with the same
    keys compiles nothing. The results of a call have the keys of that call."""
    wrap, jitted = WRAPPED[name], fr.jit(lambda tree: (see_keys(tree), tree))
    for s in (*KEYS, *reversed(KEYS)):
        got, back = jitted(wrap(s))
        assert_trees_close(got, see_keys(wrap(s)))
        assert repr(back) == repr(wrap(s))
    assert jitted.num_compiled() == len({shown(s) for s in KEYS})


GLOBAL = vars(optree.registry)["__GLOBAL_NAMESPACE"]


class Node:
    def __init__(self, x, scale):
        self.x, self.scale = x, scale


def test_the_structure_of_other_classes_is_told_apart():
    """A compilation depends on the static values of a user's pytree class, as it does on static fields."""
    optree.register_pytree_node(
        Node, lambda n: ((n.x,), n.scale), lambda scale, leaves: Node(leaves[0], scale), namespace=GLOBAL
    )
    jitted = fr.jit(lambda n: see(n.x, n.scale))
    for scale in (1, 1.0, True, 1):
        assert_trees_close(jitted(Node(ONE, scale)), see(ONE, scale))
    assert jitted.num_compiled() == 3


def test_a_key_that_may_change_is_refused():
    """A dict's key whose state cannot be part of jit's key is a TypeError."""
    for key in (Box(1), Equal(ONE), Pair([ONE])):
        with pytest.raises(TypeError, match="neither a tensor nor a plain static value"):
            fr.jit(lambda d: list(d.values()))({key: ONE})


class Box:
    def __init__(self, held):
        self.held = held


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held):
        self.held = held


class Equal(Box):
    __eq__ = lambda self, other: True
    __hash__ = lambda self: 0


class Callable(Box):
    __call__ = lambda self, x: self.held * x


class Pair(tuple):
    pass


OPAQUE = {
    "plain object": lambda: Box(ONE), "of slots": lambda: Slotted(ONE), "equal to all": lambda: Equal(ONE),
    "callable": lambda: Callable(ONE), "callable with a list": lambda: Callable([1]),
    "no tensor inside yet": lambda: Box(1), "tuple of another class": lambda: Pair([ONE]),
    "frozenset": lambda: frozenset([ONE]),
    "generator": lambda: (i for i in range(3)), "counter": itertools.count, "torch.Generator": torch.Generator,
    "set": lambda: {1},
}  # fmt: skip


@pytest.mark.parametrize("name", OPAQUE)
def test_what_changes_behind_its_name_is_refused(name):
    """An object whose state cannot be part of jit's key is a TypeError, as an argument, a static field or a result."""
    for call in (
        lambda: fr.jit(lambda x, b: x + 1)(ONE, OPAQUE[name]()),
        lambda: fr.jit(lambda v: v.x + 1)(Value(ONE, OPAQUE[name]())),
        lambda: fr.jit(lambda x: [x, OPAQUE[name]()])(ONE),
    ):
        with pytest.raises(TypeError, match="neither a tensor nor a plain static value"):
            call()


def test_functions_are_static():
    """A function as an argument is identified by `is`. Every call reads the tensors that the function closes over."""
    scale = torch.tensor(2.0)
    apply, twice, cube = fr.jit(lambda f, x: f(x)), lambda x: x * scale, lambda x: x**3
    for _ in range(2):
        assert_trees_close(apply(twice, ONE * 2), torch.full((2,), 2 * float(scale)))
        assert_trees_close(apply(cube, ONE * 2), torch.full((2,), 8.0))
        scale.mul_(2)
    assert apply.num_compiled() == 2


def test_what_a_callable_object_holds_is_in_the_key():
    """A callable object as an argument is identified by `is` and by the object's values at each call."""
    apply, scaled = fr.jit(lambda f, x: f(x)), Callable(2.0)
    for held in (2.0, 3.0, 2, 2.0):
        scaled.held = held
        assert_trees_close(apply(scaled, ONE), scaled(ONE))
    assert apply.num_compiled() == 3


class CountCalls(TorchFunctionMode):
    seen = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen += 1
        return func(*args, **(kwargs or {}))


class CountOperations(TorchDispatchMode):
    seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += func is torch.ops.aten.sin.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [CountCalls, CountOperations])
def test_modes_of_torch_follow_the_function_itself(mode):
    """Inside a torch mode that intercepts operations, the plain function runs, before and after the compilation."""
    jitted = fr.jit(lambda x: x.sin().sin())
    for _ in range(2):
        with mode() as counter:
            assert_trees_close(jitted(ONE), ONE.sin().sin())
        assert counter.seen >= 2
        assert_trees_close(jitted(ONE), ONE.sin().sin())
    assert jitted.num_compiled() == 1


def test_draws_from_the_generator_are_refused():
    """Random numbers that no argument determines raise a TypeError that suggests keys. torch's generator does not
    change."""
    before = torch.get_rng_state()
    for draw in (
        lambda x: x + torch.rand(2),
        lambda x: torch.nn.functional.dropout(x),
        lambda x: x.bernoulli(),
        lambda x: torch.randperm(3),
    ):
        with pytest.raises(TypeError, match=r"draws from torch's generator(.|\n)*fr.key"):
            fr.jit(draw)(ONE)
    assert torch.equal(torch.get_rng_state(), before)
    key = fr.key(0)
    assert_trees_close(fr.jit(lambda x, k: fr.nn.dropout(x, k, 0.5))(ONE, key), fr.nn.dropout(ONE, key, 0.5))
