"""vmap of lookups and updates makes one kernel call for all members, with the bits of a loop.

Any arguments may be stacked, at any dimension.

vmap(f)(stacked) = stack over k of f(member k),   with one call of each operator
"""

import contextlib
import functools
from unittest import mock

import pytest
import torch
from funcrec.kernels import ops
from funcrec.kernels.cpp import _native
from funcrec.kernels.rules import RULES
from hypothesis import given, settings
from hypothesis import strategies as st
from programs.surroundings import on_threads
from torch.func import grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import funcrec as fr
from funcrec.optim.write import examples
from funcrec.testing import assert_trees_close
from funcrec.testing import strategies as frs

F64 = torch.float64
FEATURE = ops.Feature(0, 0, 0, 0, False, False, 0)


class Counted(TorchDispatchMode):
    """Count the calls of each operator of funcrec. `others` collects the names of torch's operators."""

    def __init__(self):
        super().__init__()
        self.calls, self.others = {}, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.namespace.startswith("funcrec"):
            self.others.add(func.name())
        if func.namespace.startswith("funcrec"):
            name = func.name().split("::")[1]
            self.calls[name] = self.calls.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def stack(trees, dim=0):
    return tree_map(lambda *x: torch.stack(x, min(dim, x[0].dim())), *trees)


def member(tree, i):
    return tree_map(lambda x: x[i], tree)


def members(it, k):
    """Return (tables, ids) of k members that differ in numbers, ids (some outside), bags and weights."""
    tables = [{n: w * (1 + i) + i for n, w in it.tables.items()} for i in range(k)]
    last = int(it.ids.offsets[-1])
    other = [
        fr.KeyedJaggedTensor(
            it.ids.values.roll(i) - i % 2,
            it.ids.offsets.clamp(max=max(last - i, 0)),
            None if it.ids.weights is None else it.ids.weights.nan_to_num(0.5).roll(i) * (1 + i),
            None,
            it.ids.keys,
        )
        for i in range(k)
    ]
    return tables, other


STACKED = [("tables",), ("ids",), ("tables", "ids"), ("weights",), ("tables", "weights"), ("offsets",), ("values",)]


def given_members(it, k, what, dim):
    """Return (arguments, in_dims, a function that gives the arguments of member i). The arguments are tables, values,
    offsets and weights. The arguments in `what` are stacked at `dim`."""
    tables, ids = members(it, k)
    parts = [tables, [x.values for x in ids], [x.offsets for x in ids], [x.weights for x in ids]]
    names = [{"tables"}, {"ids", "values"}, {"ids", "offsets"}, {"ids", "weights"}]
    mapped = [bool(names[j] & set(what)) and parts[j][0] is not None for j in range(4)]
    place = lambda x: min(dim, x.dim())
    args = [stack(p, dim) if m else p[0] for p, m in zip(parts, mapped, strict=True)]
    dims = [tree_map(place, p[0]) if m else None for p, m in zip(parts, mapped, strict=True)]
    return args, tuple(dims), lambda i: [p[i] if m else p[0] for p, m in zip(parts, mapped, strict=True)]


def looked_up(it):
    def run(tables, values, offsets, weights):
        return fr.lookup(tables, fr.KeyedJaggedTensor(values, offsets, weights, None, it.ids.keys), it.features).values

    return run


@pytest.mark.parametrize("what", STACKED, ids="+".join)
@settings(max_examples=15)
@given(it=frs.lookups(poolings=("sum", "mean"), dtypes=(torch.float32, torch.bfloat16)), k=st.integers(1, 3),
    dim=st.integers(0, 2), out=st.integers(0, 2))  # fmt: skip
def test_a_lookup_of_stacks_is_one_call(what, it, k, dim, out):
    """A lookup with stacked tables, ids, bags or weights, at any dimension, makes one kernel call. The lookup has the
    bits of a loop."""
    args, dims, of_member = given_members(it, k, what, dim)
    if all(d is None for d in dims):
        return
    run = looked_up(it)
    if what == ("weights",) and not any(f.weighted for f in it.features):
        out = 0  # The result is not mapped, and torch places such results right at the first dimension only.
    with Counted() as counted:
        got = vmap(run, in_dims=dims, out_dims=out)(*args)
    assert counted.calls["pooled_lookup"] == 1
    want = torch.stack([run(*of_member(i)) for i in range(k)], out)
    assert_trees_close(got, want)


