"""Negative examples: ids drawn by a key, uniformly or by popularity, without the known ids of the user.

    P(id) = m(id) / Σ_free m,    m = 1,  or  count^exponent to 42 bits

Masses are integers, so each id is drawn with exactly its share, and an id that is left out is never drawn. Let C(id) be
the sum of the masses below id, and k_1 < k_2 < ... the known ids of a user. A number t in [0, Σ_free m) lies after the
known ids with C(k_i) - Σ_{j<i} m(k_j) <= t. A bisection counts these ids. The bisection can be traced, and rejects no
draw.
Shapes: V ids, U users, N pairs of a user and an id, B examples.
"""

from collections.abc import Iterator
from typing import Annotated

import torch
from torch import Tensor

from funcrec.core import (
    Count,
    Form,
    Key,
    NotNegative,
    Problem,
    Shape,
    Size,
    check,
    describe,
    device_problems,
    is_checking,
    is_tracked,
    pytree,
    random,
    reported,
    stray,
    sure,
    typed,
)
from funcrec.jagged import JaggedTensor, int_problems, is_concrete, offset_value_problems, offsets_of

TOTAL = 2.0**42  # sum of the masses by popularity: a share of 1e-8 is right to 1e-5

Users = Annotated[Tensor, Form("i[B]")]
Ids = Annotated[Tensor, Form("i[N]")]
Counts = Annotated[Tensor, Form("n[V]")]


@pytree(static=("first", "num_ids"), optional=("ends", "known", "taken"))
class Negatives:
    """A sampler of ids, called with (key, shape, user). See `uniform_negatives` and `popularity_negatives`.

    Args:
      ends: i64[V], the sum of the masses up to and including each id; None if all ids are equally likely.
      known: bag u has the ids, ascending, that are not drawn for user u; or None.
      taken: i64[N + 1], the sum of the masses of the known ids before each known id.
      first: the first id that is drawn if all ids are equally likely.
      num_ids: V.

    Example:
      >>> import torch, funcrec as fr
      >>> from funcrec.data import known_items, uniform_negatives
      >>> known = known_items(torch.tensor([0, 0, 1]), torch.tensor([1, 2, 4]))
      >>> draw = uniform_negatives(5, first=1, known=known)
      >>> draw(fr.key(0), (2, 3), user=torch.tensor([0, 1]))
      tensor([[4, 4, 4],
              [1, 3, 3]])
    """

    ends: Tensor | None
    known: JaggedTensor | None
    taken: Tensor | None
    first: int
    num_ids: int

    @typed
    def __call__(self, key: Key, shape: Shape, user: Users | None = None) -> Tensor:
        """Return ids, i64[shape]. With known ids, `user` is i[B], B = shape[0], and no known id of a user is drawn.

        Raises:
          ValueError: a user has no bag of known ids, or knows all ids. Inside `jit`, where no value can be read, such
            users get ids -1, which are in no table.
        """
        check("funcrec.data.Negatives", _user_problems(self, shape, user))
        own = random.bits(key, tuple(shape))
        total = self.num_ids - self.first if self.ends is None else self.ends[-1]
        if self.known is None:
            return self._at(random.shift_right(own, 1) % total)
        user, taken = sure(user), sure(self.taken)
        begin, end, is_there = _bag_of(self.known, user)
        wide = lambda x: x.reshape(-1, *(1,) * (len(shape) - 1))
        free = wide(torch.where(is_there, total - (taken[end] - taken[begin]), 0))
        if is_concrete(free) or is_checking():
            check("funcrec.data.Negatives", _free_problems(free, user))
        t = random.shift_right(own, 1) % free.clamp(min=1)
        low, high = (wide(x).expand(shape) for x in (begin, end))
        start, values = wide(taken[begin]), self.known.values
        longest = int((end - begin).max()) if is_concrete(end) and end.numel() else values.shape[0]
        for _ in range(longest.bit_length()):
            middle = (low + high) // 2
            at = middle.clamp(max=max(values.shape[0] - 1, 0))
            is_before = (self._before(values[at]) - (taken[at] - start) <= t) & (middle < high)
            low, high = torch.where(is_before, middle + 1, low), torch.where(is_before, high, middle)
        return torch.where(free > 0, self._at(t + taken[low] - start), -1)

    def _before(self, ids: Tensor) -> Tensor:
        """Return the sum of the masses of the ids below each id."""
        if self.ends is None:
            return (ids - self.first).clamp(min=0, max=self.num_ids - self.first)
        return torch.where(ids > 0, self.ends[(ids - 1).clamp(min=0, max=self.num_ids - 1)], 0)

    def _at(self, mass: Tensor) -> Tensor:
        """Return for each number the id whose interval of masses contains the number."""
        if self.ends is None:
            return mass + self.first
        return torch.searchsorted(self.ends, mass, right=True)

    def __repr__(self) -> str:
        how = "alike" if self.ends is None else "by popularity"
        return f"Negatives({self.num_ids} ids {how}, {describe(self.known)} known)"


