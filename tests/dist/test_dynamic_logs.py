"""Logs of tables whose ids come and go, on a mesh: ranks undo vocabularies and their own rows, and send new ids."""

import pytest
import torch
from programs import daily_ids as daily
from programs.daily_ids import ONE_AXIS, PAIRS, SPARSE, TWO_AXES

import funcrec as fr
from funcrec.serve.freshness._publish import gathered
from funcrec.testing import assert_trees_close


def logged(mesh, kind, name="adam", steps=4, buckets=()):
    placements = {"user": (ONE_AXIS | TWO_AXES)[kind], "item": fr.row_wise("x"), "day": fr.replicated()}
    plan = fr.Plan(placements, buckets=buckets)
    step = daily.step(SPARSE[name], mesh=mesh, plan=plan)
    return step, fr.logged(step, steps=steps, rows=260 if steps else None)


def history(kind, name, axes, is_real, buckets=()):
    """Return ([(the state after a rewind by k, the earlier state), ...], [(tables then with the Delta, tables now)],
    the counts of the last step)."""
    mesh = (fr.Mesh.distributed if is_real else fr.Mesh.emulated)(**axes)
    plain, step = logged(mesh, kind, name, buckets=buckets)
    own = lambda x: fr.shard(x, fr.P("x"), mesh=mesh) if is_real else x
    run = step.init(fr.Params(daily.dynamic(), torch.ones(())))
    state, before, then = fr.copy(run.state), [], []
    for batch in map(own, daily.batches(12, 6, size=64)):
        before.append(fr.copy(run.state))
        then.append((int(run.log.version), fr.gather_tables(run.state.tables, mesh)))
        run, metrics = step(run, batch)
        state, _ = plain(state, batch)
        assert_trees_close(run.state, state, rtol=0, atol=0)
    pairs = [(fr.rewind(run, k, mesh=mesh).state, before[6 - k]) for k in range(1, 5)]
    sent = []
    for now, since in ((run, then), (fr.rewind(run, 2, mesh=mesh), then[::3])):
        tables = fr.gather_tables(now.state.tables, mesh)
        for version, old in since:
            changed = gathered(fr.delta(now, version, mesh=mesh), now.state.tables, mesh)
            sent.append((fr.apply_delta(old, changed), tables))
    return pairs, sent, {k: int(x) for k, x in metrics["vocabularies"]["users"].items()}


def assert_history(pairs, sent, counts):
    assert counts["admitted"] and counts["evicted"]
    for got, want in [*pairs, *sent]:
        assert_trees_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_steps_on_an_emulated_mesh_are_undone(kind, name):
    """Under every placement, rewind gives the sharded state k steps ago bit for bit, and a Delta since any version
    gives the whole tables and vocabularies of now."""
    assert_history(*history(kind, name, {"x": 2} if kind in ONE_AXIS else {"x": 2, "y": 2}, is_real=False))


@pytest.mark.parametrize("kind", ["row_wise", "column_wise", "replicated"])
def test_steps_on_ranks_are_undone(kind, ranks):
    """On gloo ranks the same holds, and all ranks' rows make one Delta."""
    for got in ranks(2).run(history, kind, "adam", {"x": 2}, True, deadline_s=300):
        assert_history(*got)


CUT = {"two": ("row_wise", {"x": 2}, "x"), "four": ("grid", {"x": 2, "y": 2}, ("y", "x"))}


@pytest.mark.parametrize(("kind", "axes", "buckets"), CUT.values(), ids=CUT)
def test_steps_of_cut_vocabularies_are_undone(kind, axes, buckets):
    """With vocabularies cut by buckets, each rank logs its part, and the parts of all ranks make one Delta."""
    assert_history(*history(kind, "adam", axes, False, buckets))


def test_steps_of_cut_vocabularies_are_undone_on_ranks(ranks):
    """On gloo ranks, whose Delta has the entries of all parts, the same holds."""
    for got in ranks(2).run(history, "row_wise", "adam", {"x": 2}, True, "x", deadline_s=300):
        assert_history(*got)


def test_another_state_changes_all_entries_of_cut_vocabularies():
    """After a step from another state, a Delta has every entry of the vocabulary, and none of the places behind it."""
    mesh, given = fr.Mesh.emulated(x=2, y=2), list(daily.batches(12, 2, size=64))
    _, step = logged(mesh, "row_wise", buckets=("x", "y"))
    begin = lambda: step.init(fr.Params(daily.dynamic(), torch.ones(())))
    run, _ = step(begin(), given[0])
    other, _ = step(step(begin(), given[1])[0], given[0])
    run, _ = step(fr.Logged(other.state, run.log), given[1])
    changed = fr.delta(run, 0, mesh=mesh)
    assert torch.equal(changed.vocabularies["users"].rows, torch.arange(256))
    assert torch.equal(changed.vocabularies["items"].buckets, torch.arange(1))
    empty = fr.gather_tables(begin().state.tables, mesh)
    assert_trees_close(fr.apply_delta(empty, changed), fr.gather_tables(run.state.tables, mesh), rtol=0, atol=0)