def test_stacked_tables_are_read_where_they_lie():
    """A lookup in stacked tables calls its kernel and no other operator of torch, eagerly and in a traced graph."""
    (tables, *rest), run = at(0), lambda t, *x: vmap(plainly, in_dims=(0, None, None, None))(t, *x)
    many = {n: torch.stack([t, t + 1]) for n, t in tables.items()}
    with Counted() as counted:
        run(many, *rest)
    assert counted.calls == {"pooled_lookup": 1}
    assert counted.others <= {"aten::detach"}, counted.others
    graph = make_fx(run)(many, *rest).graph
    assert [n.target for n in graph.nodes if n.op == "call_function"] == [torch.ops.funcrec_cpp.pooled_lookup.default]


WHICH = ["tables", "rows", "offsets", "weights", "weights, buffers of two lengths", "all", "none"]


@pytest.mark.parametrize("what", WHICH)
def test_the_operator_takes_stacks(what):
    """pooled_lookup of stacks is the stack of the calls of all members. This includes blocks, and stacks without
    members. The operator's fake has the same shape, and its vmap the same values."""
    k, op = 3, torch.ops.funcrec_cpp.pooled_lookup.default
    each = [
        ([torch.arange(12.0).reshape(4, 3).sin() + i, torch.arange(15.0).reshape(5, 3) * (i + 1)],
         [torch.tensor([0, 3, 1, 9, 2, 2]).roll(i), torch.tensor([1, 1, 4, 0, -1, 2] + [7] * ("two" in what)).roll(i)],
         torch.tensor([0, 2, 2, 5, 6]) - torch.tensor([0, 0, 0, 0, i]), torch.arange(6.0 + ("two" in what)) + i)
        for i in range(k)
    ]  # fmt: skip
    features = [0, 0, 0, 0, 0, 1, 0, 1, 1, 2, 2, 1, 1, 3]
    mapped = [what == "all" or what.split(",")[0] == name for name in ("tables", "rows", "offsets", "weights")]
    given = [stack([x[j] for x in each]) if m else each[0][j] for j, m in enumerate(mapped)]
    of_member = lambda i: [each[i][j] if m else each[0][j] for j, m in enumerate(mapped)]
    for blocks in (1, 2):
        run = lambda *x, blocks=blocks: op(*x, features, 2, blocks)
        want = torch.stack([run(*of_member(i)) for i in range(k)]) if any(mapped) else run(*given)
        assert_trees_close(run(*given), want)
        assert run(*tree_map(lambda x: x.to("meta"), given)).shape == want.shape
        if any(mapped):
            none = [tree_map(lambda x: x[:0], x) if m else x for x, m in zip(given, mapped, strict=True)]
            assert run(*none).shape == (0, *want.shape[1:])
            turned = [tree_map(lambda x: x.movedim(0, -1), x) if m else x for x, m in zip(given, mapped, strict=True)]
            assert_trees_close(vmap(run, in_dims=tuple(-1 if m else None for m in mapped))(*turned), want)


@settings(max_examples=15)
@given(frs.lookups(poolings=("none",), dtypes=(torch.float32,)), st.sampled_from(STACKED[:3]), st.integers(1, 3))
def test_rows_of_stacks_are_one_call(it, what, k):
    """lookup_sequence of stacks has the bits of a loop, and makes one call for each feature."""
    args, dims, of_member = given_members(it, k, what, 0)

    def run(tables, values, offsets, weights):
        ids = fr.KeyedJaggedTensor(values, offsets, weights, None, it.ids.keys)
        return {n: x.values for n, x in fr.lookup_sequence(tables, ids, it.features).items()}

    with Counted() as counted:
        got = vmap(run, in_dims=dims)(*args)
    assert counted.calls["gather_rows"] == len(it.features)
    assert_trees_close(got, stack([run(*of_member(i)) for i in range(k)]))


