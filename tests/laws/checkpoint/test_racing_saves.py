"""Two saves to one path of a store at once leave one whole checkpoint, whenever the requests of one fall."""

import itertools

import pytest
import torch
from programs.failing_store import emptied

import funcrec as fr
from funcrec.checkpoint import _folder
from funcrec.files import Url

MESH = fr.Mesh.emulated(data=2)
ROOT = "memory://runs/one"


def save(number, kind):
    how = {"mesh": None if kind == "file" else MESH, **({} if kind != "kept" else {"keep": 2, "step": 7})}
    return fr.save(ROOT, {"n": number, "w": torch.full((3,), float(number))}, **how)


def with_a_call(monkeypatch, at, call):
    """Call `call` once, before the request number `at` of those that follow. Return a list that then has one item."""
    asked, done, real = itertools.count(1), [], Url.ask

    def ask(self, what, request, **how):
        if next(asked) == at:
            with monkeypatch.context() as patch:
                patch.setattr(Url, "ask", real)
                done.append(call())
        return real(self, what, request, **how)

    monkeypatch.setattr(Url, "ask", ask)
    return done


@pytest.mark.parametrize("kind", ["file", "ranks", "kept"])
def test_one_of_two_saves_stays_whole(kind, monkeypatch):
    """A save is interrupted, before any one of its requests, by all of another save to its path. The path then holds
    all of one of them. A later save removes what the other left, when that is old."""
    found = set()
    for at in itertools.count(1):
        store = emptied()
        save(0, kind)
        count = len(store.find("/runs"))
        with monkeypatch.context() as patch:
            done = with_a_call(patch, at, lambda: save(2, kind))
            path = save(1, kind)
        if not done:
            break
        held = fr.load(path if kind != "kept" else fr.latest(ROOT))
        assert torch.equal(held["w"], torch.full((3,), float(held["n"])))
        found.add(held["n"])
        with monkeypatch.context() as patch:
            patch.setattr(_folder, "STALE_S", -1)
            save(3, kind)
        assert fr.load(path)["n"] == 3 and len(store.find("/runs")) == count, (at, store.find("/runs"))
    assert found == ({1} if kind == "file" else {1, 2})
    assert at > (2 if kind == "file" else 8)
    emptied()
