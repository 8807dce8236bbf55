"""Updates of tables that hold some columns of their rows, from gradients of whole rows.

    window of columns [a, b):   cut(update(table, slots, grads)) = update(cut(table), cut(slots), grads, first=a)

Shapes: R rows, D dim. [a, b) are the columns that the table has.
"""

import pytest
import torch
from funcrec.kernels import library, ops
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import update_calls
from torch import Tensor

import funcrec as fr
from funcrec.core._tree import replace, tree_map
from funcrec.optim._rounding import draws_of, round_stochastic
from funcrec.optim.write import examples
from funcrec.tables._rowgrads import Bags, Entries, RowGrads, terms_of
from funcrec.testing import assert_trees_close

F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
LR, STEP, NUM_ROWS = 0.125, 4, 7
DIMS = (1, 5, 12, 17, 64, 130)
OPTIMIZERS = [(rule, options, getattr(fr.optim, rule)(lr=LR, **options)) for rule, options in update_calls.CASES]
CASES = [  # optimizers that read other columns only in the gradient, and adam, which reads none
    (rule, options)
    for rule, options, x in OPTIMIZERS
    if x.is_gradient_wise and (not x.is_elementwise or rule == "adam")
]


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def gradient(dim: int, dtype: torch.dtype, seed: int) -> RowGrads:
    """Return the gradient of a table: bags that share d at different columns, a mean, weights, entries after a count,
    and rows outside."""
    rows = torch.randint(-1, NUM_ROWS + 1, (12,), generator=torch.Generator().manual_seed(seed))
    d, offsets = noise(3, 2 * dim + 3, seed=seed).to(dtype), torch.tensor([0, 4, 4, 9])
    features = [ops.Feature(0, 0, 0, 0, True, False, 3), ops.Feature(0, 0, 0, 2, False, True, dim + 3)]
    bags = [Bags(d, rows, offsets, noise(12, seed=seed + 1).to(F32) if f.weighted else None, (f,)) for f in features]
    entries = Entries(rows.int(), noise(12, dim, seed=seed + 2).to(dtype), torch.tensor(5))
    return RowGrads((*bags, entries), NUM_ROWS, dim)


def slots_of(optimizer, table: Tensor, seed: int) -> dict[str, Tensor]:
    """Return slots with the values of a run after some steps."""
    made = optimizer.init({"t": table})["t"]
    return {
        k: noise(*x.shape, seed=seed + i).abs().to(x.dtype).round(decimals=2)
        for i, (k, x) in enumerate(made.items(), 3)
    }


def cut(x: Tensor, a: int, b: int) -> Tensor:
    return x[:, a:b].contiguous() if x.dim() > 1 else x


@st.composite
def windows(draw, dims=DIMS):
    """Return random (D, a, b), 0 <= a < b <= D, whole rows included. Shrinks to one column of one."""
    dim = draw(st.sampled_from(dims))
    a = draw(st.integers(0, dim - 1))
    return dim, a, draw(st.integers(a + 1, dim))


def run(implementation, device, optimizer, grads, slots, tables, key=None):
    move = lambda tree, to: tree_map(lambda x: x.to(to) if isinstance(x, Tensor) else x, tree)
    args = move((grads, slots, tables, torch.tensor(STEP)), device)
    return move(optimizer.update(*args, implementation=implementation, key=move(key, device)), "cpu")


@pytest.mark.needs("coalesce", without="fbgemm")
@pytest.mark.parametrize(("rule", "options"), CASES, ids=str)
def test_a_window_of_the_update_is_the_update_of_the_window(implementation, known, device, rule, options):
    """An update of some columns gives those columns, and the row's numbers, the bits of the whole row's update. Tables
    with windows and whole tables may share a call."""
    optimizer = getattr(fr.optim, rule)(lr=LR, **options)
    assert optimizer.is_gradient_wise

    @settings(max_examples=2 if known.slow else 8)
    @given(st.data())
    def law(data):
        cuts = {n: data.draw(windows()) for n in ("a", "b")}
        dtypes = dict(zip("ab", data.draw(st.sampled_from([(F32, BF16), (F16, F32), (F64, F64)]))))
        seed, wide = data.draw(st.integers(0, 99)), F64 if F64 in dtypes.values() else F32
        grads = {n: gradient(dim, wide, seed + i) for i, (n, (dim, _, _)) in enumerate(cuts.items())}
        tables = {n: noise(NUM_ROWS, dim, seed=seed).to(dtypes[n]) for n, (dim, _, _) in cuts.items()}
        slots = {n: slots_of(optimizer, t, seed) for n, t in tables.items()}
        want = run(implementation, device, optimizer, grads, slots, tables)
        of = lambda n, x: tree_map(lambda y: cut(y, *cuts[n][1:]), x)
        each = lambda xs: {n: of(n, x) for n, x in xs.items()}
        placed = {n: replace(g, first=torch.tensor(cuts[n][1])) for n, g in grads.items()}
        placed |= {n: grads[n] for n, (dim, a, b) in cuts.items() if b - a == dim and seed % 2}
        got = run(implementation, device, optimizer, placed, each(slots), each(tables))
        assert_trees_close(got, tuple(map(each, want)))

    law()