TRANSFORMS = {
    "grad": lambda f, *x: grad(lambda *y: f(*y).sin().sum(), argnums=(0, 3))(*x),
    "jvp": lambda f, *x: jvp(lambda t, w: f(t, x[1], x[2], w), (x[0], x[3]), (x[0], x[3] * 2)),
    "grad of grad": lambda f, *x: grad(
        lambda t, w: (grad(lambda v: f(t, x[1], x[2], v).sin().sum())(w) ** 2).sum(), argnums=(0, 1)
    )(x[0], x[3]),
}
BAG = fr.KeyedJaggedTensor.from_lists({"a": [[0, 2, 2], [], [1]], "b": [[1], [0, -1, 3], [9]]}).pad_to(12)
FEATURES = [
    fr.FeatureConfig("a", table="x", weighted=True), fr.FeatureConfig("b", table="y", pooling="mean"),
    fr.FeatureConfig("c", table="x", column="b", weighted=True, pooling="mean", max_length=2),
]  # fmt: skip


def at(i):
    """Return the tables, values, offsets and weights of member i, in f64."""
    wave = lambda *shape: (torch.arange(float(torch.Size(shape).numel()), dtype=F64) * (0.7 + i)).sin().reshape(shape)
    return [{"x": wave(3, 2), "y": wave(4, 3)}, (BAG.values + i) % 4 - 1, BAG.offsets, wave(12) + 1]


def plainly(*x):
    tables, values, offsets, weights = x
    return fr.lookup(tables, fr.KeyedJaggedTensor(values, offsets, weights, None, BAG.keys), FEATURES).values


@pytest.mark.parametrize("mapped",
    [(0, 0, 0, 0), (0, None, None, None), (None, 0, 0, None), (None, None, None, 0), (0, None, None, 0)],
    ids=str)  # fmt: skip
@pytest.mark.parametrize("name", TRANSFORMS)
def test_derivatives_of_stacks(name, mapped):
    """Derivatives inside a vmap, and of a vmap, equal those of a loop and of the reference, to second order, in f64."""
    k, each = 3, [at(i) for i in range(3)]
    args = [stack([x[j] for x in each]) if d == 0 else each[0][j] for j, d in enumerate(mapped)]
    mine = lambda i: [each[i][j] if d == 0 else each[0][j] for j, d in enumerate(mapped)]
    one = functools.partial(TRANSFORMS[name], plainly)
    want = stack([one(*mine(i)) for i in range(k)])
    close = {"rtol": 1e-11, "atol": 1e-11}
    assert_trees_close(vmap(one, in_dims=mapped)(*args), want, **close)
    with ops.using("reference"):
        assert_trees_close(stack([one(*mine(i)) for i in range(k)]), want, **close)
    if all(d is None for j, d in enumerate(mapped) if j in (0, 3)):
        return
    total = lambda t, w: vmap(plainly, in_dims=mapped)(t, args[1], args[2], w).sin().sum()
    loop = lambda t, w: sum(
        plainly(member(t, i) if mapped[0] == 0 else t, *mine(i)[1:3], w[i] if mapped[3] == 0 else w).sin().sum()
        for i in range(k)
    )
    got, sure = (grad(f, argnums=(0, 1))(args[0], args[3]) for f in (total, loop))
    assert_trees_close(got, sure, **close)
    penalty = lambda f: grad(lambda t, w: (grad(f, argnums=1)(t, w) ** 2).sum(), argnums=(0, 1))(args[0], args[3])
    assert_trees_close(penalty(total), penalty(loop), **close)


def test_nothing_to_map_over():
    """vmap gives right results for no members, for one member, and for bags without ids."""
    args = at(0)
    for k in (0, 1):
        many = [tree_map(lambda x, k=k: x.expand(k, *x.shape), y) for y in args]
        assert_trees_close(vmap(plainly)(*many), plainly(*args).expand(k, -1, -1))
        rows = lambda t, v: fr.tables._primitives.gather_rows(t["x"], v)
        assert_trees_close(vmap(rows)(*many[:2]), rows(*args[:2]).expand(k, -1, -1))
        of_weights = lambda w: grad(lambda v: plainly(*args[:3], v).sin().sum())(w)
        assert_trees_close(vmap(of_weights)(many[3]), of_weights(args[3]).expand(k, -1))
    empty = [args[0], args[1][:0], torch.zeros_like(args[2]), args[3][:0]]
    assert_trees_close(vmap(plainly)(*[stack([x, x]) for x in empty]), plainly(*empty).expand(2, -1, -1))


def test_stacks_of_tables_without_columns():
    """A lookup in stacks of tables of no columns returns no columns for each member."""
    lookup = lambda t: ops.pooled_lookup([t], [torch.tensor([0, 1])], torch.tensor([0, 2]), None, [FEATURE], 1)
    assert vmap(lookup)(torch.zeros(3, 4, 0)).shape == (3, 1, 0)


