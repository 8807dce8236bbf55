"""Find who else shares the memory to which a donating call will write.

A storage counts its holders. If a call alone has a storage, the holders are the call's leaves and the bases of leaves
that are views. One more holder is a view, a `detach()`, a numpy array or a saved graph, and would see the writes.
"""

import functools
import operator
import sys
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcrec.kernels.memory import is_mapped

_address = torch._C._storage_address  # pyright: ignore[reportAttributeAccessIssue]  # torch's stubs lack it
_num_holders = torch._C._storage_Use_Count
_uses = Tensor._use_count  # pyright: ignore[reportAttributeAccessIssue]  # torch's stubs lack it
_requires_grad = operator.attrgetter("requires_grad")


class Hold(NamedTuple):
    """The memory of the leaves that a call writes to, and the counts of holders if the call alone has this memory.

    views: the numbers of written leaves that are views. storages: the address of each written leaf's storage. counts:
    the number of holders of each storage, negative for memory that neither torch nor funcrec allocated. is_stable:
    whether the counts hold in each call whose written leaves have these storages, because written leaves that are no
    views are the only holders.
    """

    views: list[int]
    storages: list[int]
    counts: list[int]
    is_stable: bool


# Storages that `_is_foreign` has found not to be foreign: after numpy has seen such a storage, it would look foreign.
_known: dict[int, weakref.ref] = {}
MOST_KNOWN = 4096


def hold(leaves: Sequence, written: Sequence[int]) -> Hold:
    """Return the memory of the written leaves, with the counts of holders if only `leaves` share this memory."""
    views = [i for i in written if leaves[i]._base is not None]
    storages: list[int] = []
    counts: list[int] = []
    members: dict[int, dict[int, Tensor]] = {}
    for x in leaves if written else ():
        if isinstance(x, Tensor):
            members.setdefault(_address(x), {})[id(x)] = x
    for i in written:
        address = _address(leaves[i])
        storages.append(address)
        is_foreign = _is_foreign(leaves[i].untyped_storage(), address)
        counts.append((-1 if is_foreign else 1) * _expected(members[address]))
    mine = {id(leaves[i]) for i in written}
    is_stable = not views and all(mine.issuperset(members[a]) for a in storages)
    return Hold(views, storages, counts, is_stable)


def shared_leaves(known: Hold | None, leaves: Sequence, written: Sequence[int]) -> tuple[Hold, dict[int, bool]]:
    """Return the memory of the written leaves, and {leaf to write to: whether its other holder is in this process}, for
    leaves with another holder. known: what the call before found."""
    mine = [leaves[i] for i in written]
    storages = [*map(_address, mine)]
    # Most calls write to the memory of the call before: three sweeps in C then replace all of the code below. A holder
    # that `known` does not count would see the writes. So would a second user of a leaf's C++ part (a saved graph, a
    # second Python object).
    if (
        known is not None and known.is_stable and storages == known.storages
        and [*map(_num_holders, storages)] == known.counts and {*map(_uses, mine)} <= {1}
    ):  # fmt: skip
        return known, {}
    known = hold(leaves, written)
    found = zip(written, known.storages, known.counts, strict=True)
    held = {i: _num_holders(a) != abs(n) or _uses(leaves[i]) != 1 for i, a, n in found}
    return known, {i: held[i] for i, n in zip(written, known.counts, strict=True) if held[i] or n < 0}


def alone(leaves: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors whose C++ part has no other user. A call can take the memory of such tensors."""
    return [
        x
        for x, uses, follows in zip(leaves, map(_uses, leaves), map(_requires_grad, leaves), strict=True)
        if uses == 1 and not follows
    ]


def _expected(mine: dict[int, Any]) -> int:
    """Return the count of a storage whose only holders are these tensors and the unnamed bases of these tensors."""
    views = [x for x in mine.values() if x._base is not None and id(x._base) not in mine]
    num_views = Counter(x._base._cdata for x in views)
    uses, references = _private_base()
    # The unnamed base of a view holds the storage as well, but code sees that base only through the view.
    private = {x._base._cdata for x in views if _base_holders(x) == (uses + num_views[x._base._cdata], references)}
    return _wrappers() + len(mine) + len(private)


def _base_holders(view: Tensor) -> tuple[int, int]:
    base = view._base
    return _uses(base), sys.getrefcount(base)


@functools.cache
def _private_base() -> tuple[int, int]:
    """Return what `_base_holders` returns for a view of a tensor without a name, less one user for the view."""
    with torch.inference_mode(False):
        uses, references = _base_holders(torch.empty(2).view(2, 1))
    return uses - 1, references


@functools.cache
def _wrappers() -> int:
    """Return the number of holders, besides tensors, of a storage that Python has seen."""
    x = torch.empty(1)
    x.untyped_storage()
    return _num_holders(_address(x)) - 1


def _is_foreign(storage: torch.UntypedStorage, address: int) -> bool:
    """Return whether the memory belongs to an array, a file or another library, whose holders no count shows."""
    seen = _known.get(address)
    if seen is not None and seen() is storage:
        return False
    # torch can resize memory that torch allocated. Other memory has an owner that no count shows.
    if not (storage.resizable() or is_mapped(storage.data_ptr())):
        return True
    if len(_known) >= MOST_KNOWN:
        for a in [a for a, ref in _known.items() if ref() is None]:
            del _known[a]
    _known[address] = weakref.ref(storage)
    return False
