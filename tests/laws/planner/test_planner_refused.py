"""What `fr.plan` and its parts refuse that no other test of the planner reaches: constraints that exclude each other,
optimizers that read whole rows, runs that say nothing, and a missing package."""

import sys

import pytest
from programs.refused import assert_refused

import funcrec as fr

TABLES = (fr.TableConfig("item", 1000, 8), fr.TableConfig("user", 1000, 8))
FEATURES = (fr.FeatureConfig("item", table="item"), fr.FeatureConfig("user", table="user"))


def planned(features=FEATURES, mesh=(("m", 2),), **how):
    return fr.plan(TABLES, features, dict(mesh), batch_size=64, hardware="cpu", **how)


@pytest.mark.parametrize("counts", [[], [0, 0], [0.0]])
def test_row_counts_that_count_nothing_raise(counts):
    """Row counts need one number above 0: from zeros no share of a row follows."""
    call = lambda: fr.TableConstraint(row_counts=counts)
    assert_refused(call, ValueError, "funcrec.TableConstraint", "`row_counts` are out of range")


def test_tables_that_go_together_need_one_kind():
    """Two tables that go together, of which one may only be whole and the other only cut, raise with both kinds."""
    apart = {"item": {"together": "a", "kinds": ["table_wise"]}, "user": {"together": "a", "kinds": ["row_wise"]}}
    parts = "have no placement in common: ['item', 'user']", "got   item: ['table_wise']; user: ['row_wise']"
    assert_refused(lambda: planned(constraints=apart), ValueError, "funcrec.plan", *parts)
    alike = {n: {**c, "kinds": ["row_wise"]} for n, c in apart.items()}
    assert {p.kind for _, p in planned(constraints=alike).placements} == {"row_wise"}


def test_a_norm_over_tables_needs_whole_rows():
    """Placements made by hand that cut columns raise for an optimizer that clips by a norm over all columns. Whole rows
    pass."""
    clipped = fr.optim.clip(fr.optim.sgd(0.1), max_norm=1.0)
    cut = {"item": fr.column_wise("m"), "user": fr.row_wise("m")}
    call = lambda: planned(placements=cut, optimizer=clipped)
    assert_refused(
        call, ValueError, "funcrec.plan", "placement of 'item' cuts columns that the optimizer reads together"
    )
    assert planned(placements=cut, optimizer=fr.optim.sgd(0.1)).report.seconds > 0
    assert planned(placements={n: fr.row_wise("m") for n in cut}, optimizer=clipped).report.seconds > 0


def test_runs_of_tables_that_nothing_reads_say_nothing():
    """Hardware is not learnt from plans of tables that no feature reads, whose estimates are zero."""
    plan = planned(features=(), mesh=(("m", 1),))
    call = lambda: fr.Hardware.from_run([([{"steps_per_s": 3.0}], plan)], hardware="cpu")
    assert_refused(call, ValueError, "funcrec.Hardware.from_run", "the plans estimate no time")


def test_a_plan_without_scipy_names_the_package(monkeypatch):
    """Without SciPy a plan raises with the command that installs it."""
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ImportError, match=r"(?s)a plan requires SciPy.*try   pip install 'funcrec\[plan\]'"):
        planned()
