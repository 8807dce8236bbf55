"""The programs on the pages of the guide run unchanged and print the text of their comments."""

from pathlib import Path

import pytest
from programs.pages import blocks_of, run, told

import funcrec as fr

PAGES = Path(fr.__file__).parent / "guide" / "pages"
# the other pages have their own tests
OWN = [p.stem for p in sorted(PAGES.glob("*.md")) if blocks_of(p.read_text())]


@pytest.mark.parametrize("page", OWN)
def test_a_pages_blocks_run(page, tmp_path, monkeypatch):
    """Each block runs after the blocks before it. Each print gives the text of the print's comment."""
    monkeypatch.chdir(tmp_path)
    blocks = blocks_of((PAGES / f"{page}.md").read_text())
    printed = run(blocks, page)[1]
    assert told(blocks, printed) == printed
