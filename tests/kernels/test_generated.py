"""Rules that are translated to C++ and run inside the fused update equal the same rules in eager torch.

The built-in rules are Python functions like a user's rule. Without their kernels they are translated in the same way.
Shapes: R rows, D dim.
"""

import warnings

import pytest
import torch
from funcrec.kernels import cpp
from funcrec.kernels.cpp import _formulas, _rules
from hypothesis import given, settings
from hypothesis import strategies as st
from programs.surroundings import on_threads
from programs.update_calls import CASES
from torch import Tensor

import funcrec as fr
from funcrec.optim import _row
from funcrec.tables._rowgrads import Entries
from funcrec.testing import assert_trees_close

F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
DIMS = (1, 3, 16, 33, 64, 100)
LR, NUM_ROWS, STEP = 0.125, 40, 4
FIRST = dict(reversed(CASES))  # the first options of each rule


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def state_of(optimizer, dims, dtypes):
    """Return tables, gradients (with repeated rows, rows outside and NaN in the padding), and slots after some steps.
    Rows without a gradient are NaN."""
    rows = torch.tensor([3, 39, 3, -1, 7, 40, 2**40, 0, 39, 3, 8, 1, 5])
    count, named = 11, [0, 3, 7, 8, 39]
    tables, grads, exact = {}, {}, {}
    for i, (dim, dtype) in enumerate((d, t) for d in dims for t in dtypes):
        x = torch.full((NUM_ROWS, dim), torch.nan, dtype=dtype)
        x[named] = noise(5, dim, seed=i).to(dtype)
        g = noise(len(rows), dim, seed=i + 50, dtype=F64 if dtype == F64 else F32)
        g[count:] = torch.nan
        tables[f"t{i}"] = x
        entries = lambda g: fr.RowGrads((Entries(rows, g, torch.tensor(count)),), NUM_ROWS, g.shape[1], False)
        grads[f"t{i}"], exact[f"t{i}"] = entries(g), entries(g.double())
    slots = optimizer.init(tables)
    for own in slots.values():
        for k, x in own.items():
            x.copy_(
                torch.arange(x.numel()).reshape(x.shape) % 3
                if k in ("counter", "last")
                else noise(*x.shape).square() / 4
            )
    return (grads, exact), slots, tables, named


@pytest.fixture
def without_kernels(monkeypatch):
    monkeypatch.setattr(_row.Kernel, "fits", lambda *args: False)


def to(tree, dtype):
    return {n: to(x, dtype) if isinstance(x, dict) else x.to(dtype) for n, x in tree.items()}


def near(got: Tensor, truth: Tensor, same: Tensor, old: Tensor) -> bool:
    """Return whether |got - truth| <= 2 · (the error of the rule in eager f32 + one rounding of the accumulator) + one
    rounding to 16 bits."""
    eps = torch.finfo(F64 if got.dtype == F64 else F32).eps
    lost = (same.double() - truth).abs().max() if got.dtype != F64 else 1e-12
    bound = 2 * (lost + eps * (truth.abs() + old.double().abs()))
    if got.dtype in (F16, BF16):
        bound += torch.finfo(got.dtype).eps * truth.abs() + torch.finfo(got.dtype).tiny
    return bool(((got.double() - truth).abs() <= bound).all())


def check_rule(optimizer, dims, dtypes):
    (grads, exact), slots, tables, named = state_of(optimizer, dims, dtypes)
    with warnings.catch_warnings():
        # the rule runs in the kernel, which gives no warning
        warnings.simplefilter("error")
        got = optimizer.update(grads, slots, tables, STEP, implementation="cpp")
    wide = F64 if dtypes == (F64,) else F32
    same = optimizer.update(grads, to(slots, wide), to(tables, wide), STEP, implementation="reference")
    truth = optimizer.update(exact, to(slots, F64), to(tables, F64), STEP, implementation="reference")
    others = [i for i in range(NUM_ROWS) if i not in named]
    for n in tables:
        leaves = lambda out: [out[0][n], *(out[1][n][k] for k in slots[n])]  # noqa: B023
        for x, exact, plain, old in zip(*map(leaves, (got, truth, same, (tables, slots))), strict=True):
            assert torch.equal(x[others].nan_to_num(7.0), old[others].nan_to_num(7.0))
            assert x.dtype == old.dtype and near(x[named], exact[named], plain[named], old[named]), (n, x.shape)


