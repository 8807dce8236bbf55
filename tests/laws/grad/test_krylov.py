"""lanczos and conjugate_gradient beside torch.linalg on matrices that are written out."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import funcrec as fr
from funcrec.testing import assert_trees_close


def symmetric(seed: int, n: int, ranks: int, dtype=torch.float64):
    """Return a symmetric matrix f[n, n] with `ranks` eigenvalues that are not 0, some of them equal."""
    g = torch.Generator().manual_seed(seed)
    q = torch.linalg.qr(torch.randn(n, n, generator=g, dtype=torch.float64))[0]
    values = torch.randint(-3, 6, (n,), generator=g).double() * (torch.arange(n) < ranks)
    return ((q * values) @ q.T).to(dtype)


def tree_product(a):
    """Return the product with a matrix for vectors in two parts, a matrix [2, k] and the rest."""

    def run(v):
        out = a @ torch.cat([v["m"].flatten(), v["rest"]])
        k = v["m"].numel()
        return {"m": out[:k].reshape(v["m"].shape), "rest": out[k:]}

    return run


def like_of(n: int, dtype=torch.float64):
    k = n // 2 // 2
    return {"m": torch.zeros(2, k, dtype=dtype), "rest": torch.zeros(n - 2 * k, dtype=dtype)}


@settings(max_examples=30)
@given(seed=st.integers(0, 2**31), n=st.integers(1, 9), data=st.data())
def test_all_steps_find_all_eigenvalues(seed, n, data):
    """With as many steps as elements, every eigenvalue is found, repeated ones and zeros too, with its vector."""
    a = symmetric(seed, n, data.draw(st.integers(0, n)))
    found = fr.lanczos(tree_product(a), like_of(n), steps=n, key=fr.key(seed))
    assert torch.allclose(found.values, torch.linalg.eigvalsh(a), atol=1e-8)
    v = torch.cat([found.vectors["m"].flatten(1), found.vectors["rest"]], 1)
    assert torch.allclose(v @ v.T, torch.eye(n).double(), atol=1e-8)
    assert torch.allclose(v @ a, found.values[:, None] * v, atol=1e-7)


@settings(max_examples=20)
@given(seed=st.integers(0, 2**31), steps=st.integers(1, 12))
def test_each_value_is_within_its_error_of_an_eigenvalue(seed, steps):
    """The error bounds hold, whatever the number of steps."""
    g = torch.Generator().manual_seed(seed)
    a = torch.randn(30, 30, generator=g, dtype=torch.float64)
    a = a + a.T
    found, true = (
        fr.lanczos(lambda v: a @ v, torch.zeros(30).double(), steps=steps, key=fr.key(seed)),
        torch.linalg.eigvalsh(a),
    )
    distance = (found.values[:, None] - true).abs().min(1).values
    assert (distance <= found.errors + 1e-9).all()


def test_few_steps_find_the_outermost_values_of_a_loss():
    """Twelve steps find the largest eigenvalue of the Hessian by the rows that a batch reads."""
    item = [fr.FeatureConfig("a", table="item")]
    ids = fr.KeyedJaggedTensor.from_lists({"a": [[1, 2], [2, 900], [5], [6, 7], [7]]})
    loss_fn = lambda p, ids: (fr.lookup(p.tables, ids, item).values @ p.dense).sigmoid().square().sum()
    g = torch.Generator().manual_seed(0)
    params = fr.Params({"item": torch.randn(1000, 3, generator=g).double()}, torch.randn(3, generator=g).double())
    of = fr.of_rows(loss_fn, params, ids)
    product = lambda v: torch.func.jvp(torch.func.grad(of.fn), (of.params,), (v,))[1]
    found = fr.lanczos(product, of.params, steps=12, key=fr.key(1))
    whole = torch.func.hessian(lambda t: loss_fn(fr.Params({"item": t[:3000].reshape(1000, 3)}, t[3000:]), ids))
    rows = of.rows["item"]
    at = torch.cat([params.tables["item"].flatten(), params.dense])
    read = torch.cat([(rows[:, None] * 3 + torch.arange(3)).flatten(), torch.arange(3000, 3003)])
    small = whole(at)[read][:, read]
    true = torch.linalg.eigvalsh(small)
    assert float(found.errors[-1]) < 1e-3 * float(true.abs().max())
    assert abs(float(found.values[-1] - true[-1])) <= float(found.errors[-1]) + 1e-9  # the rounding of f64


@settings(max_examples=20)
@given(seed=st.integers(0, 2**31), n=st.integers(1, 8), damping=st.sampled_from([0.0, 0.5]))
def test_conjugate_gradient_solves(seed, n, damping):
    """With as many steps as elements it is the solution of torch.linalg; more steps change nothing."""
    g = torch.Generator().manual_seed(seed)
    a = torch.randn(n, n, generator=g, dtype=torch.float64)
    a = a @ a.T + torch.eye(n)
    b = torch.randn(n, generator=g, dtype=torch.float64)
    need = torch.linalg.solve(a + damping * torch.eye(n), b)
    for steps in (n, n + 3):
        found = fr.conjugate_gradient(lambda v: a @ v, b, steps=steps, damping=damping)
        assert torch.allclose(found.x, need, rtol=1e-6, atol=1e-7)
        assert float(found.residual) < 1e-6


def test_a_solution_has_derivatives_and_members():
    """grad through a solution is that of torch.linalg.solve, vmap gives the solution of each, and b = 0 gives 0."""
    a, b = torch.tensor([[3.0, 1.0], [1.0, 2.0]]).double(), torch.tensor([1.0, -1.0]).double()
    ours = lambda a, b: fr.conjugate_gradient(lambda v: a @ v, b, steps=2).x
    theirs = lambda a, b: torch.linalg.solve(a, b)
    slopes = lambda f: torch.func.grad(lambda a, b: f(a, b)[0], argnums=(0, 1))(a, b)
    (by_a, by_b), (need_a, need_b) = slopes(ours), slopes(theirs)
    assert torch.allclose(by_a + by_a.T, need_a + need_a.T)  # the two read a symmetric matrix in other ways
    assert torch.allclose(by_b, need_b)
    assert torch.allclose(torch.func.vmap(ours, (None, 0))(a, torch.stack([b, 2 * b]))[1], 2 * theirs(a, b))
    zero = torch.func.grad(lambda b: ours(a, b).sum())(torch.zeros(2).double())
    assert torch.isfinite(zero).all() and not ours(a, torch.zeros(2).double()).any()


def test_f32_and_mixed_dtypes():
    """f32 vectors give f32 values; a leaf in bf16 is kept in its dtype for the product."""
    found = fr.lanczos(lambda v: 2 * v, torch.zeros(3), steps=2, key=fr.key(0))
    assert found.values.dtype == torch.float32 and torch.allclose(found.values, torch.full((2,), 2.0))
    seen = []
    like = {"a": torch.zeros(2, dtype=torch.bfloat16), "b": torch.zeros(2)}
    product = lambda v: (seen.append(v["a"].dtype), fr.tree.map(lambda x: 2 * x, v))[1]
    assert fr.lanczos(product, like, steps=1, key=fr.key(0)).values.dtype == torch.float32
    assert seen == [torch.bfloat16]


@pytest.mark.parametrize("f", [torch.func.vmap, fr.jit], ids=["vmap", "jit"])
def test_lanczos_under_transforms(f):
    """Eigenvalues of stacked matrices are those of each, and a program's are the eager ones."""
    a = torch.stack([symmetric(1, 4, 4), symmetric(2, 4, 2)])
    values = lambda a: fr.lanczos(lambda v: a @ v, torch.zeros(4).double(), steps=4, key=fr.key(0)).values
    if f is fr.jit:
        assert torch.allclose(fr.jit(values)(a[1]), torch.linalg.eigvalsh(a[1]), atol=1e-8)
        return
    assert torch.allclose(torch.func.vmap(values)(a), torch.linalg.eigvalsh(a), atol=1e-8)


