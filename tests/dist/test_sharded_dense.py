"""Dense parameters sharded over ranks train like whole parameters, up to rounding, in a part of the memory.

torch rounds an element in the middle of a vector differently than at the vector's end. An update of a part therefore
does not have the bits of a whole update.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from programs.as_staged import as_staged
from programs.cut_dense import DENSE, options, real, trained
from programs.moving import bits

import funcrec as fr
from funcrec.testing import assert_trees_close

CLOSE = {"rtol": 2e-6, "atol": 2e-6}
WHERE = [({"x": 3}, ("x",)), ({"x": 2, "y": 2}, ("y",)), ({"x": 2, "y": 2}, ("x", "y")), ({"x": 2, "y": 3}, ("y", "x"))]


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("sizes, axes", WHERE, ids=str)
def test_cut_parameters_train_as_whole_ones(sizes, axes, name):
    """Emulated steps give the results of whole parameters: tables, slots, dense parameters, optimizer states and
    running statistics."""
    mesh = fr.Mesh.emulated(**sizes)
    (cut, metrics), (whole, want) = (trained(name, mesh, a, 4) for a in (axes, ()))
    assert_trees_close(fr.gather_state(cut, mesh), fr.gather_state(whole, mesh), **CLOSE)
    assert_trees_close(metrics, want, **CLOSE)
    assert all(x.axes == axes if k != "scale" else x.dim() == 0 for k, x in cut.dense.items())


@pytest.mark.parametrize(
    "sizes, axes", [({"x": 2}, ("x",)), ({"x": 2, "y": 2}, ("y",)), ({"x": 2, "y": 2}, ("y", "x"))], ids=str
)
def test_ranks_keep_their_parts(sizes, axes, ranks):
    """On gloo ranks, sharded parameters train like whole parameters. Each rank keeps ceil(N / n) elements of a leaf of
    N elements."""
    n, world = torch.tensor([sizes[a] for a in axes]).prod().item(), 2 if len(sizes) == 1 else 4
    cut, whole = (ranks(world).run(real, "adam", sizes, a, 4, False) for a in (axes, ()))
    for (state, kept, loss), (want, sizes_whole, want_loss) in zip(cut, whole, strict=True):
        assert_trees_close((state, loss), (want, want_loss), **CLOSE)
        assert kept == {k: -(-m // n) if k != "scale" else 1 for k, m in sizes_whole.items()}


def test_a_staged_step_on_parts_is_the_step(ranks):
    """Staged and donated, on two ranks, the step on parts equals the eager step."""
    fast, plain = (ranks(2).run(as_staged, real, "adam", {"x": 2}, ("x",), 3, compiled) for compiled in (True, False))
    for (state, kept, _), (want, want_kept, _) in zip(fast, plain, strict=True):
        assert kept == want_kept
        assert_trees_close(state, want, rtol=1e-5, atol=1e-6)


@settings(max_examples=10)
@given(st.sampled_from(WHERE), st.sampled_from(WHERE), st.booleans())
def test_states_move_between_cuts(before, after, to_whole):
    """reshard shards parameters and optimizer states again, or makes them whole, with every bit. Training then
    continues in the same way."""
    (sizes, axes), (new_sizes, new_axes) = before, after
    new_axes = () if to_whole else new_axes
    source, mesh = fr.Mesh.emulated(**sizes), fr.Mesh.emulated(**new_sizes)
    state, _ = trained("adam", source, axes, 2)
    whole = fr.gather_state(state, source)
    given_to = options("adam", mesh, new_axes)
    moved = fr.reshard(
        state, given_to["plan"], mesh=mesh, sparse=given_to["sparse"], from_mesh=source, exact=True, dense_axes=new_axes
    )
    assert_trees_close(bits(fr.gather_state(moved, mesh)), bits(whole))
    direct = fr.reshard(whole, given_to["plan"], mesh=mesh, sparse=given_to["sparse"], exact=True)
    got, _ = trained("adam", mesh, new_axes, 2, state=moved, first=2)
    want, _ = trained("adam", mesh, (), 2, state=direct, first=2)
    assert_trees_close(fr.gather_state(got, mesh), fr.gather_state(want, mesh), **CLOSE)


def test_a_batch_that_does_not_fit_leaves_the_parts():
    """With too small a capacity, the parts and the state of their optimizer keep every bit."""
    mesh = fr.Mesh.emulated(x=2)
    state, _ = trained("adam", mesh, ("x",), 1)
    same, metrics = trained("adam", mesh, ("x",), 1, state=state, first=1, capacity=1)
    assert int(metrics["overflow"]) > 0
    assert_trees_close(bits(same), bits(state))


def norm_clipped():
    """Return SGD on gradients clipped to a norm of 1. The norm needs all elements at once."""
    plain = fr.optim.dense(torch.optim.SGD, lr=0.1)

    def update(grads, state, params, step):
        norm = torch.stack([g.norm() for g in grads]).norm()
        return plain.update([g / norm.clamp(min=1) for g in grads], state, params, step)

    return plain._replace(update=update)


def test_an_optimizer_of_more_than_elements_is_refused():
    """An optimizer with a norm over its parameters raises before any parameter is sharded."""
    mesh = fr.Mesh.emulated(x=2)
    with pytest.raises(ValueError, match="update each element on its own"):
        fr.train_step(lambda p, b: p, **{**options("sgd", mesh, ("x",)), "dense": norm_clipped()})


@pytest.mark.parametrize("axes", [(), ("x",)])
def test_merge_keeps_the_tree(axes):
    """A merge that loses or adds a leaf raises before any state is made."""
    mesh = fr.Mesh.emulated(x=2)
    for wrong in (lambda dense, aux: {"w": dense["w"]}, lambda dense, aux: {**dense, "more": dense["w"]}):
        with pytest.raises(ValueError, match="`merge` gives another tree than it takes"):
            trained("sgd", mesh, axes, 1, merge=wrong)


def test_a_wrong_sum_is_seen(monkeypatch):
    """The law of training fails if each part uses its rank's own gradient and not the sum."""
    mesh, cut = fr.Mesh.emulated(x=2), fr.sharding._dense_shards
    whole, summed = trained("sgd", mesh, (), 2)[0], cut.added
    monkeypatch.setattr(cut, "added", lambda parts: parts[0] if len(parts) == mesh.size else summed(parts))
    wrong = trained("sgd", mesh, ("x",), 2)[0]
    w = lambda state: fr.gather_state(state, mesh).dense["w"]
    assert w(wrong).shape == w(whole).shape and not torch.allclose(w(wrong), w(whole), atol=1e-4)
