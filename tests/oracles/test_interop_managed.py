"""TorchRec's managed collision modules become dynamic tables and come back.

Lookups of raw ids are equal, and the state on the way back has the same bits."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import funcrec as fr
from funcrec.testing import assert_trees_close

pytest.importorskip("torchrec")
import torchrec
from torchrec.modules import mc_modules
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.optim.keyed import KeyedOptimizerWrapper

CPU, KEY = torch.device("cpu"), fr.key(0)
load, to, read = fr.interop.load_torchrec_state_dict, fr.interop.to_torchrec_state_dict, fr.interop.from_torchrec
POLICIES = {
    "lru": mc_modules.LRU_EvictionPolicy, "lfu": mc_modules.LFU_EvictionPolicy,
    "distance_lfu": mc_modules.DistanceLFU_EvictionPolicy,
}  # fmt: skip
COLUMNS = {"item": ["clicked", "bought"], "user": ["user"]}
SPREAD = 2**61 // 7  # ids far beyond any table, and negative ones


def module(kind="lru", sizes=(12, 300), interval=1, is_sequence=False, **settings):
    torch.manual_seed(0)
    own = torchrec.EmbeddingConfig if is_sequence else torchrec.EmbeddingBagConfig
    sized = dict(zip(COLUMNS, sizes, strict=True))
    configs = [own(n, 3, t, feature_names=COLUMNS[t]) for t, n in sized.items()]
    managed = {
        t: mc_modules.MCHManagedCollisionModule(
            zch_size=n, device=CPU, eviction_policy=POLICIES[kind](), eviction_interval=interval, **settings
        )
        for t, n in sized.items()
    }
    collection = mc_modules.ManagedCollisionCollection(managed, configs)
    if is_sequence:
        return ManagedCollisionEmbeddingCollection(torchrec.EmbeddingCollection(tables=configs), collection)
    return ManagedCollisionEmbeddingBagCollection(torchrec.EmbeddingBagCollection(configs), collection)


def batches(seed, count, num_ids=40, size=30):
    g = torch.Generator().manual_seed(seed)
    for _ in range(count):
        lengths = torch.randint(0, 4, (3 * size,), generator=g)
        values = (torch.randint(-num_ids, num_ids, (int(lengths.sum()),), generator=g)) * (SPREAD // num_ids)
        yield torchrec.KeyedJaggedTensor(["clicked", "bought", "user"], values, lengths=lengths)


def values_of(answer):
    return answer.values() if hasattr(answer, "values") and not isinstance(answer, dict) else torch.cat(
        [answer[k].values() for k in ("clicked", "bought", "user")]
    )  # fmt: skip


def trained(theirs, given):
    """Return the module after a step of SGD on each batch."""
    for kjt in given:
        theirs.zero_grad()
        values_of(theirs(kjt)[0]).square().sum().backward()
        for p in theirs.parameters():
            p.data -= 0.1 * p.grad
    return theirs


def fresh(theirs):
    """Return (Params for the module's numbers, the features)."""
    vocabularies = read(theirs)
    tables = [t for config in vocabularies.values() for t in config.tables]
    features = [f for config in vocabularies.values() for f in config.features]
    return fr.Params(fr.dynamic_tables(fr.init(KEY, tables), vocabularies, key=KEY), {}), features


def copied(theirs):
    return {k: x.clone() for k, x in theirs.state_dict().items()}


def same_lookups(theirs, params, features, given):
    theirs.eval()
    for kjt in given:
        ids, want = read(kjt), values_of(theirs(kjt)[0]).detach()
        if features[0].pooling == "none":
            rows = fr.lookup_sequence(params.tables, ids, features)
            got = torch.cat([rows[k].unpad().values for k in ("clicked", "bought", "user")])
            assert torch.equal(got, want)
        else:
            assert_trees_close(fr.lookup(params.tables, ids, features).values, want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", POLICIES)
@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**30), steps=st.integers(0, 6), interval=st.integers(1, 3), is_sequence=st.booleans(),
    sizes=st.sampled_from([(2, 40), (12, 300), (129, 700)]), num_ids=st.sampled_from([4, 40, 400]),
)  # fmt: skip
def test_lookups_are_those_of_the_module(kind, seed, steps, interval, is_sequence, sizes, num_ids):
    """After any history of batches, lookups of raw ids in the loaded tables are those of the module: known ids have
    their rows, unknown ids the module's last row. The state written back has the module's bits."""
    theirs = trained(module(kind, sizes, interval, is_sequence), batches(seed, steps, num_ids))
    params, features = fresh(theirs)
    before = copied(theirs)
    params = load(params, before)
    same_lookups(theirs, params, features, batches(seed + 1, 2, num_ids))
    assert_trees_close(dict(theirs.state_dict()), before, rtol=0, atol=0)
    assert {n: v.policy for n, v in params.tables.vocabularies.items()} == dict.fromkeys(COLUMNS, kind)
    back = to(params, before)
    assert list(back) == list(before)
    assert_trees_close(back, before, rtol=0, atol=0)
    again = load(fresh(theirs)[0], back)
    assert_trees_close(again.tables.vocabularies, params.tables.vocabularies, rtol=0, atol=0)