# -- sums and updates --------------------------------------------------------------------------------------------


def row_grads(i, dtype=torch.float32):
    """Return the gradients of member i for two tables: bags, and entries with repeats, some of them outside."""
    d = fr.KeyedTensor.from_dict({"a": torch.ones(3, 2) * (1 + i), "b": torch.full((3, 3), 0.5 - i)})
    ids = fr.KeyedJaggedTensor((BAG.values + i) % 5 - 1, BAG.offsets, None, None, BAG.keys)
    of = fr.lookup_transpose(d, ids, [fr.FeatureConfig("a", table="x"), fr.FeatureConfig("b", table="y")], TABLES)
    more = fr.RowGrads.from_entries(torch.tensor([2, 0, 2, 7]) - i % 2, torch.ones(4, 2) * (i + 2), num_embeddings=4)
    return {"x": of["x"] + more, "y": of["y"]}


TABLES = {"x": torch.arange(8.0).reshape(4, 2).sin(), "y": torch.arange(15.0).reshape(5, 3).cos()}
K = 3
GRADS = [row_grads(i) for i in range(K)]
STACKS = {n: torch.stack([t * (1 + i) for i in range(K)]) for n, t in TABLES.items()}


def test_a_sum_of_stacks_is_one_call():
    """coalesce under vmap makes one call for each table, with the bits of a loop."""
    run = lambda g: {n: (x.rows, x.grads, x.count, x.repeats) for n, x in ((n, x.coalesce()) for n, x in g.items())}
    with Counted() as counted:
        got = vmap(run)(stack(GRADS))
    assert counted.calls == {"coalesce": 2}
    assert_trees_close(got, stack([run(g) for g in GRADS]))


OPTIMIZERS = {
    name: (lambda name=name: getattr(fr.optim, name)(lr=0.1, **examples(name)[0])) for name in RULES
} | {
    "scheduled": lambda: fr.optim.sgd(lr=lambda step: 0.1 / (1 + step)),
    "own": lambda: fr.optim.row_optimizer(
        init=lambda t: {"age": torch.zeros(t.shape[0])},
        rule=lambda row, g, s, h: (row - h.lr * g / h.step, {"age": s["age"] + h.repeats}),
        lr=lambda step: 0.1 / (1 + step),
    ),
}  # fmt: skip


