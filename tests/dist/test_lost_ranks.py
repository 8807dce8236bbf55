"""A rank that is lost during `fit` ends the other ranks soon. One message names the lost rank and says why."""

import pytest
from programs import lost_ranks
from programs.lost_ranks import LEAVE_S, SLACK_S, TIMEOUT_S

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


def hold_to(told, rank, took, where, why, within_s):
    assert took < within_s + LEAVE_S + SLACK_S, told
    assert sorted(text.count("  got   ") for text in told.values()) == [0, 1], told
    for text in told.values():
        assert text.count("\n") == (4 if "  got" in text else 1) and "Traceback" not in text, told
        assert f"rank {rank} (process " in text and where in text
    assert any(why in text for text in told.values())
