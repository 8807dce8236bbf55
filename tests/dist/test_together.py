"""Messages of ranks outside of programs: every value in order, and the failure of one rank on all ranks."""

import signal
import time
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

import funcrec as fr
from funcrec.mesh import Ranks, apart_problems, say, together
from funcrec.testing import RankError, RankPool

pytestmark = pytest.mark.xdist_group("ranks")

SIZES = (0, 1, 200, 247, 248, 249, 5000)


class Pair(NamedTuple):
    a: int
    b: tuple


def test_one_process_speaks_to_itself():
    """Without other ranks, `say` and `together` give the value itself. An error of the work is raised unchanged."""
    value, error = object(), KeyError("mine")
    for ranks in (Ranks(), Ranks.of(None), Ranks.of(fr.Mesh.emulated(x=3))):
        assert ranks.is_first and say(value, ranks) == [value]
        assert together(ranks, "call", "do it", lambda: value) == [value]
        with pytest.raises(KeyError) as raised:
            together(ranks, "call", "do it", lambda: (_ for _ in ()).throw(error))
        assert raised.value is error


def test_every_rank_has_the_values_of_all(ranks):
    """Values of any size, different on each rank, come in the order of the ranks, with their types."""
    for got in ranks(2).run(sizes_said, deadline_s=60):
        assert got == [[b"0" * (n if rank == 0 else 3) for rank in range(2)] for n in SIZES] + [[Pair(0, (1,))] * 2]


def sizes_said():
    own = Ranks.of(fr.Mesh.distributed(x=2))
    values = [str(0).encode() * (n if own.is_first else 3) for n in SIZES]
    return [say(x, own) for x in (*values, Pair(0, (1,)))]


def test_the_order_on_several_axes_is_that_of_the_ranks(ranks):
    """On a mesh of two axes, values are in the order of ranks, the last axis fastest. The ranks of a mesh are the
    running ranks."""
    for said in ranks(4).run(places_said, deadline_s=60):
        assert said == [(rank, {"x": rank // 2, "y": rank % 2}) for rank in range(4)]


def places_said():
    mesh = fr.Mesh.distributed(x=2, y=2)
    own = Ranks.of(mesh)
    return say((own.rank, mesh.coordinates), own)


class Empty(ValueError):
    """An error whose truth value is false."""

    def __len__(self):
        return 0


def interrupt():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores the signal
    try:
        signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def full():
    raise OSError(28, "No space left on device")


def empty():
    raise Empty("nothing")


FAILURES = {
    "an error of its own": (full, "OSError", "rank 1 could not do it", "OSError: [Errno 28] No space left on device"),
    "an error that is false": (empty, "ValueError", "rank 1 could not do it", "Empty: nothing"),
    "an interrupt": (interrupt, "RuntimeError", "rank 1 could not do it", "KeyboardInterrupt"),
    "a result that cannot be sent": (lambda: lambda: 0, "AttributeError", "rank 1 could not do it", "pickle"),
}


@pytest.mark.parametrize("how", FAILURES)
def test_a_failure_of_one_rank_is_reported_on_all(how, ranks):
    """The rank that fails raises its own error. All other ranks raise at once an error of the same kind, with the
    failed rank's name and words. Later messages pair again."""
    _, kind, *fragments = FAILURES[how]
    (there, number, after, took_s), (here, *_) = ranks(2).run(failed_on_one, how, deadline_s=60)
    assert took_s < 20 and after == [0, 1]
    assert all(x in there for x in fragments), there
    assert there.startswith({"AttributeError": "RuntimeError", "Empty": "ValueError"}.get(kind, kind)), there
    assert number == (28 if kind == "OSError" else None)
    assert here and "rank 1 could not" not in here


def failed_on_one(how):
    own, told, number, begin = Ranks.of(fr.Mesh.distributed(x=2)), "", None, time.monotonic()
    try:
        together(own, "funcrec.test", "do it", FAILURES[how][0] if own.rank == 1 else lambda: 0)
    except BaseException as error:
        told, number = f"{type(error).__name__}: {error}", getattr(error, "errno", None)
    return told, number, say(own.rank, own), time.monotonic() - begin


def test_a_rank_that_does_not_come_is_waited_for_until_the_timeout():
    """A rank that never calls makes the other ranks raise an error after the timeout of the mesh."""
    begin = time.monotonic()
    with RankPool(2, timeout_s=30) as pool, pytest.raises(RankError, match="rank 0: RuntimeError"):
        pool.run(alone, deadline_s=60)
    assert time.monotonic() - begin < 40


def alone():
    own = Ranks.of(fr.Mesh.distributed(x=2, timeout_s=2.0))
    say(0, own) if own.is_first else time.sleep(6)


def test_a_group_of_some_ranks_speaks_alone(ranks):
    """Ranks of a process group exchange values only within the group."""
    assert ranks(4).run(halves_said, deadline_s=60) == [[0, 1], [0, 1], [2, 3], [2, 3]]


def halves_said():
    first, second = dist.new_group([0, 1]), dist.new_group([2, 3])
    own = Ranks.of_group(first if dist.get_rank() < 2 else second)
    assert own.size == 2 and own.rank == dist.get_rank() % 2
    return say(dist.get_rank(), own)


def test_arguments_that_differ_are_named():
    """For each argument that differs from that of rank 0, the problem names the first other rank and both values."""
    same, other = {"plan": "a", "mesh": "m"}, {"plan": "b", "mesh": "m"}
    assert list(apart_problems([same, same])) == []
    (problem,) = apart_problems([same, same, other])
    assert problem.what == "`plan` is not the same on all ranks."
    assert (problem.got, problem.need) == ("b on rank 2", "a, as on rank 0")


def test_tensors_and_modes_around_do_not_matter(ranks):
    """Under a vmap, or with another default device, ranks get the values that the ranks sent."""
    for said in ranks(2).run(said_inside, deadline_s=60):
        assert said == [[0, 1]] * 2


def said_inside():
    own, found = Ranks.of(fr.Mesh.distributed(x=2)), []
    torch.func.vmap(lambda x: (found.append(say(own.rank, own)), x)[1])(torch.zeros(2))
    with torch.device("meta"):
        found.append(say(own.rank, own))
    return found
