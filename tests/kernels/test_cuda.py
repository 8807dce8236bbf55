"""Triton's kernels on a CUDA device equal the CPU's kernels at sizes of many programs, with NaN after the last id."""

import pytest
import torch
from funcrec.kernels import library, ops, reference
from funcrec.kernels.draws import NORMAL, UNIFORM
from funcrec.kernels.ops import Feature, Segment, Terms
from funcrec.kernels.vocabulary import EVERYONE, Admission
from torch.utils._pytree import tree_map

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
R, N, B = 5_000, 60_000, 4_001
to_cuda = lambda tree: tree_map(lambda x: x.cuda() if isinstance(x, torch.Tensor) else x, tree)


def draw_ids(draw, ints=torch.int64):
    """Return random ids, some very frequent and some outside the table, with garbage after the last bag."""
    ids = (R * torch.rand(N, generator=draw) ** 6).long() - 2
    inner = torch.randint(0, N - 98, (2 * B - 1,), generator=draw).sort().values
    offsets = torch.cat([torch.tensor([0]), inner, torch.tensor([N - 99])])
    ids[N - 99 :] = 2**31 - 1
    weights = torch.rand(N, generator=draw)
    weights[N - 99 :] = torch.nan
    return ids.to(ints), offsets.to(ints), weights


@pytest.mark.parametrize(("dtype", "dim", "ints"), [
    (F32, 64, torch.int64), (F32, 100, torch.int32), (BF16, 128, torch.int64), (F16, 7, torch.int32),
    (F64, 33, torch.int64),
])  # fmt: skip
def test_large_lookups_and_gradients(dtype, dim, ints):
    """Lookups, gradients of weights and summed rows equal those of the reference. Every run gives the same bits."""
    draw = torch.Generator().manual_seed(dim)
    ids, offsets, weights = draw_ids(draw, ints)
    tables = [torch.randn(R, dim, generator=draw).to(dtype) for _ in range(2)]
    features = [Feature(0, 0, 0, 0, True, False, 0), Feature(1, 0, B, 9, False, True, dim)]
    call = lambda how, *args: ops.pooled_lookup(*args, features, B, implementation=how)
    given = (tables, [ids], offsets, weights)
    wide = [t.double() for t in tables]
    truth = call("reference", wide, [ids], offsets, weights.double())
    got = call("triton", *to_cuda(given))
    assert (got.cpu() - truth).abs().max() <= 1e-3 * (1 + truth.abs().max())
    assert torch.equal(got, call("triton", *to_cuda(given)))
    d = torch.randn(B, 2 * dim, generator=draw).to(ops.accumulation_dtype(dtype))
    back = lambda how, d, *args: ops.pooled_lookup_weights(d, *args, features, implementation=how)
    assert_near(back("triton", *to_cuda((d, *given))), back("reference", d, *given))

    segments = [Segment(0, 0, 0, 0, 0, 0, B, 0, True, -1), Segment(1, 0, dim, 0, 0, B, B, 9, False, 0)]
    terms = Terms([d], [ids], [offsets], [weights], segments)
    shapes = [(R, dim)] * 2
    need = ops.coalesce(terms, shapes, implementation="reference")
    on_cuda = Terms(*to_cuda(tuple(terms[:4])), segments)
    found = [ops.coalesce(on_cuda, shapes, implementation="triton") for _ in range(2)]
    for (rows, grads, count, repeats), again, (rows_0, grads_0, count_0, repeats_0) in zip(*found, need):
        n = int(count)
        assert n == int(count_0) and torch.equal(rows[:n].cpu(), rows_0[:n]) and torch.equal(repeats.cpu(), repeats_0)
        assert_near(grads[:n], grads_0[:n])
        assert torch.equal(grads, again[1])


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize(("dtype", "dim"), [(F32, 64), (F16, 7), (BF16, 128), (F64, 1030)])
def test_quantised_rows_have_the_cpu_s_bytes(bits, dtype, dim):
    """Quantised rows of a device are the reference's on a CPU, byte for byte: by default and by the reference, to the
    nearest code, at random by one key and by a key for each row."""
    draw = torch.Generator().manual_seed(dim)
    table = (torch.randn(R, dim, generator=draw) * 10 ** (8 * torch.rand(R, 1, generator=draw) - 4)).to(dtype)
    table[::7, 0] = torch.nan
    keys = torch.randint(-(2**63), 2**63 - 1, (R,), generator=draw)
    for key in (None, torch.tensor(5), keys):
        want = reference.quantize_rows(table, bits, key)
        for how in (None, "reference"):
            assert torch.equal(ops.quantize_rows(*to_cuda((table, bits, key)), implementation=how).cpu(), want)


