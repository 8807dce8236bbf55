"""The site that `make docs` makes: the guide's pages, and the reference of the docstrings beside them."""

import os
import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote

import pytest

import funcrec as fr

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.xdist_group("docs")  # the site is built once


class Page(HTMLParser):
    """The ids of a page, its links, and its text without the sources that it shows."""

    def __init__(self, page: str):
        super().__init__()
        self.ids, self.links, self.text, self.depth = set(), [], [], 0
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.ids.add(given.get("id"))
        self.links += [given[k] for k in ("href", "src") if given.get(k)]
        if self.depth or "pdoc-code" in (given.get("class") or ""):
            self.depth += tag == "div"

    def handle_endtag(self, tag):
        self.depth -= bool(self.depth) and tag == "div"

    def handle_data(self, data):
        if not self.depth:
            self.text.append(data)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """{path: page}, by the command of the Makefile, which warns of nothing."""
    line = re.search(r"-m (mkdocs .*)", (ROOT / "Makefile").read_text())[1]
    out = tmp_path_factory.mktemp("docs")
    command = [sys.executable, "-m", *shlex.split(line), "--site-dir", str(out)]
    done = subprocess.run(
        command, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return {p.relative_to(out): Page(p.read_text()) for p in out.rglob("*.html") if p.name != "404.html"}, out


def modules(module: ModuleType = fr):
    """{name: module} of the public ones."""
    inner = [getattr(module, n) for n in module.__all__]
    yield module.__name__, module
    for x in inner:
        if isinstance(x, ModuleType) and hasattr(x, "__all__"):
            yield from modules(x)


def test_every_public_name_has_a_place(site):
    """Each public name of each public module has an anchor on the module's page. Private modules have no page."""
    pages, _ = site
    reference = {".".join(p.with_suffix("").parts[1:]): x for p, x in pages.items() if p.parts[0] == "reference"}
    found = dict(modules())
    assert {"funcrec", "funcrec.data", "funcrec.optim", "funcrec.tree"} <= set(found)
    for name, module in found.items():
        own = {n for n in module.__all__ if not isinstance(getattr(module, n), ModuleType)}
        assert own <= reference[name].ids, f"{name}: {own - reference[name].ids}"
    assert not [name for name in reference if "._" in name]


def test_every_public_name_is_found_by_task(site):
    """The page of tasks links to each public name of funcrec, and to each of its namespaces."""
    links = set(site[0][Path("reference.html")].links)
    for name in fr.__all__:
        x = getattr(fr, name)
        want = f"#{name}" if not isinstance(x, ModuleType) else f"funcrec/{name}"
        assert any(want in link for link in links), name


def test_every_link_leads_somewhere(site):
    """Each link within the site leads to a file, and its fragment to an id there. No page loads anything from
    elsewhere."""
    pages, out = site
    for path, page in pages.items():
        for link in page.links:
            if re.match("[a-z]+:", link):
                assert link.startswith(("https:", "data:")) and not link.endswith((".js", ".css")), (path, link)
                continue
            file, _, anchor = link.partition("#")
            target = (out / path).parent.joinpath(unquote(file)).resolve() if file else out / path
            assert target.is_file(), (path, link)
            to = pages.get(target.relative_to(out.resolve()) if file else path)
            assert not anchor or to is None or unquote(anchor) in to.ids, (path, link)


def test_no_page_names_a_private_module(site):
    """The text that a reader sees, apart from sources, calls everything by its public name."""
    for path, page in site[0].items():
        said = re.findall(r"funcrec(?:\.\w+)*\._[a-z]\w*", " ".join(page.text))
        assert not said, f"{path}: {set(said)}"
