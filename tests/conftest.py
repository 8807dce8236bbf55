"""One thread, or FUNCREC_TEST_THREADS; interrupts as in a terminal; hypothesis profiles; torch.empty that shows early
reads; few passes of the garbage collector; bytecode on disk."""

import gc
import importlib.util
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, settings
from programs.as_staged import staged_only

import funcrec as fr
from funcrec.compile.backend import _inductor

gc.disable()  # while tests are collected: a pass reads all that is collected and frees next to nothing
# Without bytecode on disk each fresh interpreter would compile funcrec's source again.
sys.dont_write_bytecode = os.environ.pop("PYTHONDONTWRITEBYTECODE", None) is None and sys.dont_write_bytecode

torch.set_num_threads(int(os.environ.get("FUNCREC_TEST_THREADS", "1")))
# Otherwise a first torch.compile starts a pool of processes, each of which imports torch. fr.jit starts none.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Tests compile hundreds of programs. The first, not the eighth of each worker, compiles the header that all include.
_inductor.MANY = 1

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell starts what runs in its background so
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "ci", derandomize=True, deadline=None, max_examples=10, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("long", parent=settings.get_profile("ci"), derandomize=False, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


CHUNK = 20  # tests of one file that one worker runs in turn
REFUSED = []  # the processes that a test would have started


def _poisoned(empty):
    """`empty` that is NaN, or the least integer, when a module of funcrec calls it."""

    def fill(*args, **kwargs):
        out = empty(*args, **kwargs)
        if not sys._getframe(1).f_globals.get("__name__", "").startswith("funcrec") or out.is_meta:
            return out
        if out.is_floating_point():
            return torch.full_like(out, torch.nan)
        return out if out.dtype == torch.bool else torch.full_like(out, torch.iinfo(out.dtype).min)

    return fill


def pytest_addoption(parser):
    parser.addoption("--alone", action="store_true", help="skip each test where it would start a process")


@pytest.fixture(scope="session", autouse=True)
def alone(request):
    """With --alone compilers, ranks, servers and fresh interpreters are not started: `make check`."""
    patch = pytest.MonkeyPatch()
    if request.config.option.alone:

        def skip(*args, **kwargs):
            REFUSED.append(args)
            pytest.skip("starts a process")

        patch.setattr(subprocess, "Popen", skip)
        patch.setattr(multiprocessing.process.BaseProcess, "start", skip)
    yield
    patch.undo()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A test that was refused a process, in a thread of its own or where it expects an error, is skipped, too."""
    report = yield
    if REFUSED and report.failed:
        report.outcome, report.longrepr = "skipped", (str(item.path), None, "Skipped: starts a process")
    if call.when == "teardown":
        REFUSED.clear()
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session):
    """While tests run, also in the process that has workers, garbage is collected again: without the tests themselves,
    which are over a million objects, and less often than by Python's thresholds."""
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    gc.enable()
    return (yield)


@pytest.fixture(scope="session", autouse=True)
def poisoned_memory():
    patch = pytest.MonkeyPatch()
    for owner, name in [(torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")]:
        patch.setattr(owner, name, _poisoned(getattr(owner, name)))
    yield
    patch.undo()


@pytest.fixture(scope="session", autouse=True)
def unflushed():
    """No test cuts the power, and a disk takes milliseconds for each flush: fsync and fdatasync only look at their
    file. Tests of when they are called, and of what follows their errors, replace them."""

    def look(fd):
        os.fstat(fd)  # it raises for a number of no file, as they do

    patch = pytest.MonkeyPatch()
    for name in ("fsync", "fdatasync"):
        if hasattr(os, name):
            patch.setattr(os, name, look)
    yield
    patch.undo()


@pytest.fixture(autouse=True)
def same_threads():
    """A test leaves torch the threads that it had: those that follow are run on as many as was asked for."""
    before = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == before


@pytest.fixture(scope="session")
def packaged(tmp_path_factory):
    """Return the folder of a portable package, which is compiled once for the group "packages". Tests change copies."""
    from programs import packages

    from funcrec.serve import _export

    # A compiled header would be read once here, and takes longer than what it saves.
    own = {**_export.ISA["portable"], "aot_inductor.precompile_headers": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(_export.ISA, "portable", own)
        return packages.export(tmp_path_factory.mktemp("packaged") / "model", isa="portable")


@pytest.fixture(scope="session")
def of_ids(tmp_path_factory):
    """Return (a run whose ids came and went, the folder of its package), once for the group "packages"."""
    from programs import daily_ids

    run, example = daily_ids.begun(), next(daily_ids.batches(1, 1, 8))
    folder = tmp_path_factory.mktemp("of_ids") / "model"
    return run, fr.export(daily_ids.predict, run.state.params, fr.Batch(example.ids), folder, version="0")


@pytest.fixture
def interpreted():
    """Staged graphs are run as they stand, not compiled."""
    with staged_only():
        yield


@pytest.hookimpl(specname="pytest_collection_modifyitems", tryfirst=True)
def pytest_chunks_of_files(config, items):
    """Long files go to the workers in chunks of tests. For each test that it hands out, xdist counts all groups of the
    worker: 15,000 groups of one test would take its controller 17 s, and the workers 10 s."""
    if not getattr(config.option, "loadgroup", 0):
        return
    free = [x for x in items if not x.get_closest_marker("xdist_group")]
    for path, tests in itertools.groupby(free, key=lambda item: item.path):
        tests = list(tests)
        for i in range(0, len(tests) - CHUNK + 1, CHUNK):
            group = pytest.mark.xdist_group(f"{path.relative_to(config.rootpath)} {i // CHUNK}")
            for item in tests[i : i + CHUNK]:
                item.add_marker(group)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Examples that need TorchRec run where it is installed, as the tests against it do. Tests of one group go to one
    worker, or none: what they share is made once."""
    grouped = (
        [x for x in items if x.get_closest_marker("xdist_group")] if getattr(config.option, "loadgroup", 0) else []
    )
    if lost := [x.nodeid for x in grouped if "@" not in x.nodeid.rpartition("]")[2]]:
        raise pytest.UsageError(f"pytest {pytest.__version__} and its xdist form no groups: {lost[0]} is in none")
    if importlib.util.find_spec("torchrec") is None:
        sources = {x: [e.source for e in x.dtest.examples] for x in items if hasattr(x, "dtest")}
        items[:] = [x for x in items if not any("torchrec" in source for source in sources.get(x, ()))]
