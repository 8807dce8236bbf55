"""Triton finds, admits and draws as the reference does, bit for bit. Without a GPU triton interprets the kernels."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_map

pytest.importorskip("triton", reason="needs triton")
from funcrec.kernels import draws, ops, reference
from funcrec.kernels import triton as kernels
from funcrec.kernels.draws import CONSTANT, GIVEN, NORMAL, UNIFORM, Fresh
from funcrec.kernels.forms import flatten
from funcrec.kernels.reference_columns import find_columns
from funcrec.kernels.reference_quantized import mix
from funcrec.kernels.reference_vocabulary import bucket_of, find_ids
from funcrec.kernels.vocabulary import EVERYONE, SCORED, Admission, shared_of

import funcrec as fr
from funcrec.testing import assert_trees_close

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMITS = torch.tensor([2**63 - 1, -(2**63), 0, -1, 2**31, 2**32 - 1])


def moved(tree, device=DEVICE):
    return tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, tree)


def run(name: str, *args):
    """Return what a function of Triton returns, or its first arguments after it wrote to copies of them."""
    if not name.endswith("_"):
        return moved(getattr(kernels, name)(*moved(args)), "cpu")
    first = [x.clone() for x in moved(args[0])]
    getattr(kernels, name)(first, *moved(args[1:]))
    return moved(first, "cpu")


def filled(num_rows, seed, shared):
    """Return a vocabulary with half of its rows in use, and its ids."""
    held = torch.randint(-(2**62), 2**62, (num_rows // 2,), generator=torch.Generator().manual_seed(seed))
    vocabulary = fr.vocabulary(num_rows, unknown=shared or "zeros", seed=seed)
    return fr.admit(vocabulary, held)[0], held


@settings(max_examples=12, deadline=None)
@given(
    size=st.sampled_from([0, 1, 3, 4, 5, 130]), buckets=st.integers(1, 3), shared=st.sampled_from([0, 1, 5]),
    seed=st.integers(0, 2**30), dtype=st.sampled_from([torch.int64, torch.int32]), padding=st.integers(0, 3),
    of_all=st.sampled_from([0, 7, 2**30]),
)  # fmt: skip
def test_found_rows_are_the_references(size, buckets, shared, seed, dtype, padding, of_all):
    """Known and unknown ids, the padding and all 64 bits have the reference's rows, in a part of a vocabulary too."""
    vocabulary, held = filled(128 * buckets, seed, shared)
    g = torch.Generator().manual_seed(seed)
    ids = held[torch.randint(len(held), (size,), generator=g)]
    ids = torch.where(
        torch.rand(size, generator=g) < 0.3, torch.randint(-(2**63), 2**63 - 1, (size,), generator=g), ids
    )
    given = vocabulary.tags, vocabulary.entries, ids.to(dtype), torch.tensor(max(size - padding, 0))
    how = shared_of(shared, of_all), vocabulary.salt
    assert torch.equal(run("find_ids", *given, *how), find_ids(*given, *how))


def test_columns_are_the_references():
    """The columns of several vocabularies in one buffer have the reference's rows, other ids stay, garbage after the
    last offset is not read."""
    (a, held), (b, _) = filled(128, 1, 0), filled(256, 2, 3)
    ids = torch.cat([held[:20], torch.arange(10), held[20:30], torch.tensor([-1, 2**62])])
    offsets, how = torch.tensor([0, 10, 20, 25, 30, 40, 40]), [0, a.salt, 3, b.salt]
    columns = [0, 0, 0, 2, 7, 0, 0, 4, 2, 0, 1, 0, 2, 1, 0]
    state = [a.tags, a.entries, b.tags, b.entries]
    assert torch.equal(
        run("find_columns", state, ids, offsets, how, columns), find_columns(state, ids, offsets, how, columns)
    )


# -- admission ---------------------------------------------------------------------------------------------------


