"""The programs of the guide's pages run as they stand and print what their comments say."""

from pathlib import Path

import pytest
from programs.pages import blocks_of, run, told

import funcrec as fr

PAGES = Path(fr.__file__).parent / "guide" / "pages"
OWN = [p.stem for p in sorted(PAGES.glob("*.md")) if blocks_of(p.read_text())]  # others' pages have tests of their own


@pytest.mark.parametrize("page", OWN)
def test_a_pages_blocks_run(page, tmp_path, monkeypatch):
    """Each block runs behind those before it, and each print gives its comment."""
    monkeypatch.chdir(tmp_path)
    blocks = blocks_of((PAGES / f"{page}.md").read_text())
    printed = run(blocks, page)[1]
    assert told(blocks, printed) == printed
