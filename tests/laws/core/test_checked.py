"""checked and validate change nothing for valid values, and name invalid values."""

import threading

import pytest
import torch
from hypothesis import given

import funcrec as fr
from funcrec.core._tree import replace
from funcrec.testing import assert_trees_close
from funcrec.testing import strategies as frs

ITEM = fr.TableConfig("item", num_embeddings=5, embedding_dim=2)
CLICKED = fr.FeatureConfig("clicked", table="item", max_length=3)
TABLES = {"item": torch.ones(5, 2)}


def ids(bags):
    return fr.KeyedJaggedTensor.from_lists({"clicked": bags})


@given(frs.lookups())
def test_checked_lookups_give_the_same_bits_or_an_error(made):
    """checked(lookup) equals lookup where validate finds nothing, and raises where it finds something."""
    pooled = [f for f in made.features if f.pooling != "none"]
    if not pooled:
        return
    ids, read = made.ids, {f.key for f in pooled if f.weighted}
    # only validate checks weights that this lookup does not read, because another lookup may read them
    if ids.weights is not None:
        bare = tuple(k for k in ids.keys if k not in read or k in ids.unweighted)
        ids = replace(ids, weights=ids.weights if read else None, unweighted=bare if read else ())
    run = lambda: fr.lookup(made.tables, ids, pooled)
    try:
        fr.validate(ids, pooled, made.tables)
    except fr.CheckError:
        with pytest.raises(fr.CheckError):
            fr.checked(run)()
    else:
        assert_trees_close(fr.checked(run)(), run())


def test_checked_ends_with_the_call_and_stays_in_its_thread():
    """The switch is off again after a call, after an error, and in every other thread."""
    wrong = lambda: fr.lookup(TABLES, ids([[9]]), [CLICKED]).values
    seen = []

    def both():
        other = threading.Thread(target=lambda: seen.append(wrong()))
        other.start()
        other.join()
        return wrong()

    with pytest.raises(fr.CheckError):
        fr.checked(both)()
    assert_trees_close(seen[0], torch.zeros(1, 2))
    assert_trees_close(wrong(), torch.zeros(1, 2))


def nan_dense(params, batch):
    return (params.dense["w"] - 1).sqrt().sum() * fr.lookup(params.tables, batch, [CLICKED]).values.sum()


def nan_row(params, batch):
    return fr.lookup(params.tables, batch, [CLICKED])["clicked"][1].sub(1).sqrt().sum() * params.dense["w"].sum()


def gradient(loss_fn, bags):
    return lambda: fr.checked(fr.value_and_grad(loss_fn))(fr.Params(TABLES, {"w": torch.ones(2)}), ids(bags))


def broken_offsets(offsets):
    return fr.KeyedJaggedTensor(torch.zeros(2, dtype=torch.int64), torch.tensor(offsets), keys=("clicked",))


BAD = {
    "id too large": (lambda: fr.validate(ids([[0], [4, 5, 6]]), [CLICKED], [ITEM]), "id 5 in bag 1, id 6 in bag 1"),
    "id negative": (lambda: fr.validate(ids([[-1]]), [CLICKED], [ITEM]), "id -1 in bag 0"),
    "three ids": (lambda: fr.validate(ids([[9, 9], [9]]), [CLICKED], [ITEM]), r"id 9 in bag 1\n"),
    "many ids": (lambda: fr.validate(ids([[9, 9], [9, 9], [9]]), [CLICKED], [ITEM]), "and 2 more"),
    "bag too long": (lambda: fr.validate(ids([[], [1, 2, 3, 4]]), [CLICKED], [ITEM]), "bag 1 with 4 ids"),
    "descending": (lambda: fr.validate(broken_offsets([0, 2, 1]), [CLICKED], [ITEM]), "descends"),
    "beyond": (lambda: fr.validate(broken_offsets([0, 3]), [CLICKED], [ITEM]), "beyond the values"),
    "not from 0": (lambda: fr.validate(broken_offsets([1, 2]), [CLICKED], [ITEM]), "begin at 0"),
    "lookup": (lambda: fr.checked(fr.lookup)(TABLES, ids([[7]]), [CLICKED]), "id 7 in bag 0"),
    "nan in a dense gradient": (gradient(nan_dense, [[1]]), r"params.dense\['w'\]` is not finite"),
    "infinite row gradient": (gradient(nan_row, [[1], [2]]), r"params.tables\['item'\]` is not finite"),
}


@pytest.mark.parametrize("call, fragment", BAD.values(), ids=BAD.keys())
def test_bad_values_are_named(call, fragment):
    """CheckError names feature, bag and id, or the gradient that is not finite. CheckError is a ValueError."""
    with pytest.raises(fr.CheckError, match=fragment) as error:
        call()
    assert isinstance(error.value, ValueError)
    assert all(part in str(error.value) for part in ("got   ", "need  "))


def test_hashed_ids_are_always_rows():
    """A feature with a hash has no id out of range."""
    hashed = fr.FeatureConfig("clicked", table="item", hash=fr.modulo())
    fr.validate(ids([[-7, 10**12]]), [hashed], [ITEM])
