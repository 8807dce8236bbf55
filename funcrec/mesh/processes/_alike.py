"""Checks before an exchange that all ranks have arguments of one form, with the same derivatives.

    digest(forms) = max over ranks = min over ranks

If the buffers of a rank have another size than other ranks expect, the exchange crashes or hangs. Where values can be
read, one exchange of 256 bytes compares all forms, and shows a rank that does something else (`together`). Ranks send
more only if the forms differ. While a program is staged the ranks compare the forms through torchrun's store, once for
each new form. A program that exists already costs nothing. The ranks use the store and not `say`, because a rank that
has its program runs the exchanges of that program, and a collective would pair with those exchanges.
"""

import hashlib
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import timedelta
from math import prod
from typing import Any, ClassVar, NamedTuple

import torch.distributed as dist
import torch.utils._pytree as torch_tree
from torch import Tensor

from funcrec.core import Problem, check, has_tracked, message, reported
from funcrec.mesh._axes import bound_axes, rank_at
from funcrec.mesh._paper import real_group
from funcrec.mesh._parts import Part, is_jagged
from funcrec.mesh.processes._together import (
    Failure,
    Ranks,
    Told,
    broken_off,
    device_of,
    different_problems,
    of_all_ranks,
    words_of,
)

FOLLOWED, PLAIN, FAILED = "followed", "not followed", "failed"
HINT = "ids of one capacity on all ranks (`pad_to`, or `pad_to_bucket` by the longest), batches of one size (pad_last)"


class RankForm(NamedTuple):
    """A rank's report: the form of an argument, and whether it is differentiated; or the reason why it failed."""

    path: str
    followed: str
    form: str

    @staticmethod
    def of(part: Part, has_form: bool) -> "RankForm":
        form = form_of(part.value) if has_form else ""
        return RankForm(part.path, FOLLOWED if has_tracked(part.value) else PLAIN, form)


def form_of(x: Any) -> str:
    """Return a leaf's form as text: dtype and shape of a tensor, keys and parts of a jagged value, else the class."""
    if isinstance(x, Tensor):
        return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
    if not is_jagged(x):
        return type(x).__name__
    names = [f"{torch_tree.keystr(k)[1:]} {form_of(y)}" for k, y in torch_tree.tree_flatten_with_path(x)[0]]
    keys = f"keys {list(x.keys)}, strides {x.strides}, " if hasattr(x, "keys") else ""
    return f"{keys}{', '.join(names)}"


def form_text(tree: Any) -> str:
    """Return the form of every leaf with its path, as a text that ranks can compare. A jagged value is one leaf."""
    named = torch_tree.tree_flatten_with_path(tree, is_leaf=is_jagged)[0]
    return "; ".join(sorted(f"{torch_tree.keystr(path)} {form_of(x)}".strip() for path, x in named))


def apart_over_ranks(told: Sequence[RankForm], axes: Sequence[str]) -> Iterator[Problem]:
    """Report what differs between the ranks of the axes. Values can be read here, and all ranks report the same."""
    ranks, number = ranks_of_axes(axes), digest("\n".join(map("\t".join, told)))
    first = of_all_ranks(Told(b"", None, number), ranks)
    if all(own == first[0] for own in first):
        return
    failed = {r: own.failure.words for r, own in enumerate(first) if own.failure is not None}
    if (yield from reported(failed_problems(failed) if failed else different_problems(first))):
        return
    yield from problems_of(told, of_all_ranks(told, ranks))


def ranks_of_axes(names: Sequence[str]) -> Ranks:
    """Return the ranks of these axes, which are bound here."""
    axes = bound_axes("funcrec.shard_map", tuple(names))
    sizes, places = {a.name: a.size for a in axes}, {a.name: a.index for a in axes}
    groups = tuple(real_group(a.group) for a in axes)
    return Ranks(rank_at(places, tuple(names), sizes), prod(sizes.values()), groups, device_of(groups[0]))