@pytest.mark.parametrize("kind", POLICIES)
def test_training_here_comes_back(kind):
    """Tables that a step of funcrec trained, with new ids, give the same lookups in a new module. Loaded from there,
    they have the same ids, ages, counts and rows."""
    theirs = trained(module(kind, sizes=(200, 300)), batches(1, 3))
    params, features = fresh(theirs)
    loss = lambda p, ids: fr.lookup(p.tables, ids, features).values.square().sum()
    step = fr.train_step(loss, sparse=fr.optim.sgd(0.1))
    state = step.init(load(params, theirs.state_dict()))
    for kjt in batches(2, 3, num_ids=60):
        state, metrics = step(state, read(kjt))
    assert int(metrics["vocabularies"]["user"]["admitted"]) > 0
    other = module(kind, sizes=(200, 300))
    other.load_state_dict(to(state, other.state_dict()))
    same_lookups(other, state.params, features, batches(3, 2, num_ids=60))
    again = load(params, other.state_dict()).tables
    for n, v in state.tables.vocabularies.items():
        had, has = fr.vocabulary_items(v), fr.vocabulary_items(again.vocabularies[n])
        kept = {"lru": ["ids", "ages"], "lfu": ["ids", "counts"], "distance_lfu": ["ids", "ages", "counts"]}[kind]
        assert_trees_close({k: had[k] for k in kept}, {k: has[k] for k in kept}, rtol=0, atol=0)
        at = had["rows"][: had["count"]], has["rows"][: has["count"]]
        assert torch.equal(state.tables[n][at[0]], again[n][at[1]])
    other.train()
    trained(other, batches(4, 2, num_ids=60))  # the module goes on


def test_rows_of_ids_that_a_module_has_stay():
    """An id that the module of the written state has keeps its row there. New ids take rows without an id first, and
    rows without an id keep their numbers."""
    theirs = trained(module(sizes=(40, 300)), [torchrec.KeyedJaggedTensor(
        ["clicked", "bought", "user"], torch.tensor([5, 9, 11, 70]), lengths=torch.tensor([3, 0, 1]))])  # fmt: skip
    before, (params, features) = copied(theirs), fresh(theirs)
    step = fr.train_step(lambda p, ids: fr.lookup(p.tables, ids, features).values.sum(), sparse=fr.optim.sgd(0.1))
    state = step.init(load(params, before))
    state, _ = step(state, fr.KeyedJaggedTensor.from_lists({"clicked": [[3, 9]], "bought": [[]], "user": [[]]}))
    after = to(state, before)
    row = lambda d, i: int(d[f"{PREFIX}item.{ROWS}"][(d[f"{PREFIX}item.{IDS}"] == i).nonzero()[0, 0]])
    rows = [row(before, i) for i in (5, 9, 11)]
    assert [row(after, i) for i in (5, 9, 11)] == rows
    new, weight = row(after, 3), "_embedding_module.embedding_bags.item.weight"
    assert new not in rows and new != 39
    others = [i for i in range(40) if i not in (row(after, 9), new)]
    assert torch.equal(after[weight][others], before[weight][others])


