"""Stale pipelines on real ranks: the bits of a plain loop that is written with their staleness."""

import pytest
from programs import stale, training
from programs.as_staged import as_staged

import funcrec as fr

X = {"x": 2}


@pytest.mark.parametrize("kind, how", [
    ("table_wise", {"exact": True, "codec": fr.Codec("bfloat16", "int8")}), ("row_wise", {"dedup": True}),
    ("row_wise", {"capacity": 8}),
])  # fmt: skip
def test_a_stale_pipeline_on_ranks_is_the_loop_written_so(kind, how, ranks):
    """States and metrics have the bits of a loop whose lookups read the tables before the last update, not others'."""
    for same, fresh, held_bytes, threads in ranks(2).run(
        stale.beside_a_loop, X, training.plan_of(kind, X), 4, how, deadline_s=120
    ):
        assert same and not fresh and held_bytes > 0 and not threads


def test_two_axes_are_one_process(ranks):
    """Tables cut over a grid of four ranks, whose rows travel twice, have the bits of one process's loop by hand."""
    axes = {"x": 2, "y": 2}
    assert ranks(4).run(stale.beside_one_process, axes, training.plan_of("grid", axes), deadline_s=120) == [True] * 4


def test_a_jitted_step_that_donates_its_state(ranks):
    """The same of a jitted step, which uses up each state, beside a jitted loop. A last batch may have another size,
    and a second run goes on."""
    for first, second, programs, threads in ranks(2).run(as_staged, stale.donated, deadline_s=300):
        assert first and second and programs == 1 and not threads


def test_ranks_that_run_out_of_data(ranks):
    """A rank without data goes on with blank batches, as in the loop that is given such: no sample is lost."""
    assert ranks(2).run(stale.uneven, deadline_s=120) == [(True, [])] * 2


@pytest.mark.parametrize("how, mine, theirs", [("left", "", ""), ("raises", "LookupError", "RuntimeError")])
def test_runs_that_end_early(how, mine, theirs, ranks):
    """Left by break, or by an error of one rank's loader at its place: the batches before count, and a run follows."""
    assert ranks(2).run(stale.ended, how, deadline_s=120) == [(2, theirs, True, []), (2, mine, True, [])]
