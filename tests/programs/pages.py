"""Run a page's Python blocks in order, as a reader would, and compare the printed lines with the page's comments."""

import re
from typing import Any

BLOCK = re.compile(r"```python\n(.*?)```(?:\n+```text\n(.*?)\n```)?", re.DOTALL)
LINE, MARK = "\n", "\\n"
PRINT = re.compile(r"^ *print\(.*\)(?:  # (.*))?$", re.MULTILINE)


def blocks_of(text: str) -> list[str]:
    """Return the Python blocks. A block of text right after one is the comment of its last print."""
    return [
        f"{code.rstrip()}  # {shown.replace(LINE, MARK)}\n" if shown else code for code, shown in BLOCK.findall(text)
    ]


def run(blocks: list[str], page: str) -> tuple[dict[str, Any], list[str]]:
    """Return (the names after the last block, the printed lines)."""
    names, printed = {"__name__": "page"}, []
    names["print"] = lambda *x: printed.append(" ".join(map(str, x)))
    for block in blocks:
        exec(compile(block, page, "exec"), names)
    return names, printed


def told(blocks: list[str], printed: list[str]) -> list[str]:
    """Return the expected text of each print: the print's comment, or the printed text if there is no comment."""
    said = [want for block in blocks for want in PRINT.findall(block)]
    assert len(said) == len(printed), (said, printed)
    return [want.replace(MARK, LINE) or got for want, got in zip(said, printed, strict=True)]
