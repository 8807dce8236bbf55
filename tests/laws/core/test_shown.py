"""repr of steps, optimizers, models and layers: the call that made them, on one line."""

import pytest
import torch

import funcrec as fr

TABLES, FEATURES = [fr.TableConfig("item", 50, 4)], [fr.FeatureConfig("clicked", table="item")]
LOSS = lambda params, batch: params.dense["w"].sum()
ADAGRAD = fr.optim.rowwise_adagrad(lr=0.1)
DENSE = fr.optim.dense(torch.optim.Adam, lr=0.01)
STEP = fr.train_step(LOSS, sparse=ADAGRAD, dense=DENSE)
ON_MESH = fr.train_step(
    LOSS, sparse=ADAGRAD, mesh=fr.Mesh.emulated(data=2), plan=fr.Plan({"item": fr.row_wise("data")})
)
SHOWN = [
    (ADAGRAD, "rowwise_adagrad(lr=0.1)"),
    (fr.optim.adam(torch.tensor(0.1)), "adam(f32[])"),
    (DENSE, "dense(Adam, lr=0.01)"),
    (STEP, "train_step(<lambda>, sparse=rowwise_adagrad(lr=0.1), dense=dense(Adam, lr=0.01))"),
    (fr.models.deepfm(TABLES, FEATURES), "deepfm([TableConfig('item')], [FeatureConfig('clicked')])"),
    (fr.logged(STEP, rows=8), f"logged({STEP!r}, rows=8)"),
    (STEP._replace(init=print), "TrainStep(init=print, update=Update)"),
    (fr.jit(STEP), f"<funcrec.jit of {STEP!r}>"),
    (fr.jit(STEP, donate=("state",)), f"<funcrec.jit of {STEP!r}, donate=('state',)>"),
]


@pytest.mark.parametrize("value, text", SHOWN, ids=[text[:30] for _, text in SHOWN])
def test_a_value_made_by_a_call_shows_the_call(value, text):
    """repr(maker(*args)) is the call with short arguments; a value with a replaced field shows its fields."""
    assert repr(value) == text


def test_a_step_on_a_mesh_shows_mesh_and_plan():
    """The mesh and the plan stand in the text; no closure and no line break does."""
    text = repr(ON_MESH)
    assert "mesh=Mesh.emulated(data=2)" in text and "row_wise" in text and "sparse=rowwise_adagrad" in text
    assert "\n" not in text and " at 0x" not in text


def test_a_step_with_a_long_plan_shows_its_kinds():
    """A plan of many tables stands in the text as its kinds with their numbers, in less than a screen."""
    kinds = {f"t{i}": fr.row_wise("data") if i % 3 else fr.replicated() for i in range(300)}
    text = repr(fr.logged(fr.train_step(LOSS, mesh=fr.Mesh.emulated(data=2), plan=fr.Plan(kinds)), rows=8))
    assert "plan=Plan(300 tables: 100 replicated, 200 row_wise)" in text and len(text) < 400


def test_long_arguments_are_cut():
    """A sequence shows three elements and its length."""
    tables = [fr.TableConfig(f"t{i}", 50, 4) for i in range(9)]
    features = [fr.FeatureConfig(t.name, table=t.name) for t in tables]
    assert "TableConfig('t2'), ... 9 in all]" in repr(fr.models.deepfm(tables, features))