@typed
def uniform_negatives(num_ids: Count, *, first: Size = 0, known: JaggedTensor | None = None) -> Negatives:
    """Return a sampler of the ids first, ..., num_ids - 1, all equally likely.

    Args:
      first: 1 leaves out id 0, the unknown id of encodings.
      known: the ids that are not drawn for each user, as `known_items` returns them.

    Law: the ids depend only on the key, the shape, the user and the known ids of the user. No known id is drawn.

    Example:
      >>> import funcrec as fr
      >>> fr.data.uniform_negatives(100)(fr.key(0), (2, 2))
      tensor([[27, 27],
              [15, 19]])
    """
    call = "funcrec.data.uniform_negatives"
    if first >= num_ids:
        need, hint = f"first < num_ids = {num_ids}", "first=0"
        check(call, [Problem("`first` leaves no id to draw.", f"{first}", need, hint)])
    return _with_known(call, Negatives(None, None, None, int(first), int(num_ids)), known)


@typed
def popularity_negatives(
    counts: Counts, *, exponent: NotNegative = 0.75, known: JaggedTensor | None = None
) -> Negatives:
    """Return a sampler of ids with probability count^exponent over the sum. An id without a count is never drawn.

    Args:
      counts: the count of each id, i[V] or f[V], such as `encoding.ids["item"].counts`. Set counts[0] to 0 to leave out
        the unknown id.
      exponent: 0 makes all counted ids equally likely. 1 draws each id in proportion to its count.
      known: the ids that are not drawn for each user, as `known_items` returns them.

    Law: the law of `uniform_negatives` holds. All devices of one kind draw the same bits.

    Example:
      >>> import torch, funcrec as fr
      >>> draw = fr.data.popularity_negatives(torch.tensor([0, 90, 9, 1]), exponent=1.0)
      >>> draw(fr.key(0), (1000,)).bincount(minlength=4)
      tensor([  0, 889, 105,   6])

    Source: Mikolov et al., "Distributed representations of words and phrases" (2013), §2.2.
    """
    call = "funcrec.data.popularity_negatives"
    check(call, count_vector_problems(counts), _drawn_problems(counts))
    share = torch.where(counts > 0, counts.to(torch.float64) ** float(exponent), 0)
    masses = torch.where(counts > 0, (share / share.sum() * TOTAL).round().long().clamp(min=1), 0)
    return _with_known(call, Negatives(masses.cumsum(0), None, None, 0, counts.shape[0]), known)


@typed
def known_items(user: Ids, item: Ids, *, num_users: Count | None = None) -> JaggedTensor:
    """Return one bag for each user: bag u has the known items of user u, ascending and each once.

    Args:
      user, item: i[N], ids >= 0 of the rows to train on. Negatives leave out these pairs.
      num_users: the number of bags. The default is the largest id of a user + 1.

    Example:
      >>> import torch
      >>> from funcrec.data import known_items
      >>> known_items(torch.tensor([2, 0, 2, 2]), torch.tensor([7, 5, 3, 7])).to_lists()
      [[5], [], [3, 7]]
    """
    call = "funcrec.data.known_items"
    check(call, _pair_problems(user, item, num_users))
    order = item.argsort(stable=True)
    order = order[user[order].argsort(stable=True)]
    user, item = user[order].long(), item[order].long()
    is_new = torch.ones_like(user, dtype=torch.bool)
    is_new[1:] = (user[1:] != user[:-1]) | (item[1:] != item[:-1])
    user, item = user[is_new], item[is_new]
    size = int(user[-1]) + 1 if num_users is None and len(user) else num_users or 0
    return JaggedTensor(item, offsets_of(torch.bincount(user, minlength=size)))


@typed
def log_q(counts: Counts, *, exponent: NotNegative = 1.0) -> Tensor:
    """Return the logarithm of each id's share, f[V]. The share is count^exponent over the sum.

    `in_batch_softmax` subtracts it from the logits.

    Args:
      counts: the count of each id in the rows to train on, i[V] or f[V]. An id with count 0 is treated as if its count
        were 1. The result is f32, or f64 if the counts are f64.
      exponent: 1 for candidates from the batch. For drawn candidates, the exponent of `popularity_negatives`.

    Example:
      >>> import torch, funcrec as fr
      >>> fr.data.log_q(torch.tensor([0, 1, 3])).exp()
      tensor([0.2000, 0.2000, 0.6000])

    Source: Yi et al., "Sampling-bias-corrected neural modeling" (RecSys 2019), eq. 3.
    """
    check("funcrec.data.log_q", count_vector_problems(counts))
    logs = counts.to(torch.float64).clamp(min=1).log() * float(exponent)
    return (logs - logs.logsumexp(0)).to(torch.float64 if counts.dtype == torch.float64 else torch.float32)


def _with_known(call: str, negatives: Negatives, known: JaggedTensor | None) -> Negatives:
    if known is None:
        return negatives
    check(call, _known_problems(known, negatives.num_ids))
    known = JaggedTensor(known.values.long(), known.offsets.long())
    masses = negatives._before(known.values + 1) - negatives._before(known.values)
    return Negatives(negatives.ends, known, offsets_of(masses), negatives.first, negatives.num_ids)


