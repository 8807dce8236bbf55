"""Generated histories of users who rate items, for rankers: the data of MLPerf's DLRMv3, as a function of a key.

    p(category c of user u at time t) = (α / K + n_c) / (α + Σ n),   α uniform in 1 .. 500,   n: counts before t
    rating = (item's own rating + the category's rating for u at t) / 2,   label = rating >= 3.5

A user has K categories, in an order of preference. Each of T timestamps brings a user new samples, with probability
`activity`. Items become available with time. Shapes: B rows of a batch, U users, T timestamps, L the longest history,
C candidates, K categories of a user, S the most samples of a timestamp.

Source: meta-recsys/generative-recommenders, dlrm_v3/streaming_synthetic_data.py, whose law this is, in other code.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from funcrec.core import Count, Key, Problem, UnitInterval, check, describe, pytree, random, typed
from funcrec.data.datasets._random_rows import uniform_of
from funcrec.data.readers._rows import marked, row_problems, there
from funcrec.jagged import KeyedJaggedTensor, is_concrete, offsets_of
from funcrec.tables import Batch

ITEM_RATINGS, ITEM_CHANCES = (5.0, 4.0, 3.0, 2.0, 1.0), (0.2, 0.25, 0.25, 0.2, 0.1)
CATEGORY_RATINGS = ((4.5, 4.0, 0.0), (4.5, 4.0, 3.5), (3.5, 3.0, 2.5), (2.5, 2.0, 1.5))  # of each quarter
CATEGORY_CHANCES = ((0.8, 0.2, 0.0), (0.1, 0.8, 0.1), (0.1, 0.8, 0.1), (0.1, 0.8, 0.1))
MOST_ALPHA, LIKED = 500, 3.5
PURPOSES = ("user", "active", "length", "alpha", "category", "item", "rating", "own")
HISTORY = ("item", "category", "action", "time")
CANDIDATES = ("candidate_item", "candidate_category")
SIZES = (
    "num_users", "num_items", "num_categories", "categories_per_user", "num_timestamps", "length", "num_candidates",
    "max_history", "activity",
)  # fmt: skip


@pytree(static=SIZES)
class GeneratedHistories:
    """A dataset of requests in order of time, as `generated_histories` returns it. Row t · U + u is user u at t."""

    key: Tensor
    num_users: int
    num_items: int
    num_categories: int
    categories_per_user: int
    num_timestamps: int
    length: int
    num_candidates: int
    max_history: int
    activity: float

    @property
    def num_rows(self) -> int:
        return self.num_timestamps * self.num_users

    @property
    def most(self) -> int:
        """Return S, the most samples of a timestamp."""
        return max(2 * self.length, self.num_candidates + 1)

    def take(self, rows: Tensor) -> Batch:
        """Return the batch of row numbers i64[B], whose shapes depend on B only.

        Rows of users who are not active at their time may be taken too."""
        return _take(self, rows)[0]

    def chances(self, rows: Tensor) -> Tensor:
        """Return the probability of each label, f64[B, C], given the user's order of categories, the item's own rating
        and the time. No model can know more."""
        check("funcrec.data.GeneratedHistories.chances", row_problems(rows, self.num_rows, self.key.device))
        inside = there(rows, self.num_rows)[1]
        return marked(_take(self, rows)[1], inside if inside is None else inside[:, None])

    def requests(self, timestamp: int) -> Tensor:
        """Return the rows i64[R] of the users who are active at a timestamp, in order."""
        check("funcrec.data.GeneratedHistories.requests", timestamp_problems(timestamp, self.num_timestamps))
        users = torch.arange(self.num_users, device=self.key.device)
        return users[is_active(self, users, timestamp)] + timestamp * self.num_users

    def __repr__(self) -> str:
        sizes = f"{self.num_users} users, {self.num_items} items, {self.num_timestamps} timestamps"
        return f"GeneratedHistories({sizes}, {self.num_candidates} candidates)"


@typed
def generated_histories(
    key: Key,
    *,
    num_users: Count = 5_000_000,
    num_items: Count = 1_000_000_000,
    num_categories: Count = 128,
    categories_per_user: Count = 4,
    num_timestamps: Count = 100,
    length: Count = 100,
    num_candidates: Count = 32,
    max_history: Count = 2048,
    activity: UnitInterval = 0.7,
) -> GeneratedHistories:
    """Return generated requests to rank candidates, in order of time; the defaults are those of DLRMv3.

    Args:
      num_items: each category has num_items // num_categories of them, in one range.
      length: the mean number of samples of an active user at a timestamp. The number is normal with a deviation of a
        quarter, and at least num_candidates + 1.
      num_candidates: C, how many of a request's samples are its candidates.
      max_history: L. A longer history loses its oldest samples.
      activity: the probability that a user has a request at a timestamp.

    Returns:
      data, with `num_rows` and `take(rows)` like all data of `fr.data`. A batch has the columns "user" (one id);
      "item", "category", "action" (1, 2, 4, 8 or 16, for ratings from 1 to 5, half ratings rounded
      down) and "time", the history before;
      "candidate_item", "candidate_category" (C ids each); and "query_time" (one). The label is f32[B, C]. Times count
      from 0 at the samples before the first timestamp. `data.requests(t)` has the rows of a timestamp; `data.chances`
      the probability of each label.

    Raises:
      ValueError: a category has fewer items than there are timestamps, or a user more categories than there are.

    Law: row r depends only on the key, on r and on the settings. The history of a row contains the samples of the same
      user's earlier rows.

    Cost: a batch takes time and memory in proportion to the latest timestamp of its rows. Each timestamp adds operators
      to the program of `fr.jit(data.take)`: it compiles for 13 s with 2 timestamps and for 43 s with 100, and runs
      hardly faster than `take` itself.

    Example:
      >>> import torch, funcrec as fr
      >>> data = fr.data.generated_histories(fr.key(0), num_users=10, num_items=1000, num_categories=8,
      ...     num_timestamps=5, length=6, num_candidates=2, max_history=16)
      >>> batch = fr.data.take(data, data.requests(4)[:3])
      >>> batch.ids.keys[:5], batch.label.shape, data.chances(data.requests(4)[:3]).shape
      (('user', 'item', 'category', 'action', 'time'), torch.Size([3, 2]), torch.Size([3, 2]))

    Source: MLCommons inference v6.0, DLRMv3; meta-recsys/generative-recommenders, dlrm_v3.
    """
    check(
        "funcrec.data.generated_histories",
        category_problems(num_items, num_categories, categories_per_user, num_timestamps),
    )
    return GeneratedHistories(
        key, num_users, num_items, num_categories, categories_per_user, num_timestamps, length, num_candidates,
        max_history, float(activity),
    )  # fmt: skip


# -- the law --------------------------------------------------------------------------------------------------------


def chance(data: GeneratedHistories, purpose: str, at: Tensor) -> Tensor:
    """Return uniform numbers f64 in [0, 1), one for each number of a sequence i64."""
    key = random.fold_in(data.key, PURPOSES.index(purpose))
    return uniform_of(random.mix(key + (at + 1) * random.GAMMA))


def visit(data: GeneratedHistories, users: Tensor, time: Tensor | int) -> Tensor:
    """Return the number i64 of a user's visit. Timestamp -1 is before the first one."""
    return users * (data.num_timestamps + 1) + time + 1


