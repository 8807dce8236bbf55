"""Pipelines on real ranks have the bits of the plain loop. However they end, nothing hangs and no thread is left."""

import pytest
from programs import piped
from programs.as_staged import as_staged

import funcrec as fr
from funcrec.testing import RankPool

pytestmark = pytest.mark.xdist_group("ranks")

X = {"x": 2}


@pytest.mark.parametrize(
    "kind, how", [("table_wise", {"exact": True, "codec": fr.Codec("bfloat16", "int8")}), ("row_wise", {"dedup": True})]
)
def test_a_pipeline_on_ranks_is_the_plain_loop(kind, how, ranks):
    """States and metrics have the bits of the plain loop. Ids are exchanged ahead."""
    for same, ahead_bytes, threads in ranks(2).run(piped.beside_a_loop, X, piped.plan_of(kind), 3, how, deadline_s=120):
        assert same and ahead_bytes > 0 and not threads


def test_a_jitted_step_that_donates_its_state(ranks):
    """A staged step whose states are donated to the next step also has the bits of the plain loop."""
    for same, ahead_bytes, threads in ranks(2).run(as_staged, piped.donated, deadline_s=300):
        assert same and ahead_bytes > 0 and not threads


def test_copies_that_train_apart_are_the_plain_loops(ranks):
    """A plan with replicas on four ranks also has the bits of the plain loop. Its ids are exchanged within the
    group."""
    axes = {"copy": 2, "x": 2}
    plan = fr.Plan(dict.fromkeys(piped.SHAPES, fr.row_wise("x")), replicas="copy")
    for same, ahead_bytes, threads in ranks(4).run(piped.beside_a_loop, axes, plan, 3, {}, deadline_s=120):
        assert same and ahead_bytes > 0 and not threads


def test_batches_of_many_forms_and_a_plan_that_changes(ranks):
    """Batches of other sizes or without ids give the bits of the plain loop. So does a state that moves to another plan
    while batches are in progress."""
    assert ranks(2).run(piped.of_many_forms, deadline_s=120) == [(True, [])] * 2


def test_what_does_not_fit_is_run_again(ranks):
    """pipeline(retry_overflow(...)) trains on every batch whole, with the bits of steps with enough capacity."""
    assert ranks(2).run(piped.retried, deadline_s=120) == [({1: True, "measure": True}, [])] * 2


def test_ranks_that_run_out_of_data(ranks):
    """A rank without data continues with blank batches, as in a loop that gets such batches. Without weights, all ranks
    raise after the last batch that all ranks had."""
    for filled, told, count, same, threads in ranks(2).run(piped.uneven, deadline_s=120):
        assert filled and same and count == 3 and not threads
        assert "ranks [1] have no more, ranks [0] have" in told


@pytest.mark.parametrize("how, mine, theirs", [
    ("raises", "LookupError: no such file", "RuntimeError: funcrec.pipeline: the batches of another rank"),
    ("form", "ValueError: funcrec.pipeline: the ranks' batches have different forms", None),
    ("keys", "ValueError: funcrec.pipeline: the ranks' batches have different forms.\n  got   .ids keys ['u', ", None),
])  # fmt: skip
def test_what_breaks_on_one_rank_is_told_on_all(how, mine, theirs, ranks):
    """If one rank's loader raises, or its batch has another form or other keys, the loop ends after the same batch on
    all ranks. The ranks can start again."""
    for rank, (told, count, same, threads) in enumerate(ranks(2).run(piped.broken, how, deadline_s=120)):
        assert told.startswith(mine if rank == 1 or theirs is None else theirs), told
        assert count == 2 and same and not threads


def test_loops_that_are_left_early(ranks):
    """Ranks that leave their loop at the same batch, but at different times, can start another loop. Exchanges pair,
    and nothing hangs."""
    assert ranks(2).run(piped.left_early, deadline_s=60) == [(True, [])] * 2


def test_a_rank_that_leaves_before_its_step_is_out():
    """A rank that leaves alone, before its first step, does not wait for the other ranks. The other ranks wait for it
    until the timeout."""
    with RankPool(2, timeout_s=20) as pool:
        mine, theirs = pool.run(piped.left_alone, 6.0, deadline_s=60)
    assert mine < 4 < theirs


def test_a_rank_without_any_batch(ranks):
    """A rank that never had a batch cannot make a blank batch. All ranks therefore raise."""
    for told, left in ranks(2).run(piped.none_at_all, deadline_s=60):
        assert "ranks [0] have no more, ranks [1] have" in told and "a batch for every rank" in told and not left


def test_a_slow_exchange_of_ids_is_hidden(ranks):
    """If ids arrive 60 ms late and a step takes as long, most of the delay is hidden, and the bits are the same."""
    for slow_s, fast_s, same in ranks(2).run(piped.hidden, deadline_s=120):
        assert same and slow_s - fast_s > 0.6 * piped.LATE_S, (slow_s, fast_s)


def test_a_pipeline_asserts_as_its_step(ranks):
    """A step that asserts raises in a pipeline, too, at the batch that the assertion refuses."""
    for seen, text in ranks(2).run(piped.asserted, deadline_s=60):
        assert (seen, text) == (2, "Expected Tensor with single nonzero value, but got zero")


REFUSED = {
    "no exchange": "3",
    "another mesh": "0: funcrec.pipeline: `mesh` is missing, or not the step's",
    "a tracked tensor": "0: funcrec.pipeline: autograd tracks the step",
    "a write": "1: funcrec.pipeline: the values that give the step's ids changed after the exchange.\n"
    "  got   a write to f32[16]",
    "a donated batch": "0: funcrec.pipeline: the step donates its batch.\n  got   donate=('state', 'x')",
    "an exchange in a loop": "0: funcrec.while_loop: a loop or a branch exchanges values between ranks",
}


def test_steps_that_a_pipeline_cannot_cut(ranks):
    """A step without exchanges runs as it is. Steps whose exchanges cannot be made ahead raise, and leave no thread."""
    for told, left in ranks(4).run(piped.refusals, deadline_s=120):
        assert told.keys() == REFUSED.keys() and not left
        for name, text in REFUSED.items():
            assert told[name].startswith(text), (name, told[name])
