"""Vocabularies: every step equals the model of dicts, and depends on the multiset of its ids alone."""

import contextlib
import dataclasses
import pickle
import re

import pytest
import torch
from funcrec.kernels import ops
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from programs.surroundings import on_threads
from programs.vocabulary_model import LOWER, Model

import funcrec as fr
from funcrec.kinds._admission import choose, settle, settled
from funcrec.testing import assert_trees_close
from funcrec.testing import strategies as frs

I64 = torch.iinfo(torch.int64)
HARD = [0, -1, I64.min, I64.max, 2**32, -(2**40), 2**31 - 1, -(2**31)]


def drawn_ids(seed: int, size: int, pool: int = 400) -> list[int]:
    """Return ids of a pool, where few are frequent, and some are the hardest numbers."""
    draws = torch.Generator().manual_seed(seed)
    at = (torch.rand(size, generator=draws) ** 3 * pool).long()
    return [HARD[k] if k < len(HARD) else k * 7919 - 10**6 for k in at.tolist()]


def tensor(ids) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int64)


def by_age_and_count(age, count):
    """A policy of a user: old ids leave first, each further time that an id was seen makes it two steps younger."""
    return 2 * count - age


def same(x, y):
    assert_trees_close(x, y, rtol=0, atol=0)


class Machine(RuleBasedStateMachine):
    """A vocabulary beside the model, and the rows that a replay of all turnovers gives."""

    @initialize(empty=frs.vocabularies(policies=("lru", "lfu", "distance_lfu", by_age_and_count)))
    def begin(self, empty):
        self.it, self.model, self.replayed = empty, Model(empty), {}

    @rule(seed=st.integers(0, 2**20), size=st.sampled_from((0, 1, 30, 90, 200)), pool=st.sampled_from((60, 150, 400)))
    def admit(self, seed, size, pool):
        ids = drawn_ids(seed, size, pool)
        self.step(ids, None)

    @rule(seed=st.integers(0, 2**20), later=st.integers(-3, 9))
    def admit_at(self, seed, later):
        self.step(drawn_ids(seed, 20), max(self.model.now + later, 0))

    def step(self, ids, now):
        before, held = self.it, [x.clone() for x in (self.it.tags, self.it.entries)]
        known = {i for i in ids if self.model.is_known(i)}
        self.it, rows, turnover = fr.admit(before, tensor(ids), now=now)
        changes, hits, refused = self.model.admit(ids, now)
        assert rows.tolist() == [self.model.find(i) for i in ids]
        n = int(turnover.count)
        evicted = [i if e else None for i, e in zip(turnover.old_ids.tolist(), turnover.evicted.tolist(), strict=True)]
        assert [*zip(turnover.rows.tolist(), turnover.new_ids.tolist(), evicted)][:n] == changes
        assert turnover.rows[n:].tolist() == [-1] * (len(ids) - n) and turnover.admitted.tolist() == [
            k < n for k in range(len(ids))
        ]
        assert (int(turnover.hits), int(turnover.refused)) == (hits, refused)
        assert hits + n + refused == len(set(ids))
        assert known.isdisjoint(evicted)  # No id leaves in a step that reads it.
        assert torch.equal(before.tags, held[0]) and torch.equal(before.entries, held[1])
        self.replay(turnover)

    @precondition(lambda self: self.it.ttl is not None)
    @rule()
    def expire(self):
        self.it, turnover = fr.expire(self.it)
        found = [*zip(turnover.rows.tolist(), turnover.old_ids.tolist())][: int(turnover.count)]
        assert sorted(found) == self.model.expire()
        self.replay(turnover)

    @rule(seed=st.integers(0, 2**20))
    def find(self, seed):
        ids = drawn_ids(seed, 30)
        assert fr.find(self.it, tensor(ids)).tolist() == [self.model.find(i) for i in ids]

    def replay(self, turnover):
        for k in range(int(turnover.count)):
            row = int(turnover.rows[k])
            assert self.replayed.pop(row, None) == (int(turnover.old_ids[k]) if turnover.evicted[k] else None)
            if turnover.admitted[k]:
                self.replayed[row] = int(turnover.new_ids[k])

    @invariant()
    def holds_what_the_model_holds(self):
        if not hasattr(self, "it"):
            return
        rows = {128 * b + s: e for b, own in self.model.slots.items() for s, e in own.items()}
        live = self.it.tags.nonzero().flatten().tolist()
        word = self.it.entries[live, 1]
        got = zip(
            self.it.entries[live, 0].tolist(), (word >> 32 & LOWER).tolist(), (word & LOWER).tolist(), strict=True
        )
        assert {row: [*entry] for row, entry in zip(live, got, strict=True)} == rows
        assert {row: e[0] for row, e in rows.items()} == self.replayed
        assert len({e[0] for e in rows.values()}) == len(rows) == int(self.it.num_ids)
        if self.it.sketch is not None:
            assert self.it.sketch.tolist() == [c for b in sorted(self.model.sketch) for c in self.model.sketch[b]]


