"""Functions that ranks run to test loops on real ranks."""

import os
import signal
from unittest import mock

import torch

import funcrec as fr
from funcrec.loop import _run_state

TABLES, FEATURES = (fr.TableConfig("item", 12, 1),), (fr.FeatureConfig("item", table="item"),)
MODEL = fr.models.lr(TABLES, FEATURES)
METRICS = {
    "auc": fr.metrics.auc(from_logits=True),
    "exact": fr.metrics.exact_auc,
    "average_precision": fr.metrics.exact_average_precision,
    "rauc": fr.metrics.exact_rauc,
    "cali_free_ne": fr.metrics.cali_free_ne(from_logits=True),
    "loss": fr.metrics.log_loss(from_logits=True),
    "both": fr.metrics.collect({"mse": fr.metrics.mse(), "mae": fr.metrics.mae()}),
    "sums": lambda scores, labels, weights: torch.stack([scores.sum(), (labels * weights).sum()]),
}


def batch(weight):
    """Return a batch of 12 examples, each with one of 12 items."""
    ids = fr.KeyedJaggedTensor.from_lists({"item": [[i] for i in range(12)]})
    return fr.Batch(ids, (torch.arange(12) % 3 == 0).float(), None, torch.tensor(weight, dtype=torch.float32))


def weighted_step(weight, mesh=None):
    """Return the whole (loss, tables, dense) after a step on the batch."""
    plan = {} if mesh is None else {"mesh": mesh, "plan": fr.Plan.uniform("row_wise", TABLES, mesh)}
    kind = {"sparse": fr.optim.sgd(1.0), "dense": fr.optim.dense(torch.optim.SGD, lr=1.0), "has_aux": True}
    step = fr.train_step(fr.models.loss(MODEL), **kind, **plan)
    own = batch(weight) if mesh is None else fr.shard(batch(weight), fr.P(mesh.axis_names), mesh=mesh)
    state, metrics = step(step.init(MODEL.init(fr.key(0))), own)
    tables = state.tables if mesh is None else fr.gather_tables(state.tables, mesh)
    return metrics["loss"], tables, state.dense


def weighted_step_of_ranks(weight):
    return weighted_step(weight, fr.Mesh.distributed(data=2))


def evaluated(weight, mesh=None):
    """Return the metrics of all 12 examples. The process evaluates its own examples in batches of 3."""
    params = fr.Params({"item": torch.linspace(-1, 1, 12).roll(5)[:, None]}, {"bias": torch.zeros(1)})
    rows = fr.loop.own_part(torch.arange(12), mesh)
    whole = batch(weight)
    cut = lambda i: fr.Batch(whole.ids[i.tolist()], whole.label[i], None, whole.weight[i])
    return fr.evaluate(MODEL.apply, params, [cut(i) for i in rows.split(3)], METRICS, mesh=mesh)


def evaluated_on_ranks(weight):
    return evaluated(weight, fr.Mesh.distributed(data=2))


def refused(weight):
    """Return the error of ranks with different numbers of examples."""
    mesh = fr.Mesh.distributed(data=2)
    params = fr.Params({"item": torch.zeros(12, 1)}, {"bias": torch.zeros(1)})
    try:
        fr.evaluate(MODEL.apply, params, [batch(weight)] * (1 + mesh.coordinates["data"]), METRICS, mesh=mesh)
    except ValueError as error:
        return str(error)
    return ""


def interrupted(path, num_steps):
    """Return (the error that ends a run, the rank's steps). The first rank alone gets SIGTERM."""
    mesh, steps = fr.Mesh.distributed(data=2), []

    def callback(record):
        if record.when == "step":
            steps.append(record.step)
            if record.step == 2 and mesh.coordinates["data"] == 0:
                os.kill(os.getpid(), signal.SIGTERM)

    add = lambda total, batch: (total + batch, {"loss": total})
    try:
        fr.fit(add, torch.tensor(0.0), [1.0] * num_steps, epochs=1, checkpoint=path, callbacks=[callback], mesh=mesh)
    except SystemExit as error:
        return error.code, steps
    return 0, steps


def resumed(folder):
    """Return the error of a rank when the ranks resume from separate checkpoints with different positions."""
    mesh = fr.Mesh.distributed(data=2)
    path = f"{folder}/run{mesh.coordinates['data']}.pt"
    add = lambda total, batch: (total + batch, {"loss": total})
    fr.fit(add, torch.tensor(0.0), [1.0] * (3 + mesh.coordinates["data"]), epochs=1, checkpoint=path)
    try:
        fr.fit(add, torch.tensor(0.0), [1.0] * 3, epochs=2, checkpoint=path, resume="auto", mesh=mesh)
    except ValueError as error:
        return str(error)
    return ""


def seen_by_one(folder):
    """Return the error of a rank when only the first rank sees the checkpoint, however long the others wait."""
    mesh = fr.Mesh.distributed(data=2)
    path, add = f"{folder}/{mesh.coordinates['data']}", lambda state, batch: (state + batch, {})
    if mesh.coordinates["data"] == 0:
        fr.fit(add, torch.tensor(0.0), [1.0] * 3, epochs=1, checkpoint=path)
    with mock.patch.object(_run_state, "APPEAR_S", 0.2):
        try:
            fr.fit(add, torch.tensor(0.0), [1.0] * 3, epochs=2, checkpoint=path, resume="auto", mesh=mesh)
        except ValueError as error:
            return str(error)
    return ""


def saved_by_the_clock(path, minutes):
    """Return (positions of the checkpoints that a rank finds, the steps at which it finds them). The first rank's clock
    always says that a save is due. The other clocks never do."""
    mesh, seen, at = fr.Mesh.distributed(data=2), [], []
    _run_state.Clock.is_due = lambda clock: clock.minutes == minutes and mesh.coordinates["data"] == 0
    torch.distributed.barrier()

    def callback(record):
        torch.distributed.barrier()
        position = fr.load(path)["position"]
        if record.when == "step" and position not in seen:
            seen.append(position)
            at.append(record.step)

    add = lambda total, batch: (total + batch, {"loss": total})
    how = {"checkpoint": path, "save_every_minutes": minutes, "callbacks": [callback], "mesh": mesh}
    fr.fit(add, torch.tensor(0.0), [1.0] * 40, epochs=1, **how)
    return seen, at


def kept(path):
    """Return (the end of a run that keeps checkpoints, None), or (None, the text of its error)."""
    torch.distributed.barrier()
    add = lambda total, batch: (total + batch, {"loss": total})
    how = {"checkpoint": path, "keep": 2, "resume": "auto", "mesh": fr.Mesh.distributed(data=2)}
    try:
        return fr.fit(add, torch.tensor(0.0), [1.0] * 4, epochs=2, **how).state.item(), None
    except ValueError as error:
        return None, str(error)
