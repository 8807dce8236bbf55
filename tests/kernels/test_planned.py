"""Calls whose tensors are described in C++ keep nothing of a tensor from call to call.

Unusual tensors are described in Python."""

import copy
import ctypes
import pickle
import threading

import pytest
import torch
from funcrec.kernels import cpp, ops
from funcrec.kernels.cpp import _native, _planned, _quantized, _top_k

import funcrec as fr

DIM, BAGS, COUNT = 5, 3, 4
FEATURES = [ops.Feature(t, 0, t * BAGS, 0, False, False, t * DIM) for t in range(COUNT)]
IDS = torch.tensor([0, 6, -1, 3, 5, 5, 2, 9, 1, 4, 0, 6])
OFFSETS = torch.arange(COUNT * BAGS + 1)


def coded(rows: int = 7, seed: int = 0, dim: int = DIM) -> torch.Tensor:
    return cpp.quantize_rows(torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed)), 8)


def looked_up(tables, ids=IDS, offsets=OFFSETS, features=FEATURES, bits=(8,) * COUNT, dims=(DIM,) * COUNT, **how):
    return ops.quantized_lookup(tables, [ids], offsets, None, features, BAGS, bits, dims, **how)


def outcome(call, *args, **how):
    """Return the bits of a call, or (the type of its error, the error's text after "got")."""
    try:
        out = call(*args, **how)
    except (TypeError, ValueError, RuntimeError) as error:
        return type(error), str(error).partition("got")[2]
    return [x.clone() for x in (out if isinstance(out, tuple) else (out,))]


def is_same(a, b) -> bool:
    if isinstance(a, tuple) or isinstance(b, tuple):
        return a == b
    return all(map(torch.equal, a, b))


@pytest.fixture
def closely(monkeypatch):
    """Return a function that makes a call with every tensor described in Python."""

    def run(call, *args, **how):
        with monkeypatch.context() as patched:
            patched.setattr(_planned, "_runner", lambda path, name: (None, 0))
            return outcome(call, *args, **how)

    return run


@pytest.fixture
def never_closely(monkeypatch):
    """Fail the test if a tensor is described in Python."""
    fail = lambda *args: pytest.fail("described in Python")
    monkeypatch.setattr(_quantized, "_described", fail)
    monkeypatch.setattr(_top_k, "score_dtype", fail)


def replaced_data(x):
    x.data = coded(9, 5)


def swapped(x):
    torch.utils.swap_tensors(x, coded(8, 6))


def transposed(x):
    x.data = coded().T.contiguous().T


def given_away(x):
    x.untyped_storage().resize_(0)


