"""Assert that a call is refused in the four parts of an error."""

from collections.abc import Callable

import pytest

PARTS = ("got", "need")


def assert_refused(
    call: Callable, kind: type | tuple[type, ...], *fragments: str, parts: tuple[str, ...] = PARTS
) -> str:
    """Assert that a call raises an error of this kind, whose message has `funcrec`, the fragments and the parts. Return
    the message with its notes."""
    with pytest.raises(kind) as error:
        call()
    text = "\n".join([str(error.value), *getattr(error.value, "__notes__", ())])
    wanted = ("funcrec", *fragments, *(f"\n  {part:<6}" for part in parts))
    assert [words for words in wanted if words not in text] == [], text
    return text
