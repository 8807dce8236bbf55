"""Mutations of collectives, exchanges, sharded lookups and steps. For each mutation, a law must fail.

The tests use the same table.

PYTHONPATH=tests .venv/bin/python -m programs.mutations
"""

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from funcrec.kernels import ops

import funcrec as fr
from funcrec.core._tree import replace
from funcrec.mesh import _exchange as exchange
from funcrec.mesh import _joined
from funcrec.sharding import _combine, _gather_terms, _update
from funcrec.sharding import _lanes as route_ids
from funcrec.sharding import _route_distinct as unique
from funcrec.sharding import _sequences as sequence
from funcrec.sharding._transport import POOLED
from funcrec.testing import assert_trees_close
from funcrec.train import _rank_step
from programs import lookup_transforms as lookups
from programs import overflow, training
from programs import sequence_models as sequences
from programs.transforms import DENSE, cells, dense_transforms, values

TINY = {"rtol": 1e-6, "atol": 1e-6}


class Mutation(NamedTuple):
    """One mutation: owner.name, or owner[name] of a dict, becomes wrong(the original). Then `law` must raise."""

    owner: Any
    name: str
    wrong: Callable[[Any], Any]
    law: Callable[[], None]


# -- laws: the command prints the first line of each ----------------------------------------------------------------


def is_map(name, n=4):
    """Law: a collective and its transforms equal the map of all ranks' values and the transforms of that map."""
    want = {k: f(values(n)) for k, f in dense_transforms(DENSE[name]).items()}
    assert_trees_close(cells(fr.Mesh.emulated(x=n), name), want, rtol=1e-12, atol=1e-12)


def looks_up(name):
    """Law: a sharded lookup and all its transforms equal the plain lookup and its transforms."""
    axes = {"x": 2}
    assert_trees_close(
        lookups.cells(fr.Mesh.emulated(**axes), name), lookups.wanted(axes, name), rtol=1e-12, atol=1e-12
    )


def has_bits(kind):
    """Law: lookups, sequences and the gradients of their tables have the bits of one process."""
    model = sequences.fixed(fr.Mesh.emulated(x=2), kind)
    assert_trees_close(sequences.mapped(model), sequences.whole(model))


def is_deduplicated():
    """Law: with dedup=True sequences have the bits of one process. Gradients differ by rounding."""
    mesh, plan, tables, _, features = sequences.fixed(fr.Mesh.emulated(x=2), "row_wise")
    lists = {k: [[(i + j * j) % 4 for j in range(3)] for i in range(4)] for k in "uv"}
    weights = {k: [[0.1 + 0.3 * j for j in range(3)] for _ in range(4)] for k in "uv"}
    model = mesh, plan, tables, fr.KeyedJaggedTensor.from_lists(lists, weights=weights, dtype=torch.int64), features
    got, want = sequences.mapped(model, dedup=True), sequences.whole(model)
    assert_trees_close(got[0], want[0])
    assert_trees_close(got[1], want[1], **TINY)


def keeps_state():
    """Law: a batch that does not fit changes no bit, and is counted."""
    overflow.assert_unchanged(*overflow.overflown(fr.Mesh.emulated(x=2), "row_wise"), "row_wise")


def trains(name, kind, most_joined=_joined.MOST_JOINED):
    """Law: steps on a mesh equal the steps of one process."""
    mesh = fr.Mesh.emulated(x=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_joined, "MOST_JOINED", most_joined)
        got = training.together(name, mesh, training.plan_of(kind, mesh.shape), 2, 4, exact=True)
    assert_trees_close(got[:3], training.alone(name, 2, 2, 4)[:3], rtol=2e-6, atol=2e-6)


def law(f, *args):
    return functools.update_wrapper(functools.partial(f, *args), f)


# -- mutations ---------------------------------------------------------------------------------------------------


def _rule(kind, law_name=None, **fields):
    return Mutation(exchange.EXCHANGES, kind, lambda made: made._replace(**fields), law(is_map, law_name or kind))


def _turned_round(x, call):
    return exchange._emulate_permute(x, call._replace(pairs=tuple((d, s) for s, d in call.pairs)))


def _dropped(name, wrong):
    return Mutation(exchange._Exchange, name, lambda made: staticmethod(wrong), law(is_map, "psum", 2))


def _kept_apart(made):
    return lambda grads, layout, told=(), *rest: (grads, made({}, layout, told, *rest)[1])


def _cut_late(made):
    late = lambda x: x.flatten().roll(1).reshape(x.shape)
    return lambda *args: {i: tuple(map(late, of_x)) for i, of_x in made(*args).items()}


def _elsewhere(made):
    """Return a function that sends ids to the rank, of two ranks, that does not own their rows."""
    return lambda *args: (lambda x: x._replace(ranks=tuple(1 - r for r in x.ranks)))(made(*args))


def _uncounted(made):
    """Return a function that counts only ids that fit into the buffer."""

    def owner_blocks(*args, **how):
        blocks, counts, sent = made(*args, **how)
        return blocks, counts.clamp(max=args[5]), sent

    return owner_blocks


def _late(made):
    """Return a function that reads a block's answers one place too far."""

    def route(*args):
        routed = made.route(*args)
        return replace(routed, sent=torch.where(routed.sent < 0, -1, (routed.sent + 1) % routed.rows.shape[0]))

    return made._replace(route=route)


def _alone(made):
    """Return a function that keeps only the first id of each row."""

    def transpose(d, routed, *args):
        earlier = (routed.sent[:, None] == routed.sent[None]).tril(-1).any(1)
        return made.transpose(d, replace(routed, sent=torch.where(earlier, -1, routed.sent)), *args)

    return made._replace(transpose=transpose)


