"""Tables that follow a vocabulary: new rows are drawn by id, training equals that of a table with all ids, and growth
keeps every row."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import funcrec as fr
from funcrec.testing import assert_trees_close
from funcrec.testing import strategies as frs

KEY, DIM, IDS = fr.key(3), 3, 700
UNIFORM = fr.TableConfig("user", 4096, DIM, initializer=fr.uniform(0.3))
KINDS = {
    "uniform": UNIFORM,
    "normal": fr.TableConfig("user", 4096, 5, initializer=fr.normal(0.2), dtype=torch.bfloat16),
    "xavier": fr.TableConfig("user", 4096, 8, initializer=fr.xavier_normal(), dtype=torch.float64),
    "constant": fr.TableConfig("user", 4096, 1, initializer=fr.constant(0.5), dtype=torch.float16),
}
FEATURE = [fr.FeatureConfig("clicked", table="user")]
SPARSE = {"rowwise_adagrad": fr.optim.rowwise_adagrad(lr=0.3), "adam": fr.optim.adam(lr=0.1)}


def same(x, y):
    assert_trees_close(x, y, rtol=0, atol=0)


def garbage(tables, slots):
    """Return tables and slots of NaN, as rows are that someone had before."""
    return fr.tree.map(lambda x: torch.full_like(x, torch.nan), (tables, slots))


@pytest.mark.parametrize("optimizer", SPARSE)
@pytest.mark.parametrize("kind", KINDS)
def test_new_rows_are_those_of_init(kind, optimizer):
    """A new row holds the numbers of row `id` of init, and slots as init makes them, whatever id had the row before.
    Other rows keep their bits."""
    config, sparse = KINDS[kind], SPARSE[optimizer]
    it, rows, turnover = fr.admit(fr.vocabulary(256), torch.arange(0, 4000, 29))
    whole = fr.init(KEY, [config])
    tables = {"user": whole["user"].new_zeros(256, config.embedding_dim)}
    slots = sparse.init(tables)
    new, fresh = fr.renew(*garbage(tables, slots), turnover, sparse, KEY, [config])
    same(new["user"][rows], whole["user"][torch.arange(0, 4000, 29)])
    same(fr.tree.map(lambda x: x[rows], fresh), fr.tree.map(lambda x: x[rows], slots))
    free = it.tags == 0
    assert new["user"][free].isnan().all() and all(x[free].isnan().all() for x in fresh["user"].values())


@given(st.integers(-(2**63), 2**63 - 1), st.integers(1, 40))
def test_rows_of_any_id_are_numbers_of_the_sequence(i, dim):
    """The row of any id, also of the largest and of negative ones, is part of the initializer's sequence, and depends
    on the id alone."""
    config = fr.TableConfig("user", 128, dim, initializer=fr.normal())
    tables, sparse = {"user": torch.zeros(128, dim)}, SPARSE["adam"]
    drawn = []
    for more in ([], [5, 6, 7]):
        _, rows, turnover = fr.admit(fr.vocabulary(128, seed=len(more)), torch.tensor([*more, i]))
        drawn.append(fr.renew(tables, sparse.init(tables), turnover, sparse, KEY, [config])[0]["user"][rows[-1]])
    same(*drawn)
    assert drawn[0].isfinite().all()


def gradients(tables, rows, step):
    """Return row gradients that depend on the rows' numbers and on the step."""
    bags = fr.KeyedJaggedTensor.from_jagged({"clicked": rows})
    acts = fr.lookup(tables, bags, FEATURE)
    return fr.lookup_transpose(
        dataclasses.replace(acts, values=acts.values * 0.1 * (step + 1)),
        bags,
        FEATURE,
        [fr.TableConfig("user", tables["user"].shape[0], DIM)],
    )


