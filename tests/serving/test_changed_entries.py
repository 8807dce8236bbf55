"""Each entry of a package's JSON files, changed alone, is refused with the same words in Python and in C++."""

import copy
import hashlib
import json
import os
import random
import re
import shutil

import pytest
import torch
from programs import answers, every_dtype

import funcrec as fr

pytestmark = pytest.mark.xdist_group("every_dtype")

BLANK = "0" * 64
# the number of changes tried per entry
SHARE = {"manifest.json": 2, "weights.json": 15}
if os.environ.get("HYPOTHESIS_PROFILE") == "long":
    SHARE = dict.fromkeys(SHARE, 1000)


def others(x):
    """List other values for an entry."""
    kinds = [None, True, "", "no", -1, 0, 1.5, 2**47, 2**63, 10**30, [], [x], {}, {"name": x}]
    near = {
        int: lambda: [x + 1, x - 1, 2 * x, -x, x + 4096, x - 4096, float(x), str(x)],
        str: lambda: [x + " ", x[:-1], x.upper(), x + "2", [x]],
        list: lambda: [x[1:], x[:-1], x + x[:1], x[::-1], [*x, None]],
        dict: lambda: [{**x, "more": 1}, *({k: v for k, v in x.items() if k != own} for own in x)],
        bool: lambda: [not x, int(x)],
    }
    return [y for y in kinds + near.get(type(x), list)() if json.dumps(y) != json.dumps(x)]


def places(x, path=()):
    """Yield the paths of all entries; of a list, only the first and the last item."""
    yield path
    keys = list(x) if isinstance(x, dict) else sorted({0, len(x) - 1}) if isinstance(x, list) and x else ()
    for k in keys:
        yield from places(x[k], (*path, k))


def changed(content, path, value):
    if not path:
        return value
    out = copy.deepcopy(content)
    inner = out
    for k in path[:-1]:
        inner = inner[k]
    inner[path[-1]] = value
    return out


def written(content):
    """Write the content as funcrec does, with a matching digest, so that the content itself is what gets refused."""
    text = json.dumps(content, indent=1) + "\n"
    pattern = re.compile(r'("(?:digest|model\.pt2|encoding\.frc)": )"[0-9a-f]{64}"')
    own = hashlib.sha256(pattern.sub(rf'\1"{BLANK}"', text).encode()).hexdigest()
    return re.sub(r'("digest": )"[0-9a-f]{64}"', rf'\1"{own}"', text, count=1)


def said_by(act, kinds):
    """Return (what, got, need) of the first problem that is raised, or None."""
    try:
        act()
    except kinds as error:
        text = re.sub(r"\Afuncrec\.[\w.]+: ", "", str(error))
        return re.match(r"(.*)\n  got   (.*)\n  need  (.*)", text).groups()


@pytest.fixture(scope="module")
def package_and_running(folder, built):
    with answers.Answers(built / "funcrec-answers", folder, 1, 1, 1) as running:
        yield fr.load_package(folder), running


@pytest.mark.parametrize("name", ["manifest.json", "weights.json"])
def test_changed_entries_are_refused_in_the_same_words(name, package_and_running, folder, tmp_path):
    """Any entry may be changed to any other value, with a matching digest or not. Both languages refuse it with the
    same problem, got and need, or both accept it and give the same outputs. Only changes of the weights' version, of
    their order, and of unread entries are accepted; none of a manifest."""
    package, running = package_and_running
    there = tmp_path / "copy"
    shutil.copytree(folder, there, copy_function=os.link)
    (there / name).unlink()
    batch, rng, taken, told = every_dtype.batch(3), random.Random(0), set(), set()
    ids, want = batch.ids, package(batch)
    ask = lambda: running.run(ids.num_bags, batch.dense, ids.values, ids.offsets, ids.weights)
    before, content = ask(), json.loads((folder / name).read_text())
    in_python = (lambda: fr.load_package(there)) if name == "manifest.json" else (lambda: package.swap(there))
    in_cpp = (lambda: running.open(there)) if name == "manifest.json" else (lambda: running.swap(there))
    for path in places(content):
        inner = content
        for k in path:
            inner = inner[k]
        values = others(inner)
        for value in rng.sample(values, min(SHARE[name], len(values))):
            new = changed(content, path, value)
            text = written(new) if rng.random() < 0.8 else json.dumps(new, indent=1) + "\n"
            (there / name).write_text(text)
            said = said_by(in_python, (ValueError, OSError))
            assert said == said_by(in_cpp, answers.AnswersError), (path, value)
            told.add(said and re.sub(r"`.*`", "", said[0]))
            if said is None:
                taken.add(path)
                assert all(torch.equal(x, want[n]) for n, x in package(batch).items())
                assert all(torch.equal(x, y) for x, y in zip(ask().outputs, before.outputs, strict=True))
    # the offset of a tensor without bytes
    may = lambda path: path in ((), ("version",), ("tensors",)) or len(path) == 2 or path[2] == "offset"
    assert all(name == "weights.json" and may(path) for path in taken), taken
    assert len(told) >= 4
