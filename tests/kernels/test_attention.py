"""jagged_attention and its transpose, in every implementation, against the reference in float64.

Shapes: N queries, M keys, H heads, D dim, V dim of values.
"""

import itertools

import pytest
import torch
from funcrec.kernels import ops, reference, reference_attention
from funcrec.kernels.forms import accumulation_dtype, time_bounds
from funcrec.kernels.reference_jagged import place_among
from hypothesis import given
from hypothesis import strategies as st
from programs.surroundings import on_threads

import funcrec as fr
from funcrec.testing import assert_trees_close

F64 = torch.float64
BUDGET = {F64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
SHAPES = {  # lengths of queries, keys before those of the queries, (H, D, V)
    "short": ([3, 0, 1, 5], [0, 0, 0, 0], (2, 5, 3)),
    "kept": ([2, 0, 70, 1], [9, 4, 130, 0], (1, 25, 40)),
    "two tiles of keys": ([7, 60], [800, 330], (1, 16, 17)),
    "two tasks": ([500], [0], (1, 3, 2)),
    "fewer keys": ([9, 3], [-4, -3], (2, 4, 4)),
    "no bags": ([], [], (2, 4, 4)),
}
SETTINGS = list(itertools.product((True, False), (True, False), ("plain", "biased", "targets", "both")))


def drawn(name, mixture, dtype=F64, seed=0):
    """Return queries, keys, values, cotangents and the other tensors. The padding of all of them is garbage."""
    lengths, kept, (heads, dim, width) = SHAPES[name]
    g = torch.Generator().manual_seed(seed)
    of_keys = [n + m for n, m in zip(lengths, kept, strict=True)]
    floats = [
        torch.randn(sum(n) + 3, heads, d, generator=g, dtype=F64)
        for n, d in ((lengths, dim), (of_keys, dim), (of_keys, width), (lengths, width))
    ]
    for x, n in zip(floats, (lengths, of_keys, of_keys, lengths), strict=True):
        x[sum(n) :] = torch.nan
    offsets = [torch.tensor([0, *n], dtype=torch.int64).cumsum(0) for n in (lengths, of_keys)]
    rest = [None] * 5
    if mixture in ("biased", "both"):
        times = [torch.randint(0, 900, (sum(n) + 3,), generator=g) for n in (lengths, of_keys)]
        rest = [torch.randn(n, m, generator=g).to(dtype) for n, m in ((heads, 7), (1, 14))] + [*times, None]
    if mixture in ("targets", "both"):
        rest[4] = torch.tensor([(3 * i + 1) % 5 for i in range(len(lengths))], dtype=torch.int64)
    q, k, v, d = (x.to(dtype) for x in floats)
    return (q, k, v), d, [*offsets, *rest]


def near(got, want, budget, size=1.0):
    """Check that got is want with an error below the budget times the greatest number, or `size` if that is less."""
    got = got.double()
    assert got.shape == want.shape and not got.isnan().any()
    same = got == want  # -inf
    greatest = max([size, *want[want.isfinite()].abs().flatten().tolist()])
    assert (torch.where(same, 0, got - want).abs() <= budget * greatest).all(), (got - want).abs().nan_to_num().max()


def wide(xs):
    return [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in xs]


@pytest.mark.needs("jagged_attention", without="reference")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", BUDGET)
def test_results_are_the_references(ask, known, dtype, shape):
    """Outputs, logarithms and all cotangents agree with the reference in float64, for every mixture of settings, with
    NaN in the padding. A slow implementation has two of four mixtures in a cell, and all four with each dtype."""
    settings = SETTINGS[::5][list(SHAPES).index(shape) // 4 :: 2] if known.slow else SETTINGS
    if known.slow and sum(SHAPES[shape][0]) > 20:
        if (dtype, shape) != (torch.float32, "kept"):
            pytest.skip("takes minutes in triton's interpreter")
        settings = SETTINGS[-1:]
    for causal, softmax, mixture in settings:
        floats, d, rest = drawn(shape, mixture, dtype)
        numbers = 0.4, 7.0, softmax, causal
        out, logs = ask("jagged_attention", *floats, *rest, *numbers)
        want = reference.jagged_attention(*wide(floats), *wide(rest), *numbers)
        assert out.dtype == dtype
        near(out, want[0], BUDGET[dtype])
        near(logs, want[1], BUDGET[dtype])
        got = ask("jagged_attention_transpose", d, out, logs, *floats, *rest, *numbers)
        need = reference.jagged_attention_transpose(d.double(), *want, *wide(floats), *wide(rest), *numbers)
        for i, (x, y) in enumerate(zip(got, need, strict=True)):  # a bias is a sum over many pairs
            near(x, y, BUDGET[dtype], 1.0 if i < 3 else 100.0)
            assert i > 2 or not x[rest[min(i, 1)][-1] :].any()


@given(
    lengths=st.lists(st.integers(0, 60), max_size=5), kept=st.integers(-9, 60), seed=st.integers(0, 2**16),
    dims=st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(1, 70)), setting=st.sampled_from(SETTINGS),
)  # fmt: skip
def test_sizes_and_settings_are_free(lengths, kept, seed, dims, setting):
    """Any lengths, dims and settings give the reference's outputs and cotangents."""
    causal, softmax, mixture = setting
    SHAPES["drawn"] = lengths, [max(kept, -n) for n in lengths], dims
    floats, d, rest = drawn("drawn", mixture, seed=seed)
    numbers = 0.3, 5.0, softmax, causal
    got = ops.jagged_attention(*floats, *rest, *numbers)
    want = reference.jagged_attention(*floats, *rest, *numbers)
    assert_trees_close(list(got), list(want), rtol=1e-9, atol=1e-10)
    of = lambda f, out: list(f(d, *out, *floats, *rest, *numbers))
    need = of(reference.jagged_attention_transpose, want)
    assert_trees_close(of(ops.jagged_attention_transpose, got), need, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("mixture", ["plain", "both"])
@pytest.mark.parametrize("softmax", [True, False])
def test_bits_do_not_depend_on_threads_or_the_batch(softmax, mixture):
    """One and three threads give the same bits. A bag has the same rows alone as in its batch."""
    floats, d, rest = drawn("kept", mixture, torch.float32)
    numbers = 0.4, 7.0, softmax, True

    def run(floats, d, rest):
        out = ops.jagged_attention(*floats, *rest, *numbers)
        return [*out, *ops.jagged_attention_transpose(d, *out, *floats, *rest, *numbers)]

    found = []
    for n in (1, 3):
        with on_threads(n):
            found.append(run(floats, d, rest))
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))
    (a, b), (c, e) = rest[0][2:4].tolist(), rest[1][2:4].tolist()
    q, k, v = floats
    own = [*([torch.tensor([0, y - x]) for x, y in ((a, b), (c, e))]), *rest[2:]]
    if rest[4] is not None:
        own[4], own[5] = rest[4][a:b], rest[5][c:e]
    if rest[6] is not None:
        own[6] = rest[6][2:3]
    alone = run((q[a:b], k[c:e], v[c:e]), d[a:b], own)
    assert torch.equal(alone[0], found[0][0][a:b])
    for x, y in zip(alone[2:5], (found[0][2][a:b], found[0][3][c:e], found[0][4][c:e]), strict=True):
        assert torch.equal(x, y)


