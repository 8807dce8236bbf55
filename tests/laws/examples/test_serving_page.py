"""Every program and every shell line of funcrec/examples/SERVING.md runs unchanged, except for the ports."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from programs import answers, small_movielens

import funcrec as fr

pytestmark = pytest.mark.xdist_group("serving")
PAGE = Path(fr.__file__).parent / "examples" / "SERVING.md"
BLOCKS = re.findall(r"```(python|sh)\n(.*?)```", PAGE.read_text(), re.DOTALL)
PROGRAMS = [block for kind, block in BLOCKS if kind == "python"]


def batch(lists):
    return fr.Batch(fr.KeyedJaggedTensor.from_lists(lists))


def free_ports(n):
    """Return free ports of the loopback address."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
    ports = [s.getsockname()[1] for s in held]
    for s in held:
        s.close()
    return ports


class Page:
    """The results of the page's blocks: names, printed lines, responses to curl, servers."""

    def __init__(self):
        self.names, self.printed, self.answers, self.servers = {"__name__": "page"}, [], [], []
        self.names["print"] = lambda *x: self.printed.append(" ".join(map(str, x)))
        self.ports = dict(zip(("8080", "8081", "8082"), map(str, free_ports(3)), strict=True))
        self.environ = {k: v for k, v in os.environ.items() if k != "FUNCREC_SERVE"}
        self.environ["PATH"] = f"{Path(sys.executable).parent}:{self.environ['PATH']}"
        self.environ["PYTHONPATH"] = str(Path(fr.__file__).parents[1])

    def run(self, kind, block):
        for said, own in self.ports.items():
            block = block.replace(said, own)
        if kind == "python":
            exec(compile(block, PAGE.name, "exec"), self.names)
        elif " serve " in block:
            self.start(block)
        else:
            done = subprocess.run(["bash", "-c", block], env=self.environ, capture_output=True, text=True, timeout=60)
            self.answers.append(json.loads(done.stdout))

    def start(self, line):
        self.servers.append(subprocess.Popen(["bash", "-c", f"exec {line}"], env=self.environ))
        port = int(re.search(r"--port (\d+)", line)[1])
        end = time.monotonic() + 60
        while time.monotonic() < end and self.servers[-1].poll() is None:
            with socket.socket() as s:
                if not s.connect_ex(("127.0.0.1", port)):
                    return
            time.sleep(0.1)
        pytest.fail(f"no server: {line}")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Return the page after a run of its blocks in order, in an empty folder, with a small MovieLens."""
    answers.build()
    folder, own = tmp_path_factory.mktemp("serving"), fr.data.movielens_1m
    small = small_movielens.write(tmp_path_factory.mktemp("ml"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(fr.data, "movielens_1m", lambda: own(small))
        made = Page()
        try:
            for kind, block in BLOCKS:
                made.run(kind, block)
            yield made
        finally:
            for server in made.servers:
                server.terminate()
            ended = [server.wait(20) for server in made.servers]
    assert ended == [0, 0]


@pytest.mark.parametrize("block", PROGRAMS)
def test_a_program_has_twenty_lines(block):
    """Without imports, a program on the page has at most twenty lines of at most 120 columns."""
    lines = [x for x in block.splitlines() if x.strip() and not x.startswith("import ")]
    assert len(lines) <= 20 and max(map(len, lines)) <= 120


def test_the_page_prints_what_it_says(page):
    """Each print on the page gives the text of the print's comment."""
    assert page.printed == re.findall(r"^print\(.*\)  # (.*)$", "".join(PROGRAMS), re.MULTILINE) != []


def test_curl_is_answered_as_python(page):
    """The response to curl equals the package's result in Python, with the exported weights."""
    (answer,) = page.answers
    asked = batch({"user": [[3]], "item": [[17]], "genre": [[1, 2]]})
    want = fr.load_package("model")(asked)["click"]
    assert (answer["version"], answer["ids_out_of_range"]) == ("monday", 0)
    torch.testing.assert_close(torch.tensor(answer["outputs"]["click"]), want, rtol=0, atol=1e-6)


def test_the_server_has_the_newest_weights(page):
    """After /reload and /delta, the response of the server equals the eager result of the newest parameters,
    quantised."""
    names = page.names
    ids = {"user": [[3], [80]], "item": [[17], [60]], "genre": [[1, 2], []]}
    answer = names["ask"]("/predict", {"ids": ids}, int(page.ports["8080"]))
    want = names["predict"](names["quantised"](names["run"].state), batch(ids))["click"]
    old = fr.load_package("model")(batch(ids))["click"]
    got = torch.tensor(answer["outputs"]["click"])
    assert answer["version"] == "wednesday" and not torch.allclose(got, old, atol=1e-4)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


def test_recommendations_are_the_best_unseen_items(page):
    """Over HTTP a user gets the unseen items with the highest scores, best first."""
    names, port = page.names, int(page.ports["8081"])
    seen = [[0, 17], [0, *range(1, 40)], []]
    ids = {"user": [[3], [4], [999]], "seen": seen}
    answer = names["ask"]("/predict", {"ids": ids}, port)
    towers, params = names["towers"], names["params"]
    scores = towers.query(params, batch(ids)) @ towers.candidate(params, names["items"]).T
    for b, bag in enumerate(seen):
        scores[b, bag] = -torch.inf
    best = scores.topk(10).values
    rows = torch.tensor(answer["outputs"]["item"])
    torch.testing.assert_close(torch.tensor(answer["outputs"]["score"]), best, rtol=0, atol=1e-5)
    torch.testing.assert_close(scores.gather(1, rows), best, rtol=0, atol=1e-5)
    assert answer["ids_out_of_range"] == 1 and not {17} & set(answer["outputs"]["item"][0])
