"""fit tells a bad batch from a divergence, and keeps what diverged out of its checkpoint."""

import math

import pytest
import torch

import funcrec as fr
from funcrec.testing import assert_trees_close

TABLES = (fr.TableConfig("item", 30, 4),)
FEATURES = (fr.FeatureConfig("item", table="item"),)
KIND = {"sparse": fr.optim.sgd(0.1), "dense": fr.optim.dense(torch.optim.SGD, lr=0.1)}


def loss_fn(params, batch):
    logits = fr.lookup(params.tables, batch.ids, FEATURES)["item"].sum(1) + params.dense["b"]
    return fr.losses.bce(logits, batch.label, batch.weight)


def batch(labels=(1.0, 0.0), weights=(1.0, 1.0), rows=(1, 2)):
    ids = fr.KeyedJaggedTensor.from_lists({"item": [[x] for x in rows]})
    return fr.Batch(ids, torch.tensor(labels), weight=torch.tensor(weights))


STEP = fr.train_step(loss_fn, **KIND)
FAST = fr.jit(STEP, donate=("state",))


def start(step=STEP):
    return step.init(fr.Params(fr.init(fr.key(0), TABLES), {"b": torch.zeros(())}))


BAD = {
    "a label of 5": ({"labels": (1.0, 5.0)}, r"label\[1\] = 5.0"),
    "a label of NaN": ({"labels": (math.nan, 0.0)}, r"label\[0\] = nan"),
    "a weight of -1": ({"weights": (1.0, -1.0)}, r"weight\[1\] = -1.0"),
    "a weight of infinity": ({"weights": (math.inf, 1.0)}, r"weight\[0\] = inf"),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("step", ["eager", "jit", "pipeline"])
def test_a_bad_label_or_weight_is_named_with_its_batch(bad, step, tmp_path):
    """A label or weight that the loss does not take raises the loss's own error, with a note that names the batch. The
    checkpoint is from before that batch."""
    how, words = BAD[bad]
    train = {"eager": STEP, "jit": FAST, "pipeline": fr.pipeline(FAST)}[step]
    batches = [batch(), batch(), batch(**how), batch()]
    with pytest.raises(ValueError, match=words) as error:
        fr.fit(train, start(), batches, epochs=2, checkpoint=tmp_path / "run", save_every_steps=2)
    assert not isinstance(error.value, fr.loop.DivergedError)
    assert any("batch 2 of epoch 0" in note for note in error.value.__notes__)
    assert fr.load(tmp_path / "run")["state"].step == 2


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_label_or_weight_of_a_step_of_ones_own_is_named(bad):
    """For a step whose loss is unknown, the divergence error names the batch and its invalid weights and labels, or the
    range of its labels if all are valid."""
    how, _ = BAD[bad]
    step = lambda state, batch: (state, {"loss": torch.tensor(math.nan if batch is wrong else 1.0)})
    wrong = batch(**how)
    words = r"label.*5" if bad == "a label of 5" else BAD[bad][1]
    with pytest.raises(fr.loop.DivergedError, match=f"(?s)step 2.*nan, in batch 1 of epoch 0.*{words}"):
        fr.fit(step, torch.tensor(0), [batch(), wrong, batch()], epochs=1, validate=lambda batch: batch)


def test_padding_with_bad_numbers_is_no_divergence():
    """An example of weight 0 may have any label."""
    padded = batch((1.0, math.nan), (1.0, 0.0))
    done = fr.fit(FAST, start(), [batch(), padded], epochs=1)
    assert math.isfinite(done.history[0]["loss"])


def burst(at):
    """Return a step like STEP whose update number `at` makes a row NaN. Its loss is from before the update."""

    def step(state, batch):
        new, metrics = STEP(state, batch)
        rows = new.tables["item"].clone()
        rows[7] = math.nan if int(new.step) == at else rows[7]
        return fr.TrainState(new.step, {"item": rows}, new.slots, new.dense, new.dense_opt, new.key), metrics

    return step


@pytest.mark.parametrize("how", [{}, {"save_every_steps": 1}, {"monitor": "loss", "mode": "min"}])
@pytest.mark.parametrize("at", [2, 3, 4, 6])
def test_a_divergence_in_the_last_update_before_a_checkpoint(at, how, tmp_path):
    """An update that makes parameters NaN ends the run before the next checkpoint, though its loss was finite. The
    checkpoint keeps finite parameters, and so does `best`."""
    path = tmp_path / "run"
    with pytest.raises(fr.loop.DivergedError, match=r"the parameters diverged by step .*") as error:
        fr.fit(burst(at), start(), [batch(), batch()], epochs=3, checkpoint=path, **how)
    assert "tables['item']" in str(error.value)
    ends = at if "save_every_steps" in how else at + at % 2
    assert error.value.step == ends
    saved = fr.load(path)["state"]
    assert saved.step == (at - 1 if "save_every_steps" in how else ends - 2)
    assert all(x.isfinite().all() for x in fr.tree.leaves((saved.params, error.value.best)) if x is not None)


def test_a_stop_writes_no_parameters_that_diverged(tmp_path):
    """A run that is stopped after an update with NaN raises, and keeps the checkpoint from before."""
    asked = []
    stop = lambda: int(len(asked) == 3) if asked.append(1) is None else 0
    with pytest.raises(fr.loop.DivergedError, match="the parameters diverged"):
        fr.fit(burst(1), start(), [batch()] * 9, epochs=1, checkpoint=tmp_path / "run", stop=stop)
    assert fr.load(tmp_path / "run")["state"].step == 0


def test_numbers_that_were_not_finite_at_first_do_not_count(tmp_path):
    """Parameters that are infinite or NaN when the run begins, such as a mask, do not end the run."""

    def masked(params, batch):
        return loss_fn(params, batch) + params.dense["mask"].clamp(0, 1).sum()

    step = fr.train_step(masked, **KIND)
    dense = {"b": torch.zeros(()), "mask": torch.tensor([0.0, -math.inf])}
    state = step.init(fr.Params(fr.init(fr.key(0), TABLES), dense))
    done = fr.fit(step, state, [batch()], epochs=2, checkpoint=tmp_path / "run")
    assert done.state.dense["mask"][1] == -math.inf


def test_a_member_whose_parameters_diverge_does_not_end_the_others():
    """An ensemble continues while the parameters of at least one member are finite."""
    members = torch.func.vmap(STEP.init)(
        fr.Params({"item": torch.rand(3, 30, 4)}, {"b": torch.zeros(3)}), torch.stack([fr.key(i) for i in range(3)])
    )
    every = torch.func.vmap(STEP, in_dims=(0, None))

    def step(lost):
        def run(state, batch):
            new, metrics = every(state, batch)
            dense = {"b": torch.where(torch.tensor(lost), math.nan, new.dense["b"])}
            return fr.TrainState(new.step, new.tables, new.slots, dense, new.dense_opt, new.key), metrics

        return run

    done = fr.fit(step([True, False, True]), members, [batch()], epochs=1)
    assert done.state.dense["b"].isfinite().tolist() == [False, True, False]
    with pytest.raises(fr.loop.DivergedError, match=r"params.dense\['b'\]"):
        fr.fit(step([True, True, True]), members, [batch()], epochs=1)


def test_a_mesh_keeps_its_checkpoint_too(tmp_path):
    """On an emulated mesh, parameters that diverge in the last update of an epoch leave the checkpoint as it was."""
    mesh = fr.Mesh.emulated(data=2)
    plan = fr.Plan({"item": fr.row_wise("data")})
    steep = lambda params, batch: 10 * loss_fn(params, batch)
    huge = fr.train_step(steep, sparse=fr.optim.sgd(3e38), dense=KIND["dense"], mesh=mesh, plan=plan)
    with pytest.raises(fr.loop.DivergedError, match="the parameters diverged by step 1"):
        fr.fit(huge, start(huge), [batch()], epochs=1, checkpoint=tmp_path / "run", mesh=mesh)
    saved = fr.load(tmp_path / "run")["state"]
    assert saved.step == 0
    assert_trees_close(saved.tables, fr.init(fr.key(0), TABLES), rtol=0, atol=0)


def test_large_parameters_are_no_divergence(tmp_path):
    """Finite parameters whose sum overflows do not end the run."""
    still = fr.train_step(loss_fn, sparse=fr.optim.sgd(0.0), dense=fr.optim.dense(torch.optim.SGD, lr=0.0))
    state = still.init(fr.Params({"item": torch.full((30, 4), 1e37)}, {"b": torch.zeros(())}))
    step = lambda state, batch: (still(state, batch)[0], {"loss": 1.0})
    done = fr.fit(step, state, [batch()], epochs=1, checkpoint=tmp_path / "run")
    assert done.state.tables["item"].sum() == math.inf
