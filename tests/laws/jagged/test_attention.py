"""Attention within bags against torch's of each bag alone, in float64, and the laws of bags, histories and targets."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from programs.refused import assert_refused
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

import funcrec as fr
from funcrec.testing import garbage_padding

JT, F64 = fr.JaggedTensor, torch.float64
HOW = {"softmax": {}, "silu": {"activation": "silu", "normalizer": 7.0}}
each_activation = pytest.mark.parametrize("activation", HOW)
each_causal = pytest.mark.parametrize("causal", [True, False])
CLOSE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 2e-5, F64: 1e-12}


def drawn(*shape, seed=0, dtype=F64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def bags(lengths, *shape, seed=0, dtype=F64, padding=2):
    """Return bags of random vectors with NaN as padding."""
    values = drawn(sum(lengths) + padding, *shape, seed=seed, dtype=dtype)
    values[sum(lengths) :] = torch.nan
    return JT(values, torch.tensor([0, *lengths]).cumsum(0))


def case(lengths, heads=2, dim=4, width=3, dtype=F64, kept=None):
    """Return queries, keys and values; bag b has kept[b] keys before those of its queries."""
    of_keys = [n + m for n, m in zip(lengths, kept or [0] * len(lengths), strict=True)]
    q, k, v = (
        bags(n, heads, d, seed=i, dtype=dtype)
        for i, (n, d) in enumerate(((lengths, dim), (of_keys, dim), (of_keys, width)))
    )
    return q, k, v.values


def biases(heads, lengths, of_keys):
    times = lambda n: torch.arange(sum(n) + 2) * 37 % 101
    return {
        "position_bias": drawn(heads, 5, seed=7),
        "time_bias": drawn(1, 9, seed=8),
        "query_times": times(lengths),
        "key_times": times(of_keys),
    }


def brute(q, k, v, causal=True, targets=0, position=None, time=None, times=None, activation="softmax", normalizer=0.0):
    """Return the attention of one bag, by loops over queries and keys."""
    (n, heads, dim), m = q.shape, k.shape[0]
    out = q.new_zeros(n, heads, v.shape[2])
    history = m - min(targets, m)
    for h in range(heads):
        for i in range(n):
            at, scores, seen = i + m - n, [], []
            for j in range(m):
                if (j > at and causal) or (j >= history and j != at):
                    continue
                s = q[i, h] @ k[j, h] / dim**0.5
                if position is not None:
                    away = abs(min(at, history) - min(j, history))
                    s = s + position[h % len(position), min(away, position.shape[1] - 1)]
                if time is not None:
                    apart = max(float(abs(times[0][i] - times[1][j])), 1.0)
                    s = s + time[h % len(time), min(int(torch.tensor(apart).log() / 0.301), time.shape[1] - 1)]
                scores.append(s)
                seen.append(j)
            if seen:
                s = torch.stack(scores)
                w = s.softmax(0) if activation == "softmax" else torch.nn.functional.silu(s) / normalizer
                out[i, h] = w @ v[seen, h]
    return out


def parts(x, offsets):
    return [x[a:b] for a, b in zip(offsets.tolist(), offsets.tolist()[1:], strict=False)]


@pytest.mark.parametrize("dtype", CLOSE)
@each_causal
def test_attention_is_torchs_of_each_bag(causal, dtype):
    """Softmax attention is scaled_dot_product_attention of each bag, in float64, with NaN in the padding."""
    q, k, v = case([3, 0, 1, 70, 200], dim=5, dtype=dtype)
    got = fr.jagged_attention(q, k, v, causal=causal)
    assert got.values.dtype == dtype and not got.values[274:].any()
    for x, *each in zip(*(parts(y, q.offsets) for y in (got.values, q.values, k.values, v)), strict=True):
        wide = [y.double().movedim(0, 1) for y in each]
        want = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=causal).movedim(0, 1)
        torch.testing.assert_close(x.double(), want, rtol=CLOSE[dtype], atol=CLOSE[dtype])


@given(
    lengths=st.lists(st.integers(0, 5), max_size=4), seed=st.integers(0, 99), causal=st.booleans(),
    activation=st.sampled_from([*HOW]), biased=st.booleans(), targeted=st.booleans(), kept=st.booleans(),
)  # fmt: skip
def test_every_setting_is_its_definition(lengths, seed, causal, activation, biased, targeted, kept):
    """Biases, kept histories, targets and both activations equal loops over queries and keys, in every mixture."""
    before = [(seed + 3 * i) % 4 for i in range(len(lengths))] if kept else [0] * len(lengths)
    of_keys = [n + m for n, m in zip(lengths, before, strict=True)]
    q, k, v = case(lengths, kept=before)
    more = biases(2, lengths, of_keys) if biased else {}
    counts = torch.tensor([(seed + i) % 4 for i in range(len(lengths))], dtype=torch.int64) if targeted else None
    got = fr.jagged_attention(q, k, v, causal=causal, num_targets=counts, **HOW[activation], **more)
    for b, x in enumerate(parts(got.values, q.offsets)):
        own = [parts(y, o)[b] for y, o in ((q.values, q.offsets), (k.values, k.offsets), (v, k.offsets))]
        times = biased and [parts(more[f"{s}_times"], o.offsets)[b] for s, o in (("query", q), ("key", k))]
        want = brute(
            *own, causal, int(counts[b]) if targeted else 0, more.get("position_bias"), more.get("time_bias"), times,
            **{"activation": "softmax", **HOW[activation]},
        )  # fmt: skip
        torch.testing.assert_close(x, want)
    assert not got.values[sum(lengths) :].any()


@each_activation
def test_a_query_does_not_depend_on_what_comes_later(activation):
    """With `causal`, the row of query t is the same for any keys, values and queries after t."""
    q, k, v = case([6, 4])
    more = biases(2, [6, 4], [6, 4])
    call = lambda q, k, v: fr.jagged_attention(JT(q, off), JT(k, off), v, **HOW[activation], **more).values
    off = q.offsets
    want = call(q.values, k.values, v)
    for t in range(6):
        moved = [x.clone() for x in (q.values, k.values, v)]
        for x in moved:
            x[t + 1 : 6] = 9.0
        assert torch.equal(call(*moved)[: t + 1], want[: t + 1])


@each_activation
def test_batches_together_are_batches_apart(activation):
    """The attention of two joined batches is the attention of each."""
    one, other = case([3, 0]), case([5, 1, 2], dim=4)
    both = [
        torch.cat([x[: len(x) - 2], y]) for x, y in zip(*([*(z.values for z in c[:2]), c[2]] for c in (one, other)))
    ]
    offsets = torch.cat([one[0].offsets, other[0].offsets[1:] + 3])
    got = fr.jagged_attention(JT(both[0], offsets), JT(both[1], offsets), both[2], **HOW[activation]).values
    want = [fr.jagged_attention(*c, **HOW[activation]).values for c in (one, other)]
    torch.testing.assert_close(got, torch.cat([want[0][:3], want[1]]))


@each_activation
def test_a_kept_history_gives_the_rows_of_the_whole_sequence(activation):
    """The last queries of each bag alone, with all keys, have the same rows as among all queries."""
    lengths, new = [6, 3, 4], [2, 3, 0]
    q, k, v = case(lengths)
    more = biases(2, lengths, lengths)
    whole = fr.jagged_attention(q, k, v, **HOW[activation], **more)
    last = torch.cat([torch.arange(end - n, end) for end, n in zip(q.offsets[1:].tolist(), new, strict=True)])
    few = JT(q.values[last], torch.tensor([0, *new]).cumsum(0))
    got = fr.jagged_attention(few, k, v, **HOW[activation], **more | {"query_times": more["query_times"][last]})
    torch.testing.assert_close(got.values, whole.values[last])


@each_activation
def test_targets_together_are_targets_one_by_one(activation):
    """Each target of a bag has the row that it has as the only one after the history, without `num_targets`. The same
    holds for a kept history."""
    history, count = 5, 3
    q, k, v = case([history + count])
    more = biases(2, [8], [8])
    call = lambda q, k, v, targets=None, **more: (
        fr.jagged_attention(q, k, v, num_targets=targets, **HOW[activation], **more).values
    )
    together = call(q, k, v, torch.tensor([count]), **more)
    only = JT(q.values[history : history + count], torch.tensor([0, count]))
    new = more | {"query_times": more["query_times"][history : history + count]}
    torch.testing.assert_close(call(only, k, v, torch.tensor([count]), **new), together[history : history + count])
    for c in range(count):
        rows = torch.tensor([*range(history), history + c])
        one = [JT(x.values[rows], torch.tensor([0, history + 1])) for x in (q, k)]
        times = {n: x[rows] if n.endswith("times") else x for n, x in more.items()}
        torch.testing.assert_close(call(*one, v[rows], **times)[-1], together[history + c])


def dense(activation, more, causal=True):
    def f(q, k, v, position, time):
        extra = {"activation": "softmax", **HOW[activation]}
        of = [brute(q[a:b], k[c:d], v[c:d], causal, t, position, time, (more[0][a:b], more[1][c:d]), **extra)
            for a, b, c, d, t in ((0, 2, 0, 4, 1), (2, 2, 4, 4, 2), (2, 5, 4, 7, 0))]  # fmt: skip
        return torch.cat(of)

    return f


@each_activation
@each_causal
def test_derivatives_are_those_of_the_definition(activation, causal):
    """First and second derivatives by queries, keys, values and both biases are right, and 0 in the padding."""
    q, k, v = drawn(7, 2, 3), drawn(8, 2, 3, seed=1), drawn(8, 2, 2, seed=2)
    x = q, k, v, drawn(1, 3, seed=3), drawn(2, 6, seed=4)
    times = torch.arange(7) * 11 % 13, torch.arange(8) * 5 % 17
    of_queries, of_keys, targets = torch.tensor([0, 2, 2, 5]), torch.tensor([0, 4, 4, 7]), torch.tensor([1, 2, 0])

    def ours(q, k, v, position, time):
        return fr.jagged_attention(
            JT(q, of_queries), JT(k, of_keys), v, causal=causal, num_targets=targets, position_bias=position,
            time_bias=time, query_times=times[0], key_times=times[1], **HOW[activation],
        ).values[:5]  # fmt: skip

    total = lambda f: lambda *x: f(*x).sin().sum()
    theirs = dense(activation, times, causal)
    torch.testing.assert_close(ours(*x), theirs(*x))
    every = tuple(range(5))
    got, want = grad(total(ours), every)(*x), grad(total(theirs), every)(*x)
    torch.testing.assert_close(got, want)
    assert not got[0][5:].any() and not got[1][7:].any()
    move = tuple(drawn(*y.shape, seed=9) for y in x)
    slope = lambda f: jvp(f, x, move)[1]
    torch.testing.assert_close(slope(ours), slope(theirs))
    torch.testing.assert_close(slope(grad(total(ours), every)), slope(grad(total(theirs), every)))
    inner = lambda f: lambda *x: sum((d * m).sum() for d, m in zip(grad(total(f), every)(*x), move, strict=True))
    torch.testing.assert_close(grad(inner(ours), every)(*x), grad(inner(theirs), every)(*x))


@each_activation
def test_transforms_compose(activation):
    """vmap, jit, hessians and Jacobians equal those of single calls, also for 0 bags and 0 positions."""
    off = torch.tensor([0, 2, 2, 5])
    f = lambda x: fr.jagged_attention(JT(x, off), JT(x * 2, off), x.sin(), **HOW[activation]).values
    x = drawn(6, 2, 3)
    stack = torch.stack([x, x * 2 - 1, x.flip(0)])
    want = torch.stack([f(x) for x in stack])
    torch.testing.assert_close(vmap(f)(stack), want)
    torch.testing.assert_close(fr.jit(f)(x), f(x))
    slope = lambda x: jvp(f, (x,), (torch.ones_like(x),))[1]
    torch.testing.assert_close(vmap(slope)(stack), torch.stack([slope(x) for x in stack]))
    torch.testing.assert_close(jacfwd(f)(x), jacrev(f)(x))
    total = lambda x: f(x).square().sum()
    torch.testing.assert_close(hessian(total)(x), jacrev(jacrev(total))(x))
    torch.testing.assert_close(fr.jit(grad(total))(x), grad(total)(x))
    by_bags = lambda o: fr.jagged_attention(JT(x, o), JT(x, o), x, **HOW[activation]).values
    offsets = torch.stack([off, torch.tensor([0, 0, 4, 6])])
    torch.testing.assert_close(vmap(by_bags)(offsets), torch.stack([by_bags(o) for o in offsets]))
    for o in (torch.zeros(1, dtype=torch.int64), torch.zeros(4, dtype=torch.int32)):
        for y in (x, x[:0]):
            empty = lambda y, o=o: fr.jagged_attention(JT(y, o), JT(y, o), y, **HOW[activation]).values
            assert not empty(y).any() and empty(y).shape == y.shape
            assert not grad(lambda y, f=empty: f(y).sum())(y).any()


def test_a_query_without_keys_is_zero():
    """A bag of more queries than keys gives 0 to the queries before the first key, and no NaN to any derivative."""
    q, k, v = JT(drawn(3, 1, 2), torch.tensor([0, 3])), JT(drawn(1, 1, 2), torch.tensor([0, 1])), drawn(1, 1, 2)
    f = lambda q, k, v: fr.jagged_attention(JT(q, torch.tensor([0, 3])), JT(k, torch.tensor([0, 1])), v).values
    out = fr.jagged_attention(q, k, v).values
    assert not out[:2].any() and torch.equal(out[2], v[0])
    assert all(d.isfinite().all() for d in grad(lambda *x: f(*x).square().sum(), (0, 1, 2))(q.values, k.values, v))
    none = fr.jagged_attention(q, JT(k.values[:0], torch.zeros(2, dtype=torch.int64)), v[:0])
    assert not none.values.any() and none.values.shape == (3, 1, 2)


@given(seed=st.integers(0, 2**16))
def test_padding_changes_nothing(seed):
    """Whatever the padding of queries, keys, values and times holds, rows and derivatives have the same bits."""
    q, k, v = (bags([2, 3], 2, 3, seed=i, padding=3) for i in range(3))
    more = biases(2, [2, 3], [2, 3]) | {"query_times": drawn(8), "key_times": drawn(8, seed=1)}

    def rows(q, k, v):
        call = lambda *x: fr.jagged_attention(JT(x[0], q.offsets), JT(x[1], k.offsets), x[2], **more).values
        values = q.values, k.values, v.values
        return call(*values), *grad(lambda *x: call(*x).square().sum(), (0, 1, 2))(*values)

    zero = [JT(x.values.nan_to_num(0), x.offsets) for x in (q, k, v)]
    noisy = [garbage_padding(x, fr.key(seed + i)) for i, x in enumerate((q, k, v))]
    for x, y in zip(rows(*zero), rows(*noisy), strict=True):
        assert torch.equal(x, y) and not x[5:].any()


Q, V = JT(torch.ones(3, 2, 4), torch.tensor([0, 1, 3])), torch.ones(3, 2, 5)
WRONG = {
    "`queries.values` is not a tensor of this dtype": lambda: fr.jagged_attention(JT(Q.values.long(), Q.offsets), Q, V),
    "`queries.values` is not a tensor of these": lambda: fr.jagged_attention(JT(Q.values[:, 0], Q.offsets), Q, V),
    "`queries` have no dim": lambda: fr.jagged_attention(*(JT(Q.values[:, :, :0], Q.offsets),) * 2, V),
    "`values` has another dtype": lambda: fr.jagged_attention(Q, Q, V.double()),
    "`keys` have weights": lambda: fr.jagged_attention(Q, JT(Q.values, Q.offsets, V[:, 0, 0]), V),
    "`keys` does not match `queries`": lambda: fr.jagged_attention(Q, JT(V, Q.offsets), V),
    "`values` does not match `keys`": lambda: fr.jagged_attention(Q, Q, V[:2]),
    "`queries`, which is f32[3, 2, 4] in 2 bags": lambda: fr.jagged_attention(Q, JT(Q.values, torch.tensor([0, 3])), V),
    "`silu` requires `normalizer`": lambda: fr.jagged_attention(Q, Q, V, activation="silu"),
    "`softmax` takes no `normalizer`": lambda: fr.jagged_attention(Q, Q, V, normalizer=2.0),
    "`position_bias` does not fit the heads": lambda: fr.jagged_attention(Q, Q, V, position_bias=torch.ones(3, 2)),
    "`time_bias` and times come together": lambda: fr.jagged_attention(Q, Q, V, time_bias=torch.ones(1, 2)),
    "`key_times` does not match `keys`": lambda: fr.jagged_attention(
        Q, Q, V, time_bias=torch.ones(1, 2), query_times=torch.ones(3), key_times=torch.ones(2)
    ),
    "`query_times` does not match `queries`": lambda: fr.jagged_attention(
        Q, Q, V, time_bias=torch.ones(1, 2), query_times=torch.ones(2), key_times=torch.ones(3)
    ),
    "`num_targets` does not match `queries`": lambda: fr.jagged_attention(Q, Q, V, num_targets=torch.ones(3).long()),
}


@pytest.mark.parametrize("text", WRONG)
def test_what_does_not_fit_is_refused(text):
    """The error has what, got and need."""
    assert_refused(WRONG[text], (TypeError, ValueError), text)


def test_a_gradient_runs_the_kernels():
    """On a CPU, a gradient of first order calls kernel and transpose once each, eager, in vmap and staged."""
    off, x = torch.tensor([0, 2, 5]), drawn(5, 2, 3)
    total = lambda x: fr.jagged_attention(JT(x, off), JT(x, off), x).values.square().sum()
    stack = torch.stack([x, x.flip(0)])
    calls = {"eager": lambda: grad(total)(x), "vmap": lambda: vmap(grad(total))(stack)}
    for call in calls.values():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            call()
        names = [e.name for e in seen.events()]
        assert names.count("funcrec_cpp::jagged_attention") == 1
        assert names.count("funcrec_cpp::jagged_attention_transpose") == 1
    staged = str(fr.jit(grad(total)).lower(x).graph)
    assert staged.count("funcrec_cpp.jagged_attention.default") == 1
    assert staged.count("funcrec_cpp.jagged_attention_transpose.default") == 1
