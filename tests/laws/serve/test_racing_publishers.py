"""Of two publishers of one folder in a store, one goes on and the other raises, whenever the requests of one fall."""

import pytest
from programs.failing_store import emptied, with_a_call
from programs.fresh import STEP, batch, begun, bits, held

import funcrec as fr
from funcrec.files import as_path
from funcrec.serve.freshness import _published

pytestmark = pytest.mark.xdist_group("packages")
ROOT = "memory://runs/published"
REFUSED = "has another publisher"


@pytest.fixture(scope="module")
def runs():
    out = [begun()]
    for n in range(6):
        out.append(STEP(out[-1], batch(n, 9))[0])
    return out


@pytest.fixture(scope="module")
def right(runs):
    return [bits(dict(sorted(fr.tree.paths(held(run.state, "coded"))))) for run in runs]


class Publisher:
    """A publisher of the runs' states, which counts its steps from `step` on."""

    def __init__(self, package, runs, step):
        self.runs, self.step = runs, step
        self.tell = fr.publish(ROOT, package, every_steps=1, keep=2)

    def publish(self):
        """Publish the next step; return whether the folder is still this publisher's."""
        self.step += 1
        try:
            self.tell(fr.loop.Record("step", 0, self.step, {}, self.runs[self.step % len(self.runs)]))
        except ValueError as error:
            assert REFUSED in str(error) and "\n  need  one publisher of a folder" in str(error), error
            return False
        return True


def is_followed(package, right):
    """Follow the folder; the package then has the bits of the step that its version names."""
    package.follow(ROOT)
    step = int(package.version.split("-")[2])
    assert bits(package.params) == right[step % len(right)], package.version
    return step


@pytest.mark.parametrize("begins", ["both", "second", "first"])
def test_one_of_two_publishers_goes_on_whichever_request_the_other_precedes(begins, coded, runs, right, monkeypatch):
    """A publication is interrupted, before any one of its requests, by all of another publisher's publication. Then one
    of both goes on, and the other raises. Packages that follow have the bits of the steps that their versions name."""
    outcomes, at = set(), 0
    while True:
        at += 1
        store, near = emptied(), fr.load_package(coded)
        first, second = Publisher(coded, runs, 0), Publisher(coded, runs, 100)
        if begins == "second":
            assert first.publish() and first.publish()
        if begins == "first":
            assert second.publish()
        if begins != "both":
            is_followed(near, right)
        other = []
        with monkeypatch.context() as patch:
            asked = with_a_call(patch, at, lambda own=second, said=other: said.append(own.publish()))
            own = first.publish()
        if not other:
            break
        assert own or other[0]
        is_followed(near, right)
        goes = [first.publish() if own else False, second.publish() if other[0] else False]
        if not (own and other[0]):
            assert goes == [own, other[0]]
        assert goes.count(True) == 1, (at, own, other, goes)
        last = (first, second)[goes.index(True)]
        assert last.publish()
        assert is_followed(near, right) == is_followed(fr.load_package(coded), right) == last.step
        left = [x.name for x in as_path("test", ROOT, remote=True).iterdir()]
        assert {p.run for p in map(_published.piece_of, left) if p} == {near.version[-6:]}
        assert len([x for x in left if _published.claim_of(x) >= 0]) == 1, left
        outcomes.add((own, other[0], goes[0]))
    assert at == asked[0] + 1 and at > 10 and len(outcomes) > 1
    store.store.clear()


def test_a_name_is_created_once():
    """create writes an object where none is, and leaves another's bytes."""
    emptied()
    url = as_path("test", "memory://runs/name", remote=True)
    assert url.create(b"a") and not url.create(b"b") and url.read_bytes() == b"a"
    url.unlink()
    assert url.create(b"b") and url.read_bytes() == b"b"
    emptied()