def is_active(data: GeneratedHistories, users: Tensor, time: Tensor | int) -> Tensor:
    return (chance(data, "active", visit(data, users, time)) < data.activity) | (time < 0)


def categories_of(data: GeneratedHistories, users: Tensor) -> Tensor:
    """Return the categories of users in their order of preference, i64[B, K]: a draw without repeats."""
    at = users[:, None] * data.num_categories + torch.arange(data.num_categories, device=users.device)
    return chance(data, "user", at).argsort(1)[:, : data.categories_per_user]


def lengths_at(data: GeneratedHistories, at: Tensor) -> Tensor:
    """Return the number of samples of visits, i64."""
    z = math.sqrt(2) * torch.erfinv((chance(data, "length", at) + 2.0**-54) * 2 - 1)
    drawn = (data.length + (data.length // 4) * z).round().long()
    return drawn.clamp(min=data.num_candidates + 1, max=data.most)


def own_rating(data: GeneratedHistories, items: Tensor) -> Tensor:
    """Return the rating of each item itself, f64."""
    return picked(chance(data, "own", items), ITEM_CHANCES, ITEM_RATINGS)


def picked(u: Tensor, chances, values) -> Tensor:
    """Return values[k] with probability chances[k], by uniform numbers."""
    bounds = torch.tensor(chances, dtype=u.dtype, device=u.device).cumsum(0)[:-1]
    return torch.tensor(values, dtype=u.dtype, device=u.device)[torch.searchsorted(bounds, u, right=True)]


def quarter_of(data: GeneratedHistories, place: Tensor) -> Tensor:
    """Return the quarter of a category's place in the user's order, 0 to 3."""
    k = data.categories_per_user
    return (place >= k // 4).long() + (place >= k // 2) + (place >= k // 4 * 3)


def category_ratings(num_times: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the ratings f64[num_times, 4, 3] that categories of each quarter may have at timestamps -1, 0, ...; and
    their probabilities f64[4, 3].

    The first, second and third rating of a quarter move with the first, second and third cosine. The ratings 4.5, 4.0
    and 3.5 of the first two quarters, and those of the others, come in this order."""
    waves = [[[math.cos((t - 1 + shift) * math.pi / 4) for shift in (0, 2, 4)]] for t in range(num_times)]
    ratings = torch.tensor(CATEGORY_RATINGS, dtype=torch.float64) + 0.5 * torch.tensor(waves, dtype=torch.float64)
    return ratings.to(device), torch.tensor(CATEGORY_CHANCES, dtype=torch.float64, device=device)


def draws_of(data: GeneratedHistories, at: Tensor) -> tuple[Tensor, Tensor]:
    """Return (α i64, uniform numbers f64[..., S] that draw the samples' categories) of visits."""
    nth = torch.arange(data.most, device=at.device)
    alpha = 1 + (chance(data, "alpha", at) * MOST_ALPHA).long()
    return alpha, chance(data, "category", at[..., None] * data.most + nth)


def bounds_of(share: Tensor, counts: Tensor, total: Tensor) -> Tensor:
    """Return the probabilities f64[B, K - 1] that a sample's category is among the first k, for k = 1 .. K - 1.

    share: α / K · k. counts: i64[B, K - 1], the samples so far in the first k categories. total: i64[B, 1], α + Σ n."""
    return (share + counts) / total


def places_of(u: Tensor, bounds: Tensor) -> Tensor:
    """Return the places i64[..., S] of the categories that u f64[..., S] draws, by bounds f64[..., K - 1]."""
    return sum(((u >= bound[..., None]) for bound in bounds.unbind(-1)), torch.zeros_like(u, dtype=torch.int64))


def samples_of(data: GeneratedHistories, users: Tensor, categories: Tensor, places: Tensor, which: Tensor):
    """Return (item i64, category i64, rating f64, chance f64 that the rating is at least 3.5), each [B, n], of samples.

    places: i64[B, T · S], of all samples. which: i64[B, n], t · S + s for sample s of timestamp t - 1."""
    time, place = which // data.most - 1, places.gather(1, which)
    at = visit(data, users[:, None], time) * data.most + which % data.most
    category = categories.gather(1, place)
    per_category = data.num_items // data.num_categories
    available = per_category * (time + 1).clamp(min=1) // data.num_timestamps
    item = category * per_category + (chance(data, "item", at) * available).long()
    ratings, chances = category_ratings(data.num_timestamps + 1, users.device)
    quarter, own = quarter_of(data, place), own_rating(data, item)
    drawn = (chance(data, "rating", at)[:, :, None] >= chances.cumsum(1)[quarter][:, :, :-1]).sum(2)
    rated = (ratings[time + 1, quarter] + own[:, :, None]) / 2
    rating = rated.gather(2, drawn[:, :, None])[:, :, 0]
    return item, category, rating, (chances[quarter] * (rated >= LIKED)).sum(2)


def all_places(data: GeneratedHistories, users: Tensor, when: Tensor, num_times: int) -> tuple[Tensor, Tensor]:
    """Return (the place of each sample's category i64[B, T, S], whether it is in the history bool[B, T, S]).

    T timestamps from -1 on. Counts of a timestamp depend on the places before, so this is a loop over T; all else is
    computed at once, which keeps the graph of a compiled `take` small."""
    times = torch.arange(-1, num_times - 1, device=users.device)
    at = visit(data, users[:, None], times)
    is_past = is_active(data, users[:, None], times) & (when[:, None] > times)
    lengths = torch.where(is_past, lengths_at(data, at), 0)
    valid = torch.arange(data.most, device=users.device) < lengths[:, :, None]
    alpha, u = draws_of(data, at)
    k = torch.arange(1, data.categories_per_user, device=users.device)
    share = (alpha.double() / data.categories_per_user)[:, :, None] * k
    total = (alpha + lengths.cumsum(1) - lengths)[:, :, None]
    parts = share, total, u[:, :, :, None], valid[:, :, :, None]
    counts, bounds = torch.zeros_like(users)[:, None].expand(-1, k.shape[0]), []
    for own_share, own_total, drawn, is_there in zip(*(x.unbind(1) for x in parts), strict=True):
        bounds.append(bounds_of(own_share, counts, own_total))
        counts = counts + ((drawn < bounds[-1][:, None]) & is_there).sum(1)
    return places_of(u, torch.stack(bounds, 1)), valid


def _take(data: GeneratedHistories, rows: Tensor) -> tuple[Batch, Tensor]:
    """Return the batch of `rows`, and the probability of each label."""
    call = "funcrec.data.take"
    check(call, row_problems(rows, data.num_rows, data.key.device))
    last = data.num_timestamps - 1
    if is_concrete(rows):
        last = int(rows.max()) // data.num_users if rows.numel() else 0
    rows, inside = there(rows.long(), data.num_rows)
    users, when = rows % data.num_users, rows // data.num_users
    categories = categories_of(data, users)
    places, valid = all_places(data, users, when, last + 2)
    kept, lengths = newest(valid.flatten(1), data.max_history)
    own = (when[:, None] + 1) * data.most + torch.arange(data.num_candidates, device=rows.device)
    item, category, rating, chances = samples_of(data, users, categories, places.flatten(1), torch.cat([kept, own], 1))
    cut = lambda x: x.split([data.max_history, data.num_candidates], 1)
    action = torch.bitwise_left_shift(torch.ones_like(kept), cut(rating)[0].floor().long() - 1)
    columns = cut(item)[0], cut(category)[0], action, kept // data.most
    ids = _packed(data, users, when, lengths, columns, (cut(item)[1], cut(category)[1]))
    label = (cut(rating)[1] >= LIKED).float()
    return Batch(ids, marked(label, inside if inside is None else inside[:, None])), cut(chances)[1]


def newest(valid: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return (the places i64[B, most] of each row's last valid elements, in order; their number i64[B])."""
    rank = valid.flip(1).cumsum(1).flip(1) - 1  # 0 for the newest
    valid = valid & (rank < most)
    lengths = valid.sum(1)
    to = torch.where(valid, lengths[:, None] - 1 - rank, most)
    place = torch.arange(valid.shape[1], device=valid.device).expand_as(valid)
    return torch.zeros_like(to[:, :1]).expand(-1, most + 1).scatter(1, to, place)[:, :most], lengths


def _packed(data: GeneratedHistories, users: Tensor, when: Tensor, lengths: Tensor, history: tuple, candidates: tuple):
    """Return the ids of all columns in one buffer, with L places of each history, of which `lengths` are filled."""
    num_rows, ones = users.shape[0], torch.ones_like(users)
    counts = [ones, *[lengths] * len(HISTORY), *[ones * data.num_candidates] * len(CANDIDATES), ones]
    offsets = offsets_of(torch.cat(counts))
    capacity = num_rows * (2 + len(HISTORY) * data.max_history + len(CANDIDATES) * data.num_candidates)
    starts = offsets[:-1].view(len(counts), num_rows)
    buffer = torch.zeros(capacity + 1, dtype=torch.int64, device=users.device)
    at = [starts[0], starts[-1]]
    put = [users, when + 1]
    place = torch.arange(data.max_history, device=users.device)
    for i, column in enumerate(history):
        at.append(torch.where(place < lengths[:, None], starts[1 + i][:, None] + place, capacity))
        put.append(column)
    for i, column in enumerate(candidates):
        at.append(starts[1 + len(HISTORY) + i][:, None] + torch.arange(data.num_candidates, device=users.device))
        put.append(column)
    flat = [torch.cat([x.flatten() for x in group]) for group in (at, put)]
    keys = ("user", *HISTORY, *CANDIDATES, "query_time")
    return KeyedJaggedTensor(buffer.scatter(0, *flat)[:capacity], offsets, keys=keys)


# -- validators ------------------------------------------------------------------------------------------------------


def timestamp_problems(timestamp: object, num_timestamps: int) -> Iterator[Problem]:
    need, hint = f"an int from 0 to {num_timestamps - 1}", f"timestamp={num_timestamps - 1}"
    if not isinstance(timestamp, int) or isinstance(timestamp, bool):
        yield Problem("`timestamp` is not an integer.", describe(timestamp), need, hint, TypeError)
    elif not 0 <= timestamp < num_timestamps:
        yield Problem("`timestamp` does not exist.", f"{timestamp}", need, hint)


def category_problems(num_items: int, num_categories: int, per_user: int, num_timestamps: int) -> Iterator[Problem]:
    if num_items // num_categories < num_timestamps:
        got = f"{num_items // num_categories} items a category, {num_timestamps} timestamps"
        need = "num_items // num_categories >= num_timestamps, so that the first timestamp has items"
        yield Problem("`num_items` are too few.", got, need)
    if per_user > num_categories:
        got = f"{per_user} of {num_categories}"
        yield Problem("`categories_per_user` is more than `num_categories`.", got, "at most num_categories")