def _bag_of(known: JaggedTensor, user: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return where each user's bag begins, where it ends, and whether there is one. A missing bag is empty."""
    count = known.offsets.shape[0] - 1
    is_there = (user >= 0) & (user < count)
    user = torch.where(is_there, user, 0)
    begin = known.offsets[user.clamp(max=count)]
    return begin, torch.where(is_there, known.offsets[(user + 1).clamp(max=count)], begin), is_there


# -- validators ------------------------------------------------------------------------------------------------------


def count_vector_problems(counts: Tensor) -> Iterator[Problem]:
    need, hint = "counts >= 0, i[V] or f[V], some above 0", 'encoding.ids["item"].counts'
    if counts.shape[0] == 0:
        yield Problem("`counts` are none.", describe(counts), need, hint)
    elif is_concrete(counts):
        counts = counts.detach()
        if not bool(counts.isfinite().all()) or float(counts.min()) < 0:
            yield Problem("`counts` has a value that is not a count.", f"{float(counts.min()):g}", need, hint)
        elif float(counts.max()) == 0:
            yield Problem("`counts` are all 0.", describe(counts), need, hint)


def _drawn_problems(counts: Tensor) -> Iterator[Problem]:
    if is_tracked(counts):
        got = f"{describe(counts)} that is differentiated"
        need = "counts; which ids are drawn has no derivative"
        yield Problem("`counts` cannot be differentiated.", got, need, "counts.detach()", TypeError)


def _known_problems(known: JaggedTensor, num_ids: int) -> Iterator[Problem]:
    hint = "known_items(user, item)"
    wrong = yield from reported(int_problems(known.values, "known.values"))
    if wrong or not is_concrete(known.values) or not is_concrete(known.offsets):
        return
    found = offset_value_problems(known.values.shape[0], known.offsets, "known.offsets")
    if (yield from reported(p._replace(hint=p.hint or hint) for p in found)):
        return
    values = known.values[: int(known.offsets[-1])]
    begins = torch.zeros(len(values) + 1, dtype=torch.bool)
    begins[known.offsets] = True
    if bool(((values[1:] <= values[:-1]) & ~begins[1:-1]).any()):
        need = "each once, ascending"
        yield Problem("`known` has a bag that does not ascend.", "an id again, or a smaller one", need, hint)
    elif (wrong := stray(values, num_ids)) is not None:
        yield Problem("`known` has an id that does not exist.", f"id {wrong}", f"0 <= id < {num_ids}", hint)


def _user_problems(negatives: Negatives, shape: Shape, user: Tensor | None) -> Iterator[Problem]:
    hint = 'user=batch.ids["user"].values'
    if (user is None) != (negatives.known is None):
        got, need = ("no user", "the user of each example") if user is None else (describe(user), "None")
        what = "`user` is missing: ids are known of users." if user is None else "`user` has no known ids to leave out."
        yield Problem(what, got, need, hint if user is None else "known=known_items(user, item)")
        return
    if user is None or negatives.known is None:
        return
    if (yield from reported(device_problems(known=negatives.known.values, user=user))):
        return
    if tuple(shape[:1]) != tuple(user.shape):
        need = f"({user.shape[0]}, ...)"
        yield Problem("`shape` does not match `user`.", f"{tuple(shape)}", need, f"shape=({user.shape[0]}, 4)")
    elif is_concrete(user) or is_checking():
        count, hint = negatives.known.offsets.shape[0] - 1, "known_items(user, item, num_users=...)"
        if (wrong := stray(user, count)) is not None:
            what = "`user` has a user without a bag of known ids."
            yield Problem(what, f"user {wrong}", f"0 <= user < {count}", hint)


def _free_problems(free: Tensor, user: Tensor) -> Iterator[Problem]:
    none = free.flatten() <= 0
    if bool(none.any()):
        got, hint = f"user {int(user[int(none.int().argmax())])}", "leave such users out: no id is a negative of theirs"
        yield Problem("`user` has a user who knows all ids.", got, "at least one id that is not known", hint)


def _pair_problems(user: Tensor, item: Tensor, num_users: int | None) -> Iterator[Problem]:
    hint = "data.categorical[:, 0], the ids of the first column"
    for name, x in (("user", user), ("item", item)):
        if not is_concrete(x):
            need = "a tensor on the CPU, outside of transforms"
            yield Problem(f"`{name}` has no values that can be read.", describe(x), need, f"{name}.cpu()")
        elif x.numel() and int(x.min()) < 0:
            yield Problem(f"`{name}` has a negative id.", f"{int(x.min())}", "ids >= 0", hint)
    if num_users is not None and is_concrete(user) and user.numel() and int(user.max()) >= num_users:
        need = f"below {num_users}"
        yield Problem("`num_users` has no place for a user.", f"user {int(user.max())}", need, "num_users=None")