MUTATIONS = {
    "psum forgets a rank": _rule("psum", emulate=lambda x, call: (x[1:].sum(0), False)),
    "all_to_all stays": _rule("all_to_all", emulate=lambda x, call: (x, True)),
    "all_gather in another order": _rule("all_gather", emulate=lambda x, call: (x.flip(0), False)),
    "psum_scatter keeps its own": _rule("psum_scatter", emulate=lambda x, call: (x[:, 0], True)),
    "psum's transpose is its own cotangent": _rule("psum", transpose="pvary"),
    "psum_scatter's transpose of another form": _rule("psum_scatter", transpose="all_to_all"),
    "ppermute sends on": _rule("ppermute", "ppermute_some", emulate=_turned_round),
    "an exchange without its transpose": _dropped("backward", lambda ctx, *d: (None, None, *(x * 1.5 for x in d))),
    "an exchange without its tangent": _dropped("jvp", lambda ctx, a, b, *t: tuple(t)),
    "an exchange that does not batch": _dropped("vmap", lambda info, dims, call, marker, *xs: (xs, dims[2:])),
    "a mean is not divided": Mutation(_combine, "_divided", lambda made: lambda x, *args: x, law(looks_up, "row_wise")),
    "a mean's gradient is not divided": Mutation(_combine, "_scaled", lambda made: lambda d, *args: d,
        law(has_bits, "row_wise")),
    "copies keep their own gradients": Mutation(
        _gather_terms, "gather_terms", _kept_apart, law(has_bits, "replicated")
    ),
    "ids go to another rank": Mutation(route_ids, "owners_at", _elsewhere, law(has_bits, "row_wise")),
    "a lane begins one id late": Mutation(
        sequence, "lane_places", lambda made: lambda *args: made(*args).roll(1, -1), law(has_bits, "row_wise")
    ),
    "a lane's rows are another lane's": Mutation(
        sequence, "lane_places", lambda made: lambda routed, i, n: made(routed, (i + 1) % 3, n),
        law(has_bits, "row_wise")
    ),
    "dedup: an owner's blocks begin one row late": Mutation(POOLED, "distinct", _late, is_deduplicated),
    "dedup: only one id of a row gives its gradient": Mutation(POOLED, "distinct", _alone, is_deduplicated),
    "dedup: sums go to the next place": Mutation(
        unique,
        "_at_owners",
        lambda made: lambda sums, routed, *args: made(sums, replace(routed, rows=routed.rows.roll(1, -1)), *args),
        is_deduplicated,
    ),
    "what does not fit is trained on": Mutation(fr.RowGrads, "where", lambda made: lambda self, condition: self,
        keeps_state),
    "ids without room are not counted": Mutation(ops, "owner_blocks", _uncounted, keeps_state),
    "overflow is not counted": Mutation(
        _rank_step, "joined_overflow", lambda made: lambda grads: torch.zeros(2, dtype=torch.int64), keeps_state
    ),
    "dense gradients stay on their rank": Mutation(
        _rank_step, "added", lambda made: lambda parts: parts[0], law(trains, "adam", "row_wise")
    ),
    "large dense gradients stay on their rank": Mutation(
        _rank_step, "ordered_sum", lambda made: lambda tree, axes: tree, law(trains, "adam", "row_wise", 0)
    ),
    "rows stay on their rank": Mutation(
        _rank_step, "gather_terms", _kept_apart, law(trains, "adam", "replicated")
    ),
    "what travels together is cut one element late": Mutation(
        _gather_terms, "gather_each", _cut_late, law(trains, "adam", "replicated")
    ),
    "columns in place: gradients are of the own columns": Mutation(
        _rank_step, "whole_banks", lambda made: lambda sparse, layout: (), law(trains, "partial", "column_wise")
    ),
    "columns in place: all owners take the first ones": Mutation(
        _update, "first_columns", lambda made: lambda layout: {b: [0] * len(x) for b, x in made(layout).items()},
        law(trains, "partial", "column_wise"),
    ),
    "a row's second moment is of its own columns": Mutation(
        _update, "column_banks", lambda made: lambda sparse, layout: {}, law(trains, "rowwise_adagrad", "column_wise")
    ),
}  # fmt: skip


@contextlib.contextmanager
def changed(mutation):
    with pytest.MonkeyPatch.context() as patch:
        owner, name = mutation.owner, mutation.name
        if isinstance(owner, dict):
            patch.setitem(owner, name, mutation.wrong(owner[name]))
        else:
            patch.setattr(owner, name, mutation.wrong(getattr(owner, name)))
        yield


def why_red(check):
    """Return in one line why a law fails, or None if it holds."""
    try:
        check()
    except (AssertionError, ValueError, RuntimeError) as error:
        return str(error).strip().splitlines()[0][:120]
    return None


def main():
    """Print each mutation, its law and how the law fails. The exit code is the number of mutations that break no
    law."""
    torch.set_num_threads(1)
    unseen, green = 0, {}
    for which, mutation in MUTATIONS.items():
        key = getattr(mutation.law, "func", mutation.law), getattr(mutation.law, "args", ())
        if key not in green:
            green[key] = why_red(mutation.law)
        with changed(mutation):
            why = why_red(mutation.law)
        unseen += why is None or green[key] is not None
        told = f"BROKEN WITHOUT IT: {green[key]}" if green[key] else f"red: {why}" if why else "NOT SEEN"
        print(f"{which:48} {mutation.law.__doc__}\n{'':48} {told}", flush=True)
    print(f"{len(MUTATIONS) - unseen} of {len(MUTATIONS)} mutations turn a law red")
    return unseen


if __name__ == "__main__":
    sys.exit(main())
