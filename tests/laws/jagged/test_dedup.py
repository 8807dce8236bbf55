"""dedup_bags stores equal bags once; the bags of the examples do not change, and keep their meaning through cuts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from programs.refused import assert_refused
from programs.shared_bags import expanded, with_inverse

import funcrec as fr
from funcrec.jagged import _dedup, parts_of_examples
from funcrec.testing import assert_trees_close, garbage_padding
from funcrec.testing import strategies as frs

KJT = fr.KeyedJaggedTensor
SMALL = frs.keyed_jagged_tensors(elements=st.integers(0, 1), max_bags=6, max_length=2)
IDS = KJT.from_lists({"a": [[1, 2], [1, 2], [3], []], "b": [[5], [6], [5], [5]]})


def lists(ids):
    """Return the bags with the weights of each key, as hashable values."""
    return {k: list(zip(map(tuple, x.to_lists()), weights_of(x), strict=True)) for k, x in ids.items()}


def weights_of(x):
    weights = x.weights
    return [()] * x.num_bags if weights is None else map(tuple, fr.JaggedTensor(weights, x.offsets).to_lists())


@given(SMALL, st.integers(0, 9))
def test_the_examples_keep_their_bags(ids, seed):
    """Each example keeps its bag. The distinct bags differ, and come in the order of their first examples, whatever the
    padding holds."""
    dirty = garbage_padding(ids, fr.key(seed))
    got = fr.dedup_bags(dirty)
    assert got.num_examples == ids.num_bags and got.capacity == int(got.offsets[-1])
    found, want = lists(got), lists(ids)
    for f, key in enumerate(ids.keys):
        assert found[key] == list(dict.fromkeys(want[key]))
        assert [found[key][i] for i in got.inverse[f].tolist()] == want[key]
    assert_trees_close(fr.dedup_bags(got), got)
    assert lists(_dedup.expand_bags(got)) == want and _dedup.expand_bags(got).inverse is None


@given(SMALL)
def test_other_keys_stay_as_they_are(ids):
    """Keys outside `keys` keep a bag for each example, and their inverse indices count up."""
    for key in ids.keys:
        got = fr.dedup_bags(ids, [key])
        for f, other in enumerate(ids.keys):
            if other != key:
                assert lists(got)[other] == lists(ids)[other]
                assert got.inverse[f].tolist() == list(range(ids.num_bags))


@given(SMALL)
def test_colliding_hashes_change_nothing(ids):
    """If the hashes of all bags are equal, the bags themselves are compared, and the result is the same."""
    want = fr.dedup_bags(ids)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_dedup, "_hashes", lambda parts, bag, place, lengths: torch.zeros_like(lengths))
        assert_trees_close(fr.dedup_bags(ids), want)


@given(SMALL, st.sampled_from([1, 2, 3]))
def test_parts_have_bags_of_their_own(ids, n):
    """With num_parts=n, the batch can be cut into n parts, whose examples have the bags of the batch's part."""
    ids = ids[: ids.num_bags // n * n]
    got = fr.dedup_bags(ids, num_parts=n)
    size = ids.num_bags // n
    for i, part in enumerate(parts_of_examples(got, n)):
        assert lists(expanded(part)) == lists(ids[i * size : (i + 1) * size])


@given(SMALL, st.sampled_from([1, 2]))
def test_cut_and_joined_ids_are_the_ids(ids, n):
    """A function of ids with inverse indices on a mesh gives ids whose examples have the bags of the whole batch."""
    ids = ids[: ids.num_bags // n * n]
    got = fr.dedup_bags(ids, num_parts=n)
    same = fr.shard_map(lambda x: x, mesh=fr.Mesh.emulated(x=n), in_specs=fr.P("x"), out_specs=fr.P("x"))(got)
    assert lists(same) == lists(got) and torch.equal(same.inverse, got.inverse) and same.strides == got.strides


def test_examples_that_share_bags_across_ranks_are_refused():
    """Ids are cut by examples only if the examples of each part have bags of that part."""
    same = fr.shard_map(lambda x: x, mesh=fr.Mesh.emulated(x=2), in_specs=fr.P("x"), out_specs=fr.P("x"))
    crossed = with_inverse(IDS, torch.tensor([[0, 1, 2, 3], [0, 3, 2, 1]]))
    with pytest.raises(ValueError, match="share a bag across 2 parts"):
        same(crossed)
    with pytest.raises(ValueError, match="2 ranks cannot share"):
        same(fr.dedup_bags(IDS))


@given(SMALL)
def test_keys_and_examples_keep_the_inverse(ids):
    """permute, split and concat keep the inverse indices of their keys; positions are examples."""
    got = fr.dedup_bags(ids)
    keys = ids.keys[::-1]
    assert lists(expanded(got.permute(keys))) == lists(ids.permute(keys))
    parts = got.split([1] * len(keys))
    assert all(lists(expanded(p)) == lists(ids.permute(p.keys)) for p in parts)
    if keys:
        joined = KJT.concat(parts)
        assert lists(joined) == lists(got) and torch.equal(joined.inverse, got.inverse)
    middle = slice(ids.num_bags // 3, ids.num_bags)
    assert lists(expanded(got[middle])) == lists(ids[middle])


@given(SMALL, st.sampled_from([1, 4, 16]))
def test_buckets_hold_the_same_examples(ids, minimum):
    """pad_to_bucket adds empty bags that no example has, at most one for each example."""
    got = fr.dedup_bags(ids)
    padded = fr.pad_to_bucket(got, minimum=minimum)
    assert torch.equal(padded.inverse, got.inverse)
    for key in ids.keys:
        bags, more = got[key].to_lists(), padded[key].to_lists()
        assert more[: len(bags)] == bags and not any(more[len(bags) :]) and len(more) <= ids.num_bags


def test_nearby_batches_meet_one_program():
    """Two batches whose numbers of distinct bags lie in one bucket have the same shapes and strides."""
    draw = lambda n: KJT.from_lists({"a": [[i % n] for i in range(64)], "b": [[i] for i in range(64)]})
    one, two = (fr.pad_to_bucket(fr.dedup_bags(draw(n))) for n in (19, 23))
    forms = [([x.shape for x in fr.tree.leaves(ids)], ids.strides) for ids in (one, two)]
    assert forms[0] == forms[1] and one.strides == (24, 64)


def e(call, kind, *words):
    return call, kind, words


SHARED = fr.dedup_bags(IDS)
BAD = {
    "a key that is not there": e(lambda: fr.dedup_bags(IDS, ["c"]), KeyError, "['c']", "['a', 'b']"),
    "parts that do not divide": e(lambda: fr.dedup_bags(IDS, num_parts=3), ValueError, "4 examples", "num_parts=3"),
    "strides without inverse": e(
        lambda: fr.dedup_bags(KJT.from_lists({"a": [[1]], "b": [[1], [2]]})), ValueError, "strides=(1, 2)"
    ),
    "an index of no bag": e(
        lambda: fr.dedup_bags(with_inverse(IDS, torch.tensor([[0], [9]]))), ValueError, "'b'", "inverse[1][0] = 9"
    ),
    "under vmap": e(
        lambda: torch.func.vmap(lambda x: fr.dedup_bags(KJT(x, IDS.offsets, keys=IDS.keys)))(IDS.values[None]),
        ValueError, "cannot be compared here", "before `jit`",
    ),
    "under jit": e(lambda: fr.jit(fr.dedup_bags)(IDS), ValueError, "cannot be compared here"),
    "weights with a gradient": e(
        lambda: fr.dedup_bags(KJT(IDS.values, IDS.offsets, torch.ones(9).requires_grad_(), keys=IDS.keys)),
        TypeError, "equal bags share one",
    ),
    "concat of other numbers of examples": e(
        lambda: KJT.concat([SHARED.permute(["a"]), SHARED.permute(["b"])[:2]]), ValueError, "[4, 2]"
    ),
    "an inverse of other keys": e(
        lambda: fr.lookup({"t": torch.ones(9, 1)}, with_inverse(IDS, torch.zeros(1, 2, dtype=torch.int64)),
            [fr.FeatureConfig("a", table="t")]),
        ValueError, "does not match the keys", "2 keys",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    """A wrong argument raises an error that names it."""
    call, kind, words = BAD[name]
    assert_refused(call, kind, *words)


def test_shared_and_plain_bags_do_not_join():
    """concat refuses parts of which only some have inverse indices, however few those or the others are."""
    plain = {k: fr.KeyedJaggedTensor.from_lists({k: [[1], [1]]}) for k in "abc"}
    for shared in ("a", "ab", "c"):
        parts = [fr.dedup_bags(x) if k in shared else x for k, x in plain.items()]
        with pytest.raises(ValueError, match="only some of `parts` have inverse indices"):
            fr.KeyedJaggedTensor.concat(parts)
