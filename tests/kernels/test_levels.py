"""Every instruction set gives the same bits: rules, a user's rules, lookups, transposes, quantised rows, top_k.

The width of a vector could change only a sum over a row. `total` in csrc/passes.h therefore uses the same number of
partial sums on every instruction set. A user's rule calls torch's vector functions with one width on all instruction
sets.
"""

import warnings

import pytest
import torch
from funcrec.kernels import cpp, ops, reference
from funcrec.kernels.cpp import _formulas, _native
from funcrec.kernels.draws import CONSTANT, NORMAL, UNIFORM
from programs.update_calls import CASES, make, numbers
from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path

import funcrec as fr
from funcrec.optim import _row
from funcrec.testing import assert_trees_close

pytestmark = pytest.mark.skipif(not any(map(_native._path, _native.LEVELS)), reason="the C++ kernels are not built")
F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
DTYPES = (F32, F16, BF16, F64)
DIMS = (1, 2, 3, 7, 8, 15, 16, 17, 24, 31, 32, 33, 64, 100, 128, 130)
NUM_ROWS, LR, STEP = 60, 0.125, 4
SUMS = ("lars_sgd", "rowwise_adagrad", "rowwise_adagrad_counter", "rowwise_adagrad_cowclip", "partial_rowwise_adam",
        "lamb", "partial_rowwise_lamb")  # fmt: skip


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def differences(found: dict[str, object]) -> list[str]:
    """Return the differences from the first level's tree, as texts: the level, the path, and the share of bytes."""
    (first, truth), *others = found.items()
    leaves = dict(tree_flatten_with_path(truth)[0])
    out = []
    for level, tree in others:
        for path, x in tree_flatten_with_path(tree)[0]:
            differ = (bits(x) != bits(leaves[path])).double().mean().item()
            out += [f"{level} from {first} at {path}: {differ:.1%} of bytes"] if differ else []
    return out


def state_of(optimizer, dtypes, dims=DIMS):
    """Return gradients for rows that repeat never, once or often, slots after some steps, and tables."""
    rows = torch.randint(-1, NUM_ROWS + 1, (150,), generator=torch.Generator().manual_seed(1))
    shapes = {f"{d} of {t}": (d, t) for d in dims for t in dtypes}
    tables = {n: noise(NUM_ROWS, d, seed=d).to(t) for n, (d, t) in shapes.items()}
    of = lambda d, t: noise(len(rows), d, seed=d + 1, dtype=F64 if t == F64 else F32)
    grads = {n: fr.RowGrads.from_entries(rows, of(d, t), num_embeddings=NUM_ROWS) for n, (d, t) in shapes.items()}
    slots = optimizer.init(tables)
    for own in slots.values():
        for k, x in own.items():
            counts = torch.arange(x.numel()).reshape(x.shape) % 3
            x.copy_(counts if k in ("counter", "last") else noise(*x.shape, seed=4).square() / 4)
    return grads, slots, tables


@pytest.mark.parametrize("key", [None, fr.key(7)], ids=["to nearest", "at random"])
@pytest.mark.parametrize(
    "number", range(len(CASES)), ids=lambda i: "-".join(map(str, (CASES[i][0], *CASES[i][1].values())))
)
def test_built_in_rules(number, key, on_every_level):
    """Every form of every built-in rule gives the same bits of tables and slots, for tables of every dtype and
    width."""
    rule, options = CASES[number]
    optimizer = getattr(fr.optim, rule)(lr=LR, **options)
    if key is not None:
        optimizer = fr.optim.stochastic_rounding(optimizer, key=key)
    found = {}
    for dtypes in ((F32, F16, BF16), (F64,)) if key is None else ((F16, BF16),):
        grads, slots, tables = state_of(optimizer, dtypes)
        run = lambda: optimizer.update(grads, slots, tables, STEP, implementation="cpp")  # noqa: B023
        for level, tree in on_every_level(run).items():
            found.setdefault(level, []).append(tree)
    assert differences(found) == []


