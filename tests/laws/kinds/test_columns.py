"""Several vocabularies in one call: their rows, states and new rows are those of calls one by one."""

import pytest
import torch
from funcrec.kernels import ops
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import funcrec as fr
from funcrec.kinds import NewRows, with_new_rows
from funcrec.kinds._columns import admit_columns, buffers_of, columns_of, find_columns
from funcrec.testing import assert_trees_close

KINDS = [
    {},
    {"policy": "lfu", "unknown": 3, "seed": 1},
    {"policy": "distance_lfu", "ttl": 2},
    {"policy": lambda age, count: count - age, "unknown": 1},
    {"admit": 2, "seed": 5},
    {"admit": 0.5},
]


def batches(draw, names: list[str], number: int = 3) -> list[fr.KeyedJaggedTensor]:
    """Return batches with garbage in the padding, some of i32, from so few ids that many come again."""
    seed, num_bags = draw(st.integers(0, 999)), draw(st.integers(0, 5))
    generator, out = torch.Generator().manual_seed(seed), []
    for _ in range(number):
        lengths = torch.randint(0, 9, (len(names) * num_bags,), generator=generator)
        n = int(lengths.sum())
        ids = torch.randint(-40, 300, (n + draw(st.sampled_from([0, 7])),), generator=generator)
        ids = ids.int() if draw(st.booleans()) else ids * 10**12
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        out.append(fr.KeyedJaggedTensor.from_offsets(names, ids, offsets))
    return out


def ids_of(ids: fr.KeyedJaggedTensor, columns: dict[str, int | None]) -> Tensor:
    """Return the ids of the columns, at most so many of each bag, in a loop."""
    bags = [bag[:most] for c, most in columns.items() for bag in ids.to_lists()[c]]
    return torch.tensor([i for bag in bags for i in bag], dtype=torch.int64)


@pytest.mark.parametrize("implementation", ["cpp", "reference"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_all_at_once_are_one_by_one(implementation, data):
    """admit_columns and find_columns give the states, new rows, numbers and rows of fr.admit and fr.find on each
    vocabulary's ids."""
    kinds = data.draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3))
    names = [f"c{i}" for i in range(len(kinds) + 2)]
    columns = [{n: data.draw(st.sampled_from([None, 1, 3]))} for n in names[: len(kinds)]]
    columns[0][names[-1]] = None  # the first vocabulary has two columns, and one column belongs to no vocabulary
    own = apart = [fr.vocabulary(128 * data.draw(st.sampled_from([1, 3])), **x) for x in kinds]
    with ops.using(implementation):
        for ids in batches(data.draw, names):
            own, new, numbers = admit_columns(own, buffers_of([ids], columns))
            made = [fr.admit(v, ids_of(ids, c)) for v, c in zip(apart, columns, strict=True)]
            apart, turnovers = [x[0] for x in made], [x[2] for x in made]
            assert_trees_close(own, apart)
            for i, t in enumerate(turnovers):
                at = slice(new.of(i)["rows"], new.of(i)["rows"] + int(t.count))
                assert_trees_close((new.rows[at], new.ids[at]), (t.rows[: t.count], t.new_ids[: t.count]))
                assert int(new.counts[new.of(i)["number"]]) == int(t.count)
                assert numbers[i].tolist() == [*map(int, (t.admitted.sum(), t.evicted.sum(), t.hits, t.refused))]
            found = find_columns(own, ids, columns)
            for v, c in zip(own, columns, strict=True):
                assert_trees_close(
                    ids_of(fr.KeyedJaggedTensor.from_offsets(ids.keys, found, ids.offsets), c),
                    fr.find(v, ids_of(ids, c)),
                )
            assert torch.equal(found[ids.offsets[-1] :], ids.values[ids.offsets[-1] :].long())  # padding stays