@pytest.mark.parametrize("mapped", ["all", "gradients", "steps apart"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_of_stacks_is_one_call(name, mapped):
    """An update of stacked tables, slots, gradients and steps has the bits of a loop. The update makes one call of the
    operator, and of the compiled function, for all tables of all members."""
    opt = OPTIMIZERS[name]()
    slots = [opt.init(member(STACKS, i)) for i in range(K)]
    slots = [tree_map(lambda s, i=i: s + 0.1 * i, own) for i, own in enumerate(slots)]
    steps = torch.tensor([4, 4, 4] if mapped != "steps apart" else [0, 3, 9])
    stacked = (stack(GRADS), stack(slots), STACKS, steps)
    dims = (0, None, None, None) if mapped == "gradients" else (0, 0, 0, 0)
    args = [x if d == 0 else member(x, 0) for x, d in zip(stacked, dims, strict=True)]
    opt.update(*(member(x, 0) if d == 0 else x for x, d in zip(args, dims, strict=True)))  # a user's rule is compiled
    entry, calls = _native.call, []
    with Counted() as counted, mock.patch.object(_native, "call", lambda n, x: (calls.append(n), entry(n, x))):
        got = vmap(lambda g, s, t, n: opt.update(g, s, t, n), in_dims=dims)(*args)
    assert calls == ["fused_update"]
    updates = {n: c for n, c in counted.calls.items() if "update" in n}
    assert list(updates.values()) == [1], counted.calls
    each = [[member(x, i) if d == 0 else y for x, y, d in zip(stacked, args, dims, strict=True)] for i in range(K)]
    assert_trees_close(got, stack([opt.update(*x) for x in each]))


def test_the_rules_that_read_the_step_are_known():
    """The table of rules marks exactly the rules whose rows differ at another step."""
    for name, rule in RULES.items():
        hyper = [0.5] * len(rule.hyper)
        table, slots = torch.tensor([[1.0, 1.0], [1.0, 2.0]]), [torch.full((2,), 0.5), torch.full((2, 2), 0.5)]
        given = [slots[is_wide] for is_wide in rule.wide]
        grads = fr.RowGrads.from_entries(torch.tensor([1]), torch.tensor([[0.3, -1.0]]), num_embeddings=2)
        terms = fr.tables._rowgrads.terms_of([grads])
        lr = torch.tensor(0.1, dtype=F64)
        at = lambda t: tree_leaves(ops.fused_update([table], [given], terms, lr, torch.tensor(t), None, name, hyper))  # noqa: B023
        differs = any(not torch.equal(a, b) for a, b in zip(at(0), at(7), strict=True))
        assert differs == rule.is_timed, name


def test_random_rounding_is_the_members_own():
    """Under vmap, 16-bit tables are rounded with the key of each member, as in a loop."""
    opt = fr.optim.stochastic_rounding(fr.optim.rowwise_adagrad(lr=0.1), key=fr.key(3))
    tables = {n: t.bfloat16() for n, t in STACKS.items()}
    slots = stack([opt.init(member(tables, i)) for i in range(K)])
    for steps in (torch.tensor([1, 1, 1]), torch.tensor([0, 1, 2])):
        got = vmap(opt.update)(stack(GRADS), slots, tables, steps)
        want = [opt.update(GRADS[i], member(slots, i), member(tables, i), steps[i]) for i in range(K)]
        assert_trees_close(got, stack(want))


K_APART, BAGS, DIMS = 3, 400, (5, 4)


def drawn_members(rule: str, dtype: torch.dtype, apart: tuple[str, ...], seed: int = 0):
    """Return (tables, slots, terms, in_dims of the terms, segments, numbers) of three members.

    Three features with bags read two tables, with sums, means and weights, beside entries without bags. Ids lie also
    outside the tables. Member 1 has no id if rows are apart."""
    g = torch.Generator().manual_seed(seed)
    acc = F64 if dtype == F64 else torch.float32
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=acc)
    ids = lambda *shape: torch.randint(-1, 310, shape, generator=g)
    own = lambda name, make: torch.stack([make() for _ in range(K_APART)]) if name in apart else make()
    offsets = lambda: torch.sort(torch.randint(0, 1600, (3 * BAGS + 1,), generator=g))[0]
    d = [draw(K_APART, BAGS, 3 * DIMS[0] + DIMS[1]), draw(K_APART, 700, DIMS[0])]
    rows = [own("rows", lambda: ids(1600)), own("rows", lambda: ids(700))]
    for x in rows if "rows" in apart else ():
        x[1] = -1
    terms = [d, rows, [own("offsets", offsets)], [own("weights", lambda: draw(1600).abs())]]
    parts = [
        ops.Segment(0, 0, 0, 0, 0, 0, BAGS, 0, False, -1), ops.Segment(0, 0, 5, 0, 0, BAGS, BAGS, 3, True, 0),
        ops.Segment(0, 1, 0, 1, -1, 0, 700, 0, False, -1), ops.Segment(1, 0, 15, 0, 0, 2 * BAGS, BAGS, 0, False, -1),
    ]  # fmt: skip
    dims = [[0 if x.dim() > rank else None for x in xs] for rank, xs in zip((2, 1, 1, 1), terms, strict=True)]
    tables = [draw(K_APART, 40, DIMS[0]).to(dtype), draw(K_APART, 300, DIMS[1]).to(dtype)]
    slots = [[draw(*t.shape[: 3 if wide else 2]).abs() for wide in RULES[rule].wide] for t in tables]
    numbers = torch.rand(K_APART, len(RULES[rule].hyper), generator=g, dtype=F64) * 0.5
    optional = torch.tensor([n in dict(RULES[rule].optional).values() for n in RULES[rule].hyper])
    zero = (torch.rand(numbers.shape, generator=g) < 0.3) & ~optional
    return tables, slots, terms, dims, parts, numbers.masked_fill(zero, 0)


def assert_members_are_alone(rule, dtype, apart, key=None, lr=(0.1, 0.3, 0.01), threads=1):
    """One call of the compiled update for all members has the bits of the members' own calls. Returns the tables."""
    tables, slots, terms, in_dims, parts, numbers = drawn_members(rule, dtype, apart)
    lr, steps = torch.tensor(lr, dtype=F64), torch.tensor([0, 4, 9])

    def update(tables, slots, terms, lr, step, key, numbers):
        given = ops.Terms(*terms, parts)
        return ops.fused_update(tables, slots, given, lr, step, key, rule, [0.5] * len(numbers), None, (), numbers)

    at = (0, 0, in_dims, 0, 0, None if key is None else 0, 0)
    of_terms = lambda i: [
        [x[i] if dim == 0 else x for x, dim in zip(*xs, strict=True)] for xs in zip(terms, in_dims, strict=True)
    ]
    own_key = lambda i: None if key is None else key[i]
    alone = lambda i: update(*member([tables, slots], i), of_terms(i), lr[i], steps[i], own_key(i), numbers[i])
    entry, calls = _native.call, []
    with on_threads(threads), mock.patch.object(_native, "call", lambda name, x: (calls.append(name), entry(name, x))):
        got = vmap(update, in_dims=at)(tables, slots, terms, lr, steps, key, numbers)
        assert calls == ["fused_update"]
        assert_trees_close(got, stack([alone(i) for i in range(K_APART)]))
    assert not torch.equal(got[0][0][0], tables[0][0])
    assert "rows" not in apart or torch.equal(got[0][0][1], tables[0][1])
    return got[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, F64], ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_members_with_their_own_numbers_have_the_bits_of_a_loop(rule, dtype):
    """One update serves members with rates, steps and hyper-parameters of their own, whether or not they share ids,
    on any number of threads. Each member has the bits of its own update."""
    for apart, threads in (((), 1), ((), 8), (("rows",), 3), (("offsets", "weights"), 1)):
        assert_members_are_alone(rule, dtype, apart, threads=threads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_members_with_their_own_keys_round_alone(dtype):
    """Members with rates and keys of their own round at random as alone."""
    key = torch.tensor([[[[7 * i + t, 0, i, 9], [0, 2**63 - 1, 0, 0]] for t in (0, 1)] for i in range(K_APART)])
    made = [assert_members_are_alone("adam", dtype, (), key=k)[0] for k in (key, key + torch.tensor([5, 0, 0, 0]))]
    assert not torch.equal(*made)


@pytest.mark.parametrize("rule", ["sgd", "adam"])
def test_members_with_their_own_windows(rule):
    """Members that hold other columns of their rows each update their own columns. A window outside the gradient
    raises."""
    g = torch.Generator().manual_seed(0)
    tables, d, lr = torch.randn(3, 6, 2, generator=g), torch.randn(3, 4, 7, generator=g), torch.tensor([1.0, 0.1, 0.3])
    slots = [torch.rand(3, 6, 2, generator=g) for _ in RULES[rule].slots]
    parts, hyper = [ops.Segment(0, 0, 1, 0, -1, 0, 4, 0, False, -1)], [0.5] * len(RULES[rule].hyper)

    def update(table, slots, d, lr, first):
        terms = ops.Terms([d], [torch.tensor([5, 0, 5, -1])], [], [], parts)
        given = ops.fused_update([table], [slots], terms, lr.double(), torch.tensor(3), None, rule, hyper, first, (5,))
        return given[0][0], given[1][0]

    first = torch.tensor([[0], [3], [1]])
    got = vmap(update)(tables, slots, d, lr, first)
    assert_trees_close(got, stack([update(*member([tables, slots, d, lr, first], i)) for i in range(3)]))
    assert not torch.equal(got[0], tables)
    with pytest.raises(ValueError, match=r"columns \[4, 6\) of gradients with 5"):
        vmap(update)(tables, slots, d, lr, first + torch.tensor([[0], [1], [0]]))


def test_a_rate_that_is_nan_is_its_members_own():
    """A member whose rate is NaN has NaN in the rows that it reads. Other members have their own numbers."""
    for tables in assert_members_are_alone("rowwise_adagrad", torch.float32, (), lr=(0.1, torch.nan, 0.01)):
        assert [bool(t.isnan().any()) for t in tables] == [False, True, False]


def test_members_of_members():
    """vmap of vmap of an update with rates of both levels has the bits of a loop."""
    rates, table = torch.tensor([[0.1, 0.2, 0.3], [1.0, 2.0, 3.0]]), torch.arange(8.0).reshape(4, 2)
    grads = fr.RowGrads.from_entries(torch.tensor([2, 0, 2, 9]), torch.ones(4, 2), num_embeddings=4)
    one = lambda rate: fr.optim.sgd(lr=rate).update({"x": grads}, {"x": {}}, {"x": table}, 0)[0]["x"]
    want = torch.stack([torch.stack([one(x) for x in xs]) for xs in rates])
    assert torch.equal(vmap(vmap(one))(rates), want) and torch.equal(vmap(one)(rates[0]), want[0])


# -- whole steps -------------------------------------------------------------------------------------------------


def make_step(sparse):
    features = [fr.FeatureConfig("a", table="x"), fr.FeatureConfig("b", table="y", pooling="mean")]
    loss = lambda p, ids: ((fr.lookup(p.tables, ids, features).values * p.dense["w"]).sin()).mean()
    return fr.train_step(loss, sparse=sparse, dense=fr.optim.dense(torch.optim.Adam, lr=0.1))


@pytest.mark.parametrize("staged", [False, True], ids=["eager", "jit"])
def test_an_ensemble_is_its_members(staged, interpreted):
    """A donated vmap of a training step over stacked states takes the steps of each member, in place, by one update."""
    step = make_step(fr.optim.adam(lr=0.1))
    states = [step.init(fr.Params(member(STACKS, i), {"w": torch.arange(5.0) + i})) for i in range(K)]
    together, ids = stack(states), BAG
    many = vmap(step, in_dims=(0, None))
    if staged:
        many = fr.jit(many, donate=("state",))
    places = [x.data_ptr() for x in together.tables.values()]
    for _ in range(3):
        with contextlib.nullcontext() if staged else Counted() as counted:
            together, metrics = many(together, ids)
        assert staged or counted.calls == {"pooled_lookup": 2, "fused_update": 1}
        losses = []
        for i in range(K):
            states[i], own = step(states[i], ids)
            losses.append(own["loss"])
        assert_trees_close(metrics["loss"], torch.stack(losses), rtol=1e-5, atol=1e-6)
    assert_trees_close(together, stack(states), rtol=1e-5, atol=1e-6)
    if staged:
        assert [x.data_ptr() for x in together.tables.values()] == places and many.num_compiled() == 1


LOOKED = fr.KeyedJaggedTensor.from_lists(
    {"a": [[1, 2], [0]], "b": [[1], [2, 2]]}, weights={"a": [[0.5, 2.0], [3.0]], "b": [[1.0], [1.0] * 2]}
)
OF_LOOKED = [fr.FeatureConfig("a", "t", weighted=True), fr.FeatureConfig("b", "u", pooling="mean")]


def looked(tables, weights, values):
    ids = fr.KeyedJaggedTensor(values, LOOKED.offsets, weights, None, LOOKED.keys)
    return (fr.lookup(tables, ids, OF_LOOKED).values * torch.arange(1.0, 5)).square().sum()


DERIVED = {
    "value": vmap(looked),
    "tables": vmap(grad(looked)),
    "weights": vmap(grad(looked, argnums=1)),
    "both": vmap(lambda t, w, v: grad(lambda w: grad(looked)(t, w, v)["t"].square().sum())(w)),
    "forward": vmap(lambda t, w, v: jvp(lambda w: looked(t, w, v), (w,), (w,))[1]),
    "outside": lambda *given: grad(lambda *given: vmap(looked)(*given).sum(), argnums=(0, 1))(*given),
}


@pytest.mark.parametrize("is_one_call", [True, False])
@pytest.mark.parametrize("name", DERIVED)
def test_members_one_by_one_are_those_of_one_call(name, is_one_call):
    """Members whose buffers differ in length are looked up one by one, with the derivatives of each alone. There may
    be no members."""
    draw = torch.Generator().manual_seed(0)
    tables = {n: torch.randn(3, 4, 2, generator=draw) for n in "tu"}
    values = torch.stack([LOOKED.values, LOOKED.values.flip(0), LOOKED.values])
    given, run = (tables, torch.rand(3, 6, generator=draw), values), DERIVED[name]
    want = [run(*tree_map(lambda x, i=i: x[i : i + 1], given)) for i in range(3)]
    fit = mock.patch("funcrec.kernels.stacks.fit", lambda *buffers: False)
    with contextlib.nullcontext() if is_one_call else fit:
        assert_trees_close(run(*given), tree_map(lambda *x: torch.cat(x), *want), rtol=1e-5, atol=1e-5)
        none = run(*tree_map(lambda x: x[:0], given))
    assert_trees_close(none, tree_map(lambda x: x[:0], want[0]))
