"""The pages that `make docs` makes of the docstrings."""

import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest

import funcrec as fr

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.xdist_group("docs")  # the pages are made once


class Anchors(HTMLParser):
    """The ids of a page, and its text without the sources that it shows."""

    def __init__(self, page: str):
        super().__init__()
        self.ids, self.text, self.depth = set(), [], 0
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.ids.add(given.get("id"))
        if self.depth or "pdoc-code" in (given.get("class") or ""):
            self.depth += tag == "div"

    def handle_endtag(self, tag):
        self.depth -= bool(self.depth) and tag == "div"

    def handle_data(self, data):
        if not self.depth:
            self.text.append(data)


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """{module: its page}, by the command of the Makefile."""
    line = re.search(r"-m (pdoc .*)", (ROOT / "Makefile").read_text())[1]
    out = tmp_path_factory.mktemp("docs")
    command = [str(out) if x == "build/docs" else x for x in shlex.split(line)]
    subprocess.run([sys.executable, "-m", *command], check=True, capture_output=True, cwd=ROOT)
    return {".".join(p.relative_to(out).with_suffix("").parts): Anchors(p.read_text()) for p in out.rglob("*.html")}


def modules(module: ModuleType = fr):
    """{name: module} of the public ones."""
    inner = [getattr(module, n) for n in module.__all__]
    yield module.__name__, module
    for x in inner:
        if isinstance(x, ModuleType) and hasattr(x, "__all__"):
            yield from modules(x)


def test_every_public_name_has_a_place(pages):
    """Each public name of each public module has an anchor on the module's page; no page is of a private module."""
    found = dict(modules())
    assert {"funcrec", "funcrec.data", "funcrec.optim", "funcrec.tree"} <= set(found)
    for name, module in found.items():
        own = {n for n in module.__all__ if not isinstance(getattr(module, n), ModuleType)}
        assert own <= pages[name].ids, f"{name}: {own - pages[name].ids}"
    assert not [name for name in pages if "._" in name]


def test_no_page_names_a_private_module(pages):
    """What a reader sees, sources apart, calls everything by its public name."""
    for name, page in pages.items():
        said = re.findall(r"funcrec(?:\.\w+)*\._[a-z]\w*", " ".join(page.text))
        assert not said, f"{name}: {set(said)}"
