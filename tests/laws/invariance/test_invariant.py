"""invariant: an example has the same bits alone, in any batch, at any place, on any threads, eager and compiled."""

import functools

import pytest
import torch
from funcrec.kernels import ops
from programs.invariant_models import KEYS, MODELS, SIZES, batch_of, configs, noise
from programs.surroundings import on_threads

import funcrec as fr
from funcrec.invariance import check_operators, replacements
from funcrec.testing import assert_trees_close, check_invariant

equal = functools.partial(assert_trees_close, rtol=0, atol=0)
grad, jvp, vmap = torch.func.grad, torch.func.jvp, torch.func.vmap


@pytest.mark.parametrize("name", MODELS)
def test_a_prediction_does_not_see_its_batch(name):
    """An example's prediction has the same bits alone, first, last, twice, among others in any order, and on any
    threads; and it is the model's, up to rounding."""
    init, plain, _ = MODELS[name]()
    params, batch, predict = init(fr.key(0)), batch_of(range(37)), fr.invariant(plain)
    assert_trees_close(predict(params, batch), plain(params, batch), rtol=1e-4, atol=1e-6)
    check_invariant(lambda batch: predict(params, batch), batch)


def test_the_check_finds_what_sees_its_batch():
    """A mean over the batch fails the check; other results and batches raise."""
    batch = batch_of(range(37))
    with pytest.raises(AssertionError, match=r"the results of the rows \[0\] have other bits[\s\S]*the trees differ"):
        check_invariant(lambda b: b.dense - b.dense.mean(0), batch)
    with pytest.raises(ValueError, match="not one of examples"):
        check_invariant(lambda b: b.dense.mean(), batch)
    with pytest.raises(ValueError, match="no number of examples"):
        check_invariant(lambda b: b["x"], {"x": torch.ones(3), "y": torch.ones(4)})
    check_invariant(lambda ids: ids.lengths.reshape(len(KEYS), -1).T, batch.ids)


def step_of(**options):
    model = fr.models.dlrm(*configs(8), num_dense=5, bottom=(8,), sizes=SIZES[:1])  # Adam takes two powers per layer
    adam = {"sparse": fr.optim.adam(0.01), "dense": fr.optim.dense(torch.optim.Adam, lr=0.01)}
    step = fr.train_step(model, **adam, **options)
    return step, step.init(model.init(fr.key(0)), fr.key(1))


def test_a_step_is_one_on_all_threads_and_compiled():
    """Two steps of DLRM with Adam give the same bits eager and compiled, on one, two and three threads; they are the
    ordinary step's, up to rounding."""
    step, state = step_of(invariant=True)
    batch, ordinary = batch_of(range(290)), step_of()[0]
    run = lambda f: f(f(state, batch)[0], batch)
    first = run(step)
    # Adam divides by the root of squares: rounding of a gradient near zero moves its parameter by a part of the rate.
    assert_trees_close(first, run(ordinary), rtol=1e-3, atol=1e-4)
    for n in (1, 2, 3):
        with on_threads(n):
            equal(run(step), first)
    fast = fr.jit(step, donate=("state",))
    equal(fast(fast(fr.copy(state), batch)[0], batch), first)


def test_a_member_of_vmap_has_the_bits_of_its_own_run():
    """A step of three models at once gives each model the bits of its own step."""
    model = fr.models.deepfm(*configs(8), num_dense=5, sizes=SIZES)
    step = fr.train_step(model, invariant=True)
    keys, batch = fr.split(fr.key(0), 3), batch_of(range(40))
    fresh = lambda key: step.init(model.init(key), key)
    together, _ = vmap(step, in_dims=(0, None))(vmap(fresh)(keys), batch)
    for i, key in enumerate(keys):
        alone, _ = step(fresh(key), batch)
        equal(fr.tree.map(lambda x, i=i: x[i], together), alone)


def test_sums_at_places_have_one_order():
    """Values that are added at the same places, by index_put and by scatter_add, are added in the order of positions,
    on any threads, eager and compiled."""
    generator = torch.Generator().manual_seed(0)
    places, v, x = torch.randint(0, 9, (3000,), generator=generator), noise(3000, 5), torch.zeros(9, 5)
    by_index = fr.invariant(lambda x, i, v: x.index_put((i,), v, accumulate=True))
    by_scatter = fr.invariant(lambda x, i, v: x.scatter_add(0, i[:, None].expand_as(v).contiguous(), v))
    want = x.clone()
    for i, row in zip(places.tolist(), v, strict=True):
        want[i] += row
    for n in (1, 2, 3):
        with on_threads(n):
            equal((by_index(x, places, v), by_scatter(x, places, v)), (want, want))
    equal(fr.jit(by_index)(x, places, v), want)


