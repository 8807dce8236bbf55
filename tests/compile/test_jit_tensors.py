"""jit takes tensors of every form: dtypes, strides, lazy tensors and views. Tensors without dense memory raise."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import funcrec as fr
from funcrec.core._tree import tree_leaves
from funcrec.testing import assert_trees_close

X = torch.tensor([2.0, 3.0])
Z = torch.tensor([1 + 2j, 3 - 1j])
FORMS = {
    "empty": torch.ones(0), "scalar": torch.tensor(2.0), "expanded": torch.ones(1).expand(3),
    "strided": torch.arange(12.0)[::3], "transposed": torch.arange(6.0).view(2, 3).t(),
    "f64": X.double(), "f16": X.half(), "bf16": X.bfloat16(), "i64": torch.tensor([1, 2]),
    "u8": torch.tensor([1, 2], dtype=torch.uint8), "bool": torch.tensor([True, False]),
    "complex": Z, "conjugate": Z.conj(), "negative": Z.conj().imag, "meta": torch.ones(2, device="meta"),
    "inference": torch.inference_mode()(X.clone)(),
    "parameter": torch.nn.Parameter(X.clone(), requires_grad=False), "no batch": torch.ones(0, 3),
    "view at an offset": torch.arange(6.0)[1:5],
}  # fmt: skip


def test_forms_of_tensors():
    """Tensors of any dtype or strides, and lazy tensors, give the function's values and dtypes twice. They do not
    change."""
    fn = lambda given: {name: (x * 2, x, x[..., :1]) for name, x in given.items()}
    jitted, given = fr.jit(fn), {name: x if x.dim() else x[None] for name, x in FORMS.items() if not x.is_meta}
    before = {name: x.clone() for name, x in given.items()}
    for _ in range(2):
        for got, need in zip(tree_leaves(jitted(given)), tree_leaves(fn(given)), strict=True):
            assert got.dtype == need.dtype and got.device == need.device and torch.equal(got, need)
    assert_trees_close({n: x.resolve_neg() for n, x in given.items()}, before)
    assert jitted.num_compiled() == 1
    meta = fr.jit(lambda x: x[1:])(FORMS["meta"])
    assert meta.is_meta and meta.shape == (1,)


class Sub(torch.Tensor):
    pass


ODD = {
    "sparse": lambda: X.to_sparse(), "csr": lambda: torch.eye(2).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([X, X], layout=torch.jagged),
    "quantized": lambda: torch.quantize_per_tensor(X, 1.0, 0, torch.quint8), "subclass": lambda: X.as_subclass(Sub),
    "mkldnn": lambda: X.to_mkldnn(),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ODD)
def test_odd_tensors_are_refused(name, interpreted):
    """A tensor without dense, strided memory raises a TypeError that names the tensor, as an argument or closed
    over."""
    odd = ODD[name]()
    with pytest.raises(TypeError, match=r"`x\['a'\]` is not a plain tensor(.|\n)*to_dense"):
        fr.jit(lambda x: x["a"] * 2)({"a": odd})
    with pytest.raises(TypeError, match=r"closes over is not a plain tensor"):
        fr.jit(lambda x: x + (odd * 2).sum())(X)


def test_odd_results_are_refused(interpreted):
    """A function that returns a tensor without strided memory raises a TypeError."""
    with pytest.raises(TypeError, match=r"an output is not a plain tensor(.|\n)*layout torch.sparse_coo"):
        fr.jit(lambda x: x.to_sparse())(X)


def test_lazy_tensors_that_are_closed_over_are_refused(interpreted):
    """A closed-over conjugate that is not computed yet raises."""
    lazy = Z.conj()
    with pytest.raises(ValueError, match=r"is not there yet(.|\n)*resolve_conj"):
        fr.jit(lambda x: x * lazy)(X)


DONATED = {
    "a view": lambda: torch.arange(6.0)[1:4], "strided": lambda: torch.arange(6.0)[::2],
    "expanded": lambda: torch.ones(1).expand(3), "empty rows": lambda: torch.ones(3)[:3],
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", DONATED)
def test_donated_views(name, interpreted):
    """A donated view, strided or expanded, gives the right values. No other tensor's memory changes."""
    fn = lambda s, x: {"t": s["t"].index_put((torch.tensor([1]),), x), "n": s["t"].sum()}
    step, given = fr.jit(fn, donate=("s",)), DONATED[name]()
    whole = given._base if given._base is not None else given
    before, need = whole.clone(), fn({"t": given.clone()}, X[:1])
    got = step({"t": given}, X[:1])
    assert_trees_close(got, need)
    if type(whole) is torch.Tensor:
        assert_trees_close(whole, before)
    assert_trees_close(step({"t": got["t"]}, X[1:]), fn(need, X[1:]))


def test_donated_inference_tensors(interpreted):
    """An inference tensor outside of inference mode cannot be written. The call therefore raises before it takes
    anything. Inside inference mode the tensor is donated."""
    step = fr.jit(lambda s: s.index_put((torch.tensor([1]),), X[:1]), donate=("s",))
    given = torch.inference_mode()(X.clone)()
    with pytest.raises(TypeError, match=r"`s` is an inference tensor(.|\n)*clone"):
        step(given)
    assert_trees_close(given, X)
    with torch.inference_mode():
        assert_trees_close(step(given), torch.tensor([2.0, 2.0]))


def test_fake_tensors_give_fake_tensors():
    """A jitted function of a fake tensor, outside of its mode and after a call with numbers, gives a fake tensor of the
    result's form. Its program, which would read memory that is not there, does not run."""
    double, x = fr.jit(lambda x: 2 * x, donate=("x",)), torch.ones(3, 4)
    given = FakeTensorMode().from_tensor(x)
    double(x)
    out = double(given)
    assert isinstance(out, FakeTensor) and out.shape == (3, 4) and given.shape == (3, 4)
    with pytest.raises(TypeError, match="a fake tensor"):
        fr.jit(lambda x: 2 * x).lower(torch.ones(3, 4)).compile()(given)