def in_order(numbers, d, out, logs, floats, rest):
    """Return attention and its cotangents by the formulas, as dense matrices of the padded bags."""
    (scale, normalizer, softmax, causal), (offsets, key_offsets, position_bias, time_bias, *times, targets) = (
        numbers,
        rest,
    )
    queries, keys = reference_attention._layouts(offsets, floats[0].shape[0], key_offsets, floats[1].shape[0])
    wide = lambda x: x.to(accumulation_dtype(x.dtype))
    q, k, v = queries.take(wide(floats[0])) * scale, keys.take(wide(floats[1])), keys.take(wide(floats[2]))
    d_out, own = queries.take(wide(d)), queries.take(wide(out))
    sees, distance = reference_attention._pairs(queries, keys, targets, causal)
    s = torch.einsum("gnhd,gmhd->ghnm", q, k)
    if position_bias is not None:
        s = s + reference_attention._picked(wide(position_bias), distance.clamp(max=position_bias.shape[1] - 1))
        apart = (queries.take(times[0].double())[:, :, None] - keys.take(times[1].double())[:, None]).abs().float()
        s = s + reference_attention._picked(wide(time_bias), place_among(time_bounds(time_bias), apart))
    g = torch.einsum("gnhv,gmhv->ghnm", d_out, v)
    if softmax:
        p = (s - queries.take(logs).movedim(2, 1)[..., None]).exp()
        slopes = p * (g - (d_out * own).sum(-1).movedim(2, 1)[..., None])
    else:
        z = s.sigmoid()
        p, slopes = s * z * (1 / normalizer), g * (1 / normalizer) * (z * (1 + s * (1 - z)))
    p, slopes = (torch.where(sees[:, None], x, 0) for x in (p, slopes))
    d_q = torch.einsum("ghnm,gmhd->gnhd", slopes, k) * scale
    d_k, d_v = torch.einsum("ghnm,gnhd->gmhd", slopes, q), torch.einsum("ghnm,gnhv->gmhv", p, d_out)
    return [x.to(d.dtype) for x in (queries.put(d_q), keys.put(d_k), keys.put(d_v))]