def test_emulated_ranks_take_one_step_on_all_threads():
    """A step on an emulated mesh has the same bits on one, two and three threads, and is near to the ordinary one."""
    model, mesh = fr.models.deepfm(*configs(8), num_dense=5, sizes=SIZES), fr.Mesh.emulated(data=4)
    plan = fr.Plan(dict.fromkeys(KEYS, fr.row_wise("data")))
    step, plain = (fr.train_step(model, mesh=mesh, plan=plan, invariant=x) for x in (True, False))
    state, batch = step.init(model.init(fr.key(0))), batch_of(range(8))
    first = step(state, batch)
    assert_trees_close(first[1]["loss"], plain(state, batch)[1]["loss"], rtol=1e-5)
    for n in (2, 3):
        with on_threads(n):
            equal(step(state, batch), first)


def test_rows_of_zeros_after_the_batch_change_no_gradient():
    """The sums over a batch of up to 256 examples do not see padding of weight 0 after the last example."""
    w, x, y = noise(6, 3), noise(150, 6, seed=1), noise(150, 3, seed=2)
    loss = lambda w, x, y: ((x @ w - y).square() * (x != 0).any(1, keepdim=True)).sum(1).sum()
    ask = fr.invariant(torch.func.grad_and_value(loss))
    padded = [torch.cat([v, torch.zeros(106, v.shape[1])]) for v in (x, y)]
    equal(ask(w, *padded), ask(w, x, y))


def sums_at_places(x):
    """Return sums at places of columns, of elements, and of the outer dims of three."""
    i, j, cube = torch.tensor([[0, 2], [-1, 2]]), torch.tensor([1, 1]), torch.stack([x, -x], 1)
    put, none = torch.ops.aten.index_put, torch.zeros(2, dtype=torch.int64)
    at = put(x, [None, i], x[:, :1, None], True) + put(x, [none, j], x[:, 2].sum() * x.new_ones(2), True)
    return at + put(cube, [none, None, j], x[:, :2].sum(0), True).sum(1) + x.index_add(1, j, x[:, 2:4], alpha=0.5)


X, SQUARE = noise(5, 8, seed=3), noise(8, 8)
FUNCTIONS = {
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(1),
    "layer_norm": lambda x: torch.nn.functional.layer_norm(x, (8,)),
    "cosine": lambda x: torch.nn.functional.cosine_similarity(x, x.flip(1)),
    "var": lambda x: x.var(1),
    "std and mean": lambda x: sum(torch.std_mean(x, 1)),
    "gelu": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "gelu by erf": torch.nn.functional.gelu,
    "waves": lambda x: torch.sin(x) * torch.cos(3 * x) + torch.atan2(x, x.flip(1)),
    "products": lambda x: x.prod(1, keepdim=True) + x.cumprod(1) + x[:, 0].prod(),
    "sums at places": lambda x: sums_at_places(x),
    "silu": torch.nn.functional.silu,
    "softplus": torch.nn.functional.softplus,
    "logsigmoid": torch.nn.functional.logsigmoid,
    "elu": torch.nn.functional.elu,
    "power": lambda x: x.abs() ** 1.7 + x**3 + 2.0**x,
    "norm": lambda x: torch.linalg.vector_norm(x, dim=1),
    "norm of 3": lambda x: torch.linalg.vector_norm(x, 3, dim=1),
    "einsum": lambda x: torch.einsum("bi,bj->bij", x, x).sum((1, 2)),
    "mean of two dims": lambda x: torch.stack([x, x]).mean((0, 2)),
    "addmm": lambda x: torch.addmm(x, x, SQUARE.to(x.dtype), beta=0.5, alpha=3),
    "addmm without a bias": lambda x: torch.addmm(x, x, SQUARE.to(x.dtype), beta=0, alpha=3),
    "lerp by tensors": lambda x: torch.lerp(x, x.flip(1), x.sigmoid()),
    "largest and smallest": lambda x: sum(torch.linalg.vector_norm(x, p, dim=1) for p in (torch.inf, -torch.inf)),
    "whole quotients": lambda x: x + x.div(0.3, rounding_mode="trunc") + x.div(x.flip(1), rounding_mode="floor"),
    "lerp": lambda x: torch.lerp(x, x.flip(1), 0.7),
    "bce": lambda x: torch.nn.functional.binary_cross_entropy_with_logits(x, x.sigmoid(), reduction="none"),
    "in place": lambda x: x.clone().add_(x, alpha=0.3).mul_(2).exp_(),
    "differences": lambda x: (2 - x) - x.sub(3, alpha=0.7) + torch.rsub(x, x, alpha=0.1) + x.add(1, alpha=0.3),
    "cumsum": lambda x: x.cumsum(1),
    "matmul": lambda x: torch.stack([x[0] @ x[0], (SQUARE.to(x.dtype) @ x[0]).sum()]).unsqueeze(0).expand(len(x), 2),
    "a vector's norms": lambda x: torch.stack([torch.linalg.vector_norm(x[0, 0], p) for p in (0, 1, 2)]),
    "logs": lambda x: x.abs().log2() + (x.abs() + 1).log10(),
    "rows": lambda x: x[torch.tensor([0, 2, 2, -1])],
    "numbers": lambda x: (x * 0.37 - 0.3) / 0.7 + torch.addcmul(x, x, x, value=0.3) * torch.tensor(1.37),
    "chains": lambda x: chains(x, *(SQUARE[:, :n].to(x.dtype) for n in (1, 8))),
}