@pytest.mark.parametrize("optimizer", SPARSE)
def test_training_equals_that_of_a_table_of_all_ids(optimizer):
    """While no id is refused or evicted, a table that follows a vocabulary is trained to the bits of a table with a row
    for every id; its rows are permuted."""
    sparse, it = SPARSE[optimizer], fr.vocabulary(4096)
    whole = fr.init(KEY, [UNIFORM])
    tables = {"user": torch.full((4096, DIM), torch.nan)}
    slots, whole_slots = sparse.init(tables), sparse.init(whole)
    seen = set()
    for step in range(5):
        draws = torch.Generator().manual_seed(step)
        ids = fr.JaggedTensor.from_lists([(torch.rand(40, generator=draws) ** 2 * IDS).long() for _ in range(6)])
        it, rows, turnover = fr.admit(it, ids)
        assert not turnover.evicted.any() and not turnover.refused
        tables, slots = fr.renew(tables, slots, turnover, sparse, KEY, [UNIFORM])
        tables, slots = sparse.update(gradients(tables, rows, step), slots, tables, step)
        whole, whole_slots = sparse.update(gradients(whole, ids, step), whole_slots, whole, step)
        seen |= set(ids.values.tolist())
    held = torch.tensor(sorted(seen))
    rows = fr.find(it, held)
    same(tables["user"][rows], whole["user"][held])
    same(fr.tree.map(lambda x: x[rows], slots), fr.tree.map(lambda x: x[held], whole_slots))


def test_a_row_that_changed_hands_keeps_nothing():
    """An id that returns after its eviction begins again. In a run with many evictions, each row holds the numbers of
    its own id."""
    config, sparse = fr.TableConfig("user", 4096, DIM, initializer=fr.uniform(0.3)), SPARSE["rowwise_adagrad"]
    it, tables = fr.vocabulary(256), {"user": torch.zeros(256, DIM)}
    slots, whole, evicted = sparse.init(tables), fr.init(KEY, [config])["user"], 0
    for step in range(30):
        ids = torch.randint(0, 4096, (80,), generator=torch.Generator().manual_seed(step))
        it, rows, turnover = fr.admit(it, ids)
        tables, slots = fr.renew(tables, slots, turnover, sparse, KEY, [config])
        evicted += int(turnover.evicted.sum())
        has_row = rows >= 0
        same(tables["user"][rows[has_row]], whole[ids[has_row]])
    assert evicted > 1000


@given(frs.vocabularies(), st.integers(2, 4), st.integers(0, 99))
def test_growth_keeps_every_id_row_and_slot(it, factor, seed):
    """A grown vocabulary has the same ids, stamps and counts; each id's row and slots move with it, and the rows of
    unknown ids stay the last ones."""
    ids = torch.randint(-500, 500, (150,), generator=torch.Generator().manual_seed(seed))
    it, *_ = fr.admit(it, ids)
    tables = {"a": torch.randn(it.num_embeddings, 2), "b": torch.randn(it.num_embeddings, 1).bfloat16()}
    slots = {"a": {"sum": torch.randn(it.num_embeddings)}}
    larger, grown, grown_slots = fr.grow(it, tables, slots, factor)
    assert larger.capacity == factor * it.capacity and int(larger.num_ids) == int(it.num_ids)
    old, new = fr.find(it, ids), fr.find(larger, ids)
    assert ((old >= 0) & (old < it.capacity)).equal((new >= 0) & (new < larger.capacity))
    read = lambda x, rows: torch.where((rows >= 0).view(-1, *[1] * (x.dim() - 1)), x[rows], 0)
    same(
        fr.tree.map(lambda x: read(x, new), (grown, grown_slots)), fr.tree.map(lambda x: read(x, old), (tables, slots))
    )
    live, was = new < larger.capacity, old < it.capacity
    same(larger.entries[new[live & (new >= 0)]], it.entries[old[was & (old >= 0)]])


def test_growth_twice_is_growth_by_the_product():
    """Growth by 2 and then by 3 is growth by 6."""
    it, *_ = fr.admit(fr.vocabulary(256, admit=2), torch.arange(300) % 170)
    tables = {"a": torch.randn(256, 2)}
    same(fr.grow(*fr.grow(it, tables, {}, 2), 3), fr.grow(it, tables, {}, 6))


