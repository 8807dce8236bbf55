"""Trees of checkpoints: load returns what save accepts."""

import collections
import enum
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import forward_ad

import funcrec as fr
from funcrec.checkpoint._tree_json import DTYPES


class Colour(enum.Enum):
    RED = 1


class Number(enum.IntEnum):
    ONE = 1


Pair = collections.namedtuple("Pair", "x y")


def donated():
    x = torch.ones(2)
    fr.jit(lambda s: s + 1, donate=("s",))(x)
    return x


def shadowed():
    """Return a value of a class whose name another class has taken."""

    def make():
        @fr.pytree
        class Twice:
            x: torch.Tensor

        return Twice

    first, _ = make(), make()
    return first(torch.ones(1))


def circle():
    node = []
    node.append(node)
    return node


def deep(depth):
    node = 1
    for _ in range(depth):
        node = [node]
    return node


REFUSED = {  # a function that returns a value that cannot be saved, and a part of the error
    "numpy integer": (lambda: np.int64(3), "x.item()"),
    "numpy float": (lambda: np.float64(3), "x.item()"),
    "numpy array": (lambda: np.ones(2), "torch.from_numpy"),
    "Enum": (lambda: Colour.RED, "x.value"),
    "IntEnum": (lambda: Number.ONE, "x.value"),
    "set": (lambda: {1}, "set"),
    "bytes": (lambda: b"x", "bytes"),
    "complex": (lambda: 1j, "complex"),
    "class": (lambda: int, "the class int"),
    "function": (lambda: print, "builtin"),
    "dtype": (lambda: torch.float32, "dtype"),
    "named tuple": (lambda: Pair(1, 2), "tuple(x)"),
    "OrderedDict": (lambda: collections.OrderedDict(a=1), "dict(x)"),
    "defaultdict": (lambda: collections.defaultdict(int), "dict(x)"),
    "config": (lambda: fr.TableConfig("t", 2, 2), "TableConfig"),
    "shadowed": (shadowed, "another class has taken its name"),
    "circle": (circle, "holds itself"),
    "deep": (lambda: deep(200), "at most 100"),
    "parameter": (lambda: torch.nn.Parameter(torch.ones(2)), "x.detach()"),
    "frozen parameter": (lambda: torch.nn.Parameter(torch.ones(2), requires_grad=False), "x.detach()"),
    "requires grad": (lambda: torch.ones(2, requires_grad=True), "x.detach()"),
    "of a graph": (lambda: torch.ones(2, requires_grad=True) * 2, "x.detach()"),
    "sparse": (lambda: torch.eye(2).to_sparse(), "x.to_dense()"),
    "sparse rows": (lambda: torch.eye(2).to_sparse_csr(), "x.to_dense()"),
    "quantised": (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantised"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "nested"),
    "jagged nested": (
        lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
        "NestedTensor",
    ),
    "meta": (lambda: torch.ones(2, device="meta"), "no memory"),
    "bits": (lambda: torch.ones(2, dtype=torch.uint8).view(torch.bits8), "view(torch.uint8)"),
    "key of numpy": (lambda: {np.int64(1): 2}, "int(k)"),
    "key of an Enum": (lambda: {Colour.RED: 2}, "str(k)"),
    "key of an IntEnum": (lambda: {Number.ONE: 2}, "int(k)"),
    "key of a frozenset": (lambda: {frozenset({1}): 2}, "frozenset"),
    "key of a type": (lambda: {int: 2}, "type"),
    "key of bytes": (lambda: {b"x": 2}, "bytes"),
    "key in a tuple": (lambda: {(1, np.int64(1)): 2}, "int64"),
    "key of a tensor": (lambda: {torch.ones(1): 2}, "Tensor"),
    "key of a named tuple": (lambda: {Pair(1, 2): 2}, "Pair"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_not_come_back_is_refused_at_save(name, tmp_path):
    """A leaf or key that load could not return raises TypeError with its path. No file is written."""
    make, fragment = REFUSED[name]
    with pytest.raises(TypeError) as error:
        fr.save(tmp_path / "a.pt", {"good": 1, "bad": make()})
    text = str(error.value)
    assert text.startswith("funcrec.save: `tree['bad']"), text
    assert fragment in text
    assert all(f"\n  {part}  " in text for part in ("got ", "need", "try ")), text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("make", [np.int64, np.float64, lambda x: [np.float64(x)], lambda x: (np.bool_(x),)])
def test_a_numpy_number_is_refused_at_the_root(make, tmp_path):
    """save refuses a numpy number that is the tree, or lies in the list that is the tree. Nothing converts it first."""
    with pytest.raises(TypeError, match=r"x\.item"):
        fr.save(tmp_path / "a.pt", make(1))


def test_every_bad_leaf_is_told_at_once(tmp_path):
    """One error names all leaves and keys that cannot be saved."""
    with pytest.raises(TypeError) as error:
        fr.save(tmp_path / "a.pt", {"a": [object()], "b": {Colour.RED: {1}}, "c": torch.ones(1, device="meta")})
    for path in ("tree['a'][0]", "tree['b']", "tree['b'][<Colour.RED: 1>]", "tree['c']"):
        assert f"`{path}`" in str(error.value)


def test_a_donated_tensor_is_named_with_the_call_that_took_it(tmp_path):
    """Saving a donated state raises DonatedError with the path, the argument and the call."""
    with pytest.raises(fr.DonatedError, match=r"`tree\['state'\]` cannot be saved[^$]*`s` was donated to call 1"):
        fr.save(tmp_path / "a.pt", {"state": donated()})


TRANSFORMS = {
    "vmap": lambda f: torch.func.vmap(f)(torch.ones(2, 3)),
    "grad": lambda f: torch.func.grad(lambda x: f(x).sum())(torch.ones(3)),
    "jvp": lambda f: torch.func.jvp(f, (torch.ones(3),), (torch.ones(3),)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_no_file_is_part_of_a_transform(name, tmp_path):
    """save and load raise inside vmap, grad and jvp, where they would write or read the tensors of a transform."""
    path, told = fr.save(tmp_path / "a.pt", torch.arange(3)), []

    def f(x):
        for call in (lambda: fr.save(path, x), lambda: fr.save(path, torch.ones(2)), lambda: fr.load(path)):
            with pytest.raises(TypeError, match="inside vmap, grad or another transform"):
                call()
        told.append(name)
        return x

    TRANSFORMS[name](f)
    assert told == [name]
    assert torch.equal(fr.load(path), torch.arange(3))


def test_a_tensor_with_a_tangent_is_refused(tmp_path):
    """A tensor with a forward tangent raises, because the tangent would be lost."""
    with forward_ad.dual_level():
        with pytest.raises(TypeError, match="that is differentiated"):
            fr.save(tmp_path / "a.pt", forward_ad.make_dual(torch.ones(2), torch.ones(2)))
        fr.save(tmp_path / "a.pt", torch.ones(2))


def test_values_of_inference_mode_are_saved_and_loaded(tmp_path):
    """save and load give the same results under inference_mode and no_grad as outside."""
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            assert_same(fr.load(fr.save(tmp_path / "a.pt", torch.arange(3.0))), torch.arange(3.0))


def assert_same(a, b):
    """Compare types, keys and their order, dtypes, shapes and bits, without the library's own comparison."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device)
        whole = lambda x: torch.empty(x.shape, dtype=x.dtype).copy_(x).reshape(-1).view(torch.uint8)
        assert torch.equal(whole(a), whole(b))
    elif isinstance(a, dict):
        for (k, x), (m, y) in zip(a.items(), b.items(), strict=True):
            assert_same(k, m)
            assert_same(x, y)
    elif isinstance(a, (list, tuple)):
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, float):
        assert a == b or (math.isnan(a) and math.isnan(b))
        assert math.copysign(1, a) == math.copysign(1, b) or math.isnan(a)
    elif hasattr(a, "__dict__"):
        assert_same(vars(a), vars(b))
    else:
        assert a == b


VIEWS = {
    "strided": lambda x: torch.cat([x, x])[::2],
    "turned": lambda x: x.reshape(-1, 1).expand(-1, 3).t(),
    "late": lambda x: torch.cat([x, x])[x.shape[0] :],
    "scalar": lambda x: x.sum().to(x.dtype) if x.dtype.is_floating_point and x.element_size() > 1 else x,
    "empty": lambda x: x[:0],
    "conj": lambda x: x.conj() if x.is_complex() else x,
    "negative": lambda x: x.conj().imag if x.dtype == torch.complex64 else x,
    "zero": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype) if x.dtype == torch.float32 else x,
}


@st.composite
def tensors(draw):
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    size = draw(st.integers(0, 5))
    data = torch.tensor(draw(st.lists(st.integers(0, 255), min_size=size * 16, max_size=size * 16)), dtype=torch.uint8)
    x = (data % 2 if dtype == torch.bool else data).view(dtype)
    return VIEWS[draw(st.sampled_from(sorted(VIEWS)))](x) if draw(st.booleans()) else x


texts = st.text(st.characters(codec=None), max_size=4) | st.sampled_from(["\ud800\udc00", "\0", '"', "tensor"])
plain = (
    st.none() | st.booleans() | st.integers() | st.integers(-(2**70), 2**70) | st.floats() | texts
    | st.sampled_from([-(2**63), 2**63, -0.0]) | st.just(5000).map(lambda n: 10**n)
)  # fmt: skip
keys = st.recursive(plain, lambda k: st.tuples(k, k), max_leaves=3)
bad = st.sampled_from(sorted(set(REFUSED) - {"deep", "circle"})).map(lambda name: REFUSED[name][0]())


def classes(children):
    ids = st.sampled_from([{"a": [[1], []]}, {"a": [[2]], "b": [[1, 2]]}, {"é": []}])
    return (
        st.builds(fr.Params, st.just({}), children)
        | ids.map(fr.KeyedJaggedTensor.from_lists)
        | st.builds(lambda x, y: fr.Params({"t": x}, y), children, children)
        | st.just(fr.KeyedJaggedTensor.from_lists({"a": [[1]], "b": [[1], [2]]}))
    )


def trees(leaves):
    return st.recursive(
        leaves,
        lambda c: (
            st.lists(c, max_size=3)
            | st.lists(c, max_size=3).map(tuple)
            | st.dictionaries(keys, c, max_size=3)
            | classes(c)
        ),
        max_leaves=8,
    )


@settings(max_examples=300)
@given(tree=trees(plain | tensors()))
def test_what_save_accepts_load_returns(tree, tmp_path_factory):
    """Over generated trees, load(save(x)) is x in types, keys, order, dtypes, shapes, bits and static fields. The
    loaded tree has its own memory."""
    path = fr.save(tmp_path_factory.getbasetemp() / "tree.pt", tree)
    found = fr.load(path)
    assert_same(found, tree)
    leaves = torch.utils._pytree.tree_leaves(found)
    addresses = [x.data_ptr() for x in leaves if isinstance(x, torch.Tensor) and x.numel()]
    assert len(set(addresses)) == len(addresses)
    fr.load(path, like=tree)


@settings(max_examples=300)
@given(tree=trees(plain | tensors() | bad))
def test_a_tree_is_saved_whole_or_refused(tree, tmp_path_factory):
    """Over generated trees with leaves of every kind, the tree loads unchanged, or save names the paths that cannot be
    saved."""
    path = tmp_path_factory.getbasetemp() / "tree.pt"
    try:
        fr.save(path, tree)
    except TypeError as error:
        assert "cannot be saved" in str(error) and str(error).startswith("funcrec.save: `tree")
    else:
        assert_same(fr.load(path), tree)


def test_depth_within_the_limit_comes_back(tmp_path):
    """Trees 100 levels deep are saved and loaded."""
    tree = deep(100)
    assert fr.load(fr.save(tmp_path / "a.pt", tree)) == tree
