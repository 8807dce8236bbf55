"""Ranks watch each other: if a rank ends, or falls silent, all other ranks end, and report which rank, where and why.

    with watch(mesh) as at:     at("step 8")        tells the other ranks what this rank does

A thread of each process writes a beat twice a second to the store of the process group. It reads the beats of the next
rank, checks the next rank's process if that runs on this machine, and reads the verdict. The first thread that sees
what went wrong writes the verdict, and all ranks end with its text. If the main thread waits in an exchange that cannot
be interrupted, the thread ends the process. A broken exchange is never reported as the cause: the verdict names the
ranks that did not come to that exchange.

Beats do not use `say`: a lost rank would hold all other ranks in an exchange, and no rank would know which rank is
lost.
"""

import contextlib
import functools
import os
import secrets
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store

from funcrec.core import Problem, message, sure, typed
from funcrec.loop._ranks import num_processes
from funcrec.mesh import Mesh, Ranks, default_store, is_broken, say

BEAT_S = 0.5
SILENT_S = 30.0  # the time from the last beat until the verdict; shorter if exchanges have a shorter timeout
BROKEN_S = 5.0  # the time from a broken exchange until the verdict on the ranks that did not come to it
LEAVE_S = 5.0  # the time from the verdict until the thread ends a process that does not end itself
SAVE_S = 25.0  # LEAVE_S for a process that writes a checkpoint: torchrun waits for 30 s
STORE_S = 10.0  # the longest wait for an answer of the store

watched: ContextVar["Watched | None"] = ContextVar("funcrec_watched", default=None)


class RankLost(RuntimeError):
    """Another rank ended or does not answer. All other ranks raise this error with the same text, so none continues
    alone.

    Example:
      >>> import funcrec as fr
      >>> issubclass(fr.loop.RankLost, RuntimeError)
      True
    """


@dataclass
class Watched:
    """The values that the main thread and the watching thread share."""

    rank: int
    processes: list[list[int]]  # for each rank the machine, the process id and the start time of the process
    store: Store
    silent_s: float
    place: str = "its first work"
    ended: str = ""  # how the main thread ended
    broken: str = ""  # the exchange that broke off in the main thread
    is_left: bool = False  # whether the main thread left after its last step, without an error
    turn: int = 0  # of the watching thread
    is_mute: bool = False  # whether the store does not answer
    verdict: str = ""
    wake: threading.Event = field(default_factory=threading.Event)
    found: threading.Event = field(default_factory=threading.Event)  # the verdict sets this event
    main: int = field(default_factory=threading.get_ident)


@typed
@contextlib.contextmanager
def watch(mesh: Mesh | None) -> Iterator[Callable[[str], None]]:
    """Watch all ranks while the body of the `with` statement runs. `fit` does this by itself.

    If a rank ends, all ranks end. Every rank enters and leaves the block. Whatever ends a rank (an exception, a kill,
    os._exit, a machine that is gone, a stopped process) ends the other ranks with a RankLost that names the rank, what
    it did and what it raised. If an exchange with the lost rank blocks a main thread, the process ends with exit code 1
    and the same text on stderr. An uncaught RankLost prints no traceback. One rank prints its full text, and all other
    ranks print one line.

    All other ranks end within these seconds after the event: 6 for an exception, and for a process on the same machine.
    For a process on another machine, one that is stopped or cannot run Python, and on both sides of a link that is cut:
    30 (or the timeout of the mesh, if that is less) plus 6. For a process that runs and does not come to an exchange:
    the timeout of the mesh (`timeout_s`) plus 11. A process that writes a checkpoint has 25.

    A block inside another has no effect of its own. On CUDA, NCCL itself ends a process whose exchange waits longer
    than the timeout.

    Args:
      mesh: a mesh of real ranks. For other meshes, and for None, there is nothing to watch.

    Yields:
      at: (text) -> None. It reports what this rank begins to do, and raises the RankLost if there is one.

    Example:
      >>> import funcrec as fr
      >>> with fr.loop.watch(fr.Mesh.emulated(data=2)) as at:
      ...     at("step 1")
    """
    if num_processes(mesh) == 1 or watched.get() is not None:
        yield at
        return
    own = meet(sure(mesh))
    thread = threading.Thread(target=keep_watch, args=(own,), name="funcrec.watch", daemon=True)
    thread.start()
    threading.Thread(target=keep_guard, args=(own,), name="funcrec.watch of the store", daemon=True).start()
    token = watched.set(own)
    try:
        yield at
        at(own.place)
    except RankLost as error:
        record(error, own)
        raise
    except BaseException as error:
        if is_broken(error):
            own.broken = f"{error.__cause__ or error}".partition("\n")[0]
        else:
            own.ended = f"{type(error).__name__}: {error}"
        own.wake.set()
        if not own.found.wait(BROKEN_S + STORE_S):
            own.verdict = words("the store of the process group does not answer.", own.broken or own.ended)
        if own.broken:
            lost = RankLost(own.verdict)
            record(lost, own)
            raise lost from None
        raise
    finally:
        watched.reset(token)
        own.is_left = True
        own.wake.set()
        thread.join(STORE_S)