def test_a_grown_vocabulary_goes_on_as_before():
    """After growth, steps find the old ids in their rows, and admit new ones to the free rows."""
    it, *_ = fr.admit(fr.vocabulary(128), torch.arange(128))
    larger, *_ = fr.grow(it, {}, {})
    larger, rows, turnover = fr.admit(larger, torch.arange(100, 180))
    assert int(turnover.hits) == 28 and not turnover.evicted.any() and not turnover.refused
    assert rows.unique().numel() == 80


@pytest.mark.parametrize("name", SPARSE)
def test_a_compiled_step_with_renewal_equals_the_eager_one(name, interpreted):
    """admit, renew and an update staged together, with everything donated, give the bits of the eager calls."""
    sparse = SPARSE[name]

    def step(it, tables, slots, ids, number):
        it, rows, turnover = fr.admit(it, ids)
        tables, slots = fr.renew(tables, slots, turnover, sparse, KEY, [UNIFORM])
        return it, *sparse.update(gradients(tables, rows, 0), slots, tables, number)

    fast = fr.jit(step, donate=("it", "tables", "slots"))
    tables = {"user": torch.zeros(256, DIM)}
    eager = fr.vocabulary(256), tables, sparse.init(tables)
    staged = fr.tree.map(torch.clone, eager)
    for k in range(4):
        ids = fr.JaggedTensor(
            torch.randint(0, 900, (90,), generator=torch.Generator().manual_seed(k)), torch.tensor([0, 40, 80])
        )
        eager, staged = step(*eager, ids, torch.tensor(k)), fast(*staged, ids, torch.tensor(k))
        same(staged, eager)


TURNOVER = fr.admit(fr.vocabulary(128), torch.arange(3))[2]
TABLES = {"user": torch.zeros(128, DIM)}
GIVEN = {"tables": TABLES, "slots": SPARSE["adam"].init(TABLES), "turnover": TURNOVER, "optimizer": SPARSE["adam"]}
renew = lambda **change: fr.renew(**(GIVEN | {"key": KEY, "configs": [UNIFORM]} | change))
WRONG = [
    ("keeps gradients for later", lambda: renew(optimizer=fr.optim.accumulate(SPARSE["adam"], every=2, capacity=9))),
    ("does not make slots", lambda: renew(optimizer=3)),
    ("are not those of `optimizer`", lambda: renew(optimizer=fr.optim.sgd(0.1))),
    (r"are not those of `optimizer`.\s*got   slots \[\]", lambda: renew(slots={})),
    ("has no 'item'", lambda: renew(configs=[fr.TableConfig("item", 128, 2)])),
    ("is not that of its config", lambda: renew(configs=[fr.TableConfig("user", 128, 7)])),
    ("initializer of 'user' is not known", lambda: renew(configs=[fr.TableConfig("user", 9, DIM, initializer=max)])),
    ("does not follow the vocabulary", lambda: fr.grow(fr.vocabulary(128, unknown=2), TABLES, {})),
    ("`times` is too large", lambda: fr.grow(fr.vocabulary(128), TABLES, {}, 2**33)),
]


@pytest.mark.parametrize("message, call", WRONG, ids=[w[0] for w in WRONG])
def test_what_does_not_fit_is_refused(message, call):
    """Tables, configs, optimizers and factors that do not fit raise an error that names them."""
    with pytest.raises((TypeError, ValueError), match=message):
        call()


@given(frs.vocabularies(policies=("lru", "lfu", "distance_lfu", lambda age, count: count - age)), st.integers(0, 99))
def test_a_list_makes_the_vocabulary_again(it, seed):
    """A list, in any order, makes a vocabulary of any size with the same ids, ages and counts, which continues like the
    first one."""
    draws = torch.Generator().manual_seed(seed)
    for _ in range(3):
        it, *_ = fr.admit(it, torch.randint(-99, 99, (150,), generator=draws))
    items = fr.vocabulary_items(it)
    n = int(items["count"])
    assert n == int(it.num_ids) and torch.equal(fr.find(it, items["ids"][:n]), items["rows"][:n])
    garbage = {k: torch.cat([x[:n].flip(0), torch.full((4,), -7)]) if x.dim() else x for k, x in items.items()}
    for capacity in (it.capacity, 1024):
        empty = fr.vocabulary(capacity, policy=it.policy, ttl=it.ttl, unknown=it.unknown, seed=it.seed)
        made, rows = fr.vocabulary_of(empty, items)
        same(fr.vocabulary_of(empty, garbage), (made, torch.cat([rows[:n].flip(0), torch.full((4,), -1)])))
        assert torch.equal(fr.find(made, items["ids"][:n]), rows[:n])
        again = fr.vocabulary_items(made)
        same([again[k][:n] for k in ("ids", "ages", "counts")], [items[k][:n] for k in ("ids", "ages", "counts")])
        assert int(again["count"]) == n and int(made.now) == int(it.now)
        _, _, turnover = fr.admit(made, items["ids"][:n])
        assert int(turnover.hits) == n and int(turnover.count) == 0