def chains(x, thin, square):
    """Return products of four matrices, whose cheapest order follows the number of rows, in each way to write them."""
    factors = (x, thin, thin.T, square)
    by_lists = torch.einsum(x, [0, 1], thin, [1, 30], thin.T, [30, 2], square, [2, 3], [0, 3])
    return torch.linalg.multi_dot(factors) + torch.einsum("bi,ij,jk,kl->bl", factors) * by_lists


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_torchs_up_to_rounding_with_their_derivatives(name):
    """Values, gradients, tangents and members of vmap are near to torch's, of the same shapes and dtypes, in f32, f64
    and bf16; and each row has its own bits."""
    f = FUNCTIONS[name]
    for x, rtol in ((X, 1e-5), (X.double(), 1e-10), (X.bfloat16(), 3e-2)):
        assert_trees_close(fr.invariant(f)(x), f(x), rtol=rtol, atol=rtol)
    d = grad(lambda x: (f(x) * 0.5).square().sum())
    assert_trees_close(fr.invariant(d)(X), d(X), rtol=1e-4, atol=1e-5)
    tangent = lambda x: jvp(f, (x,), (x.flip(0),))
    assert_trees_close(fr.invariant(tangent)(X), tangent(X), rtol=1e-4, atol=1e-5)
    fr.jit(fr.invariant(d)).lower(X)
    stack = torch.stack([X, X.flip(0)])
    equal(fr.invariant(vmap(f))(stack), torch.stack([fr.invariant(f)(x) for x in stack]))
    equal(vmap(fr.invariant(f))(stack), fr.invariant(vmap(f))(stack))


def test_a_chain_of_products_goes_from_left_to_right():
    """A row of a chain has the bits of the row alone, whichever order is the cheapest for its batch."""
    x, a, b, c = noise(40, 64), noise(64, 8, seed=1), noise(8, 64, seed=2), noise(64, 5, seed=3)
    chain, summed = (lambda x: torch.linalg.multi_dot([x, a, b, c])), (lambda x: torch.einsum("bi,ij,jk->bk", x, a, b))
    for f in map(fr.invariant, (chain, summed)):
        equal(f(x[3:4]), f(x)[3:4])
    equal(fr.invariant(chain)(x), fr.invariant(lambda x: x @ a @ b @ c)(x))


def test_floats_of_16_bits_are_rounded_once_eager_and_compiled():
    """Functions of 16-bit floats have one result, eager and compiled, also where numbers of 24 bits multiply them; and
    the squares of a norm do not overflow."""
    x, own = X.bfloat16(), ("numbers", "silu", "addmm", "lerp", "sums at places", "power")
    every = fr.invariant(lambda x: {name: FUNCTIONS[name](x) for name in own})
    equal(fr.jit(every)(x), every(x))
    equal(fr.invariant(torch.linalg.vector_norm)(torch.full((4,), 300.0).half()), torch.tensor(600.0).half())