def test_several_tensors_of_ids_count_together():
    """A batch of two KeyedJaggedTensors admits the ids of both, as one with all ids does."""
    parts = [
        fr.KeyedJaggedTensor.from_lists({"a": [[4, 5]], "b": [[7]]}),
        fr.KeyedJaggedTensor.from_lists({"a": [[5]]}),
    ]
    whole = fr.KeyedJaggedTensor.from_lists({"a": [[4, 5, 5]], "b": [[7]]})
    columns, empty = [{"a": None}, {"b": 1}], [fr.vocabulary(128), fr.vocabulary(128, seed=3)]
    one, _, numbers = admit_columns(empty, buffers_of(parts, columns))
    assert_trees_close(one, admit_columns(empty, buffers_of([whole], columns))[0])
    assert numbers.tolist() == [[2, 0, 0, 0], [1, 0, 0, 0]]


def test_columns_of_features_are_as_long_as_the_longest_that_reads_them():
    """A column has the greatest max_length of its features, or None if one of them reads whole bags."""
    f = lambda name, most, key: fr.FeatureConfig(name, table="t", max_length=most, column=key)
    assert columns_of([f("x", 3, "a"), f("y", 5, "a"), f("z", None, "b"), f("w", 2, "b")]) == {"a": 5, "b": None}


# -- new rows ----------------------------------------------------------------------------------------------------


def grouped() -> fr.optim.RowOptimizer:
    """Return an optimizer whose first slots are the row itself."""
    return fr.optim.row_optimizer(
        init=lambda table: {"first": table.clone()}, rule=lambda row, grad, slots, hyper: (row - grad, slots)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("optimizer", [fr.optim.adam(), fr.optim.adagrad(initial_accumulator=0.5), grouped()],
                         ids=["adam", "adagrad", "slots of the row"])  # fmt: skip
def test_only_counted_rows_are_new(dtype, optimizer):
    """The first `count` rows of each vocabulary have the numbers and slots that `init` gives to their ids. All other
    rows keep every bit, also where garbage follows in the places."""
    make = lambda name, init: fr.TableConfig(name, 256, 5, dtype=dtype, initializer=init)
    configs = [
        make("n", fr.normal(0.1)),
        make("u", fr.uniform()),
        make("c", fr.constant(0.1)),
        make("x", fr.xavier_normal()),
    ]
    tables = {c.name: torch.full((256, 5), 7.0, dtype=dtype) for c in configs}
    slots = {n: {k: torch.full_like(x, 9.0) for k, x in own.items()} for n, own in optimizer.init(tables).items()}
    rows, ids = torch.tensor([3, 200, 9, 9, 2**40, 8]), torch.tensor([5, 100, 0, 255, 7, 9])
    new = NewRows(rows, ids, torch.tensor([2, 99, 1]), (4, 2), every=2)
    owners = [(0, configs[0]), (0, configs[1]), (1, configs[2]), (1, configs[3])]
    got, got_slots = with_new_rows(tables, slots, new, owners, optimizer, fr.key(3))
    first = fr.init(fr.key(3), configs)
    for v, c in owners:
        pairs = ((3, 5), (200, 100)) if v == 0 else ()  # the one new row of the second vocabulary is no row
        want = tables[c.name].clone()
        for row, i in pairs:
            want[row] = first[c.name][i]
        assert_trees_close(got[c.name], want)
        for k, x in slots[c.name].items():
            want = x.clone()
            for row, i in pairs:
                want[row] = optimizer.init({c.name: first[c.name][i][None]})[c.name][k][0]
            assert_trees_close(got_slots[c.name][k], want)
    assert all(bool((x == 7).all()) for x in tables.values())  # the arguments are unchanged


def test_new_rows_have_derivatives():
    """Tables that a gradient follows are renewed in plain torch: the gradient of a new row is zero."""
    config, sparse = fr.TableConfig("t", 128, 2), fr.optim.sgd(0.1)
    new = NewRows(torch.tensor([3, 5]), torch.tensor([1, 2]), torch.tensor([1]), (2,))
    total = lambda t: with_new_rows({"t": t}, {"t": {}}, new, [(0, config)], sparse, fr.key(0))[0]["t"].square().sum()
    table = torch.rand(128, 2)
    want = 2 * table
    want[3] = 0
    assert_trees_close(torch.func.grad(total)(table), want)
