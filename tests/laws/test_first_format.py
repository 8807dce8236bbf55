"""Files of the checkpoints' first format, of which one is kept here."""

from pathlib import Path

import pytest
import torch

import funcrec as fr
from funcrec.testing import assert_trees_close

KEPT = Path(__file__).parent / "data" / "checkpoint_1.pt"
TABLES = (fr.TableConfig("item", 7, 3), fr.TableConfig("user", 4, 2, dtype=torch.bfloat16))
FEATURES = (fr.FeatureConfig("clicked", table="item"), fr.FeatureConfig("who", table="user"))
IDS = fr.KeyedJaggedTensor.from_lists({"clicked": [[1, 2], [], [6]], "who": [[0], [3], [1, 1]]})


def loss_fn(params, batch):
    acts = fr.lookup(params.tables, batch, FEATURES)
    return acts["clicked"].square().sum() + params.dense["w"].square().sum() + acts["who"].square().sum()


def kept_tree():
    """What the file was made of."""
    dense = {"w": torch.arange(3.0), "layers": [(torch.ones(2, 2, dtype=torch.float64),)]}
    step = fr.train_step(
        loss_fn, sparse=fr.optim.rowwise_adagrad(lr=0.1), dense=fr.optim.dense(torch.optim.SGD, lr=0.1)
    )
    state, _ = step(step.init(fr.Params(fr.init(fr.key(1), TABLES), dense)), IDS)
    plain = {
        "epoch": 3,
        "best": 0.5,
        "name": "run",
        "flags": (True, None, -1),
        "empty": torch.zeros(0, 3),
        "big": 2**70,
    }
    more = {5: [torch.tensor(7)], "view": torch.arange(6).reshape(2, 3).t()}
    return {"state": state, "ids": IDS, **plain, **more}


def test_a_file_of_the_first_format_is_its_tree():
    """A checkpoint that an earlier release wrote comes back with every bit, type and name,
    each tensor in memory of its own; saved again, too."""
    tree = kept_tree()
    loaded = fr.load(KEPT, like=tree)
    assert_trees_close(loaded, tree)
    assert loaded["flags"] == (True, None, -1)
    assert loaded["big"] == 2**70
    assert type(loaded["state"]) is fr.TrainState
    assert all(x.is_contiguous() for x in torch.utils._pytree.tree_leaves(loaded) if isinstance(x, torch.Tensor))


def test_a_loaded_state_of_the_first_format_trains_on(tmp_path):
    """What was loaded, and what is saved of it, goes on to the bits of the state that was saved."""
    step = fr.train_step(
        loss_fn, sparse=fr.optim.rowwise_adagrad(lr=0.1), dense=fr.optim.dense(torch.optim.SGD, lr=0.1)
    )
    loaded = fr.load(KEPT)["state"]
    again = fr.load(fr.save(tmp_path / "again", loaded))
    want, _ = step(kept_tree()["state"], IDS)
    for state in (loaded, again):
        assert_trees_close(step(state, IDS)[0], want)


def test_a_damaged_file_of_the_first_format_is_found(tmp_path):
    """With any byte changed, or cut off anywhere, the file is refused by name or is the tree that it was."""
    whole, tree = KEPT.read_bytes(), kept_tree()
    at = tmp_path / "damaged.pt"
    refused = 0
    broken = [whole[:i] + bytes([whole[i] ^ 0x5A]) + whole[i + 1 :] for i in range(0, len(whole), 3)]
    broken += [whole[:n] for n in range(0, len(whole), 131)]
    for content in broken:
        at.write_bytes(content)
        try:
            loaded = fr.load(at)
        except ValueError as error:
            assert "`damaged.pt` is not a whole checkpoint." in str(error)
            refused += 1
        else:
            assert_trees_close(loaded, tree)
    assert refused > len(broken) / 2


GOOD = {"format": "funcrec checkpoint 1", "tree": ("tensor", 0), "tensors": [torch.ones(2)]}
CRAFTED = {
    "no dict": [1],
    "no format": {**GOOD, "format": None},
    "no tensors": {"format": GOOD["format"], "tree": ("plain", 1)},
    "no tree": {"format": GOOD["format"], "tensors": []},
    "no such tensor": {**GOOD, "tree": ("tensor", 1)},
    "a tensor at -1": {**GOOD, "tree": ("tensor", -1)},
    "more than the file has": {**GOOD, "tensors": [torch.ones(1).expand(1 << 40)]},
    "a sparse tensor": {**GOOD, "tensors": [torch.ones(2, 2).to_sparse()]},
    "a tensor left over": {**GOOD, "tree": ("plain", 1)},
    "a node of no kind": {**GOOD, "tree": ("set", [1])},
    "a class of no name": {**GOOD, "tree": ("class", 3, [], [], ("plain", None))},
    "a class that is not here": {**GOOD, "tree": ("class", "os.system", [], [], ("tuple", []))},
    "a dict of no pairs": {**GOOD, "tree": ("dict", [1, 2])},
    "a key without a hash": {**GOOD, "tree": ("dict", [([1], ("tensor", 0))])},
}


@pytest.mark.parametrize("name", CRAFTED)
def test_a_crafted_file_of_the_first_format_is_refused(name, tmp_path):
    """A file of the right checksums that save did not write is refused by name,
    before memory is asked for that the file does not have."""
    torch.save(CRAFTED[name], tmp_path / "crafted.pt")
    with pytest.raises(ValueError, match=r"`crafted\.pt` is not a whole checkpoint"):
        fr.load(tmp_path / "crafted.pt")