@pytest.mark.parametrize("name", ["softmax", "layer_norm", "power", "bce", "differences"])
def test_an_exported_program_gets_the_tables_operators(name):
    """torch.export's program of the plain function, with the table's operators in it, has the bits of invariant(f) for
    other numbers of rows, too; with any other operator it raises."""
    module, rows = torch.nn.Module(), torch.export.Dim("B", min=1, max=100)
    module.forward = FUNCTIONS[name]
    program = torch.export.export(module, (X,), dynamic_shapes=({0: rows},), strict=False)
    changed = program.run_decompositions(replacements())
    check_operators(changed.graph)
    for x in (X, X[:1], X.repeat(3, 1)):
        equal(changed.module()(x), fr.invariant(FUNCTIONS[name])(x))
    with pytest.raises(TypeError, match="no fixed order"):
        check_operators(program.run_decompositions({}).graph)


def by_fbgemm(x):
    with ops.using("fbgemm"):
        ids = fr.KeyedJaggedTensor.from_lists({"item": [[1, 2], [3]]})
        return fr.lookup({"item": x}, ids, [fr.FeatureConfig("item", table="item")]).values


REFUSED = {
    "a convolution": lambda x: torch.nn.functional.conv1d(x[None], SQUARE[None, :5, :3]),
    "a draw": lambda x: x + torch.rand(8),
    "dropout": lambda x: torch.nn.functional.dropout(x),
    "a factorial": torch.lgamma,
    "a decomposition": lambda x: torch.linalg.svd(x)[1],
    "places of torch's own": lambda x: torch.nn.functional.fractional_max_pool2d(x[None], 2, (2, 2)),
    "complex numbers": lambda x: torch.complex(x, x).sum(),
    "a product of complex numbers": lambda x: torch.complex(x, x) @ torch.complex(x, x).mT,
    "FBGEMM's sums": lambda x: by_fbgemm(x),
    "a result in given memory": lambda x: torch.special.ndtr(x, out=torch.empty_like(x)),
    "a chain in given memory": lambda x: torch.linalg.multi_dot([x, SQUARE, SQUARE], out=torch.empty_like(x)),
    "attention that drops": lambda x: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *[x[None, None]] * 3, 0.5
    ),
    "its gradients": lambda x: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *[x[None, None]] * 5, x[None, None, :, 0], 0.5, False
    ),
    "distances, by size": lambda x: torch.cdist(x, x),
    "a branch of torch's own": lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)),
    "a sum at a mask": lambda x: x.index_put((x > 0,), x[0, :1], True),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_operator_without_a_fixed_order_raises(name):
    """What has no place in the table raises, eager and while it is staged, and says which operator it is."""
    for call in (fr.invariant(REFUSED[name]), fr.jit(fr.invariant(REFUSED[name]))):
        with pytest.raises(
            TypeError,
            match=r"an operator has no fixed order here\.\s*got   (aten|prims|funcrec_fbgemm|torch.cdist|cond|.*out=)",
        ):
            call(X)


def test_a_derivative_from_outside_raises():
    """grad, jvp, and autograd around the call raise, and so does torch.export; a derivative inside, and jit and vmap
    around, run."""
    f = fr.invariant(lambda w: (X @ w).square().sum())
    w = noise(8, 2)
    for outside in (grad(f), lambda w: jvp(f, (w,), (w,)), lambda w: f(w.requires_grad_())):
        with pytest.raises(TypeError, match=r"differentiated from outside[\s\S]*around the derivative"):
            outside(w.clone())
    held = w.clone().requires_grad_()
    with pytest.raises(TypeError, match="differentiated from outside"):
        fr.invariant(lambda: (X @ held).sum())()
    with torch.no_grad():
        fr.invariant(lambda: (X @ held).sum())()
    module = torch.nn.Module()
    module.forward = fr.invariant(lambda x: x.sum(1))
    with pytest.raises(TypeError, match=r"torch\.export records above"):
        torch.export.export(module, (X,), strict=False)
    with pytest.raises(TypeError, match=r"torch\.jit\.trace records above"):
        torch.jit.trace(fr.invariant(lambda x: x.sum(1)), (X,))


