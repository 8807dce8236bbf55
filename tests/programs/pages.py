"""The Python of a page: its blocks, run one after the other as a reader runs them, and what each print says."""

import re
from typing import Any

BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
PRINT = re.compile(r"^ *print\(.*\)(?:  # (.*))?$", re.MULTILINE)


def blocks_of(text: str) -> list[str]:
    return BLOCK.findall(text)


def run(blocks: list[str], page: str) -> tuple[dict[str, Any], list[str]]:
    """(the names afterwards, what was printed)."""
    names, printed = {"__name__": "page"}, []
    names["print"] = lambda *x: printed.append(" ".join(map(str, x)))
    for block in blocks:
        exec(compile(block, page, "exec"), names)
    return names, printed


def told(blocks: list[str], printed: list[str]) -> list[str]:
    """What the comments behind the prints say, and what was printed where there is none."""
    said = [want for block in blocks for want in PRINT.findall(block)]
    assert len(said) == len(printed), (said, printed)
    return [want or got for want, got in zip(said, printed, strict=True)]