@pytest.mark.parametrize("implementation", [None, "reference"])
def test_every_step_equals_the_model(implementation):
    """Any sequence of steps, removals and reads equals a model made of dicts, in rows, turnovers and every entry."""
    few = settings(max_examples=25, stateful_step_count=12)
    with ops.using(implementation) if implementation else contextlib.nullcontext():
        run_state_machine_as_test(Machine, settings=few)


@given(frs.vocabularies(), st.integers(0, 2**20), st.sampled_from((1, 70, 400)))
def test_the_order_of_ids_changes_nothing(it, seed, size):
    """A permutation of the ids, i32 ids, and ids in bags with garbage after them give the same vocabulary and turnover,
    and the same row for each id."""
    before, *_ = fr.admit(it, tensor(drawn_ids(seed + 1, 300)))
    ids = tensor([i for i in drawn_ids(seed, size) if abs(i) < 2**31])
    after, rows, turnover = fr.admit(before, ids)
    by = torch.randperm(ids.shape[0], generator=torch.Generator().manual_seed(seed))
    moved, rows_moved, turnover_moved = fr.admit(before, ids[by])
    same((moved, rows_moved, turnover_moved), (after, rows[by], turnover))
    same(fr.admit(before, ids.int()), (after, rows, turnover))
    bags = fr.JaggedTensor(torch.cat([ids, tensor(HARD)]), tensor([0, ids.shape[0] // 2, ids.shape[0]]))
    padded, in_bags, longer = fr.admit(before, bags)
    same((padded, in_bags.values[: ids.shape[0]]), (after, rows))
    same(fr.tree.map(lambda x: x[: ids.shape[0]] if x.dim() else x, longer), turnover)
    assert (in_bags.values[ids.shape[0] :] == -1).all() and in_bags.offsets is bags.offsets
    same(fr.find(after, bags).values[: ids.shape[0]], fr.find(after, ids))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("admit", [None, 3, 0.5])
def test_threads_change_no_bit(threads, admit):
    """Large steps, which several threads share, give the same bits on any number of threads."""
    run = lambda: [*steps_of(fr.vocabulary(1024, policy="lfu", admit=admit, unknown=5), 30_000, 3)]
    with on_threads(1):
        want = run()
    with on_threads(threads):
        same(run(), want)


def steps_of(it, size, count):
    for k in range(count):
        it, rows, turnover = fr.admit(it, tensor(drawn_ids(k, size, 3000)))
        yield it, rows, turnover


def test_a_full_vocabulary_has_a_place_for_all_that_fit():
    """If no bucket has more than 128 ids, every id has a row, and keeps it."""
    it, rows = fr.vocabulary(4096), {}
    for k in range(6):
        ids = drawn_ids(k, 500, 1500)
        it, got, turnover = fr.admit(it, tensor(ids))
        assert int(turnover.refused) == 0 and not turnover.evicted.any()
        for i, row in zip(ids, got.tolist(), strict=True):
            assert rows.setdefault(i, row) == row
    assert len(set(rows.values())) == len(rows) == int(it.num_ids)


def test_ids_beyond_a_bucket_in_one_step_are_refused_and_counted():
    """If a step has more ids than a bucket holds, the rest is refused and reads the rows of unknown ids."""
    it, rows, turnover = fr.admit(fr.vocabulary(128, unknown=3), torch.arange(300))
    assert int(turnover.count) == 128 and int(turnover.refused) == 172
    assert ((rows >= 128) == ~torch.isin(torch.arange(300), turnover.new_ids[:128])).all()
    assert sorted(set(rows[rows >= 128].tolist())) == [128, 129, 130] and rows.max() < it.num_embeddings
    zeros = fr.admit(fr.vocabulary(128), torch.arange(300))[1]
    assert ((zeros == -1) == (rows >= 128)).all()


def test_frequent_ids_come_first():
    """Of the candidates of a bucket, those that occur most often in the step get the slots."""
    ids = torch.arange(200).repeat_interleave(torch.arange(200) + 1)
    _, _, turnover = fr.admit(fr.vocabulary(128), ids)
    assert sorted(turnover.new_ids[:128].tolist()) == [*range(72, 200)]


@pytest.mark.parametrize("policy", ["lfu", "distance_lfu"])
def test_a_rare_id_does_not_evict_a_frequent_one(policy):
    """With a policy of counts, a new id is refused unless its own score is above that of the id that would leave."""
    it, _, _ = fr.admit(fr.vocabulary(128, policy=policy), torch.arange(128).repeat(5))
    _, _, rare = fr.admit(it, torch.tensor([500]))
    _, _, frequent = fr.admit(it, torch.tensor([500] * 6))
    assert (int(rare.refused), int(frequent.refused), int(frequent.evicted.sum())) == (1, 0, 1)


def test_a_sketch_admits_what_comes_again():
    """With admit=k an id gets a row in the step in which it was missed k times in all, and its count begins from k."""
    it, first = fr.vocabulary(1024, admit=3), torch.tensor([5, 6, 6, 7, 7, 7])
    it, rows, turnover = fr.admit(it, first)
    assert (rows >= 0).tolist() == [False] * 3 + [True] * 3 and int(turnover.refused) == 2
    it, rows, _ = fr.admit(it, torch.tensor([5, 6]))
    assert (rows >= 0).tolist() == [False, True]
    it, rows, _ = fr.admit(it, torch.tensor([5]))
    assert rows >= 0 and (it.entries[it.tags != 0, 1] & LOWER).tolist() == [3, 3, 3]


def test_a_sketch_forgets():
    """Ids that come once do not fill the sketch: its lines are halved, so that most of them stay refused."""
    it = fr.vocabulary(128, admit=4)
    for k in range(40):
        it, _, _ = fr.admit(it, torch.arange(20) + 1000 * k)
    assert int(it.num_ids) < 40 and int(it.sketch.long().sum()) < 64 * 4


@given(st.floats(0, 1), st.integers(0, 99))
def test_a_draw_admits_the_share_p(p, seed):
    """With admit=p an id is admitted with probability p in each step: 0 admits none, 1 all, and the draw depends on
    id, step and seed alone."""
    it, ids = fr.vocabulary(2**15, admit=p, seed=seed), torch.arange(2000)
    _, _, turnover = fr.admit(it, ids)
    assert abs(int(turnover.count) / 2000 - p) < 0.06
    _, _, half = fr.admit(it, ids[::2])
    whole = turnover.new_ids[turnover.admitted]
    assert torch.equal(half.new_ids[half.admitted].sort().values, whole[whole % 2 == 0].sort().values)


def test_draws_of_0_and_1_admit_none_and_all():
    """admit=0.0 admits no id, and admit=1.0 admits every id."""
    for p, count in ((0.0, 0), (1.0, 500)):
        assert int(fr.admit(fr.vocabulary(2048, admit=p), torch.arange(500))[2].count) == count


def test_stamps_pass_the_end_of_32_bits():
    """Ages are right when the step passes 2³², and a count stays at its largest number."""
    it, _, _ = fr.admit(fr.vocabulary(128, ttl=5), torch.arange(128), now=2**32 - 3)
    it, _, _ = fr.admit(it, torch.arange(64), now=2**32 + 1)
    it, _, turnover = fr.admit(it, torch.arange(1000, 1003), now=2**32 + 4)
    assert turnover.evicted.all() and (turnover.old_ids >= 64).all()
    assert int(fr.expire(it)[0].num_ids) == 64 + 3
    full = dataclasses.replace(it, entries=torch.stack([it.entries[:, 0], it.entries[:, 1] | LOWER - 1], 1))
    after, _, _ = fr.admit(full, torch.arange(64).repeat(3))
    assert (after.entries[after.tags != 0, 1] & LOWER >= LOWER - 1).all()


def test_the_clock_does_not_go_back():
    """A step with a lower number than the last counts as the last one."""
    it, _, _ = fr.admit(fr.vocabulary(128), torch.tensor([1]), now=50)
    back, _, _ = fr.admit(it, torch.tensor([1]), now=torch.tensor(7))
    assert int(back.now) == 50 and int(fr.admit(back, torch.tensor([1]))[0].now) == 51


@pytest.mark.parametrize("policy", ["lru", by_age_and_count, lambda age, count: count / (age + 1.0)])
def test_compiled_steps_equal_eager_ones(policy, interpreted):
    """Staged by fr.jit, with the vocabulary donated or not, a step gives the bits of the eager step."""
    eager = fr.vocabulary(128, policy=policy, admit=2, ttl=3, unknown=2)
    staged, donated = eager, fr.tree.map(torch.clone, eager)
    step, in_place = fr.jit(fr.admit), fr.jit(fr.admit, donate=("vocabulary",))
    for k in range(4):
        ids = tensor(drawn_ids(k, 150))
        want, got = fr.admit(eager, ids), step(staged, ids)
        eager, staged = want[0], got[0]
        same(got, want)
        taken = donated.entries.data_ptr(), donated.tags.data_ptr()
        donated, *rest = in_place(donated, ids)
        same((donated, *rest), want)
        assert k == 0 or taken == (donated.entries.data_ptr(), donated.tags.data_ptr())


def test_vmap_is_a_step_of_each_member():
    """vmap over vocabularies and ids gives each member's own step."""
    members = [fr.admit(fr.vocabulary(128, admit=2), tensor(drawn_ids(k, 90)))[0] for k in range(3)]
    ids = torch.stack([tensor(drawn_ids(k + 9, 40)) for k in range(3)])
    stacked = fr.tree.map(lambda *x: torch.stack(x), *members)
    want = [fr.admit(v, i) for v, i in zip(members, ids, strict=True)]
    same(torch.func.vmap(fr.admit)(stacked, ids), fr.tree.map(lambda *x: torch.stack(x), *want))
    same(
        torch.func.vmap(fr.find)(stacked, ids), torch.stack([fr.find(v, i) for v, i in zip(members, ids, strict=True)])
    )


@pytest.mark.parametrize("implementation", ["cpp", "reference"])
def test_a_step_in_place_is_the_step(implementation):
    """Written in the vocabulary's own memory, a step has the bits of the pure step."""
    with ops.using(implementation):
        it, ids = fr.admit(fr.vocabulary(128, admit=2), tensor([1, 2, 1]))[0], tensor([2, 3, 3, 9])
        choice = choose(it, ids)
        want, mine = settled(it, choice), fr.copy(it)
        now = settle(mine, choice)
        same(now, want)
    assert now.tags.data_ptr() == mine.tags.data_ptr()


def test_an_empty_step_only_moves_the_clock():
    """A step without ids changes nothing but the clock."""
    it, _, _ = fr.admit(fr.vocabulary(128), torch.arange(20))
    after, rows, turnover = fr.admit(it, tensor([]))
    assert rows.shape == (0,) and int(turnover.count) == 0 and int(after.now) == 2
    same((after.tags, after.entries), (it.tags, it.entries))
    assert fr.find(it, tensor([])).shape == (0,)


def test_a_vocabulary_travels():
    """A vocabulary is a value: it is pickled, moved, and its settings belong to its structure."""
    it, _, _ = fr.admit(fr.vocabulary(300, policy="lfu", ttl=7, admit=2, unknown=4, seed=3), torch.arange(20))
    same(pickle.loads(pickle.dumps(it)), it)
    assert it.capacity == 384 and it.num_embeddings == 388
    assert repr(it) == "Vocabulary(384 rows, policy='lfu', ttl=7, admit=2, unknown=4, seed=3)"
    assert fr.find(it.to("meta"), torch.arange(3, device="meta")).shape == (3,)


def test_lookups_read_rows_of_a_vocabulary():
    """A lookup of the rows reads a table of R rows and the shared rows. With "zeros", an unknown id reads zeros."""
    it, ids, _ = fr.admit(fr.vocabulary(128), fr.JaggedTensor.from_lists([[3, 4], [5]]))
    unknown = fr.find(it, fr.JaggedTensor.from_lists([[3, 99], [99]]))
    table, feature = {"user": torch.randn(it.num_embeddings, 2)}, fr.FeatureConfig("u", table="user")
    out = fr.lookup(table, fr.KeyedJaggedTensor.from_jagged({"u": unknown}), [feature])["u"]
    assert torch.equal(out, torch.stack([table["user"][ids.values[0]], torch.zeros(2)]))


e = lambda message, fn, *args, **kwargs: (message, fn, args, kwargs)
WRONG = [
    e("`admit` is out of range.*got   300.*255", fr.vocabulary, 128, admit=300),
    e("`admit` is out of range.*got   1.5", fr.vocabulary, 128, admit=1.5),
    e("`admit`", fr.vocabulary, 128, admit=True),
    e("`capacity` is too large", fr.vocabulary, 2**40),
    e("`unknown` is too large", fr.vocabulary, 128, unknown=2**31),
    e("`ttl` is too large", fr.vocabulary, 128, ttl=2**32),
    e("`now` is too large", fr.admit, fr.vocabulary(128), torch.arange(3), now=2**63),
    e("`policy`", fr.vocabulary, 128, policy="fifo"),
    e("`ids` is not a tensor of this dtype.*f32", fr.admit, fr.vocabulary(128), torch.ones(3)),
    e("`ids.values` are not ids", fr.find, fr.vocabulary(128), fr.JaggedTensor.from_lists([[1.5]])),
    e("has no ttl", fr.expire, fr.vocabulary(128)),
    e("`vocabulary.entries` does not fit", fr.find, dataclasses.replace(
        fr.vocabulary(128), entries=torch.zeros(3, 2).long()), torch.arange(3)),
    e("`policy` returns no score for each row", fr.admit, fr.vocabulary(128, policy=lambda a, c: 3), torch.arange(3)),
    e("`policy` failed", fr.admit, fr.vocabulary(128, policy=lambda a, c: a @ a @ c @ c), torch.arange(3)),
]  # fmt: skip


@pytest.mark.parametrize("message, fn, args, kwargs", WRONG, ids=[w[0][:30] for w in WRONG])
def test_what_does_not_fit_is_refused(message, fn, args, kwargs):
    """Settings out of range, ids that are not integers, and tensors that do not fit raise an error that names them."""
    with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
        fn(*args, **kwargs)
    text = " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert re.search(message, text, re.S), text
