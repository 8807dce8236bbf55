"""Lose one rank during `fit`, for tests of the other ranks and for measurements.

PYTHONPATH=tests python -m programs.lost_ranks        every way at every moment: seconds until the other ranks are down
"""

import contextlib
import itertools
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

import funcrec as fr
from funcrec.loop import _run_state, _watch
from funcrec.testing import RankError, RankPool

WAYS = ("exception", "exit", "kill", "stop", "hang")
MOMENTS = ("loader", "step", "callback", "save", "evaluation")
TIMEOUT_S, LEAVE_S, SLACK_S = 1.0, 0.5, 4.0


def lose(way, folder):
    """End, stop or hang this process in the given way."""
    (folder / "lost").write_text(f"{time.time()} {os.getpid()}")
    match way:
        case "exception":
            raise ValueError("of my own")
        case "exit":
            os._exit(0)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hang":
            time.sleep(60)


@contextlib.contextmanager
def stderr_in_file(way, folder, rank):
    """Write this rank's errors to a file."""
    os.dup2(os.open(folder / f"stderr{rank}", os.O_WRONLY | os.O_CREAT), 2)
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    try:
        yield
    except fr.loop.RankLost as error:
        sys.excepthook(type(error), error, None)
        sys.stderr.flush()
        with contextlib.suppress(ProcessLookupError):  # a rank that does not end must delay no rank
            os.kill(int((folder / "lost").read_text().split()[1]), signal.SIGKILL * (way in ("stop", "hang")))
        raise


def run_stale(way, moment, folder):
    """Run a stale pipeline, in which an exchange of rows is always in progress. Rank 1 is lost after its third step, or
    in the thread that fetches its fourth batch."""
    _watch.LEAVE_S = LEAVE_S
    mesh = fr.Mesh.distributed(data=3, timeout_s=20.0)
    rank = mesh.coordinates["data"]
    loss_fn = lambda p, ids: fr.lookup(p.tables, ids, [fr.FeatureConfig("x", table="t")]).values.square().mean()
    kind = {"sparse": fr.optim.sgd(0.1), "dense": fr.optim.dense(torch.optim.SGD, lr=0.1)}
    step = fr.train_step(loss_fn, **kind, mesh=mesh, plan=fr.Plan({"t": fr.row_wise("data")}))
    state = step.init(fr.Params({"t": torch.ones(7, 2)}, {}))
    is_lost = lambda here, n: here == moment and rank == 1 and n == 3 and lose(way, folder)

    def loader():
        for i in range(6):
            is_lost("loader", i)
            yield fr.KeyedJaggedTensor.from_lists({"x": [[i], [i + 1]]})

    with stderr_in_file(way, folder, rank), fr.loop.watch(mesh) as at:
        for i, _ in enumerate(fr.stale_pipeline(step, mesh=mesh).run(state, loader())):
            at(f"step {i + 1}")
            is_lost("step", i + 1)


def run(way, moment, folder):
    """Run `fit` and lose one rank at its third step. Rank 0 is lost in a save, rank 1 at the other moments."""
    _watch.SILENT_S, _watch.LEAVE_S, _watch.BROKEN_S, _watch.SAVE_S = 1.0, LEAVE_S, 1.0, LEAVE_S
    mesh = fr.Mesh.distributed(data=3, timeout_s=TIMEOUT_S)
    rank, save = mesh.coordinates["data"], _run_state.save
    is_lost = lambda here, n: here == moment and rank == (moment != "save") and n == 3 and lose(way, folder)
    total = fr.shard_map(lambda x: fr.psum(x, "data"), mesh=mesh, in_specs=fr.P("data"), out_specs=fr.P())

    def step(state, batch):
        is_lost("step", batch)
        return state + total(torch.ones(1)), {}

    def loader(position):
        for i in range(position.batch, 4):
            is_lost("loader", i)
            yield fr.data.Position(*divmod(i + 1 + position.epoch * 4, 4)), i

    def callback(record):
        is_lost("callback", record.step if record.when == "step" else 0)

    def saved(path, tree, **how):
        is_lost("save", tree["position"][1])
        return save(path, tree, **how)

    def evaluate(params):
        is_lost("evaluation", 3)
        return {}

    _run_state.save = saved
    with stderr_in_file(way, folder, rank):
        fr.fit(
            step, torch.zeros(()), loader, epochs=2, checkpoint=folder / "run.pt", save_every_steps=1,
            evaluate=evaluate, callbacks=[callback], mesh=mesh,
        )  # fmt: skip


def lost(way, moment, run=run):
    """Return ({rank: its error}, the lost rank, the seconds until the other ranks ended)."""
    with tempfile.TemporaryDirectory() as folder, RankPool(3, timeout_s=10) as pool:
        with contextlib.suppress(RankError):
            pool.run(run, way, moment, Path(folder), deadline_s=60)
        rank = int(moment != "save")
        files = {r: Path(folder) / f"stderr{r}" for r in range(3) if r != rank}
        began = float((Path(folder) / "lost").read_text().split()[0])
        return (
            {r: p.read_text() for r, p in files.items()},
            rank,
            max(p.stat().st_mtime for p in files.values()) - began,
        )


def main():
    torch.set_num_threads(1)
    print(f"seconds; exchanges wait for {TIMEOUT_S:g}, a silent rank is one without a beat for 1")
    for way, moment in itertools.product(WAYS, MOMENTS):
        told, _, took = lost(way, moment)
        full = max(told.values(), key=len).splitlines()[:2]
        print(f"{way:10} {moment:11} {took:5.2f}  {' '.join(full)[:140]}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