@pytest.mark.parametrize("rule", SUMS)
def test_tables_of_some_columns(rule, on_every_level):
    """A rule gives the same bits on a table that holds some columns of a wider row, whatever the row's other columns
    are."""
    options = next(options for name, options in CASES if name == rule)
    optimizer, own = getattr(fr.optim, rule)(lr=LR, **options), slice(3, 8)
    for wide in (16, 33, 64, 130):
        _, slots, tables = state_of(optimizer, (F32, BF16), (wide,))
        call = make([(NUM_ROWS, wide)] * 2)
        held = [t[:, own].contiguous() for t in tables.values()]
        kept = [x[:, own].contiguous() if x.dim() == 2 else x for n in tables for x in slots[n].values()]
        terms = call.d, call.rows, call.offsets, call.weights, call.segments
        when, window = (torch.tensor(LR, dtype=F64), torch.tensor(STEP), None), (torch.tensor([3, 3]), [wide, wide])

        def run(held=held, kept=kept, terms=terms, when=when, window=window):
            new, state = [t.clone() for t in held], [x.clone() for x in kept]
            cpp.fused_update_(new, state, *terms, *when, rule, numbers(rule, options), *window)
            return new, state

        assert differences(on_every_level(run)) == [], wide


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_products_and_sums(dtype, on_every_level):
    """Products of matrices stored by rows and by columns, and sums over each dimension, have the reference's bits."""
    for stack, rows, depth, columns in ((2, 5, 40, 35), (1, 33, 600, 20), (1, 1, 1030, 70), (3, 40, 7, 1)):
        a, b = noise(stack, rows, depth, seed=1, dtype=dtype), noise(stack, columns, depth, seed=2, dtype=dtype).mT
        sums = (a, b.contiguous(), a.reshape(1, -1, 1))

        def run(a=a, b=b, sums=sums):
            return [cpp.invariant_bmm(a, b), *map(cpp.invariant_sum, sums)]

        truth = [reference.invariant_bmm(a, b), *map(reference.invariant_sum, sums)]
        assert differences({"reference": truth, **on_every_level(run)}) == []


# -- rules that are compiled while the program runs --------------------------------------------------------------


def updated(optimizer, grads, slots, tables):
    with warnings.catch_warnings():
        # the rule runs in the kernel, which gives no warning
        warnings.simplefilter("error")
        return optimizer.update(grads, slots, tables, STEP, implementation="cpp")


@pytest.mark.parametrize("rule", [*SUMS, "adam", "ftrl"])
def test_generated_rules(rule, on_every_level, monkeypatch):
    """A user's rule, compiled for each instruction set, gives the same bits of tables and slots."""
    monkeypatch.setattr(_row.Kernel, "fits", lambda *args: False)
    options = next(options for name, options in CASES if name == rule)
    make_optimizer = lambda: getattr(fr.optim, rule)(lr=LR, **options)
    dim = (3, 33, 64)[[*SUMS, "adam", "ftrl"].index(rule) % 3]
    for dtypes in ((F32, BF16), (F64,))[: 2 if dim == 33 else 1]:
        state = state_of(make_optimizer(), dtypes, (dim,))
        assert differences(on_every_level(lambda: updated(make_optimizer(), *state))) == []  # noqa: B023


# least arguments
ARGUMENTS = {"log": 0.1, "log2": 0.1, "log10": 0.1, "rsqrt": 0.1, "acosh": 1.1, "log1p": -0.9, "pow": 0.1}
INSIDE = ("asin", "acos", "atanh")  # arguments lie in (-1, 1)


@pytest.mark.parametrize(("dim", "dtype"), [(64, F32), (5, BF16), (33, F64)], ids=str)
def test_functions_of_a_users_rule(dim, dtype, on_every_level):
    """Every function that a rule may call gives the same bits, on elements and on a row's numbers."""
    known = {**_formulas.ARITHMETIC, **_formulas.COMPARISONS, **_formulas.LOGIC}
    names = [n for n in known if n not in _formulas.COPIES]

    def values(row, grad):
        for x, y in ((row, grad), (row[0], grad[1])):
            for n in names:
                z = x.abs() + ARGUMENTS[n] if n in ARGUMENTS else x.tanh() if n in INSIDE else 3 * x
                op = torch.rsub if n == "rsub" else getattr(torch.ops.aten, n)
                yield (op(z, y) if "{1}" in known[n] else op(z)).to(row.dtype).expand(dim)

    def run():
        optimizer = fr.optim.row_optimizer(
            init=lambda t: {"all": torch.zeros(len(t), 2 * len(names), dim, dtype=F64 if t.dtype == F64 else F32)},
            rule=lambda row, grad, s, h: (row, {"all": torch.stack([*values(row, grad)])}),
        )
        return updated(optimizer, *state_of(optimizer, (dtype,), (dim,)))[1]

    assert differences(on_every_level(run)) == []