def at(text: str) -> None:
    """Report what this rank does from now on."""
    own = watched.get()
    if own is not None:
        own.place = text
        if own.verdict:
            raise RankLost(own.verdict) from None


def meet(mesh: Mesh) -> Watched:
    """Return a Watched with the processes of all ranks, and a part of the store that no other watch uses."""
    own = [this_machine(), os.getpid(), began(os.getpid()), secrets.randbits(62)]
    ranks = Ranks.of(mesh)
    processes = say(own, ranks)
    store = PrefixStore(f"funcrec.watch.{processes[0][3]}", default_store().clone())
    device = torch.device(sure(mesh.device_mesh).device_type)
    waits = [g._get_backend(device).options._timeout.total_seconds() for g in ranks.groups]
    return Watched(ranks.rank, [c[:3] for c in processes], store, min(SILENT_S, *waits))


# -- the thread --------------------------------------------------------------------------------------------------


def keep_watch(own: Watched) -> None:
    """Write beats and look for a verdict.

    After a verdict it ends the process, if the main thread does not end by itself.
    """
    seen: dict[int, tuple[str, int]] = {}
    turns, broken_turns, end = 0, 0, float("inf")
    while not own.is_left:
        own.turn = turns = turns + 1
        broken_turns += bool(own.broken)
        try:
            found = own.verdict or verdict_of(own, seen, turns, broken_turns)
        except Exception as error:  # any error means that the store no longer answers
            found = words(*without_store(own, seen, error))
        own.verdict = own.verdict or found  # the guard may have been first
        if own.verdict and not own.found.is_set():
            end = time.monotonic() + (SAVE_S if "checkpoint" in own.place else LEAVE_S)
            own.found.set()
        if time.monotonic() > end and not (own.ended or own.broken):
            leave(own)
        own.wake.wait(BEAT_S)
        own.wake.clear()
    with contextlib.suppress(Exception):
        own.store.set(f"left {own.rank}", own.place)


def keep_guard(own: Watched) -> None:
    """End the process if the store does not answer: behind a link that is cut, a call of the store waits forever."""
    turn = still = waited = 0
    while not own.is_left:
        still, turn = (still + 1 if turn == own.turn else 0), own.turn
        if still * BEAT_S > own.silent_s and not own.found.is_set():
            own.is_mute = True
            got = f"no answer for {own.silent_s:g} s: the machine that has it, or the link to it, is gone"
            own.verdict = words("the store of the process group does not answer.", got)
            own.found.set()
        waited += own.is_mute
        if waited * BEAT_S > (SAVE_S if "checkpoint" in own.place else LEAVE_S) and not (own.ended or own.broken):
            leave(own)
        time.sleep(BEAT_S)


def verdict_of(own: Watched, seen: dict[int, tuple[str, int]], turns: int, broken_turns: int) -> str:
    """Return the verdict, or "".

    seen: {rank: (its last beat, this thread's turn when that beat was new)}. Turns do not count while this thread is
    stopped.
    """
    store, others = own.store, [r for r in range(len(own.processes)) if r != own.rank]
    store.set(f"beat {own.rank}", f"{turns} {own.place}, {line_of(own.main)}")
    if store.check(["verdict"]):
        return store.get("verdict").decode()
    if own.ended:
        return judge(own, f"rank {own.rank} (process {os.getpid()}) ended in {own.place}.", own.ended)
    if own.broken:
        store.set(f"broken {own.rank}", own.broken)
    for r in others if own.broken else [(own.rank + 1) % len(own.processes)]:
        note(store, r, seen, turns)
        machine, pid, start = own.processes[r]
        if machine == own.processes[own.rank][0] and not is_running(pid, start):
            if not store.check([f"left {r}"]):
                what = f"rank {r} (process {pid}) ended, last seen in {place_of(seen, r)}."
                return judge(own, what, "no exception: it was killed, or called os._exit")
            if own.broken:
                return judge(own, f"rank {r} (process {pid}) ended before the others.", store_text(store, f"left {r}"))
        elif turns - seen[r][1] > own.silent_s / BEAT_S and not store.check([f"left {r}"]):
            got = f"no beat for {own.silent_s:g} s: stopped, out of reach, or in a call that keeps Python's lock"
            return judge(own, f"rank {r} (process {pid}) is silent, last seen in {place_of(seen, r)}.", got)
    if broken_turns > BROKEN_S / BEAT_S:
        return judge(own, *whom_they_wait_for(own, others, seen))
    return ""


