"""Products of f32 round their operands to bf16 where torch is set so, in all transforms and programs, and nowhere
else."""

import contextlib

import pytest
import torch
from torch.func import vjp, vmap

import funcrec as fr
from funcrec.serve._export_checks import product_problems

MATMUL = torch.backends.mkldnn.matmul


@pytest.fixture(autouse=True)
def f32():
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision("highest")


@contextlib.contextmanager
def precision(how="bf16"):
    MATMUL.fp32_precision = how
    try:
        yield
    finally:
        MATMUL.fp32_precision = "ieee"


def products(x, w, c):
    """Return x w, its two transposes of c, and x w of two members."""
    out, back = vjp(torch.matmul, x, w)
    return (out, *back(c), vmap(lambda k: x @ (k * w))(torch.tensor([1.0, 2.0])))


def operands(x, w, c):
    """Return the pairs whose products these are."""
    return (x, w), (c, w.T), (x.T, c), (x.expand(2, -1, -1), torch.stack([w, 2 * w]))


def test_products_and_their_transposes_round_their_operands():
    """With the setting, a product is that of its operands rounded to bf16 where the processor has AMX, else that of
    f32; sums are f32. One function compiled in both settings gives each call its own.
    `torch.set_float32_matmul_precision("medium")` is the same setting."""
    g = torch.Generator().manual_seed(0)
    x, w, c = (torch.randn(*size, generator=g) for size in ((96, 64), (64, 48), (96, 48)))
    rounds = torch.cpu._is_amx_tile_supported()
    jitted = fr.jit(products)
    for is_set in (False, True, False):
        with precision() if is_set else contextlib.nullcontext():
            found = products(x, w, c), jitted(x, w, c)
        for made in found:
            for got, (a, b) in zip(made, operands(x, w, c), strict=True):
                a, b = (t.bfloat16().double() if is_set and rounds else t.double() for t in (a, b))
                most = torch.finfo(torch.float32).eps * a.shape[-1] ** 0.5 * (a.abs() @ b.abs())
                assert ((got - a @ b).abs() <= most).all()
    assert jitted.num_compiled() == 2
    with precision():
        rounded = x @ w
    torch.set_float32_matmul_precision("medium")
    assert torch.equal(x @ w, rounded)


def test_invariant_products_do_not_round():
    """invariant(f) has the same bits with the setting and without it, and may be exported with it."""
    f = fr.invariant(lambda x, w, c: products(x, w, c)[0])
    x = torch.linspace(-1, 2, 6400).reshape(80, 80)
    plain = f(x, x, x)
    with precision():
        assert torch.equal(f(x, x, x), plain)
        assert list(product_problems(f)) == [] and list(product_problems(products))


def inside(x):
    with torch.backends.mkldnn.flags(enabled=True, fp32_precision="bf16"):
        return x @ x


def left(x):
    MATMUL.fp32_precision = "bf16"
    return x


@pytest.mark.parametrize("fn", [inside, left])
@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_a_program_has_one_precision(fn):
    """A function that changes the setting inside a program raises, because its graph would lose the change."""
    MATMUL.fp32_precision = "none"  # so that the setting of all of oneDNN counts
    with pytest.raises(ValueError, match=r"changes the precision of f32 products.\n *got +'ieee' and then 'bf16'"):
        fr.jit(fn)(torch.ones(64, 64))


def test_an_export_is_of_f32(tmp_path):
    """export raises while products round, because a server has no such setting. A program of bf16 has autocast."""
    w, batch = torch.ones(2, 2), fr.Batch(fr.KeyedJaggedTensor.from_lists({"a": [[]]}), dense=torch.ones(1, 2))
    with precision(), pytest.raises(ValueError, match="products of f32 round their operands in this process"):
        fr.export(lambda w, batch: batch.dense @ w["w"], {"w": w}, batch, tmp_path / "model")
    assert not list(tmp_path.iterdir())