def digest(text: str) -> int:
    """Return a hash of the text, a number of 56 bits."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def report_failure(error: Exception, axes: Sequence[str]) -> None:
    """Report a failure to the other ranks.

    These call `apart_over_ranks`, or `agree_on_program` while a program is staged.
    """
    if staged.get():
        told = [RankForm("", FAILED, words_of(error))]
        default_store().set(key_of(Met.turns, dist.get_rank()), pickle.dumps(told))
        Met.turns += 1
    else:
        of_all_ranks(Told(b"", Failure.of(error), ""), ranks_of_axes(axes))


def problems_of(own: Sequence[RankForm], ranks: Sequence[Sequence[RankForm]]) -> Iterator[Problem]:
    """Report the ranks that failed, or the arguments whose forms differ.

    If no rank failed, it reports each argument with the forms of the ranks.
    """
    failed = {r: told[0].form for r, told in enumerate(ranks) if told and told[0].followed == FAILED}
    if (yield from reported(failed_problems(failed))):
        return
    for path in dict.fromkeys(t.path for told in ranks for t in told):
        have = [next((t for t in told if t.path == path), RankForm(path, PLAIN, "nothing")) for told in ranks]
        if len({t.form for t in have}) > 1:
            yield Problem(f"`{path}` differs between the ranks.", listed([t.form for t in have]), "one form", HINT)
        elif len({t.followed for t in have}) > 1:
            here = next(t.followed for t in own if t.path == path)
            got = f"{here} on this rank, and otherwise on another"
            hint = "requires_grad alike, and the same transforms, on all ranks; or `.detach()` on all"
            what, need = f"`{path}` is followed by a derivative on some ranks only.", "the same on every rank"
            yield Problem(what, got, need, hint, TypeError)


def failed_problems(failed: Mapping[int, str]) -> Iterator[Problem]:
    """Report ranks whose call could not begin. failed: {rank: its error in words}."""
    for rank, why in failed.items():
        what, need = f"rank {rank} failed before it exchanged anything.", "every rank to go on"
        yield Problem(what, why, need, "what that rank says")


def listed(forms: Sequence[str]) -> str:
    """Return a text that names each distinct form once, with its ranks."""
    ranks = {form: [r for r, other in enumerate(forms) if other == form] for form in dict.fromkeys(forms)}
    shown = lambda own: f"rank {own[0]}" if len(own) == 1 else f"ranks {', '.join(map(str, own[:8]))}"
    return "; ".join(f"{form} on {shown(own)}{', ...' if len(own) > 8 else ''}" for form, own in ranks.items())


# -- programs ----------------------------------------------------------------------------------------------------------


class Met:
    """The forms that this process has agreed on with the other ranks, and how often it has compared forms."""

    forms: ClassVar[list[list[RankForm]]] = []
    turns = 0


staged: ContextVar[str] = ContextVar("funcrec_staged", default="")  # the name of the function that jit stages


def agree_on_program(call: str, told: Sequence[RankForm], group: str) -> None:
    """Check that every rank is about to run a program for the same forms.

    Forms that this rank has met before need no check.
    """
    told = list(told)
    if told in Met.forms:
        return
    store, here, turn = default_store(), dist.get_rank(), Met.turns
    Met.turns += 1
    store.set(key_of(turn, here), pickle.dumps(told))
    size, timeout = dist.get_world_size(), longest_wait(group)
    late = []
    for rank in range(size):
        try:
            store.wait([key_of(turn, rank)], timeout)
        except RuntimeError:
            late.append(rank)
    if late:
        was = {t.path: t.form for t in Met.forms[-1]} if Met.forms else {}
        new = [t for t in told if was.get(t.path) != t.form]
        here = "; ".join(f"`{t.path}`, on rank {here} {t.form}, before {was.get(t.path, 'nothing')}" for t in new)
        what, got = "new forms came on some ranks only.", f"{here}; nothing new from ranks {late}"
        check(call, [Problem(what, got, f"on all ranks, within {timeout.total_seconds():.0f} s", HINT)])
    check(call, problems_of(told, [pickle.loads(store.get(key_of(turn, rank))) for rank in range(size)]))
    Met.forms.append(told)


def longest_wait(group: str) -> timedelta:
    """Return the time that a collective of the group waits for a rank."""
    found = real_group(group)
    return min(found._get_backend(d).options._timeout for d in found._device_types)


def default_store() -> Any:
    """Return the store of all ranks. Torch's types do not know that it holds bytes, and that it can be cloned."""
    return dist.distributed_c10d._get_default_store()


def key_of(turn: int, rank: int) -> str:
    return f"funcrec/forms/{turn}/{rank}"


def others_changed(call: str, error: RuntimeError) -> Exception:
    """Return the error to raise for a broken exchange.

    If other ranks have new forms, they never came to this exchange: the error names the forms. If the transport lost
    them, it says what ranks must do. Otherwise it is `error`.
    """
    if not (dist.is_initialized() and Met.forms):
        return broken_off(call, error)
    turn = Met.turns
    try:
        store, ranks = default_store(), range(dist.get_world_size())
        told = {r: pickle.loads(store.get(key_of(turn, r))) for r in ranks if store.check([key_of(turn, r)])}
    except RuntimeError:  # the store ended with the rank that held it
        return broken_off(call, error)
    was = {t.path: t.form for t in Met.forms[-1]}
    ranks = [told.get(r, []) for r in ranks]
    failed = list(problems_of([], ranks)) if any(t.followed == FAILED for own in ranks for t in own) else []
    if failed:
        return ValueError(message(call, failed))
    changed = [(r, t) for r, own in told.items() for t in own if was.get(t.path) != t.form]
    new = [f"`{t.path}`, on rank {r} {t.form}, here {was.get(t.path, 'nothing')}" for r, t in changed]
    if not new:
        return broken_off(call, error)
    return ValueError(message(call, [Problem("new forms came on some ranks only.", "; ".join(new), "on all", HINT)]))