def without_store(own: Watched, seen: dict[int, tuple[str, int]], error: Exception) -> tuple[str, str]:
    """Return (the ranks of this machine that have ended, why), or that the store is gone if none of them has."""
    machine = own.processes[own.rank][0]
    ended = [r for r, (m, pid, start) in enumerate(own.processes) if m == machine and not is_running(pid, start)]
    if not ended:
        hint = "the launcher, or the rank that holds it, has ended"
        return "the store of the process group is gone.", f"{type(error).__name__}: {hint}"
    told = [f"rank {r} (process {own.processes[r][1]})" for r in ended]
    at = " or ".join(dict.fromkeys(place_of(seen, r) for r in ended))
    return (
        f"{' and '.join(told)} ended, last seen in {at}.",
        "no exception here; the store of the process group is gone",
    )


def note(store: Store, rank: int, seen: dict[int, tuple[str, int]], turns: int) -> None:
    beat = store_text(store, f"beat {rank}")
    if rank not in seen or seen[rank][0] != beat:
        seen[rank] = beat, turns


def store_text(store: Store, key: str) -> str:
    """Return the value of the key; "" if the key is not set."""
    return store.get(key).decode() if store.check([key]) else ""


def place_of(seen: dict[int, tuple[str, int]], rank: int) -> str:
    beat = seen[rank][0] if rank in seen else ""
    return beat.partition(" ")[2].rpartition(", ")[0] or "its first work"


def whom_they_wait_for(own: Watched, others: list[int], seen: dict[int, tuple[str, int]]) -> tuple[str, str]:
    """Return (a text with the ranks for which a broken exchange waited, the broken exchange).

    No rank has ended here.
    """
    missing = [r for r in others if not own.store.check([f"broken {r}"])]
    if not missing:
        return "an exchange broke off on all ranks, and none of them ended.", own.broken
    left = {r: own.store.check([f"left {r}"]) for r in missing}
    where = {r: "behind its last step" if left[r] else f"in {seen[r][0].partition(' ')[2]}" for r in missing}
    told = [f"rank {r} (process {own.processes[r][1]}), {where[r]}," for r in missing]
    return f"{' and '.join(told)} did not come to an exchange.", own.broken


def judge(own: Watched, what: str, got: str) -> str:
    """Return the verdict of all ranks, which is the first written verdict."""
    return own.store.compare_set("verdict", "", words(what, got)).decode()


def words(what: str, got: str) -> str:
    hint = "the run again with resume='auto', which `torchrun --max-restarts=N` does"
    return message("funcrec.loop.watch", [Problem(what, got, "all ranks: none of them continues alone", hint)])


def line_of(thread: int) -> str:
    """Return file:line of the call that a thread is in."""
    frame = sys._current_frames().get(thread)
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}" if frame else "no call"


# -- the end -----------------------------------------------------------------------------------------------------


def leave(own: Watched) -> None:
    """End this process, whose main thread waits forever."""
    error = RankLost(own.verdict)
    record(error, own)
    os.write(2, text_of(error, own).encode())
    os._exit(1)


def record(error: RankLost, own: Watched) -> None:
    """Register the error for the last lines of torchrun and of the interpreter."""
    if os.environ.get("TORCHELASTIC_ERROR_FILE"):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        with contextlib.suppress(OSError):
            get_error_handler().record_exception(error)
    sys.excepthook = functools.partial(print_lost, own, sys.excepthook)


def print_lost(own: Watched, before: Callable, kind: type, error: BaseException, trace: object) -> None:
    """Print an uncaught RankLost without its traceback, which does not show what went wrong."""
    if isinstance(error, RankLost):
        sys.stderr.write(text_of(error, own))
    else:
        before(kind, error, trace)


def text_of(error: RankLost, own: Watched) -> str:
    """Return the text that this rank prints: one rank prints the full text, and all other ranks print one line."""
    notes = getattr(error, "__notes__", ())
    with contextlib.suppress(Exception):
        if not own.is_mute and own.store.add("told", 1) > 1:
            return f"rank {own.rank} ends, too: {error}".partition("\n")[0] + "\n"
    return "\n".join([f"{error}", *notes, ""])


def this_machine() -> int:
    """Return a number that identifies the machine, or a container with its own numbers of processes."""
    space = os.readlink("/proc/self/ns/pid") if os.path.exists("/proc/self/ns/pid") else ""
    return zlib.crc32(f"{socket.gethostname()} {space}".encode())


def began(pid: int) -> int:
    """Return the start time of a process in ticks; 0 if it does not run, -1 if the system cannot tell."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            state, *rest = file.read().rpartition(")")[2].split()
            return 0 if state in "ZX" else int(rest[18])
    except FileNotFoundError:
        return 0 if os.path.exists("/proc/self/stat") else -1


def is_running(pid: int, start: int) -> bool:
    """Return whether the process with this id and this start time still runs."""
    if start != -1:
        return began(pid) == start
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
