"""`fit` trains tables larger than memory: it reads ahead, evaluates, commits with each checkpoint, and resumes."""

import pytest
import torch
from programs.cached_users import FEATURES, KEY, OPTIMIZERS, batches_of, configs_of

import funcrec as fr

MODEL = fr.models.fm(configs_of()[:1], FEATURES[:1])


class Stop(Exception):
    """What ends a run."""


def examples(seed, count):
    """Return batches with labels 0 and 1."""
    parts = batches_of(seed, count)
    return [fr.Batch(b.ids, (b.label > 0).float()) for b in parts]


def trained(folder, *, cached, end=None, mesh=None, **how):
    """Return fit's result, by whole or cached tables. end: the step at which the run ends with an error."""
    sparse, params = OPTIMIZERS["adam"], MODEL.init(KEY)
    made = {"sparse": sparse, "dense": fr.optim.dense(torch.optim.SGD, lr=0.01), "admit": False}
    if mesh is not None:
        plan = fr.Plan({c.name: fr.row_wise("x") for c in MODEL.tables})
        made |= {"mesh": mesh, "plan": plan, "exact": True}
        how |= {"mesh": mesh, "place": lambda s: fr.reshard(s, plan, mesh=mesh, sparse=sparse, exact=True)}
    step = fr.train_step(MODEL, **made)
    if cached:
        store = fr.table_store(MODEL.tables, sparse, key=KEY, path=folder / "rows", mesh=mesh)
        caches = {"users": fr.CacheConfig(store, 128, MODEL.features)}
        params = fr.Params(fr.cached_tables({}, caches), params.dense)
        step = fr.cached_step(step, {"users": store}, depth=2)

    def stop(record):
        if record.when == "step" and record.step == end:
            raise Stop

    judged = {"validation": examples(2, 2), "metrics": {"auc": fr.metrics.exact_auc}}
    how |= {"checkpoint": folder / "run", "save_every_steps": 3, "model": MODEL, "callbacks": [stop]}
    how |= judged if mesh is None else {}
    try:
        return fr.fit(step, step.init(params), examples(1, 8), epochs=3, **how)
    finally:
        if cached:
            store.close()


def numbers(done):
    return [{k: h[k] for k in ("epoch", "loss", "auc")} for h in done.history]


@pytest.mark.parametrize(
    ("end", "asynchronous"), [(None, False), (2, False), (5, True), (10, False), (16, True), (20, False)]
)
def test_fit_gives_the_numbers_of_whole_tables(tmp_path, end, asynchronous):
    """Losses and metrics are those of whole tables, also when the run ends with an error after any step and goes on
    from its checkpoint."""
    (tmp_path / "whole").mkdir()
    want = trained(tmp_path / "whole", cached=False)
    if end is not None:
        with pytest.raises(Stop):
            trained(tmp_path, cached=True, end=end, save_asynchronously=asynchronous)
    done = trained(tmp_path, cached=True, resume="auto", save_asynchronously=asynchronous)
    assert numbers(done) == numbers(want)


def test_fit_on_a_mesh_gives_the_numbers_of_whole_tables(tmp_path):
    """On a mesh, losses are those of whole tables, also when the run ends and goes on."""
    (tmp_path / "whole").mkdir()
    mesh = fr.Mesh.emulated(x=2)
    want = trained(tmp_path / "whole", cached=False, mesh=mesh)
    with pytest.raises(Stop):
        trained(tmp_path, cached=True, end=10, mesh=mesh)
    done = trained(tmp_path, cached=True, mesh=mesh, resume="auto")
    assert [h["loss"] for h in done.history] == [h["loss"] for h in want.history]