CHANGES = {
    "written to": lambda x: x.copy_(coded(7, 3)),
    "resized, fewer rows": lambda x: x.resize_(2, x.shape[1]),
    "resized, more rows": lambda x: x.resize_(5000, x.shape[1]).zero_(),
    "resized, another width": lambda x: x.resize_(7, 8),
    "without rows": lambda x: x.resize_(0, x.shape[1]),
    "of another storage": lambda x: x.set_(coded(6, 4).untyped_storage(), 0, (6, x.shape[1]), (x.shape[1], 1)),
    "from another place of its storage": lambda x: x.set_(x.untyped_storage(), x.shape[1], (6, x.shape[1]), (9, 1)),
    "with rows far apart": lambda x: x.set_(coded(12, 4).untyped_storage(), 0, (6, 9), (18, 1)),
    "of other data": replaced_data,
    "swapped": swapped,
    "of another layout": transposed,
    "of another dtype": lambda x: setattr(x, "data", x.float()),
    "without memory": given_away,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_table_that_is_changed_is_read_as_it_is(change, closely):
    """A table may be resized, freed, swapped, or given other memory, another dtype or layout between two calls. The
    next call reads the table in its present form, or raises the error of a call that keeps nothing."""
    tables = [coded(seed=t) for t in range(COUNT)]
    first = outcome(looked_up, tables)
    CHANGES[change](tables[2])
    want = closely(looked_up, tables)
    assert is_same(outcome(looked_up, tables), want)
    if isinstance(want, list):
        plain = [torch.cat([t, t[:0]]) for t in tables]
        assert torch.equal(want[0], looked_up(plain, implementation="reference"))
        assert not torch.equal(want[0], first[0])


def test_arguments_that_are_changed_are_read_as_they_are(closely):
    """Calls read the present lists and tensors, even if a caller changed or replaced them after the previous call. The
    same holds for ids and offsets of another width, layout, length or dtype."""
    tables, features, bits, dims = [coded(seed=t) for t in range(COUNT)], [*FEATURES], [8] * COUNT, [DIM] * COUNT

    def same(*args, ids=IDS, offsets=OFFSETS):
        given = tables, ids, offsets, features, bits, dims
        got = outcome(looked_up, *given)
        assert is_same(got, closely(looked_up, *given))
        return got

    before = same()
    tables[1] = coded(11, 9)
    assert not is_same(before, same())
    features[0] = features[0]._replace(max_length=1, mean=True)
    features[1], features[2] = features[1]._replace(column=10), features[2]._replace(column=5)
    assert not is_same(before, same())
    for ids in (IDS.int(), IDS[:7], IDS.repeat(2)[::2], IDS[:0], IDS.float(), IDS[None]):
        same(ids=ids)
    for offsets in (OFFSETS.int(), OFFSETS[:-1], OFFSETS[:0], OFFSETS.repeat(2)[::2], OFFSETS.float(), OFFSETS - 5):
        same(offsets=offsets)
    bits[0] = 4
    assert same()[0] is ValueError
    tables[0] = cpp.quantize_rows(torch.randn(7, DIM), 4)
    assert same()[0].shape == (BAGS, COUNT * DIM)
    dims[3] = 4
    assert same()[0] is ValueError
    tables.pop()
    assert same()[0] is ValueError


def test_tables_that_are_freed_are_not_read():
    """A call's tables may be freed. If the tables of the next call lie in the same memory, that call reads nothing of
    the freed tables."""
    for seed in range(50):
        tables = [coded(seed=seed + t) for t in range(COUNT)]
        assert torch.equal(looked_up(tables), looked_up(tables, implementation="reference"))
        del tables


class Other(torch.Tensor):
    """A tensor of a subclass."""


def test_most_calls_are_not_described_in_python(never_closely):
    """Ids of both widths, codes of every width, and items of floats and of codes are described without Python."""
    for b in (8, 4, 2):
        tables = [cpp.quantize_rows(torch.randn(7, DIM), b) for _ in range(COUNT)]
        for ids in (IDS, IDS.int()):
            looked_up(tables, ids, bits=[b] * COUNT)
            looked_up(tuple(tables), ids, features=tuple(FEATURES), bits=[b] * COUNT)
    items = torch.randn(9, 4)
    for of in (items, items.half(), items.bfloat16()):
        ops.top_k(items[:2], of, None, None, 3)
    ops.top_k(items[:2], cpp.quantize_rows(items, 4), None, None, 3, 4)


@pytest.mark.parametrize("unusual", ["type", "parameter", "weights", "floats", "without DLPack"])
def test_others_are_described_in_python(unusual, monkeypatch, closely):
    """Subclasses of Tensor, weights, float tables, and a torch without the functions of DLPack give the same bits."""
    tables, how = [coded(seed=t) for t in range(COUNT)], {}
    want = closely(looked_up, tables)
    if unusual == "type":
        tables[1] = tables[1].as_subclass(Other)
    elif unusual == "parameter":
        tables[1] = torch.nn.Parameter(tables[1], requires_grad=False)
    elif unusual == "floats":
        tables[1], how = ops.quantized_rows(tables[1], torch.arange(7), 8, DIM), {"bits": [8, 32, 8, 8]}
    elif unusual == "weights":
        features = [f._replace(weighted=True) for f in FEATURES]
        args = tables, [IDS], OFFSETS, torch.ones(12), features, BAGS, [8] * COUNT, [DIM] * COUNT
        assert torch.equal(ops.quantized_lookup(*args), want[0])
    else:
        monkeypatch.delattr(torch.Tensor, "__dlpack_c_exchange_api__")
        _planned._runner.cache_clear()
    try:
        assert torch.equal(torch.Tensor(looked_up(tables, **how)), want[0])
    finally:
        _planned._runner.cache_clear()


def test_lookups_of_quantised_tables_wherever_they_are():
    """A lookup of QuantizedTables has the same bits after a copy or a pickle, under jit, and under vmap over ids."""
    plain = {f"t{t}": torch.randn(7, DIM) for t in range(COUNT)}
    q, features = fr.quantize(plain), [fr.FeatureConfig(n, table=n) for n in plain]
    ids = fr.KeyedJaggedTensor.from_offsets([*plain], IDS.clamp(0), OFFSETS)
    look = lambda q, ids: fr.lookup(q, ids, features).values
    want = look(fr.dequantize(q), ids)
    for own in (q, copy.deepcopy(q), pickle.loads(pickle.dumps(q))):
        assert torch.equal(look(own, ids), want)
    del own
    assert torch.equal(fr.jit(look)(q, ids), want)
    given = torch.stack([IDS.clamp(0), IDS.clamp(0).flip(0)])
    of_ids = lambda values: look(q, fr.KeyedJaggedTensor.from_offsets([*plain], values, OFFSETS))
    assert torch.equal(torch.vmap(of_ids)(given), torch.stack([*map(of_ids, given)]))


@pytest.mark.parametrize("change", [c for c in CHANGES if c != "resized, another width"])
def test_items_that_are_changed_are_read_as_they_are(change, closely):
    """top_k reads the items in their present state, not in that of an earlier call."""
    items, queries = coded(), torch.randn(2, DIM)
    best = lambda: ops.top_k(queries, items, None, None, 3, 8)
    outcome(best)
    CHANGES[change](items)
    assert is_same(outcome(best), closely(best))


def test_a_number_that_is_no_integer_has_no_plan():
    """2.0 bags are refused before and after a call with 2, and True, which torch takes for 1, keeps no plan."""
    ids, offsets, one = torch.tensor([0, 1, 2]), torch.tensor([0, 1, 3]), [ops.Feature(0, 0, 0, 0, False, False, 0)]
    calls = (
        lambda n: ops.pooled_lookup([torch.ones(7, DIM)], [ids], offsets, None, one, n),
        lambda n: ops.quantized_lookup([coded()], [ids], offsets, None, one, n, [8], [DIM]),
        lambda n: ops.top_k(torch.ones(2, DIM), torch.ones(7, DIM), None, None, n)[0].T,
    )
    for call in calls:
        for _ in range(2):
            with pytest.raises(TypeError, match="float"):
                call(2.0)
            call(2)
        assert torch.equal(call(True), call(1))


def test_threads_share_plans():
    """Calls from several threads, with more plans than funcrec keeps, each return their own result."""
    tables, wrong = [coded(seed=t) for t in range(COUNT)], []

    def run(first):
        for k in range(60):
            features = [f._replace(max_length=(first + k) % 40) for f in FEATURES]
            if not torch.equal(looked_up(tables, features=features), looked_up(tables)):
                wrong.append(k)

    threads = [threading.Thread(target=run, args=(7 * i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong and len(_quantized._plans) <= _planned.MOST
    assert ctypes.CDLL(_native.library()._name).funcrec_abi() == _native.ABI