REDUCTIONS = {
    "sum": lambda w, g: w * g.sum() + (w * g).mean(),
    "prod": lambda w, g: w * (1 + g / 8).prod(),
    "norms": lambda w, g: w / w.norm() + g.norm(p=1),
    "extremes": lambda w, g: w * w.amax() - g.amin(),
    "softmax": lambda w, g: torch.softmax(g, 0) + w.logsumexp(0),
    "variance": lambda w, g: w * w.std() + g.var(),
    "logic": lambda w, g: w + torch.all(g > -9) + torch.any(g > 0) + (w > 0).sum(),
}


@pytest.mark.parametrize("dim", [2, 100])
def test_reductions_of_a_users_rule(dim, on_every_level):
    """Every reduction of a row gives the same bits."""
    make_optimizer = lambda: fr.optim.row_optimizer(
        init=lambda t: {n: torch.zeros_like(t) for n in REDUCTIONS},
        rule=lambda row, grad, s, h: (row, {n: body(row, grad) for n, body in REDUCTIONS.items()}),
    )
    state = state_of(make_optimizer(), (F32,), (dim,))
    assert differences(on_every_level(lambda: updated(make_optimizer(), *state))) == []


# -- lookups and their transposes --------------------------------------------------------------------------------


def lookup_call(dtype: torch.dtype):
    """Return a table of every width, with three features each: sums, means of at most 4 ids, and weighted means."""
    generator, bags = torch.Generator().manual_seed(2), 20
    tables = [noise(50, d, seed=d).to(dtype) for d in DIMS]
    lengths = torch.randint(0, 9, (3 * len(DIMS) * bags,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    rows = torch.randint(-2, 53, (int(offsets[-1]),), generator=generator)
    features, column = [], 0
    for t, d in enumerate(DIMS):
        for kind in range(3):
            first = (3 * t + kind) * bags
            features.append(ops.Feature(t, 0, first, 4 * (kind == 1), kind > 0, kind == 2, column))
            column += d
    return tables, [rows], offsets, noise(len(rows), seed=3), features, bags


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lookups(dtype, on_every_level):
    """Pooled sums and means, weighted means, and the gradients of weights have the same bits."""
    tables, rows, offsets, weights, features, bags = lookup_call(dtype)
    width = sum(3 * d for d in DIMS)

    def run():
        out = ops.pooled_lookup(tables, rows, offsets, weights, features, bags)
        d = [noise(bags, width, seed=5, dtype=t) for t in (F32, F64)]
        back = [
            ops.pooled_lookup_weights(x, tables, rows, offsets, weights.to(t), features) for x in d for t in (F32, F64)
        ]
        return out, back, [cpp.gather_rows(t, rows[0]) for t in tables]

    assert differences(on_every_level(run)) == []


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_cotangents_of_tables(dtype, on_every_level):
    """Expanded entries and the entries' sums by row have the same bits."""
    call = make([(40, d) for d in DIMS], dtype)
    args = call.d, call.rows, call.offsets, call.weights, call.segments, call.shapes
    assert differences(on_every_level(lambda: (cpp.expand(*args), cpp.coalesce(*args)))) == []


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_rows_of_16_bits(dtype, on_every_level):
    """Every 16-bit number, each NaN included, is widened to the same bits. Every upper half of an f32, with low halves
    around ties, is rounded to the same bits."""
    narrow = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    low = torch.tensor([0, 1, 0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    wide = ((torch.arange(2**16) << 16)[:, None] + low).to(torch.int32).view(F32).flatten()

    def run():
        out = []
        for dim in (64, 16, 13, 1):
            n, m = narrow.numel() // dim, wide.numel() // dim
            out.append(cpp.gather_rows(narrow[: n * dim].view(n, dim), torch.arange(n)))
            target, rows = torch.zeros(m, dim, dtype=dtype), torch.arange(m)
            cpp.scatter_rows_(target, rows, torch.tensor(m), wide[: m * dim].view(m, dim))
            out.append(target)
        return out

    assert differences(on_every_level(run)) == []


def test_jagged_buffers(on_every_level):
    """Taken ranges, their transpose, padded bags, and ids grouped by owner have the same bits."""
    lengths = torch.randint(0, 9, (200,), generator=torch.Generator().manual_seed(3))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    n = int(offsets[-1])
    ids = torch.randint(0, 60, (n,), generator=torch.Generator().manual_seed(4))

    def run():
        out = [cpp.bucketize(ids, offsets, noise(n), 7, 9)]
        for dim in DIMS:
            for dtype in (F32, F64):
                x = noise(n, dim, dtype=dtype)
                ranges = offsets[:-1].flip(0), lengths.flip(0)
                taken = cpp.take_ranges(x, *ranges, n + 5)
                padded = cpp.to_padded(x, offsets, 6, -1.0)
                back = ops.take_ranges_transpose(taken[0], *ranges, n)
                out.append((taken, back, padded, cpp.from_padded(padded, offsets, n)))
        return out

    assert differences(on_every_level(run)) == []


# -- quantised rows, top_k, random numbers -----------------------------------------------------------------------


@pytest.mark.parametrize("bits_of_codes", [8, 4, 2])
def test_quantised_rows(bits_of_codes, on_every_level):
    """Quantised rows have the same bits when a kernel writes (to nearest and at random), reads or sums the rows."""
    ids = torch.randint(-2, 53, (90,), generator=torch.Generator().manual_seed(5))
    offsets, weights = torch.arange(0, 91, 3), noise(90, seed=1)

    def run():
        out = []
        for dim in DIMS:
            for dtype in (F32, F16):
                x = noise(50, dim, seed=dim).to(dtype)
                x[0], x[1, 0], x[2] = 0, torch.inf, -1e-7
                codes = [cpp.quantize_rows(x, bits_of_codes), cpp.quantize_rows(x, bits_of_codes, fr.key(3))]
                features = [
                    ops.Feature(t, 0, 5 * k, 0, k > 0, k > 1, (3 * t + k) * dim) for t in (0, 1) for k in (0, 1, 2)
                ]
                args = codes, [ids], offsets, weights, features, 5, [bits_of_codes] * 2, [dim] * 2
                plain = [cpp.quantized_rows(c, ids, bits_of_codes, dim) for c in codes]
                out.append((codes, plain, ops.quantized_lookup(*args)))
        return out

    assert differences(on_every_level(run)) == []


def test_initial_rows(on_every_level):
    """Initial rows have the same bits, which are the reference's: the drawing rounds in one way only."""
    starts = torch.cat([torch.arange(300) * 64, torch.randint(-(2**62), 2**62, (200,))])
    given = [(fr.key(1), starts, dim, kind, 0.7) for dim in DIMS for kind in (UNIFORM, NORMAL, CONSTANT)]
    run = lambda: [cpp.initial_rows(*x, dtype) for x in given for dtype in (F32, F64, F16, BF16)]
    assert differences(on_every_level(run)) == []
    assert_trees_close(run(), [reference.initial_rows(*x, dtype) for x in given for dtype in (F32, F64, F16, BF16)])


@pytest.mark.parametrize("bits_of_codes", [0, 8, 4, 2])
def test_top_k(bits_of_codes, on_every_level):
    """Scores and rows of top_k have the same bits, even where scores are equal."""

    def run():
        out = []
        for dim in DIMS:
            items, queries = noise(300, dim, seed=dim).mul(4).round() / 4, noise(9, dim, seed=1).mul(2).round()
            if bits_of_codes:
                out.append(ops.top_k(queries, cpp.quantize_rows(items, bits_of_codes), None, None, 20, bits_of_codes))
                continue
            out += [ops.top_k(queries.to(t), items.to(t), None, None, 20) for t in (F32, F64, F16)]
        return out

    assert differences(on_every_level(run)) == []


def test_random_numbers(on_every_level):
    """Random tables have the same bits."""
    configs = [
        fr.TableConfig(f"{i}", 200, 17, initializer=begin)
        for i, begin in enumerate((fr.uniform(), fr.normal(1.0), fr.xavier_normal()))
    ]
    assert differences(on_every_level(lambda: fr.init(fr.key(3), configs))) == []
