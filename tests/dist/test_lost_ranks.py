"""A rank that is lost during `fit` ends the other ranks soon. One message names the lost rank and says why."""

import os
import threading
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from programs import lost_ranks
from programs.lost_ranks import LEAVE_S, SLACK_S, TIMEOUT_S

from funcrec.loop import _watch
from funcrec.mesh import is_broken, others_changed

pytestmark = pytest.mark.xdist_group("ranks")
GONE = "no exception: it was killed, or called os._exit"
CASES = {  # (way, moment): the message, the reason, and the seconds until the other ranks have ended
    ("exception", "loader"): ("ended in the loader after step 3.", "ValueError: of my own", 1.0),
    ("exception", "save"): ("ended in the checkpoint of epoch 0, batch 3.", "ValueError: of my own", 1.0),
    ("exit", "step"): ("ended, last seen in ", GONE, 1.0),
    ("kill", "save"): ("ended, last seen in ", GONE, 1.0),
    ("kill", "evaluation"): ("ended, last seen in ", GONE, 1.0),
    ("stop", "callback"): ("is silent, last seen in ", "no beat for 1 s", 2.5),
    ("hang", "loader"): ("in the loader after step 3, lost_ranks.py:", "Timed out waiting", TIMEOUT_S + 2.0),
}


@pytest.mark.parametrize("way, moment", CASES)
def test_a_lost_rank_ends_the_others(way, moment):
    """However a rank is lost, all other ranks end within the stated time. One of them reports in full which rank it
    was, where and why. The last rank reports the loss in one line."""
    where, why, within_s = CASES[way, moment]
    told, rank, took = lost_ranks.lost(way, moment)
    hold_to(told, rank, took, where, why, within_s)


def test_a_rank_lost_within_a_stale_pipeline_ends_the_others():
    """A rank lost inside a stale pipeline within `fr.loop.watch` ends the other rank in the same way. There the next
    batch's rows are being fetched."""
    told, rank, took = lost_ranks.lost("kill", "step", lost_ranks.run_stale)
    hold_to(told, rank, took, "ended, last seen in ", GONE, 1.0)


def test_ranks_that_ended_are_named_without_the_store():
    """If the store goes before a verdict, the error names the ranks of this machine that have ended; else the store."""
    beats = {0: ("7 step 3, fit.py:9", 7)}
    at = lambda *processes: _watch.Watched(2, [["here", *p] for p in processes], None, 1.0)
    here = (os.getpid(), _watch.began(os.getpid()))
    what, why = _watch.without_store(at((2**22 - 1, 1), here, here), beats, RuntimeError("no answer"))
    assert what == f"rank 0 (process {2**22 - 1}) ended, last seen in step 3." and "store" in why
    what, why = _watch.without_store(at(here, here, here), beats, RuntimeError("no answer"))
    assert what == "the store of the process group is gone." and "RuntimeError: " in why


DEAD, HERE = (2**22 - 1, 1), (os.getpid(), _watch.began(os.getpid()))
NO_START = (os.getpid(), -1)
# (the other process, keys of the store, turns, of these since a broken exchange or None): the verdict
VERDICTS = {
    "killed": (DEAD, {}, 9, None, "rank 1 (process 4194303) ended, last seen in step 3.", GONE),
    "ended before a broken exchange": (DEAD, {"left 1": "ValueError: mine"}, 9, 0,
        "rank 1 (process 4194303) ended before the others.", "ValueError: mine"),
    "silent": (HERE, {}, 99, None, "is silent, last seen in step 3.", "no beat for 1 s"),
    "a machine without start times": ((2**22 - 1, -1), {}, 9, None, "ended, last seen in step 3.", GONE),
    "elsewhere": (HERE, {}, 9, 99, "in step 3, fit.py:9, did not come to an exchange.", "the exchange"),
    "left": (HERE, {"left 1": ""}, 9, 99, "behind its last step, did not come to an exchange.", "the exchange"),
    "broken there, too": (NO_START, {"broken 1": "x"}, 9, 99,
        "an exchange broke off on all ranks, and none of them ended.", "the exchange"),
}  # fmt: skip


@pytest.mark.parametrize("name", VERDICTS)
def test_a_verdict_says_who_was_lost(name):
    """A dead process, a silent one, and one that did not come to a broken exchange are named, each with its place; a
    second verdict does not replace the first."""
    other, keys, turns, broken_turns, what, got = VERDICTS[name]
    store = dist.HashStore()
    own = _watch.Watched(0, [["here", *HERE], ["here", *other]], store, 1.0)
    own.broken = "" if broken_turns is None else "the exchange"
    for key, value in ({"beat 1": "7 step 3, fit.py:9"} | keys).items():
        store.set(key, value)
    seen = {1: ("7 step 3, fit.py:9", 7)}
    told = _watch.verdict_of(own, seen, turns, broken_turns or 0)
    assert f"{what}\n  got   {got}" in told
    assert _watch.verdict_of(own, seen, turns, broken_turns or 0) == told == store.get("verdict").decode()


@pytest.mark.parametrize("place", ["step 3", "the checkpoint of epoch 0, batch 3"])
def test_a_store_that_does_not_answer_ends_the_rank(place, monkeypatch):
    """Behind a cut link a call of the store never returns. Then the rank ends, after more time if it writes a
    checkpoint, and prints the reason without the store."""
    held, told = threading.Event(), []
    store = SimpleNamespace(set=lambda *x: None, check=lambda keys: held.wait(), add=lambda *x: held.wait())
    own = _watch.Watched(0, [["here", os.getpid(), 1], ["there", 1, 1]], store, 1.0, place=place)
    monkeypatch.setattr(_watch, "BEAT_S", 0.01)
    monkeypatch.setattr(_watch, "LEAVE_S", 0.5)
    monkeypatch.setattr(_watch, "SAVE_S", 0.6)

    def leave(own):
        told.append(_watch.text_of(_watch.RankLost(own.verdict), own))
        own.is_left = True

    monkeypatch.setattr(_watch, "leave", leave)
    threads = [threading.Thread(target=f, args=(own,), daemon=True) for f in (_watch.keep_watch, _watch.keep_guard)]
    for thread in threads:
        thread.start()
    threads[1].join(60)
    held.set()
    threads[0].join(60)
    assert own.found.is_set() and told == [f"{own.verdict}\n"]
    assert "does not answer" in told[0] and "no answer for 1 s" in told[0]


def test_an_error_of_any_transport_is_known_by_its_cause():
    """An error of a transport that names no file of gloo gets words, and still counts as a broken exchange."""
    cause = dist.DistNetworkError("the peer is gone")
    said = others_changed("funcrec.jit", cause)
    assert "the other ranks did not take part" in str(said) and "the peer is gone" in str(said)
    said.__cause__ = cause
    assert is_broken(said) and not is_broken(ValueError("of my own")) and others_changed("funcrec.jit", said) is said
    own = RuntimeError("of my own")
    assert others_changed("funcrec.jit", own) is own


def hold_to(told, rank, took, where, why, within_s):
    assert took < within_s + LEAVE_S + SLACK_S, told
    assert sorted(text.count("  got   ") for text in told.values()) == [0, 1], told
    for text in told.values():
        assert text.count("\n") == (4 if "  got" in text else 1) and "Traceback" not in text, told
        assert f"rank {rank} (process " in text and where in text
    assert any(why in text for text in told.values())
