"""Send signals to the main job at random moments. The job must then end with the bits of an undisturbed run.

    PYTHONPATH=tests python -m programs.ctr_interrupts --count 500

This process compiles the job once. Every run is a fork of this process that gets SIGINT, SIGTERM (each sometimes
twice) or SIGKILL after a random time. The job starts again with --resume=auto, and may be interrupted again. The last
start is undisturbed.
"""

import argparse
import collections
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import tqdm

import funcrec as fr
from funcrec.examples import ctr
from programs import small_movielens

WORDS = ["--model", "fm", "--batch-size", "64", "--patience", "9", "--lr", "0.05", "--epochs", "3", "--resume=auto"]
KEYS = ("state", "best", "position", "loss_sum")


def bits(path):
    """Return the checkpoint's tensors as bytes, and the checkpoint's numbers except times."""
    tree = fr.load(path)
    leaves = torch.utils._pytree.tree_leaves({k: tree[k] for k in KEYS})
    whole = [x.reshape(-1).view(torch.uint8).numpy().tobytes() if isinstance(x, torch.Tensor) else x for x in leaves]
    return whole, [(h["epoch"], h["loss"], h["valid_auc"], h["valid_log_loss"]) for h in tree["history"]]


def forked(words, log):
    """Return the process id of a fork of this process that runs the job."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        with open(log, "a", buffering=1) as sys.stdout:
            sys.stderr = sys.stdout
            os.dup2(sys.stdout.fileno(), 2)
            try:
                code = ctr.main(words)
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else print(end.code) or 1
            except KeyboardInterrupt:  # the signal came before the job set its handlers
                code = 130
            except BaseException as error:
                print(repr(error))
    finally:
        os._exit(code)


def interrupted(draw, pid, lasts):
    """Return (signals sent at random moments, exit code)."""
    kind = draw.choices(["int", "term", "both", "twice", "kill"], [6, 6, 2, 2, 3])[0]
    time.sleep(draw.uniform(0, lasts))
    sent = {
        "int": [signal.SIGINT], "term": [signal.SIGTERM], "both": [signal.SIGTERM, signal.SIGINT],
        "twice": [signal.SIGINT, signal.SIGINT], "kill": [signal.SIGKILL],
    }[kind]  # fmt: skip
    for i, signum in enumerate(sent):
        if i:
            time.sleep(draw.choice([0, draw.uniform(0, 0.02), draw.uniform(1.0, 1.2)]))
        try:
            os.kill(pid, signum)
        except ProcessLookupError:
            break
    return sent, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def trial(draw, out, data, lasts, told):
    """Interrupt one run once to three times, then let it run to its end without a signal."""
    words, log = [*WORDS, "--data", str(data), "--out", str(out)], out.with_suffix(".log")
    for _ in range(draw.choice([1, 1, 2, 3])):
        before = len(log.read_text()) if log.exists() else 0
        sent, code = interrupted(draw, forked(words, log), lasts)
        said = log.read_text()[before:] if log.exists() else ""
        allowed = {0} | {-s if s == signal.SIGKILL else 128 + s for s in sent}
        if signal.SIGTERM in sent and (not said or "goes on from" in said or "test AUC" in said):
            allowed.add(-signal.SIGTERM)  # the signal came before the job set its handlers, or after its end
        assert code in allowed, (sent, code, log.read_text())
        place = "nothing"
        if (out / "checkpoint.pt").exists():
            epoch, batch = fr.load(out / "checkpoint.pt")["position"]
            place = "the beginning" if (epoch, batch) == (0, 0) else "between steps" if batch else "between epochs"
        told[f"exit code {code}, checkpoint of {place}"] += 1
    code = os.waitstatus_to_exitcode(os.waitpid(forked(words, log), 0)[1])
    assert code == 0, log.read_text()


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    tqdm.tqdm.set_lock(threading.RLock())  # forks share the default lock, and a killed fork would keep it locked
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        data.mkdir()
        small_movielens.write(data)
        make_job, made = ctr.make_job, []

        def once(settled):
            made.append(made[0] if made else make_job(settled))
            return made[0]._replace(options=settled)

        ctr.make_job = once
        for name in ("first", "whole"):  # run "first" compiles the job
            began = time.monotonic()
            assert ctr.main([*WORDS, "--data", str(data), "--out", str(Path(folder) / name)]) == 0
        lasts, want = time.monotonic() - began, bits(Path(folder) / "whole" / "checkpoint.pt")
        assert bits(Path(folder) / "first" / "checkpoint.pt") == want
        draw, told = random.Random(options.seed), collections.Counter()
        for i in range(options.count):
            out = Path(folder) / f"{i}"
            trial(draw, out, data, lasts, told)
            assert bits(out / "checkpoint.pt") == want, f"run {i}"
        ctr.make_job = make_job
    print(
        f"a run lasts {lasts:.2f} s; {sum(told.values())} interrupts in {options.count} runs, all of "
        f"them went on to the same bits:"
    )
    for line, count in sorted(told.items()):
        print(f"{count:6d}  {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