def assert_near(got, want):
    want = want.double()
    assert ((got.cpu().double() - want).abs() <= 2e-4 * (want.abs() + want.abs().mean() + 1e-3)).all()


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("rule", "hyper", "slots"), [
    ("rowwise_adagrad", [1e-8, 0.0, 0.0, 0.0], [(R,)]), ("adam", [0.9, 0.999, 1e-8, 0.0], [(R, 64), (R, 64)]),
])  # fmt: skip
def test_large_updates(rule, hyper, slots, dtype):
    """A fused update of a batch with very frequent rows equals the update on the CPU. Rows without an id keep every
    bit."""
    draw = torch.Generator().manual_seed(0)
    ids, offsets, _ = draw_ids(draw)
    table, d = torch.randn(R, 64, generator=draw).to(dtype), torch.randn(B, 64, generator=draw)
    state = [torch.rand(s, generator=draw) for s in slots]
    segments = [Segment(0, 0, 0, 0, 0, 0, B, 0, True, -1)]
    number = torch.tensor(0.1, dtype=F64), torch.tensor(3)
    make = lambda device: (
        [table.to(device)], [[s.to(device) for s in state]],
        Terms(*(([x.to(device) for x in xs]) for xs in ([d], [ids], [offsets], [])), segments),
        *(x.to(device) for x in number),
    )  # fmt: skip
    run = lambda device, how: ops.fused_update(*make(device), None, rule=rule, hyper=hyper, implementation=how)
    got, again, need = run("cuda", "triton"), run("cuda", "triton"), run("cpu", "cpp")
    named = torch.zeros(R, dtype=torch.bool)
    used = ids[: int(offsets[B])]
    named[used[(used >= 0) & (used < R)]] = True
    for a, b, c, old in zip(*map(torch.utils._pytree.tree_leaves, (got, again, need, ([table], [state])))):
        assert torch.equal(a, b) and torch.equal(a.cpu()[~named], old[~named])
        eps = torch.finfo(a.dtype).eps
        assert ((a.cpu().double() - c.double()).abs() <= 4 * eps + 2 * max(eps, 2e-5) * c.double().abs()).all()


def test_large_admissions():
    """Admission, settling and new rows have the reference's bits. A CUDA graph that settles gives them, too."""
    draw, triton = torch.Generator().manual_seed(0), library.load("triton")
    ids = torch.randint(0, 2 * R, (N,), generator=draw) * 10**12
    offsets = torch.tensor([0, N // 4, N // 2, N // 2, N - 99])
    how = [*Admission(1, 3, 2, EVERYONE, 3, 5), *Admission(2, 0, 0, EVERYONE, 0, 7)]
    columns, state = [0, 0, 0, 2, 0, 1, 0, 2, 2, 9000], []
    for rows in (8_192, 2_048):
        tags = torch.zeros(rows, dtype=torch.uint8)
        state += [tags, torch.zeros(rows, 2, dtype=torch.int64), torch.tensor(5), *([tags.clone()] * (rows == 8_192))]
    own = to_cuda(state)
    for i in range(3):
        step = [ids], [offsets]
        want = reference.admit_columns(state, [], *step, how, columns)
        got = triton.admit_columns(own, [], *to_cuda(step), how, columns)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(got, want, strict=True))
        given = (*to_cuda(step), list(got), how, columns)
        if i == 2:
            triton.settle_columns_([x.clone() for x in own], *given)  # compiles
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                triton.settle_columns_(own, *given)
            graph.replay()
        else:
            triton.settle_columns_(own, *given)
        state = reference.settle_columns(state, *step, list(want), how, columns)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(own, state, strict=True))
        ids = ids.roll(777) + 10**12
    for kind, dtype in ((UNIFORM, F32), (NORMAL, F32), (NORMAL, BF16), (NORMAL, F64)):
        rows = torch.tensor(9), torch.arange(3_000) * 2**51, 70, kind, 0.3, dtype
        assert torch.equal(triton.initial_rows(*to_cuda(rows)).cpu(), reference.initial_rows(*rows))