@pytest.mark.needs("fused_update", without="fbgemm")
@pytest.mark.parametrize("rule", ops.RULES)
def test_a_window_is_a_row_of_zeros_around_it(implementation, known, device, rule):
    """Under every rule, a table's columns and the table's wide slots are updated as if the other columns were zeros."""
    form, options = ops.RULES[rule], examples(rule)[-1]
    assert form.slots_with(update_calls.numbers(rule, options)) == form.slots

    @settings(max_examples=1 if known.slow else 6)
    @given(st.data())
    def law(data):
        (dim, a, b), dtype = data.draw(windows()), data.draw(st.sampled_from([F32, F64, BF16, F16]))
        acc, seed = ops.accumulation_dtype(dtype), data.draw(st.integers(0, 99))
        padded = lambda x: torch.nn.functional.pad(x, (a, dim - b)) if x.dim() > 1 else x
        table = noise(NUM_ROWS, b - a, seed=seed).to(dtype)
        shapes = [(NUM_ROWS, b - a)[: 1 + is_wide] for is_wide in form.wide]
        slots = [noise(*s, seed=seed + k).abs().to(acc) for k, s in enumerate(shapes, 1)]
        rest = (torch.tensor(LR, dtype=F64), torch.tensor(STEP), None, rule, update_calls.numbers(rule, options))
        to = lambda tree: tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, tree)
        terms = terms_of([to(gradient(dim, acc, seed))])
        call = lambda t, s, *window: ops.fused_update(
            [to(t)], [to(s)], terms, *to((*rest, *window)), implementation=implementation
        )
        whole = call(padded(table), [padded(x) for x in slots])
        got = call(table, slots, torch.tensor([a]), [dim])
        assert_trees_close(got, tree_map(lambda x: cut(x, a, b), whole))

    law()


@pytest.mark.needs("gather_rows", without="fbgemm")
@pytest.mark.parametrize("rule", ["rowwise_adagrad", "partial_rowwise_adam"])
def test_a_window_is_rounded_as_a_table(implementation, known, device, rule):
    """With a key, 16-bit columns are updated in f32, then rounded by the bits of the row and the column. The column is
    counted from the window's start."""
    optimizer, key = getattr(fr.optim, rule)(lr=LR), fr.key(3)

    @settings(max_examples=1 if known.slow else 6)
    @given(windows((5, 17, 64)), st.sampled_from([F16, BF16]))
    def law(window, dtype):
        dim, a, b = window
        g = {"t": replace(gradient(dim, F32, 5), first=torch.tensor(a))}
        table = noise(NUM_ROWS, b - a, seed=4).to(dtype)
        slots = {"t": slots_of(optimizer, table, 6)}
        plain = run(implementation, device, optimizer, g, slots, {"t": table.float()})
        got = run(implementation, device, optimizer, g, slots, {"t": table}, key)
        rows = g["t"].coalesce(implementation="reference")
        rows = rows.rows[: rows.count]
        want = table.clone()
        want[rows] = round_stochastic(
            plain[0]["t"][rows], dtype, rows, draws_of(key, {"t": g["t"]}, {"t": table})[0]
        ).to(dtype)
        assert_trees_close(got, ({"t": want}, plain[1]))

    law()


@pytest.mark.needs("fused_update", without="fbgemm")
def test_windows_are_known_to_torch(implementation, device):
    """An update with windows passes opcheck. vmap over window positions equals one update for each position."""
    call = library.operator(implementation, "fused_update")
    flat = terms_of([gradient(dim, F32, 1) for dim in (8, 5)]).flat()
    tables, slots = [noise(NUM_ROWS, w, seed=2).float() for w in (3, 5)], [torch.ones(NUM_ROWS) for _ in range(2)]
    rest = (torch.tensor(0.1, dtype=F64), torch.tensor(3), None, "rowwise_adagrad", [1e-8, 0.0, 0.0, 0.0])
    args = (tables, slots, *flat, *rest, torch.tensor([4, 0]), [8, 5])
    args = tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, args)
    cheap = ("test_schema", "test_autograd_registration", "test_faketensor")
    every = (*cheap, "test_aot_dispatch_dynamic") if implementation == "cpp" else cheap  # as in test_opcheck.py
    torch.library.opcheck(call, args, test_utils=every)
    places = torch.tensor([[0, 0], [5, 0], [2, 0]], device=device)
    mapped = torch.func.vmap(lambda first: call(*args[:-2], first, args[-1]))(places)
    for i, first in enumerate(places):
        assert_trees_close([x[i] for x in mapped], call(*args[:-2], first, args[-1]))


@pytest.mark.needs("fused_update")
def test_windows_that_do_not_fit_are_refused(implementation, device):
    """A window outside the gradient's columns, too few numbers, and an optimizer that needs whole rows each raise.
    Nothing is written."""
    tables, slots, terms = [torch.ones(NUM_ROWS, 4)], [[torch.ones(NUM_ROWS)]], terms_of([gradient(6, F32, 1)])
    rest = (torch.tensor(0.1, dtype=F64), torch.tensor(3), None, "rowwise_adagrad", [1e-8, 0.0, 0.0, 0.0])
    to = lambda tree: tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, tree)
    bad = [(None, [6]), (torch.tensor([0]), [3]), (torch.tensor([0, 0]), [6, 6])]
    bad += [(torch.tensor([3]), [6]), (torch.tensor([-1]), [6])] if device == "cpu" and implementation == "cpp" else []
    for window in bad:
        with pytest.raises(ValueError):
            ops.fused_update(*to((tables, slots, terms, *rest, *window)), implementation=implementation)
    assert (tables[0] == 1).all()
    grads, lamb = {"t": replace(gradient(6, F32, 1), first=torch.tensor(0))}, fr.optim.lamb()
    with pytest.raises(ValueError, match="columns lie apart"):
        lamb.update(grads, lamb.init({"t": tables[0]}), {"t": tables[0]}, 0, implementation=implementation)
