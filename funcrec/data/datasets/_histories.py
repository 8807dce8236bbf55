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

    Cost: a batch takes time in proportion to the latest timestamp of its rows.

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


def visit(data: GeneratedHistories, users: Tensor, timestamp: int) -> Tensor:
    """Return the number i64[B] of a user's visit. Timestamp -1 is before the first one."""
    return users * (data.num_timestamps + 1) + timestamp + 1


def is_active(data: GeneratedHistories, users: Tensor, timestamp: int) -> Tensor:
    if timestamp < 0:
        return torch.ones_like(users, dtype=torch.bool)
    return chance(data, "active", visit(data, users, timestamp)) < data.activity


def categories_of(data: GeneratedHistories, users: Tensor) -> Tensor:
    """Return the categories of users in their order of preference, i64[B, K]: a draw without repeats."""
    at = users[:, None] * data.num_categories + torch.arange(data.num_categories, device=users.device)
    return chance(data, "user", at).argsort(1)[:, : data.categories_per_user]


def lengths_at(data: GeneratedHistories, users: Tensor, timestamp: int) -> Tensor:
    """Return the number of samples of users at a timestamp, i64[B]."""
    u = chance(data, "length", visit(data, users, timestamp))
    z = math.sqrt(2) * torch.erfinv((u + 2.0**-54) * 2 - 1)
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


def category_ratings(timestamp: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the ratings that categories of each quarter may have at a time, and their probabilities, f64[4, 3].

    The first, second and third rating of a quarter move with the first, second and third cosine. The ratings 4.5, 4.0
    and 3.5 of the first two quarters, and those of the others, come in this order."""
    waves = torch.tensor([math.cos((timestamp + shift) * math.pi / 4) for shift in (0, 2, 4)], dtype=torch.float64)
    ratings = torch.tensor(CATEGORY_RATINGS, dtype=torch.float64) + 0.5 * waves
    return ratings.to(device), torch.tensor(CATEGORY_CHANCES, dtype=torch.float64, device=device)


def samples_at(data: GeneratedHistories, users: Tensor, categories: Tensor, counts: Tensor, timestamp: int):
    """Return (place, item, rating), [B, S] each: the samples of all users at a timestamp, active or not."""
    k, nth = data.categories_per_user, torch.arange(data.most, device=users.device)
    at = visit(data, users, timestamp)
    alpha = 1 + (chance(data, "alpha", at) * MOST_ALPHA).long()
    p = (alpha[:, None] / k + counts) / (alpha + counts.sum(1))[:, None]
    at = at[:, None] * data.most + nth
    place = (chance(data, "category", at)[:, :, None] >= p.cumsum(1)[:, None, :-1]).sum(2)
    per_category = data.num_items // data.num_categories
    available = per_category * max(timestamp + 1, 1) // data.num_timestamps
    item = categories.gather(1, place) * per_category + (chance(data, "item", at) * available).long()
    ratings, chances = category_ratings(timestamp, users.device)
    quarter = quarter_of(data, place)
    which = (chance(data, "rating", at)[:, :, None] >= chances.cumsum(1)[quarter][:, :, :-1]).sum(2)
    rating = (ratings[quarter].gather(2, which[:, :, None])[:, :, 0] + own_rating(data, item)) / 2
    return place, item, rating


def liked_chance(data: GeneratedHistories, place: Tensor, item: Tensor, timestamp: int) -> Tensor:
    """Return the probability that the rating is at least 3.5, f64[B, S]."""
    ratings, chances = category_ratings(timestamp, item.device)
    quarter = quarter_of(data, place)
    is_liked = (ratings[quarter] + own_rating(data, item)[:, :, None]) / 2 >= LIKED
    return (chances[quarter] * is_liked).sum(2)


def _take(data: GeneratedHistories, rows: Tensor) -> tuple[Batch, Tensor]:
    """Return the batch of `rows`, and the probability of each label."""
    call = "funcrec.data.take"
    check(call, row_problems(rows, data.num_rows, data.key.device))
    last = int(rows.max()) // data.num_users if is_concrete(rows) and rows.numel() else data.num_timestamps - 1
    rows, inside = there(rows.long(), data.num_rows)
    users, when = rows % data.num_users, rows // data.num_users
    categories = categories_of(data, users)
    counts = torch.zeros_like(categories)
    nth = torch.arange(data.most, device=rows.device)
    candidates = [torch.zeros(rows.shape[0], data.num_candidates, dtype=d, device=rows.device) for d in
                  (torch.int64, torch.int64, torch.float64, torch.float64)]  # fmt: skip
    history = []
    for t in range(-1, last + 1):
        place, item, rating = samples_at(data, users, categories, counts, t)
        category = categories.gather(1, place)
        is_past = is_active(data, users, t) & (when > t)
        valid = is_past[:, None] & (nth < lengths_at(data, users, t)[:, None])
        counts = counts + torch.zeros_like(counts).scatter_add(1, place, valid.long())
        history.append((item, category, rating, torch.full_like(item, t + 1), valid))
        if t >= 0:
            found = item, category, rating, liked_chance(data, place, item, t)
            own = (when == t)[:, None]
            candidates = [
                torch.where(own, new[:, : data.num_candidates], old) for new, old in zip(found, candidates, strict=True)
            ]
    item, category, rating, chances = candidates
    ids = _packed(data, users, when, history, item, category)
    return Batch(ids, marked((rating >= LIKED).float(), inside if inside is None else inside[:, None])), chances


def _packed(data: GeneratedHistories, users: Tensor, when: Tensor, history: list, *candidates: Tensor):
    """Return the ids of all columns in one buffer, with the last L samples of each history."""
    item, category, rating, time, valid = (torch.cat(parts, 1) for parts in zip(*history, strict=True))
    action = torch.bitwise_left_shift(torch.ones_like(item), rating.floor().long() - 1)
    rank = valid.flip(1).cumsum(1).flip(1) - 1  # 0 for the newest
    valid = valid & (rank < data.max_history)
    lengths = valid.sum(1)
    place, num_rows = (lengths[:, None] - 1 - rank).clamp(min=0), users.shape[0]
    ones = torch.ones_like(users)
    counts = [ones, *[lengths] * len(HISTORY), *[ones * data.num_candidates] * len(CANDIDATES), ones]
    offsets = offsets_of(torch.cat(counts))
    capacity = num_rows * (2 + len(HISTORY) * data.max_history + len(CANDIDATES) * data.num_candidates)
    starts = offsets[:-1].view(len(counts), num_rows)
    buffer = torch.zeros(capacity + 1, dtype=torch.int64, device=users.device)
    at = [starts[0], starts[-1]]
    put = [users, when + 1]
    for i, column in enumerate((item, category, action, time)):
        at.append(torch.where(valid, starts[1 + i][:, None] + place, capacity))
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
