"""The programs on the guide's pages run unchanged and print what their comments say."""

from pathlib import Path

import pytest
from programs.pages import blocks_of, run, told

import funcrec as fr

PAGES = Path(fr.__file__).parent / "guide" / "pages"
# the other pages have their own tests
OWN = [p.stem for p in sorted(PAGES.glob("*.md")) if blocks_of(p.read_text())]


@pytest.mark.parametrize("page", OWN)
def test_a_pages_blocks_run(page, tmp_path, monkeypatch):
    """Each block runs after the blocks before it, and each print gives its comment's text."""
    monkeypatch.chdir(tmp_path)
    blocks = blocks_of((PAGES / f"{page}.md").read_text())
    printed = run(blocks, page)[1]
    assert told(blocks, printed) == printed
