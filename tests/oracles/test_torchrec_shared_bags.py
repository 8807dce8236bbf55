"""Shared bags are TorchRec's variable batch per feature: the same lookups, and training to the same numbers."""

import pytest
import torch
from programs.shared_bags import expanded
from torch.nn.functional import embedding_bag

import funcrec as fr
from funcrec.testing import assert_trees_close

torchrec = pytest.importorskip("torchrec")

TABLES = (fr.TableConfig("t", 9, 4), fr.TableConfig("u", 7, 8))
FEATURES = (
    fr.FeatureConfig("a", table="t"),
    fr.FeatureConfig("b", table="t"),
    fr.FeatureConfig("c", table="u", pooling="mean"),
)


def batch(seed, num_examples=8):
    """Return ids of three keys, whose bags repeat, without and with their equal bags stored once."""
    draw = torch.Generator().manual_seed(seed)
    one = lambda n, rows: torch.randint(0, rows, (n,), generator=draw).tolist()
    pool = {"a": [one(n, 9) for n in (2, 3, 0)], "b": [one(n, 9) for n in (1, 2, 2, 4, 0)], "c": [one(3, 7), one(1, 7)]}
    chosen = {k: [bags[i] for i in one(num_examples, len(bags))] for k, bags in pool.items()}
    ids = fr.KeyedJaggedTensor.from_lists(chosen, dtype=torch.int64)
    return ids, fr.dedup_bags(ids)


def collection(params):
    """Return TorchRec's EmbeddingBagCollection with these tables."""
    made = torchrec.EmbeddingBagCollection(fr.interop.to_torchrec((TABLES, FEATURES)))
    for name, bag in made.embedding_bags.items():
        bag.weight.data.copy_(params[name])
    return made


@pytest.mark.parametrize("seed", range(5))
def test_lookups_are_torchrecs(seed):
    """A lookup of shared bags equals EmbeddingBagCollection of TorchRec's ids with inverse_indices."""
    ids, shared = batch(seed)
    params = fr.init(fr.key(seed), TABLES)
    theirs = collection(params)(fr.interop.to_torchrec(shared))
    ours = fr.lookup(params, shared, FEATURES)
    assert list(ours.keys) == theirs.keys()
    assert_trees_close(ours.values, theirs.values().detach(), atol=1e-6)
    assert_trees_close(ours.values, fr.lookup(params, ids, FEATURES).values)


@pytest.mark.parametrize("seed", range(5))
def test_lookups_are_torchs_in_f64(seed):
    """A lookup of shared bags equals F.embedding_bag of the distinct bags, indexed by the inverse, in f64."""
    _, shared = batch(seed)
    params = {k: v.double() for k, v in fr.init(fr.key(seed), TABLES).items()}
    want = []
    for i, f in enumerate(FEATURES):
        bags = shared[f.key].unpad()
        rows = embedding_bag(bags.values, params[f.table], bags.offsets, mode=f.pooling, include_last_offset=True)
        want.append(rows.index_select(0, shared.inverse[i]))
    assert_trees_close(fr.lookup(params, shared, FEATURES).values, torch.cat(want, 1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("equal", [False, True])
def test_ids_go_to_torchrec_and_back(equal):
    """Ids with inverse indices go to TorchRec and back unchanged, also if all keys have one number of bags."""
    ids, shared = batch(0)
    shared = fr.dedup_bags(ids.permute(["a"])) if equal else shared
    theirs = fr.interop.to_torchrec(fr.pad_to_bucket(shared) if not equal else shared)
    assert theirs.stride() == 8 and theirs.inverse_indices()[0] == list(shared.keys)
    back = fr.interop.from_torchrec(theirs)
    want = fr.pad_to_bucket(shared).unpad() if not equal else shared
    assert_trees_close(back, want)
    assert (back.strides is None) == (len({theirs.stride_per_key()[i] for i in range(len(shared.keys))}) == 1)


def test_training_reaches_torchrecs_numbers():
    """Five steps of SGD on shared bags reach the tables of TorchRec's collection, trained by torch on the same ids."""
    params = fr.init(fr.key(1), TABLES)
    theirs = collection(params)
    step = fr.train_step(
        lambda p, ids: fr.lookup(p.tables, ids, FEATURES).values.sin().square().mean(),
        sparse=fr.optim.sgd(lr=0.5),
        dense=fr.optim.dense(torch.optim.SGD, lr=0.5),
    )
    state, sgd = step.init(fr.Params(params, {})), torch.optim.SGD(theirs.parameters(), lr=0.5)
    for seed in range(5):
        _, shared = batch(seed)
        state, metrics = step(state, shared)
        sgd.zero_grad()
        loss = theirs(fr.interop.to_torchrec(shared)).values().sin().square().mean()
        loss.backward()
        sgd.step()
        assert_trees_close(metrics["loss"], loss.detach(), atol=1e-6)
    want = {name: bag.weight.detach() for name, bag in theirs.embedding_bags.items()}
    assert_trees_close(state.tables, want, atol=1e-6)


def test_sequences_have_the_examples_bags():
    """lookup_sequence applies inverse indices, which EmbeddingCollection ignores (TorchRec's issue 1895)."""
    ids, shared = batch(2)
    sequences = [fr.FeatureConfig(f.name, f.table, "none") for f in FEATURES]
    params = fr.init(fr.key(0), TABLES)
    got, want = (fr.lookup_sequence(params, x, sequences) for x in (shared, expanded(shared)))
    for k in got:
        assert got[k].to_lists() == want[k].to_lists() and got[k].num_bags == ids.num_bags
    two = (TABLES[0], fr.TableConfig("u", 7, 4))
    alike = torchrec.EmbeddingCollection(fr.interop.to_torchrec((two, sequences)))
    theirs = alike(fr.interop.to_torchrec(shared))
    assert theirs["a"].lengths().numel() == shared.bags_of("a") != ids.num_bags
