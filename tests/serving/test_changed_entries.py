"""Python and C++ refuse the same changed entries of a manifest and of a header of weights, in the same words."""

import copy
import hashlib
import json
import os
import random
import re
import shutil

import pytest
import torch
from programs import answers, every_dtype, tensor_files

import funcrec as fr
from funcrec.serve._weights import FILE

pytestmark = pytest.mark.xdist_group("every_dtype")

BLANK, PAGE = "0" * 64, 4096
# the number of tried changes per entry
SHARE = {"manifest.json": 1, FILE: 10}
if os.environ.get("HYPOTHESIS_PROFILE") == "long":
    SHARE = dict.fromkeys(SHARE, 1000)


def others(x):
    """Return other values for an entry x."""
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
    """Yield the paths of all entries. In a list, and among tensors, only the first and the last item count."""
    yield path
    few = isinstance(x, list) or "__metadata__" in x if isinstance(x, dict | list) else False
    keys = list(x) if isinstance(x, dict) else range(len(x)) if isinstance(x, list) else ()
    if few:
        keys = list(dict.fromkeys([*keys[:3], *keys[-1:]])) if isinstance(x, dict) else sorted({*keys[:1], *keys[-1:]})
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


def written(content, fits):
    """Return a manifest as funcrec writes it. If `fits`, its digest matches, so that only the content can be
    refused."""
    text = json.dumps(content, indent=1) + "\n"
    if not fits:
        return text.encode()
    pattern = re.compile(r'("(?:digest|model\.pt2|encoding\.frc)": )"[0-9a-f]{64}"')
    own = hashlib.sha256(pattern.sub(rf'\1"{BLANK}"', text).encode()).hexdigest()
    return re.sub(r'("digest": )"[0-9a-f]{64}"', rf'\1"{own}"', text, count=1).encode()


def file_of(content, body, fits):
    """Return the weights with another header. If `fits`, the header's CRC matches."""
    text = tensor_files.text_of(content)
    text = text.ljust(-(-(8 + len(text)) // PAGE) * PAGE - 8)
    return tensor_files.sealed(text, body, PAGE) if fits else len(text).to_bytes(8, "little") + text + body


def said_by(act, kinds):
    """Return (what, got, need) of the first problem in the error, or None without an error."""
    try:
        act()
    except kinds as error:
        text = re.sub(r"\Afuncrec\.[\w.]+: ", "", str(error))
        return re.match(r"(.*)\n  got   (.*)\n  need  (.*)", text).groups()


@pytest.fixture(scope="module")
def package_and_running(folder, built):
    with answers.Answers(built / "funcrec-answers", folder, 1, 1, 1) as running:
        yield fr.load_package(folder), running


@pytest.mark.parametrize("name", ["manifest.json", FILE])
def test_changed_entries_are_refused_in_the_same_words(name, package_and_running, folder, tmp_path):
    """Any entry may be changed to any other value, with a matching digest or not. Both languages refuse the change with
    the same problem, got and need, or both accept the change and give the same outputs. They accept only changes of the
    weights' version and of unread entries, and no change of a manifest."""
    package, running = package_and_running
    there = tmp_path / "copy"
    shutil.copytree(folder, there, copy_function=os.link)
    (there / name).unlink()
    batch, rng, taken, told = every_dtype.batch(3), random.Random(0), set(), set()
    ids, want = batch.ids, package(batch)
    ask = lambda: running.run(ids.num_bags, batch.dense, ids.values, ids.offsets, ids.weights)
    before, data = ask(), (folder / name).read_bytes()
    content, body = (json.loads(data), b"") if name == "manifest.json" else tensor_files.parts(data)
    in_python = (lambda: fr.load_package(there)) if name == "manifest.json" else (lambda: package.swap(there))
    in_cpp = (lambda: running.open(there)) if name == "manifest.json" else (lambda: running.swap(there))
    for path in places(content):
        inner = content
        for k in path:
            inner = inner[k]
        values = others(inner)
        for value in rng.sample(values, min(SHARE[name], len(values))):
            new = changed(content, path, value)
            fits = rng.random() < 0.8
            (there / name).write_bytes(written(new, fits) if name == "manifest.json" else file_of(new, body, fits))
            said = said_by(in_python, (ValueError, OSError))
            assert said == said_by(in_cpp, answers.AnswersError), (path, value)
            told.add(said and re.sub(r"`.*`", "", said[0]))
            if said is None:
                taken.add(path)
                assert all(torch.equal(x, want[n]) for n, x in package(batch).items())
                assert all(torch.equal(x, y) for x, y in zip(ask().outputs, before.outputs, strict=True))
    may = {("__metadata__",), ("__metadata__", "version"), ("__metadata__", "crc32")}  # a write renews crc32
    assert taken <= (may if name == FILE else set()), taken
    assert len(told) >= 4