@st.composite
def admissions(draw):
    """Draw the settings of a vocabulary: every policy, with and without ttl, sketch, share and shared rows."""
    policy, least = draw(st.integers(0, 3)), draw(st.sampled_from([0, 0, 2, 3]))
    share = draw(st.sampled_from([EVERYONE, EVERYONE, EVERYONE // 2, 0]))
    how = policy, draw(st.sampled_from([0, 1, 2])), least, share, draw(st.sampled_from([0, 4]))
    return Admission(*how, draw(st.sampled_from([0, 7, -(2**63)])))


def blank(buckets: int, how: Admission) -> list[Tensor]:
    tags = torch.zeros(128 * buckets, dtype=torch.uint8)
    return [tags, torch.zeros(len(tags), 2, dtype=torch.int64), *([tags.clone()] if how.least else [])]


def scores_of(how: Admission, state: list[Tensor], g: torch.Generator) -> Tensor | None:
    return torch.randint(-3, 3, state[0].shape, generator=g) if how.policy == SCORED else None


def ids_of_step(size: int, kinds: int, g: torch.Generator) -> Tensor:
    """Return ids with repeats, from as many as `kinds`, with those at int64's limits."""
    ids = torch.randint(0, kinds, (size,), generator=g) * 10**15 - 3
    at_limit = torch.rand(size, generator=g) < 0.1
    return torch.where(at_limit, LIMITS[torch.randint(len(LIMITS), (size,), generator=g)], ids)


def step_by_reference(state: list[Tensor], now: Tensor, ids: Tensor, valid: Tensor, how: Admission, scores, buckets=0):
    """Return what `admit_ids` and then `settle_ids` return."""
    found = reference.admit_ids(state, now, ids, valid, scores, *how)
    changes = [found[i] for i in (0, 6, 1, 2, 5, 7)]
    return found, changes, reference.settle_ids(state, now, ids, *changes, how.least, how.salt, buckets)


@settings(max_examples=12, deadline=None)
@given(how=admissions(), size=st.sampled_from([0, 1, 63, 150]), buckets=st.sampled_from([1, 1, 3]),
       kinds=st.sampled_from([20, 150, 10**3]), seed=st.integers(0, 2**30), padding=st.sampled_from([0, 0, 5]),
       dtype=st.sampled_from([torch.int64, torch.int64, torch.int32]))  # fmt: skip
def test_admission_is_the_references(how, size, buckets, kinds, seed, padding, dtype):
    """Rows, changes, numbers and the state after a step are the reference's, for every policy, in empty and in full
    buckets, with more new ids than a bucket has rows, repeats, i32 and garbage in the padding."""
    g, state, now = torch.Generator().manual_seed(seed), blank(buckets, how), torch.tensor(2**32 - 2)
    for _ in range(3):  # the clock passes 2³²
        before = ids_of_step(150, kinds, g)
        state = step_by_reference(state, now, before, torch.tensor(150), how, scores_of(how, state, g))[2]
        now = now + 1
    ids, valid = ids_of_step(size, kinds, g).to(dtype), torch.tensor(max(size - padding, 0))
    scores = scores_of(how, state, g)
    found, changes, after = step_by_reference(state, now, ids, valid, how, scores)
    assert_trees_close(run("admit_ids", state, now, ids, valid, scores, *how), found)
    assert_trees_close(run("settle_ids_", state, now, ids, *changes, how.least, how.salt), after)


@settings(max_examples=2, deadline=None)
@given(how=admissions(), seed=st.integers(0, 2**30))
def test_the_order_of_ids_changes_nothing(how, seed):
    """A permutation of a step's ids permutes their rows; changes, numbers and the state stay."""
    g, state, now = torch.Generator().manual_seed(seed), blank(1, how), torch.tensor(4)
    first = ids_of_step(100, 90, g)
    state = step_by_reference(state, now - 1, first, torch.tensor(100), how, scores_of(how, state, g))[2]
    ids, order, scores = ids_of_step(150, 200, g), torch.randperm(150, generator=g), scores_of(how, state, g)
    one, other = (run("admit_ids", state, now, x, torch.tensor(150), scores, *how) for x in (ids, ids[order]))
    assert_trees_close((one[0][order], *one[1:6], one[6][order], one[7]), other)
    settled = [
        run("settle_ids_", state, now, x, *(y[i] for i in (0, 6, 1, 2, 5, 7)), how.least, how.salt)
        for x, y in ((ids, one), (ids[order], other))
    ]
    assert_trees_close(*settled)


def test_counts_stay_at_the_greatest():
    """A count near 2³² stops at 2³² - 1, and changes no stamp."""
    how, ids = Admission(1, 0, 0, EVERYONE, 0, 0), torch.tensor([5, 5, 5, 6, 6, 9, 6])
    state = step_by_reference(blank(1, how), torch.tensor(1), ids, torch.tensor(7), how, None)[2]
    rows = reference.find_ids(*state, ids, torch.tensor(7), 0, 0)
    for row, count in ((rows[0], 2**32 - 2), (rows[3], 2**32 - 4), (rows[5], 2**32 - 1)):
        state[1][row, 1] = 1 << 32 | count
    _, changes, after = step_by_reference(state, torch.tensor(2), ids, torch.tensor(7), how, None)
    assert (after[1][rows, 1] & 2**32 - 1).tolist() == [2**32 - 1] * 7
    assert_trees_close(run("settle_ids_", state, torch.tensor(2), ids, *changes, 0, 0), after)


def test_a_part_of_a_vocabulary_admits_its_ids():
    """The ids of one part get the reference's rows there, in its buckets of the whole vocabulary."""
    how = Admission(1, 0, 2, EVERYONE, shared_of(2, 9), 5)
    ids = torch.arange(3000) * 10**9
    own = ids[bucket_of(mix(ids ^ how.salt), 9 * 128) // 3 == 1][:100].repeat(2)  # buckets 3 to 5 of 9
    state, now, valid = blank(3, how), torch.tensor(1), torch.tensor(len(own))
    found = step_by_reference(state, now, own, valid, how, None, 9)[0]
    assert int(found[7][0]) == 100
    assert_trees_close(run("admit_ids", state, now, own, valid, None, *how), found)


@settings(max_examples=6, deadline=None)
@given(
    hows=st.lists(admissions(), min_size=1, max_size=4),
    seed=st.integers(0, 2**30),
    i32=st.booleans(),
    most=st.sampled_from([0, 2]),
)
def test_all_vocabularies_at_once_are_the_references(hows, seed, i32, most):
    """Columns of several vocabularies, in two buffers with garbage after the last bag, have the reference's rows,
    changes and states; the clocks go on."""
    g, count = torch.Generator().manual_seed(seed), len(hows)
    ids = [ids_of_step(60, 300, g), ids_of_step(45, 40, g).to(torch.int32 if i32 else torch.int64)]
    offsets = [torch.randint(0, n, (9,), generator=g).sort().values for n in (60, 40)]
    columns = [(v % 2, v) for v in range(count)] + [(1, v) for v in range(count) if v % 2 == 0]
    columns = [x for v, (buffer, own) in enumerate(columns) for x in (own, buffer, 2 * (v // 2), 2 - v % 2, most)]
    whole = [x if i != 4 else shared_of(x, 0) for how in hows for i, x in enumerate(how)]
    state = []
    for v, how in enumerate(hows):
        own, now = blank(1 + v % 2, how), torch.tensor(7 + v)
        earlier = ids_of_step(100, 300, g)
        tags, entries, *sketch = step_by_reference(own, now, earlier, torch.tensor(100), how, scores_of(how, own, g))[2]
        state += [tags, entries, now, *sketch]
    tags = [x for x in state if x.dtype == torch.uint8]
    scores = []
    each = iter(state)
    for how in hows:
        own = [next(each) for _ in range(4 if how.least else 3)]
        scores += [] if how.policy != SCORED else [scores_of(how, own, g)]
    given = ids, offsets
    found = reference.admit_columns(state, scores, *given, whole, columns)
    assert_trees_close(run("admit_columns", state, scores, *given, whole, columns), found)
    after = reference.settle_columns(state, *given, list(found), whole, columns)
    assert_trees_close(run("settle_columns_", state, *given, list(found), whole, columns), after)


# -- new rows ----------------------------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("kind", [UNIFORM, NORMAL, CONSTANT])
def test_initial_rows_are_the_references(kind):
    """All dtypes, dims of one and of two tiles, starts that wrap at 64 bits: the reference's bits."""
    starts = torch.cat([LIMITS, torch.arange(5) * 130])
    for dtype, dim, size in zip(DTYPES, (131, 1, 7, 0), (11, 3, 0, 4), strict=True):
        given = torch.tensor(-(2**62) + 1), starts[:size], dim, kind, 0.3, dtype
        assert_trees_close(run("initial_rows", *given), reference.initial_rows(*given))
    given = torch.tensor(5), starts.int(), 40, kind, -0.0, torch.bfloat16
    assert_trees_close(run("initial_rows", *given), reference.initial_rows(*given))


@pytest.mark.parametrize("seed", range(3))
def test_drawn_rows_are_the_references(seed):
    """New rows of every kind in tables of every dtype, from given rows of other dtypes, with garbage after the last
    new row, have the reference's bits. Other rows keep theirs."""
    g = torch.Generator().manual_seed(seed)
    tables = [torch.randn(40, dim, generator=g).to(DTYPES[i % 4]) for i, dim in enumerate((1, 130, 5, 16, 3, 9, 4, 2))]
    rows = torch.cat([torch.randperm(40, generator=g)[:20], torch.tensor([2**40, -1, 40, 7])])
    ids = torch.cat([torch.randint(-(2**63), 2**63 - 1, (18,), generator=g), LIMITS])
    given = [torch.randn(n, tables[t].shape[1], generator=g).to(d) for n, t, d in (
        (1, 0, torch.float64), (22, 1, torch.float64), (1, 6, torch.float32), (22, 7, torch.bfloat16))]  # fmt: skip
    kinds = [(0, GIVEN, 0), (1, GIVEN, 1), (2, NORMAL, 0), (3, UNIFORM, 0), (4, CONSTANT, 0), (5, NORMAL, 0),
             (6, GIVEN, 2), (7, GIVEN, 3)]  # fmt: skip
    fresh = [Fresh(t, kind, x, 130 + t, t, 1, 2, 22, t % 3, t % 2) for t, kind, x in kinds]
    args = (
        given,
        rows,
        ids,
        torch.tensor([*[20, 3, 0][seed:], 21, -1]),
        ids[:2],
        flatten(fresh),
        [0.1 * t for t in range(8)],
    )
    assert_trees_close(run("draw_rows_", tables, *args), reference.draw_rows(tables, *args))


# -- on the host -------------------------------------------------------------------------------------------------


def test_nothing_is_read_on_the_host(no_host_reads):
    """Admission and new rows read no tensor's value on the host, so they can be part of a CUDA graph."""
    how = Admission(1, 3, 2, EVERYONE, 3, 5)
    state, ids, offsets = moved(blank(1, how)), moved(torch.tensor([4, 5, 4])), moved(torch.tensor([0, 2, 3]))
    now, valid, table, key = moved([torch.tensor(1), torch.tensor(3), torch.zeros(128, 4), torch.tensor(3)])
    timed, columns = [*state[:2], now, state[2]], [0, 0, 0, 2, 1]
    with no_host_reads():
        rows, changed, new_ids, _, _, counts, missed, numbers = kernels.admit_ids(state, now, ids, valid, None, *how)
        kernels.settle_ids_(state, now, ids, rows, missed, changed, new_ids, counts, numbers, 2, 5)
        found = kernels.admit_columns(timed, [], [ids], [offsets], [*how], columns)
        kernels.settle_columns_(timed, [ids], [offsets], found, [*how], columns)
        kernels.find_columns(state[:2], ids, offsets, [3, 5], columns)
        kernels.draw_rows_([table], [], changed, new_ids, numbers, key[None], Fresh(0, NORMAL, 0, 4, 0, 0, 0, 3), [0.1])
        kernels.initial_rows(key, ids, 4, NORMAL, 0.1, torch.float32)


def test_what_does_not_fit_is_refused():
    """A state that is no vocabulary, a column without bags, and an entry without rows raise before any work."""
    how, ids, offsets = Admission(0, 0, 0, EVERYONE, 0, 0), torch.tensor([4]), torch.tensor([0, 1])
    tags, entries = blank(1, how)
    with pytest.raises(ValueError, match="the state is not a vocabulary"):
        kernels.find_ids(tags[:5], entries[:5], ids, torch.tensor(1), 0, 0)
    for wrong in (tags.int(), tags.repeat(2)[::2][:64]):
        with pytest.raises(ValueError, match="the state is not a vocabulary"):
            kernels.find_ids(wrong, entries, ids, torch.tensor(1), 0, 0)
    step = torch.tensor(1)
    admit = lambda how, ids=ids, now=step: kernels.admit_ids([tags, entries], now, ids, step, None, *how)
    with pytest.raises(ValueError, match="a policy has no scores"):
        admit(how._replace(policy=SCORED))
    with pytest.raises(ValueError, match="`now` is not a step"):
        admit(how, now=torch.tensor([1.0]))
    with pytest.raises(ValueError, match="`ids` are not ids"):
        admit(how, torch.tensor([4.0]))
    with pytest.raises(ValueError, match="a vocabulary has no sketch"):
        admit(how._replace(least=2))
    with pytest.raises(ValueError, match="a column does not fit"):
        kernels.find_columns([tags, entries], ids, offsets, [0, 0], [0, 0, 0, 2, 0])
    with pytest.raises(ValueError, match="entry 0 does not fit"):
        fresh = Fresh(0, NORMAL, places=2)
        kernels.draw_rows_([torch.zeros(2, 2)], [], ids, ids, ids, ids, flatten([fresh]), [0.1])
    with pytest.raises(ValueError, match="there are no such rows"):
        kernels.initial_rows(ids[0], ids, 2, draws.GIVEN, 0.1, torch.float32)


def test_cuda_takes_it():
    """On a CUDA device vocabularies take Triton's kernels."""
    names = "find_ids", "find_columns", "admit_ids", "settle_ids", "admit_columns", "settle_columns", "draw_rows"
    for name in (*names, "initial_rows"):
        assert ops.available(name, torch.device("cuda")) == "triton"
