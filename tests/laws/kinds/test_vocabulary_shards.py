"""Vocabularies that are cut by buckets: ranks that admit the ids of their buckets do what one vocabulary does."""

import pytest
import torch
from funcrec.kernels import ops
from hypothesis import given, settings
from hypothesis import strategies as st

import funcrec as fr
from funcrec.core import replace
from funcrec.kinds import NewRows, cut_vocabulary, join_vocabulary, shard_specs
from funcrec.kinds._columns import admit_columns, buffers_of, find_columns
from funcrec.kinds._vocabulary_shards import admit_on_ranks, find_on_ranks, ids_on_ranks
from funcrec.testing import assert_trees_close

KINDS = [
    {},
    {"policy": "lfu", "unknown": 3, "seed": 1},
    {"policy": "distance_lfu", "ttl": 2},
    {"admit": 2, "seed": 5, "unknown": 1},
    {"admit": 0.5},
]
NAMES = ["a", "b", "c", "other"]


def batch_of(seed: int, num_ranks: int, num_bags: int, padding: int) -> fr.KeyedJaggedTensor:
    """Return a batch of `num_bags` bags for each rank, of so few ids that many come again, on either side of zero."""
    g = torch.Generator().manual_seed(seed)
    lists = {n: [torch.randint(-40, 300, (int(k),), generator=g).tolist()
                 for k in torch.randint(0, 9, (num_bags * num_ranks,), generator=g)] for n in NAMES}  # fmt: skip
    ids = fr.KeyedJaggedTensor.from_lists(lists)
    ids = replace(ids, values=ids.values.int()) if seed % 2 else ids
    return ids.pad_to(ids.capacity + padding)


def new_of(new, vocabulary: int) -> list:
    """Return the new rows of a vocabulary and their ids, in the order of rows."""
    own = new.of(vocabulary)
    count = int(new.counts.view(-1, new.every)[vocabulary, 0])
    return sorted(zip(*(x[own["rows"] :][:count].tolist() for x in (new.rows, new.ids)), strict=True))


@pytest.mark.parametrize("implementation", ["cpp", "reference"])
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_ranks_do_what_one_vocabulary_does(implementation, data):
    """Step after step, the joined shards, the numbers, the new rows and the rows of all ids are those of the whole
    vocabularies with the ids of all ranks, whether buckets divide evenly among the ranks or not."""
    kinds = data.draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3))
    n, num_bags, padding = (data.draw(st.sampled_from(x)) for x in ([1, 2, 3, 4], [1, 4], [0, 5]))
    mesh, places = fr.Mesh.emulated(x=n), []
    columns = [{name: data.draw(st.sampled_from([None, 3]))} for name in NAMES[: len(kinds)]]
    columns[0]["other"] = None
    whole = [fr.vocabulary(128 * data.draw(st.integers(1, 5)), **x) for x in kinds]
    shards = [cut_vocabulary(v, ("x",), mesh) for v in whole]
    specs = [shard_specs(s) for s in shards]

    def step(shards, ids):
        after, new, numbers = admit_on_ranks(shards, buffers_of([ids], columns))
        places[:] = [new.places]
        seen = replace(ids, values=new.seen.rows)
        found = replace(ids, values=find_on_ranks(after, buffers_of([ids], columns)))
        return after, (new.rows, new.ids, new.counts, numbers), found, seen

    run = fr.shard_map(step, mesh=mesh, in_specs=(specs, fr.P("x")), out_specs=(specs, fr.P(), fr.P("x"), fr.P("x")))
    with ops.using(implementation):
        for _ in range(3):
            batch = batch_of(data.draw(st.integers(0, 999)), n, num_bags, padding)
            whole, new, numbers = admit_columns(whole, buffers_of([batch], columns))
            shards, (*rows, total), found, seen = run(shards, batch)
            assert_trees_close([join_vocabulary(s, mesh) for s in shards], whole, rtol=0, atol=0)
            assert torch.equal(total, numbers)
            got = NewRows(*rows, *places, new.every)
            assert all(new_of(got, v) == new_of(new, v) for v in range(len(whole)))
            expected = replace(batch, values=find_columns(whole, batch, columns)).to_lists()
            assert found.to_lists() == expected
            for v, own in zip(whole, columns, strict=True):
                for c, most in own.items():
                    for bag, want in zip(seen.to_lists()[c], expected[c], strict=True):
                        assert bag[:most] == want[:most], v


@settings(max_examples=20, deadline=None)
@given(
    buckets=st.integers(1, 5), n=st.integers(1, 4), seed=st.integers(0, 99), held=st.sampled_from([0, 50, 300]),
    asked=st.sampled_from([0, 1, 40]),
)  # fmt: skip
def test_ranks_tell_the_ids_of_rows(buckets, n, seed, held, asked):
    """Each rank learns the id of any row of the whole vocabulary, from the rank that has it; rows outside have -1."""
    g, mesh = torch.Generator().manual_seed(seed), fr.Mesh.emulated(x=n)
    whole = fr.admit(fr.vocabulary(128 * buckets, seed=seed), torch.randint(-(2**62), 2**62, (held,), generator=g))[0]
    rows = torch.randint(-2, whole.capacity + 3, (n * asked,), generator=g)
    shard = cut_vocabulary(whole, ("x",), mesh)
    run = fr.shard_map(ids_on_ranks, mesh=mesh, in_specs=(shard_specs(shard), fr.P("x")), out_specs=fr.P("x"))
    inside = (rows >= 0) & (rows < whole.capacity)
    assert torch.equal(run(shard, rows), torch.where(inside, whole.entries[rows.clamp(0, whole.capacity - 1), 0], -1))


def test_a_shard_takes_an_equal_part():
    """A rank of n has the rows of a n-th of the buckets, rounded up, and tells of what it is a part."""
    whole = fr.vocabulary(5 * 128, admit=2, unknown=1)
    shard = cut_vocabulary(whole, ("x", "y"), fr.Mesh.emulated(x=2, y=2))
    assert [x.shape[0] for x in (shard.own.tags, shard.entries, shard.own.sketch)] == [8 * 128] * 3
    assert (shard.capacity, shard.num_embeddings) == (640, 641)
    assert repr(shard) == "VocabularyShard(1024 rows, policy='lru', admit=2, unknown=1 of 640, axes=('x', 'y'))"
