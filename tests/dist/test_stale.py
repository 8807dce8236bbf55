"""Stale pipelines on real ranks have the bits of a plain loop with the same staleness."""

import pytest
from programs import piped, stale, training
from programs.as_staged import as_staged

import funcrec as fr

X = {"x": 2}


@pytest.mark.parametrize("kind, how", [
    ("table_wise", {"exact": True, "codec": fr.Codec("bfloat16", "int8")}), ("row_wise", {"dedup": True}),
    ("row_wise", {"capacity": 8}),
])  # fmt: skip
def test_a_stale_pipeline_on_ranks_is_the_loop_written_so(kind, how, ranks):
    """States and metrics have the bits of a loop whose lookups read the tables before the last update. States and
    metrics differ from those of plain steps."""
    for same, fresh, held_bytes, threads in ranks(2).run(
        stale.beside_a_loop, X, training.plan_of(kind, X), 4, how, deadline_s=120
    ):
        assert same and not fresh and held_bytes > 0 and not threads


def test_two_axes_are_one_process(ranks):
    """Tables in a grid of four ranks, whose rows travel twice, have the bits of the loop in one process."""
    axes = {"x": 2, "y": 2}
    assert ranks(4).run(stale.beside_one_process, axes, piped.plan_of("grid", axes), deadline_s=120) == [True] * 4


def test_a_jitted_step_that_donates_its_state(ranks):
    """A jitted step with donated states also has the bits of a jitted loop. A last batch may have another
    size. A second run succeeds."""
    for first, second, programs, threads in ranks(2).run(as_staged, stale.donated, deadline_s=300):
        assert first and second and programs == 1 and not threads


def test_ranks_that_run_out_of_data(ranks):
    """A rank without data continues with blank batches, as in a loop that gets such batches. No example is lost."""
    assert ranks(2).run(stale.uneven, deadline_s=120) == [(True, [])] * 2


@pytest.mark.parametrize("how, mine, theirs", [("left", "", ""), ("raises", "LookupError", "RuntimeError")])
def test_runs_that_end_early(how, mine, theirs, ranks):
    """A run ends with a break, or with an error at the error's place in one rank's loader. The batches before the end
    count. Another run succeeds."""
    assert ranks(2).run(stale.ended, how, deadline_s=120) == [(2, theirs, True, []), (2, mine, True, [])]