def optimizer_of(theirs):
    named = dict(theirs._embedding_module.named_parameters())
    return KeyedOptimizerWrapper(named, lambda ps: torch.optim.Adagrad(ps, lr=0.1, eps=1e-8))


def stepped(theirs, optimizer, given):
    for kjt in given:
        optimizer.zero_grad()
        values_of(theirs(kjt)[0]).square().sum().backward()
        optimizer.step()


def known(seed, count):
    """Return batches whose ids are few, so that a module soon has all of them."""
    return list(batches(seed, count, num_ids=6))


def test_training_goes_on_with_the_optimizers_state():
    """The state of Adagrad moves with the ids: k more steps leave the same tables in both libraries, up to rounding. On
    the way back the optimizer has the bits of its own state."""
    theirs, sparse = module("lfu", sizes=(60, 60)), fr.optim.adagrad(0.1, eps=1e-8)
    optimizer = optimizer_of(theirs)
    stepped(theirs, optimizer, known(1, 4))
    params, features = fresh(theirs)
    loss = lambda p, ids: fr.lookup(p.tables, ids, features).values.square().sum()
    step, held = fr.train_step(loss, sparse=sparse), copied(theirs)
    state = step.init(load(params, held))
    assert_trees_close(load(step.init(params), held), state, rtol=0, atol=0)
    before = fr.tree.map(torch.clone, {n: dict(own) for n, own in optimizer.state_dict()["state"].items()})
    state = load(state, optimizer.state_dict(), module=held, step=4)
    assert int(state.step) == 4
    back = to(state, optimizer.state_dict(), module=to(state, held))
    for n, own in before.items():
        assert torch.equal(back["state"][n]["sum"], own["sum"])
    for kjt in known(2, 3):
        stepped(theirs, optimizer, [kjt])
        state, metrics = step(state, read(kjt))
        assert not int(metrics["vocabularies"]["item"]["admitted"])
    after = to(state, copied(theirs))
    # the module's buffer has room for 1.25 times the ids of the first batch, and it does not count the others
    of_rows = lambda own: {k: x for k, x in own.items() if "weight" in k or IDS in k or ROWS in k}
    assert_trees_close(of_rows(after), of_rows(copied(theirs)), rtol=1e-5, atol=1e-6)
    slots = to(state, optimizer.state_dict(), module=after)["state"]
    for n, own in optimizer.state_dict()["state"].items():
        assert_trees_close(slots[n]["sum"], own["sum"], rtol=1e-5, atol=1e-6)
    other = module("lfu", sizes=(60, 60))
    anew = optimizer_of(other)
    stepped(other, anew, known(9, 1))
    other.load_state_dict(after)
    anew.load_state_dict(to(state, anew.state_dict(), module=after))
    stepped(other, anew, known(3, 1))
    stepped(theirs, optimizer, known(3, 1))
    same_lookups(other, load(params, theirs.state_dict()), features, known(3, 1))


def slots_of(change):
    """Return a call that loads an optimizer's state with the module's state dict, changed."""

    def call():
        theirs = module("lfu", sizes=(60, 60))
        optimizer = optimizer_of(theirs)
        stepped(theirs, optimizer, known(1, 2))
        params, _ = fresh(theirs)
        held = copied(theirs)
        step = fr.train_step(lambda p, b: 0.0, sparse=fr.optim.adagrad(0.1))
        state = step.init(load(params, held))
        stepped(theirs, optimizer, batches(5, 1, num_ids=30))
        load(state, optimizer.state_dict(), module=change(held, copied(theirs)))

    return call