@pytest.mark.parametrize("shape", ["short", "kept", "fewer keys"])
@pytest.mark.parametrize("dtype", BUDGET)
def test_every_sum_is_one_chain_on_every_instruction_set(shape, dtype, on_every_level):
    """Outputs, logarithms and all cotangents have the same bits with AVX-512, AVX2 and plain x86. They are the bits of
    the formulas, whose products and sums are one chain each, with the exact functions of `fr.invariant`."""
    first = [*BUDGET].index(dtype)  # a short bag has every second setting, and each setting with two dtypes
    for causal, softmax, mixture in SETTINGS[first % 2 :: 2] if shape == "short" else SETTINGS[2 * first + 1 :: 7]:
        floats, d, rest = drawn(shape, mixture, dtype)
        numbers = 0.4, 7.0, softmax, causal

        def run(floats=floats, d=d, rest=rest, numbers=numbers):
            out = ops.jagged_attention(*floats, *rest, *numbers)
            return [*out, *ops.jagged_attention_transpose(d, *out, *floats, *rest, *numbers)]

        first, *others = on_every_level(run).values()
        assert all(torch.equal(x, y) for other in others for x, y in zip(first, other, strict=True))
        with ops.using("reference"):
            want = fr.invariant(reference.jagged_attention)(*floats, *rest, *numbers)
            want += (*fr.invariant(in_order)((*numbers[:2], softmax, causal), d, *first[:2], floats, rest),)
        for got, x in zip(first, want, strict=False):
            assert torch.equal(got, x), (causal, softmax, mixture)


@pytest.mark.parametrize("softmax", [True, False])
def test_long_bags_have_the_same_bits_on_every_instruction_set(softmax, on_every_level):
    """Bags of more than two tiles of keys, and of two tasks of queries, have the same bits on each instruction set."""
    for shape, mixture in (("two tiles of keys", "both"), ("two tasks", "targets")):
        floats, d, rest = drawn(shape, mixture, torch.float32)

        def run(floats=floats, d=d, rest=rest):
            out = ops.jagged_attention(*floats, *rest, 0.4, 7.0, softmax, True)
            return [*out, *ops.jagged_attention_transpose(d, *out, *floats, *rest, 0.4, 7.0, softmax, True)]

        first, *others = on_every_level(run).values()
        assert all(torch.equal(x, y) for other in others for x, y in zip(first, other, strict=True))


def test_wild_offsets_read_nothing_outside():
    """Offsets outside of the buffers, and offsets that descend, give the reference's rows."""
    (q, k, v), d, rest = drawn("short", "plain")
    q, k, v, d = (x.nan_to_num(0.5) for x in (q, k, v, d))
    numbers = 0.4, 7.0, True, True
    for offsets in ([0, 3, 2, 99], [-5, 4, 4, 9], [7, 7, 7, 7], [5, 1, 2, 6]):
        for dtype in (torch.int64, torch.int32):
            bounds = [torch.tensor(offsets, dtype=dtype)] * 2
            args = (q, k, v, *bounds, *rest[2:], *numbers)
            want, got = reference.jagged_attention(*args), ops.jagged_attention(*args)
            inside = want[0].flatten(1).any(1)
            near(got[0], want[0], 1e-11)
            near(got[1][inside], want[1][inside], 1e-11)
            need = reference.jagged_attention_transpose(d, *want, *args)
            for x, y in zip(ops.jagged_attention_transpose(d, *got, *args), need, strict=True):
                near(x, y, 1e-10)


def test_what_is_no_number_stays_in_its_bag():
    """A NaN or an infinity in one bag leaves the rows of the other bags as they are, and does not vanish."""
    (q, k, v), _, rest = drawn("short", "plain", torch.float32)
    numbers = 0.4, 7.0, True, True
    want = ops.jagged_attention(q, k, v, *rest, *numbers)[0]
    for odd in (torch.nan, torch.inf, -torch.inf):
        moved = k.clone()
        moved[5, 0, 0] = odd
        out = ops.jagged_attention(q, moved, v, *rest, *numbers)[0]
        same = reference.jagged_attention(q, moved, v, *rest, *numbers)[0]
        assert torch.equal(out[:4], want[:4]) and torch.equal(out[:, 1], want[:, 1])
        assert torch.equal(out[5:9].isnan().any(2), same[5:9].isnan().any(2))


@pytest.mark.parametrize("odd", [torch.inf, -torch.inf, torch.nan])
def test_a_time_that_is_no_number_leaves_other_pairs(odd):
    """A time of infinity or NaN puts the pairs of its row into the last bucket, and no other pairs. This holds for the
    outputs and the cotangents, under vmap too."""
    (q, k, v), d, rest = drawn("short", "both")
    numbers = 0.4, 7.0, False, True
    rest[4], rest[5] = rest[4].double() % 20, rest[5] % 20
    rest[4][1] = odd
    far = [*rest[:4], rest[4].clone(), *rest[5:]]
    far[4][1] = 1e30
    want = reference.jagged_attention(q, k, v, *far, *numbers)
    need = ops.jagged_attention_transpose(d, *want, q, k, v, *far, *numbers)
    for implementation in ("reference", "cpp"):
        got = ops.jagged_attention(q, k, v, *rest, *numbers, implementation=implementation)
        near(got[0], want[0], 1e-11)
        given = (d, *got, q, k, v, *rest, *numbers)
        for x, y in zip(ops.jagged_attention_transpose(*given, implementation=implementation), need, strict=True):
            near(x, y, 1e-10)
    two = torch.func.vmap(lambda q: reference.jagged_attention(q, k, v, *rest, *numbers)[0])(torch.stack([q, q]))
    near(two[1], want[0], 1e-11)