def steps_of(x):
    yield x.sum(1)


async def later(x):
    return x.sum(1)


@pytest.mark.parametrize("fn", [steps_of, later, lambda x: {"a": map(torch.exp, x)}])
def test_a_result_that_computes_after_the_call_raises(fn):
    """A generator, a coroutine or an iterator would compute when the mode has ended."""
    with pytest.raises(TypeError, match="a result computes after the call"):
        fr.invariant(fn)(X)


def test_an_interrupted_call_leaves_no_mode():
    """After an error inside, the next call outside is torch's own."""

    def broken(x):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fr.invariant(broken)(X)
    assert torch._C._len_torch_dispatch_stack() == 0
    X.cumsum(1)


@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows(rows):
    """A batch of no or one row gives results of the same shapes as torch's."""
    x = noise(rows, 8)
    for name, f in FUNCTIONS.items():
        if name not in ("rows", "matmul", "a vector's norms", "sums at places"):
            assert_trees_close(fr.invariant(f)(x), f(x), rtol=1e-5, atol=1e-5)


def test_whole_numbers_are_as_they_are():
    """Sums, powers, products and means of whole numbers are torch's, also of numbers that f32 does not hold."""
    n, large = torch.arange(-5, 7), torch.tensor([[2**30 + 1, 3], [5, 2**20 + 7]])
    wide = lambda n: (n @ n, n @ n[0], torch.addmm(n, n, n), n.mean(dtype=torch.float64), n.sum(0))
    equal(fr.invariant(wide)(large), wide(large))
    f = lambda n: (
        ~n,
        n << 2,
        n >> 1,
        n & 3,
        torch.gcd(n, n + 2),
        n.sum(),
        n**2,
        n.sum(dtype=torch.float64),
        (n > 0).sum(),
        n.cumsum(0),
        n.clone().add_(3),
        n.fmod(3),
        n.div(3, rounding_mode="trunc"),
        n.div(3, rounding_mode="floor"),
    )
    equal(fr.invariant(f)(n), f(n))
    functions = fr.invariant(lambda n: (n.exp(), n.sqrt(), torch.atan2(n, n + 1)))
    assert_trees_close(functions(n), functions(n.float()), rtol=0, atol=0)


def test_interactions_have_the_same_bits_on_every_instruction_set():
    """The kernel of dot products is fast by fused operations of the processor; under `invariant` it is the product of
    the reference, with the bits of a product that is written out."""
    x = torch.randn(5, 4, 300, generator=torch.Generator().manual_seed(0))
    i, j = torch.tril_indices(4, 4, -1)
    want = fr.invariant(lambda x: (x @ x.mT)[:, i, j])(x)
    assert torch.equal(fr.invariant(fr.nn.dot_interaction)(x), want)
    slopes = fr.invariant(torch.func.grad(lambda x: fr.nn.dot_interaction(x).sum()))(x)
    assert torch.equal(slopes[1:2], fr.invariant(torch.func.grad(lambda x: fr.nn.dot_interaction(x).sum()))(x[1:2]))


def test_few_terms_are_added_in_order_in_a_program():
    """A program adds up to 32 terms by itself, and more by the kernel: both have the eager bits, and 0 for zeros of
    either sign."""
    sums = fr.invariant(lambda x, y: [f.sum(1) for k in (1, 2, 31, 32, 33, 40) for f in (x[:, :k], y[:, :k, 0])])
    x, y = noise(7, 40, 5), noise(7, 40, 3)
    x[3:], y[5:] = -0.0, -0.0
    want = sums(x, y)
    for got, own in zip(fr.jit(sums)(x, y), want, strict=True):
        assert torch.equal(got.view(torch.int32), own.view(torch.int32))
    assert torch.equal(want[2], (0.0 + x[:, 0]) + x[:, 1])


def test_a_compiled_softmax_of_quotients_is_the_eager_one():
    """log_softmax(x / t) and its derivative have eager bits: Inductor would scale after it subtracts the maximum."""
    q, c = torch.randn(2, 20, 8, generator=torch.Generator().manual_seed(0))
    loss = lambda q, c: torch.log_softmax(q @ c.T / 0.05, 1).diagonal().mean()
    both = fr.invariant(torch.func.grad_and_value(loss, argnums=(0, 1)))
    equal(fr.jit(both)(q, c), both(q, c))