@pytest.mark.parametrize(
    "number", range(len(CASES)), ids=lambda i: "-".join(map(str, (CASES[i][0], *CASES[i][1].values())))
)
def test_generated_rules_are_the_rules(without_kernels, number):
    """A generated rule moves every named row as eager torch does, with at most twice the error of eager torch. All
    other rows keep every bit."""
    rule, options = CASES[number]
    optimizer = getattr(fr.optim, rule)(lr=LR, **options)
    check_rule(optimizer, [DIMS[number % 6]], (F32, (BF16, F16)[number % 2]))
    if options == FIRST[rule]:
        check_rule(optimizer, [DIMS[(number + 4) % 6]], (F64,))


@pytest.mark.parametrize("rule", ["rowwise_adagrad", "adam", "lamb"])
def test_every_dim(without_kernels, rule):
    """Generated rules equal the Python rules for tables of all dims in one call, and for rows too long for the
    stack."""
    check_rule(getattr(fr.optim, rule)(lr=LR), (*DIMS, 9001), (F32,))


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_rows_of_16_bits_are_rounded_once(dtype):
    """If a rule's elements come from other positions of the row, the row is rounded as in eager torch. Rounding is to
    nearest or with the same random bits."""
    rule = lambda row, grad, s, h: (row.flip(0) * row.sum().sign() - h.lr * grad, s)
    plain = fr.optim.row_optimizer(init=lambda t: {}, rule=rule, lr=LR)
    rows, tables = torch.tensor([3, 39, 7, 0]), {f"t{dim}": noise(NUM_ROWS, dim, seed=dim).to(dtype) for dim in DIMS}
    grads = {
        n: fr.RowGrads.from_entries(rows, noise(4, t.shape[1]), num_embeddings=NUM_ROWS) for n, t in tables.items()
    }
    slots, seen = {n: {} for n in tables}, []
    for opt in (
        plain,
        fr.optim.stochastic_rounding(plain, key=fr.key(1)),
        fr.optim.stochastic_rounding(plain, key=fr.key(2)),
    ):
        got, need = [opt.update(grads, slots, tables, STEP, implementation=i)[0] for i in ("cpp", "reference")]
        assert all(torch.equal(got[n].view(torch.int16), need[n].view(torch.int16)) for n in tables)
        seen.append(got["t100"])
    assert not any(torch.equal(seen[i], seen[j]) for i, j in ((0, 1), (0, 2), (1, 2)))


def test_threads_change_no_bit(without_kernels):
    """One and two threads give the same bits, in tables and slots."""
    optimizer, rows = fr.optim.lamb(LR), torch.randint(0, 500, (3000,), generator=torch.Generator().manual_seed(0))
    tables = {f"t{dim}": noise(500, dim) for dim in DIMS}
    grads = {n: fr.RowGrads.from_entries(rows, noise(3000, t.shape[1]), num_embeddings=500) for n, t in tables.items()}
    out = []
    for threads in (1, 2):
        with on_threads(threads):
            out.append(optimizer.update(grads, optimizer.init(tables), tables, STEP, implementation="cpp"))
    assert_trees_close(*out)


# -- what a rule may use ------------------------------------------------------------------------------------------