PREFIX = "_managed_collision_collection._managed_collision_modules."
IDS, ROWS = "_mch_sorted_raw_ids", "_mch_remapped_ids_mapping"


def test_configs_have_room_and_the_scale_of_the_module():
    """Vocabularies have room for all ids of a full module, and initializers keep the bound of its tables."""
    theirs = module(sizes=(2000, 300))
    everyone = torch.arange(1999) * (SPREAD // 2000)
    trained(theirs, [torchrec.KeyedJaggedTensor(["clicked", "bought", "user"], everyone,
                                                lengths=torch.tensor([1999, 0, 0]))])  # fmt: skip
    params, _ = fresh(theirs)
    config = read(theirs)["item"]
    assert config.vocabulary.capacity >= 2500 and config.tables[0].initializer == fr.uniform(2000**-0.5)
    loaded = load(params, theirs.state_dict()).tables
    assert int(loaded.vocabularies["item"].num_ids) == 1999
    table = dataclasses.replace(config.tables[0], num_embeddings=2049)
    small = fr.VocabularyConfig(fr.vocabulary(2048, unknown=1), [table], config.features)
    with pytest.raises(ValueError, match="ids of table 'item' find their bucket full"):
        load(with_vocabularies(item=small, user=read(theirs)["user"]), theirs.state_dict())


def with_vocabularies(**vocabularies):
    tables = {t.name: t for config in vocabularies.values() for t in config.tables}
    return fr.Params(fr.dynamic_tables(fr.init(KEY, tuple(tables.values())), vocabularies, key=KEY), {})


def changed(name, make):
    """Return a call that loads the state of a module in which `make` gives an entry, or without it for None."""

    def call():
        theirs = trained(module("distance_lfu"), batches(0, 2))
        state_dict = copied(theirs)
        key = f"{PREFIX}item.{name}"
        x = make(state_dict.pop(key, None))
        load(fresh(theirs)[0], state_dict if x is None else {**state_dict, key: x})

    return call


def with_setting(**given):
    return lambda: read(module(**given))


def other_state(call):
    return lambda: call(trained(module(), batches(0, 2)))


def trained_state(theirs):
    params, features = fresh(theirs)
    loss = lambda p, ids: fr.lookup(p.tables, ids, features).values.sum()
    step = fr.train_step(loss, sparse=fr.optim.adam(0.1))
    return step(step.init(load(params, theirs.state_dict())), read(next(batches(0, 1))))[0]


def of_policy(policy, unknown=1, names=("item", "user")):
    def call(theirs):
        own = read(theirs)
        make = lambda c: fr.VocabularyConfig(
            fr.vocabulary(512, policy=policy, unknown=unknown),
            [dataclasses.replace(c.tables[0], num_embeddings=512 + unknown)], c.features,
        )  # fmt: skip
        load(with_vocabularies(**{n: make(own[n]) for n in names}), theirs.state_dict())

    return other_state(call)


class Odd(mc_modules.LFU_EvictionPolicy):
    """A policy of a user's."""


def odd():
    theirs = module()
    theirs._managed_collision_collection._managed_collision_modules["item"]._eviction_policy = Odd()
    read(theirs)


def decayed():
    theirs = module("distance_lfu")
    theirs._managed_collision_collection._managed_collision_modules["item"]._eviction_policy._decay_exponent = 2.0
    read(theirs)


def hashed():
    config = torchrec.EmbeddingBagConfig(16, 3, "item", feature_names=["clicked"])
    own = HashZchManagedCollisionModule(zch_size=16, device=CPU, total_num_buckets=1)
    collection = mc_modules.ManagedCollisionCollection({"item": own}, [config])
    theirs = ManagedCollisionEmbeddingBagCollection(torchrec.EmbeddingBagCollection([config]), collection)
    with pytest.raises(TypeError, match="module of table 'item' has no counterpart"):
        read(theirs)
    item = read(module())["item"]
    load(with_vocabularies(item=item), theirs.state_dict())


REFUSED = {
    "ids out of order": (changed(IDS, lambda x: x.flip(0)), "are not those of a whole table"),
    "ids that are equal": (changed(IDS, lambda x: x.index_copy(0, torch.tensor([0]), x[1:2])), "are not sorted"),
    "rows of a part": (changed(ROWS, lambda x: x + 12), "are not those of a whole table"),
    "no rows": (changed(ROWS, lambda x: None), "is not whole"),
    "no counts": (changed("_mch_counts", lambda x: None), "has another policy than the state dict"),
    "more of a policy": (changed("_mch_ages", lambda x: torch.zeros(12)), "policy of table 'item' has no counterpart"),
    "another policy": (of_policy("lfu"), "has another policy than the state dict"),
    "two unknown rows": (of_policy("lru", unknown=2), "`unknown` of vocabulary 'item' is another"),
    "a vocabulary less": (of_policy("lru", names=("item",)), "table 'user' has ids in the state dict"),
    "a user's policy": (odd, "the policy of table 'item' has no counterpart"),
    "another decay": (decayed, "the policy of table 'item' has no counterpart"),
    "hashed ids": (with_setting(input_hash_func=lambda x, n: x % n), "`input_hash_func` of table 'item'"),
    "another module": (hashed, "are those of a HashZchManagedCollisionModule"),
    "plain tables": (
        other_state(lambda m: load(fr.Params({"item": torch.zeros(12, 3)}, {}), m.state_dict())), "has ids of rows",
    ),
    "a dict without ids": (
        other_state(lambda m: load(fresh(m)[0], m._embedding_module.state_dict())), "has no ids of table 'item'",
    ),
    "too few rows": (
        lambda: to(trained_state(module(sizes=(300, 300))), module(sizes=(3, 300)).state_dict()), "has too few rows",
    ),
    "slots of other ids": (
        other_state(lambda m: load(trained_state(m), m.state_dict())), "slots of `state` belong to other ids",
    ),
    "an optimizer": (
        other_state(lambda m: load(fresh(m)[0], {"state": {}})), "an optimizer's state dict does not say the ids",
    ),
    "ids of a later step": (slots_of(lambda then, now: now), "has other ids of table 'item' than `state`"),
    "slots of Params": (
        other_state(lambda m: load(fresh(m)[0], {"state": {}}, module=m.state_dict())), "belongs to an optimizer",
    ),
    "a module beside a module": (
        other_state(lambda m: load(fresh(m)[0], m.state_dict(), module=m.state_dict())), "belongs to an optimizer's",
    ),
    "a module for plain tables": (
        lambda: load(fr.Params({"item": torch.zeros(12, 3)}, {}), {"item.weight": torch.zeros(12, 3)}, module={}),
        "requires tables with vocabularies",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_counterpart_is_refused(name):
    """A state that vocabularies cannot hold, or a module cannot hold, raises and names the table."""
    call, words = REFUSED[name]
    with pytest.raises((TypeError, ValueError, KeyError), match=words):
        call()


@pytest.mark.parametrize("names", [("item", "user")])
def test_tables_that_share_a_vocabulary_are_refused(names):
    """TorchRec has a module for each table, so tables that share a vocabulary do not load."""
    theirs = module(sizes=(12, 12))
    own = read(theirs)
    tables = [t for n in names for t in own[n].tables]
    both = fr.VocabularyConfig(own["item"].vocabulary, tables, [f for n in names for f in own[n].features])
    with pytest.raises(ValueError, match="share a vocabulary"):
        load(with_vocabularies(both=both), theirs.state_dict())