def test_of_too_many_ids_the_policy_keeps_its_own():
    """A smaller vocabulary keeps the ids that its policy would keep, and says that the others have no row."""
    it, *_ = fr.admit(fr.vocabulary(1024), torch.arange(200).repeat_interleave(torch.arange(200) + 1))
    items = fr.vocabulary_items(it)
    made, rows = fr.vocabulary_of(fr.vocabulary(128, policy="lfu"), items)
    assert sorted(items["ids"][rows >= 0].tolist()) == [*range(72, 200)] and int(made.num_ids) == 128
    twice = {k: torch.cat([x[:200], x[:200]]) if x.dim() else x * 2 if k == "count" else x for k, x in items.items()}
    assert int(fr.vocabulary_of(fr.vocabulary(1024), twice)[0].num_ids) == 200


def listed(*rows):
    """Return a list of vocabulary_of: (id, age, count) of each place."""
    ids, ages, counts = torch.tensor(rows).unbind(1)
    return {"ids": ids, "ages": ages, "counts": counts, "count": torch.tensor(len(rows)), "now": torch.tensor(500)}


def test_ids_past_their_ttl_leave_a_list_first():
    """If a bucket is full, ids older than `ttl` leave first, whatever their count."""
    old, young = [(i, 90, 1000) for i in range(100)], [(i, 3, 1) for i in range(200, 300)]
    for policy in ("lru", "lfu", "distance_lfu", lambda age, count: count):
        made, _ = fr.vocabulary_of(fr.vocabulary(128, policy=policy, ttl=50), listed(*old, *young))
        assert (fr.find(made, torch.arange(200, 300)) >= 0).all() and int(made.num_ids) == 128
        gone = [i for i in range(100) if int(fr.find(made, torch.tensor([i]))) < 0]
        _, _, turnover = fr.admit(made, torch.arange(1000, 1028), now=500)
        assert sorted(gone + turnover.old_ids[turnover.evicted].tolist()) == [*range(100)]


def test_a_list_alone_says_which_ids_a_vocabulary_has():
    """Ids, counts and the clock of the vocabulary that gives the settings do not matter."""
    fresh = fr.vocabulary(128, policy="lfu", admit=2)
    used = fresh
    for _ in range(3):
        used, *_ = fr.admit(used, torch.arange(40), now=9000)
    items = listed((3, 4, 7), (1000, 0, 1))
    same(fr.vocabulary_of(used, items), fr.vocabulary_of(fresh, items))
    again = fr.vocabulary_items(fr.vocabulary_of(used, items)[0])
    assert sorted(again["ages"].tolist())[-1] == 4 and int(again["count"]) == 2


def test_the_order_of_an_id_that_is_listed_twice_changes_nothing():
    """An id that is listed twice has its least age, and of equal ages the greatest count, in any order."""
    rows = [(7, 4, 9), (7, 2, 1), (7, 2, 5), (8, 0, 1)]
    made, _ = fr.vocabulary_of(fr.vocabulary(128), listed(*rows))
    same(fr.vocabulary_of(fr.vocabulary(128), listed(*rows[::-1]))[0], made)
    found = fr.vocabulary_items(made)
    at = found["ids"].tolist().index(7)
    assert (int(found["ages"][at]), int(found["counts"][at])) == (2, 5)
