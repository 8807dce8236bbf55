"""Every public call under invariant: right, eager and compiled, or an error with words. A new name must say which."""

import pytest
from programs.invariant_calls import NONE, NOT_HERE, RAISES, RIGHT, compiled, is_of_the_host, outcome
from programs.public_calls import public_calls

pytestmark = pytest.mark.xdist_group("public_calls")  # the calls are made once
EVERY = 16  # each sixteenth call is compiled; 1 for all


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calls")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        calls = [c for c in public_calls(folder) if c.name not in NOT_HERE]
        yield {c.name: c for c in calls}, {c.name: outcome(c) for c in calls}


def test_a_public_call_is_right_or_raises(found):
    """A public call with noisy numbers has the plain call's floats up to rounding, or raises what the table says."""
    others = {name: text for name, text in found[1].items() if text not in (RIGHT, NONE)}
    assert others.keys() == RAISES.keys(), {n: others.get(n) for n in others.keys() ^ RAISES.keys()}
    for name, text in others.items():
        assert RAISES[name] in text and "got   " in text and "try   " in text, text
    assert sum(text == RIGHT for text in found[1].values()) > 200


def test_a_compiled_call_has_the_eager_bits(found):
    """Programs of the calls that return floats have the bits of the eager calls."""
    calls, outcomes = found
    right = [c for name, c in calls.items() if outcomes[name] == RIGHT and not is_of_the_host(c)]
    assert compiled(right[::EVERY]) == {}
