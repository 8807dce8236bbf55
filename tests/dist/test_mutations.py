"""Every mutation of a rule makes a law fail. `mutations.py` prints the mutations."""

import functools

import pytest
from programs.mutations import MUTATIONS, changed, why_red

pytestmark = pytest.mark.xdist_group("mutations")  # an unchanged law is run once


@functools.cache
def why_red_unchanged(law, args):
    return why_red(functools.partial(law, *args))


@pytest.mark.parametrize("which", MUTATIONS)
def test_a_wrong_rule_is_seen(which):
    """A law fails when one of the law's rules is changed."""
    mutation = MUTATIONS[which]
    assert why_red_unchanged(getattr(mutation.law, "func", mutation.law), getattr(mutation.law, "args", ())) is None
    with changed(mutation):
        assert why_red(mutation.law)