@pytest.mark.parametrize("size", [2.0**-90, 2.0**90])
def test_small_and_large_numbers(size):
    """Where squares would vanish or overflow, a solution and the eigenvalues are those of numbers near 1, times the
    size; so are the derivatives."""
    a = symmetric(3, 4, 4, torch.float32) @ symmetric(3, 4, 4, torch.float32) + torch.eye(4)
    b, key = torch.tensor([1.0, -2.0, 3.0, 0.0]), fr.key(0)
    solve = lambda b: fr.conjugate_gradient(lambda v: a @ v, b, steps=4)
    near, far = solve(b), solve(b * size)
    assert torch.equal(far.x / size, near.x) and torch.equal(far.residual / size, near.residual)
    assert_trees_close(torch.func.jacrev(lambda b: solve(b).x)(b * size), torch.func.jacrev(lambda b: solve(b).x)(b))
    found = lambda size: fr.lanczos(lambda v: (a * size) @ v, torch.zeros(4), steps=3, key=key)
    near, far = found(1.0), found(size)
    assert_trees_close((far.values / size, far.errors / size, far.vectors), tuple(near), rtol=1e-5, atol=1e-6)


def test_damping_is_a_number_or_a_tensor():
    """A tensor damps as its number does, under vmap each member by its own, and the solution has its derivative."""
    a = symmetric(1, 4, 4) @ symmetric(1, 4, 4)
    b, dampings = torch.arange(1.0, 5.0, dtype=torch.float64), torch.tensor([0.5, 2.0], dtype=torch.float64)
    solve = lambda d: fr.conjugate_gradient(lambda v: a @ v, b, steps=4, damping=d).x
    exact = lambda d: torch.linalg.solve(a + d * torch.eye(4, dtype=torch.float64), b)
    assert_trees_close(torch.func.vmap(solve)(dampings), torch.stack([solve(float(d)) for d in dampings]), rtol=1e-12)
    assert_trees_close(torch.func.jacrev(solve)(dampings[0]), torch.func.jacrev(exact)(dampings[0]), rtol=1e-6)


def test_a_product_of_another_form_is_refused():
    """A product must return a tree of the vector's shapes."""
    for product in (lambda v: {"a": v["a"][:2]}, lambda v: v["a"]):
        with pytest.raises(TypeError, match="another form than its vector"):
            fr.lanczos(product, {"a": torch.zeros(3)}, steps=2, key=fr.key(0))


def test_a_vector_that_the_matrix_makes_zero():
    """Conjugate gradient stays at 0 where no step along the vector lessens the residual."""
    found = fr.conjugate_gradient(lambda v: 0 * v, torch.ones(2), steps=2)
    assert found.x.tolist() == [0.0, 0.0] and torch.equal(found.residual, torch.ones(2).norm())


def test_vectors_without_room_are_refused():
    """A Krylov space has no more dimensions than the vector has elements, and a vector has an element."""
    with pytest.raises(ValueError, match=r"(?s)`steps` exceeds.*got   4.*at most 3"):
        fr.lanczos(lambda v: v, torch.zeros(3), steps=4, key=fr.key(0))
    with pytest.raises(ValueError, match="`like` has no elements"):
        fr.lanczos(lambda v: v, [torch.zeros(0)], steps=1, key=fr.key(0))