SCALE, PROFILE = torch.tensor(2.0), torch.arange(12.0)
F = torch.nn.functional
BODIES = {
    "softmax": lambda w, g: F.softmax(g, 0), "norms": lambda w, g: w / w.norm() + g.norm(p=1) + F.normalize(g, dim=0),
    "variance": lambda w, g: w * w.std() + g.var(), "lerp": lambda w,
    g: torch.lerp(w, g, 0.3) + torch.addcmul(w, g, g, value=2),
    "activations": lambda w, g: F.gelu(w) + F.softplus(g) + F.relu(w) + F.elu(g), "logsumexp": lambda w,
    g: w * w.logsumexp(0) + w.prod(),
    "extremes": lambda w, g: w * w.max() - g.min() + w.amax() * g.amin(), "NaN": lambda w,
    g: w + (w / torch.where(g > 0, g, torch.nan)).amax(),
    "closed over": lambda w, g: w * SCALE + PROFILE, "constants": lambda w,
    g: w + torch.tensor(2.0) * torch.ones(12) + torch.zeros_like(g),
    "dot": lambda w, g: w.dot(g) * w + w @ g, "slices": lambda w, g: torch.cat([w[:3], g[3:8], w[8:]]) + w[4] + g[-1],
    "flip": lambda w, g: w.flip(0) + g, "reshaped": lambda w, g: (w.reshape(3, 4) * g.reshape(3, 4)[1]).t().reshape(-1),
    "halves": lambda w, g: torch.stack([w[::2], g[1::2]], 1).flatten(), "in place": lambda w,
    g: (w * 2).add_(g).mul_(3),
    "logic": lambda w,
    g: torch.where((w > 0) & ~(g > 0) | torch.isinf(w), w, g) + (w > 0).sum() + torch.all(g > 9) + torch.any(g > 0),
    "integers": lambda w, g: w * torch.arange(12) + (g > 0).long() * 3, "f64": lambda w,
    g: (w.double() + g / 3).float(),
    "powers": lambda w, g: w.abs() ** 1.5 + 2.0**g + w**3 + w.square().rsqrt() + torch.pow(w.abs(), g),
    "nan_to_num": lambda w, g: torch.nan_to_num(w / (w - w)),
    "bounds": lambda w, g: w.clamp(-0.5, 0.5) + g.clamp(min=0) + torch.maximum(w, g) + torch.minimum(w, g),
    "alpha": lambda w, g: torch.add(w, g, alpha=0.5),
    "rounding": lambda w, g: w.floor() + g.ceil() + (3 * w).round() + (3 * g).trunc() + w.frac(), "gradient": lambda w,
    g: g,
    "number": lambda w, g: w.sum().expand(12),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_operations(name):
    """Operations of a rule give the values of eager torch, NaN included, and run in the kernel."""
    w, g, body = noise(3, 12, seed=1), noise(3, 12, seed=2), BODIES[name]
    opt = fr.optim.row_optimizer(init=lambda t: {}, rule=lambda row, grad, s, h: (body(row, grad), s))
    grads = {"t": fr.RowGrads.from_entries(torch.arange(3), g, num_embeddings=3)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = opt.update(grads, {"t": {}}, {"t": w}, 0, implementation="cpp")[0]["t"]
    need = torch.stack([body(*x).to(F32) for x in zip(w, g, strict=True)])
    assert_trees_close(got, need, rtol=1e-5, atol=1e-5)


ARGUMENTS = {
    "log": 0.1,
    "log2": 0.1,
    "log10": 0.1,
    "sqrt": 0.0,
    "rsqrt": 0.1,
    "acosh": 1.1,
    "log1p": -0.9,
    "pow": 0.1,
}  # least arguments
INSIDE = ("asin", "acos", "atanh")  # arguments lie in (-1, 1)


@pytest.mark.parametrize("dtype", [F32, F64])
def test_formulas(dtype):
    """Every formula equals the aten operation of the same name."""
    names = [n for n in (*_formulas.ARITHMETIC, *_formulas.COMPARISONS, *_formulas.LOGIC) if n not in _formulas.COPIES]
    sides = [(n, "{1}" in {**_formulas.ARITHMETIC, **_formulas.COMPARISONS, **_formulas.LOGIC}[n]) for n in names]
    w, g = noise(2, 64, dtype=dtype), noise(2, 64, seed=9, dtype=dtype)
    g[:, ::7] = w[:, ::7]

    def values(row, grad):
        for n, has_two in sides:
            x = row.abs() + ARGUMENTS[n] if n in ARGUMENTS else row.tanh() if n in INSIDE else 3 * row
            op = torch.rsub if n == "rsub" else getattr(torch.ops.aten, n)
            yield n, op(x, grad) if has_two else op(x)

    opt = fr.optim.row_optimizer(
        init=lambda t: {"all": torch.zeros(len(t), len(sides), t.shape[1])},
        rule=lambda row, grad, s, h: (row, {"all": torch.stack([x.to(row.dtype) for _, x in values(row, grad)])}),
    )
    grads, tables = {"t": fr.RowGrads.from_entries(torch.arange(2), g, num_embeddings=2)}, {"t": w}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = opt.update(grads, opt.init(tables), tables, 0, implementation="cpp")[1]["t"]["all"]
    eps = 1e3 * torch.finfo(dtype).eps
    for i in range(2):
        for k, (n, x) in enumerate(values(w[i], g[i])):
            assert torch.allclose(got[i, k], x.to(dtype), rtol=eps, atol=eps), n


STEPS = st.lists(
    st.tuples(
        st.sampled_from(("add", "sub", "mul", "maximum", "where", "tanh", "sqrt", "sum", "mean", "amax", "first",
                "half", "flip", "roll2")),
        st.integers(0, 9), st.integers(0, 9),
    ),
    min_size=4, max_size=24,
)  # fmt: skip


def run_steps(steps, row, grad, slots):
    """Return the result of a rule of generated operations. Each operation takes two earlier values. The last values
    become the row and the slots."""
    values = [row, grad, slots["a"], slots["b"], slots["n"]]
    for name, i, j in steps:
        x, y = values[i % len(values)], values[j % len(values)]
        one = {
            "tanh": lambda: x.tanh(), "sqrt": lambda: x.abs().sqrt(), "sum": lambda: x.sum(), "mean": lambda: x.mean(),  # noqa: B023
            "amax": lambda: x.amax(), "first": lambda: x.reshape(-1)[0], "flip": lambda: x.flip(0) if x.dim() else x,  # noqa: B023
            "half": lambda: x * 0.5, "roll2": lambda: torch.cat([x[2:], x[:2]]) if x.dim() else -x,  # noqa: B023
            "where": lambda: torch.where(x > y, x, -y), "maximum": lambda: torch.maximum(x, y),  # noqa: B023
        }  # fmt: skip
        values.append(one[name]() if name in one else getattr(torch, name)(x, y))
    wide = [x for x in values if x.dim()][::-1]
    return wide[0].expand_as(row), {"a": wide[1 % len(wide)], "b": wide[2 % len(wide)], "n": values[-1].sum()}


@settings(max_examples=12)
@given(steps=STEPS, dim=st.sampled_from([2, 5, 16, 37]))
def test_generated_programs(steps, dim):
    """Any graph of operations gives the values of eager torch, whichever old values its results overwrite."""
    init = lambda t: {"a": torch.zeros_like(t), "b": torch.zeros_like(t), "n": torch.zeros(len(t))}
    opt = fr.optim.row_optimizer(init=init, rule=lambda row, grad, s, h: run_steps(steps, row, grad, s))
    w, g = noise(3, dim, dtype=F64), noise(3, dim, seed=1, dtype=F64)
    slots = {
        "a": noise(3, dim, seed=2, dtype=F64),
        "b": noise(3, dim, seed=3, dtype=F64),
        "n": noise(3, seed=4, dtype=F64),
    }
    grads = {"t": fr.RowGrads.from_entries(torch.arange(3), g, num_embeddings=3)}
    tables, made = opt.update(grads, {"t": slots}, {"t": w}, 0, implementation="cpp")
    for i in range(3):
        new, own = run_steps(steps, w[i], g[i], {k: x[i] for k, x in slots.items()})
        assert_trees_close((tables["t"][i], {k: x[i] for k, x in made["t"].items()}), (new, own), rtol=1e-9, atol=1e-9)


# -- outside of the kernel ----------------------------------------------------------------------------------------


BLOCKED = {
    "sort": (lambda row, grad, s, h: (row - grad.sort().values, s), "aten.sort"),
    "host": (lambda row, grad, s, h: (row - float(h.lr) * grad, s), "got"),
    "half": (lambda row, grad, s, h: (row - grad.half(), s), "torch.float16"),
    "rows of rows": (lambda row, grad, s, h: (row - (row[:, None] * grad).sum(1), s), "sum of"),
}


@pytest.mark.parametrize("name", BLOCKED)
def test_other_operations_run_in_blocks(name):
    """A rule with an operation that has no formula warns once, and gives the reference's values."""
    rule, said = BLOCKED[name]
    opt = fr.optim.row_optimizer(init=lambda t: {}, rule=rule, lr=0.5)
    tables = {"a": noise(4, 5), "b": noise(4, 3)}
    grads = {
        n: fr.RowGrads.from_entries(torch.tensor([1, 3, 1]), noise(3, t.shape[1]), num_embeddings=4)
        for n, t in tables.items()
    }
    with pytest.warns(UserWarning, match=said) as seen:
        got = [opt.update(grads, {"a": {}, "b": {}}, tables, 0, implementation="cpp")[0] for _ in range(2)]
    assert len(seen) == 1
    need = opt.update(grads, {"a": {}, "b": {}}, tables, 0, implementation="reference")[0]
    assert_trees_close(got, [need, need], rtol=1e-5, atol=1e-6)


def test_many_slots_run_in_blocks():
    """A rule with more slots than the kernel holds warns, and runs in blocks."""
    names = [f"s{i}" for i in range(cpp.MOST_SLOTS + 1)]
    opt = fr.optim.row_optimizer(
        init=lambda t: {n: torch.zeros(len(t)) for n in names},
        rule=lambda row, grad, s, h: (row, {n: x + i for i, (n, x) in enumerate(s.items())}),
    )
    tables = {"t": torch.zeros(2, 3)}
    grads = {"t": fr.RowGrads.from_entries(torch.tensor([1]), torch.ones(1, 3), num_embeddings=2)}
    with pytest.warns(UserWarning, match="9 slots"):
        slots = opt.update(grads, opt.init(tables), tables, 0, implementation="cpp")[1]["t"]
    assert [slots[n].tolist() for n in names] == [[0, i] for i in range(len(names))]


def test_without_a_compiler(monkeypatch):
    """Without a C++ compiler, a user's rule raises an error that names the compiler."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    opt = fr.optim.row_optimizer(init=lambda t: {}, rule=lambda row, grad, s, h: (row - 3.25 * grad, s))
    grads = {"t": fr.RowGrads.from_entries(torch.tensor([1]), torch.ones(1, 2), num_embeddings=2)}
    with pytest.raises(RuntimeError, match="a rule cannot be compiled") as error:
        opt.update(grads, {"t": {}}, {"t": torch.zeros(2, 2)}, 0, implementation="cpp")
    assert 'try   install one, or set CXX to its name, or implementation="reference"' in str(error.value)


def test_a_wrong_table_is_refused():
    """A generated rule fits one dim and dtype. Before the kernel writes, it refuses other tables, slots and closed-over
    tensors. Each rule reads its own closed-over tensors."""
    scale = torch.ones(3)
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda w, x, lr, t, n, m: [w - x * scale, x])
    rule = _rules.generate(graph(*(torch.ones(s) for s in ((3,), (3,), (), (), (), (3,)))))
    rest = (
        [torch.ones(1, 3)],
        [torch.tensor([1])],
        [],
        [],
        [0, 0, 0, 0, -1, 0, 1, 0, 0, -1],
        torch.tensor(0.1),
        torch.tensor(0),
    )
    table = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="a rule is for another table"):
        cpp.generated_update_([table.double()], [table.clone()], *rest, None, [rule])
    with pytest.raises(ValueError, match="does not fit"):
        cpp.generated_update_([table], [torch.zeros(2)], *rest, None, [rule])
    assert not table.any()
    cpp.generated_update_([table], [torch.zeros(2, 3)], *rest, None, [rule])
    assert table.tolist() == [[0, 0, 0], [-1, -1, -1]]
    # each table's rule reads tensors of its own
    three = lambda *shape: [torch.zeros(shape) for _ in range(3)]
    segments, tables = [n for t in range(3) for n in (t, *rest[4][1:])], three(2, 3)
    rules = [rule._replace(constants=[torch.full((3,), float(t))]) for t in (1, 2, 3)]
    cpp.generated_update_(tables, three(2, 3), *rest[:4], segments, *rest[5:], None, rules)
    assert [x[1].tolist() for x in tables] == [[-1] * 3, [-2] * 3, [-3] * 3]
    scale.resize_(1)
    with pytest.raises(ValueError, match="another form"):
        cpp.generated_update_([table], [torch.zeros(2, 3)], *rest, None, [rule])
