"""A folder has one publisher at a time. A publisher killed at any moment leaves whole files."""

import contextlib
import functools
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from programs.fresh import STEP, batch, begun, bits, changed_manifest, held

import funcrec as fr
from funcrec.serve.freshness import _published

pytestmark = pytest.mark.xdist_group("packages")


def record(when, step, state):
    return fr.loop.Record(when, 0, step, {}, state)


OTHER = """
import fcntl, sys
file = open(sys.argv[1], "a+")
try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.exit("held")
file.truncate(0)
file.write('{"who": "process 7 of elsewhere", "process": "7"}')
file.flush()
print("has it", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def another(folder):
    """Start another process that publishes to the folder, yield the process's first line, and kill the process at the
    end."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", OTHER, str(folder / ".publisher")], **pipes) as process:
        try:
            yield process.stdout.readline() or process.stderr.read()
        finally:
            process.kill()


def test_a_folder_has_one_publisher(plain, tmp_path):
    """While one process publishes to a folder, another process raises with the name of the first process before it
    writes. A killed process releases the folder. Within one process, the newest publisher continues. The older
    publisher raises."""
    folder, run = tmp_path / "published", begun()
    folder.mkdir()
    first = fr.publish(folder, plain, every_steps=2)
    with another(folder) as word:
        assert word == "has it\n"
        with pytest.raises(ValueError, match="has another publisher") as error:
            # no publication is due
            first(record("step", 1, run))
        assert "process 7 of elsewhere" in str(error.value) and not _published.pieces(folder)
    first(record("step", 2, run))
    with another(folder) as word:
        assert word == "held\n"
    second = fr.publish(folder, plain, every_steps=2)
    second(record("step", 2, run))
    there = os.listdir(folder)
    with pytest.raises(ValueError, match="has another publisher"):
        first(record("step", 4, run))
    assert sorted(os.listdir(folder)) == sorted(there)
    del first, error
    second(record("step", 4, STEP(run, batch(1))[0]))
    with another(folder) as word:
        assert word == "held\n"
    assert json.loads((folder / ".publisher").read_text())["run"] == _published.pieces(folder)[-1].run
    del second
    with another(folder) as word:
        assert word == "has it\n"


def test_a_folder_is_of_one_package(plain, tmp_path):
    """A folder with published weights of another package raises and does not change. An empty folder is accepted."""
    folder, run = tmp_path / "published", begun()
    other = changed_manifest(plain, tmp_path / "other", lambda found: found.update(max_batch=7))
    fr.publish(folder, other, every_steps=1)(record("step", 1, run))
    there = os.listdir(folder)
    with pytest.raises(ValueError, match="is of another package"):
        fr.publish(folder, plain, every_steps=1)(record("step", 1, run))
    assert os.listdir(folder) == there
    for piece in _published.pieces(folder):
        _published.remove(_published.path_of(folder, piece))
    fr.publish(folder, plain, every_steps=1)(record("step", 1, run))
    fr.load_package(plain).follow(folder)


def test_a_package_is_not_published_into(plain, tmp_path):
    """`publish` raises if its folder is a package or holds weights. The folder does not change."""
    other = changed_manifest(plain, tmp_path / "other", lambda found: None)
    fr.save_weights(tmp_path / "weights", held(begun().state, "plain"))
    for folder in (other, tmp_path / "weights"):
        there = os.listdir(folder)
        with pytest.raises(ValueError, match="is a package, or holds weights"):
            fr.publish(folder, plain, every_steps=1)
        assert os.listdir(folder) == there


@contextlib.contextmanager
def forked(do):
    """Start a forked process that runs the function `do`, and kill the process at the end."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            torch.set_num_threads(1)
            do()
        os._exit(0)
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_forked_process_does_not_hold_the_folder(plain, tmp_path):
    """A process that a publisher forks, such as a data worker, does not hold the folder. After the publisher is killed,
    the next publisher continues while the worker lives. The worker itself raises if it publishes."""
    folder, run = tmp_path / "published", begun()
    first = fr.publish(folder, plain, every_steps=1)
    first(record("step", 1, run))
    with forked(functools.partial(time.sleep, 60)):
        with another(folder) as word:
            assert word == "held\n"
        first(record("step", 2, run))
        del first
        with another(folder) as word:
            assert word == "has it\n"
    first = fr.publish(folder, plain, every_steps=1)
    first(record("step", 3, run))
    found, say = os.pipe()

    def worker():
        try:
            first(record("step", 4, run))
        except ValueError as error:
            os.write(say, str(error).encode())
        finally:
            os.close(say)

    with forked(worker):
        os.close(say)
        assert b"has another publisher" in os.read(found, 1000)
    os.close(found)


def test_a_publisher_that_is_killed_leaves_one_whole_version(coded, tmp_path):
    """After SIGKILL at any moment, a follower has the weights of one published step, bit for bit. The follower never
    returns to an older publication. The next publisher continues."""
    folder, rng, runs = tmp_path / "published", random.Random(3), [begun()]
    for n in range(8):
        runs.append(STEP(runs[-1], batch(n, 9))[0])
    right = [bits(dict(sorted(fr.tree.paths(held(run.state, "coded"))))) for run in runs]
    near, had = fr.load_package(coded), -1

    def publisher():
        tell = fr.publish(folder, coded, every_steps=1, keep=2)
        for i in range(10**6):
            tell(record("step", i, runs[i % len(runs)]))

    for _ in range(12):
        with forked(publisher):
            end = time.monotonic() + 20
            while not folder.exists() or had >= newest(folder):
                assert time.monotonic() < end
            time.sleep(rng.random() * 0.03)
        for package in (near, fr.load_package(coded)):
            package.follow(folder)
            number, _, step, _ = package.version.split("-")
            assert bits(package.params) == right[int(step) % len(runs)]
        assert int(number) > had
        had = int(number)


def newest(folder):
    return max((p.number for p in _published.pieces(folder)), default=-1)
