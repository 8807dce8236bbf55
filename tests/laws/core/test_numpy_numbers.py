"""Numbers of numpy, as pandas and numpy return them, are accepted like Python's numbers, and stored as Python's
numbers."""

import numpy as np
import pytest
import torch

import funcrec as fr
from funcrec.core._tree import tree_leaves
from funcrec.testing import assert_trees_close

TABLE, FEATURE = fr.TableConfig("item", 5, 4), fr.FeatureConfig("item", table="item")
IDS = fr.KeyedJaggedTensor.from_lists({"item": [[0], [7]]})
GRADS = {"item": fr.RowGrads.from_entries(torch.tensor([1]), torch.ones(1, 4), num_embeddings=5)}
TABLES = {"item": torch.zeros(5, 4)}
trained = lambda opt, step: opt.update(GRADS, opt.init(TABLES), TABLES, step)

CALLS = {  # (integer, float) -> a value or static data
    "a table": lambda i, f: fr.TableConfig("item", i(5), i(4), initializer=fr.constant(f(0.5))),
    "its rows": lambda i, f: fr.init(
        fr.key(i(3)), [fr.TableConfig("item", i(5), i(4), initializer=fr.uniform(f(0.5)))]
    ),
    "a feature": lambda i, f: fr.FeatureConfig("item", table="item", max_length=i(3), hash=fr.multiply_shift(i(2))),
    "hashed ids": lambda i, f: fr.hash_rows(torch.tensor([7, 8]), fr.modulo(), i(5)),
    "keys": lambda i, f: [fr.key(i(2**62)), *fr.split(fr.key(0), i(2)), fr.fold_in(fr.key(0), i(9))],
    "a mesh": lambda i, f: (fr.Mesh.emulated(x=i(2)), fr.table_wise("x", rank=i(1))),
    "strides": lambda i, f: fr.KeyedJaggedTensor.from_lengths(
        ["a", "b"], torch.arange(3), torch.ones(3, dtype=torch.int64), strides=(i(1), i(2))
    ),
    "optimizers": lambda i, f: [
        trained(fr.optim.adam(lr=f(0.5), b1=f(0.5)), i(1)),
        trained(fr.optim.accumulate(fr.optim.sgd(f(0.5)), every=i(2), capacity=i(4)), 0),
        fr.optim.schedule([fr.optim.Stage("linear", max_iters=i(4), value=f(0.5))], lr=f(0.5))(i(2)),
    ],
    "a layer": lambda i, f: fr.nn.mlp((i(4), i(2), i(1))).init(fr.key(0)),
    "a model": lambda i, f: fr.models.deepfm((TABLE,), (FEATURE,), num_dense=i(3)).init(fr.key(0)),
    "padding": lambda i, f: IDS.pad_to(i(8)),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_numbers_of_numpy_are_taken_for_python_s(name):
    """A call gives the same result for integers and floats of numpy as for those of Python. No leaf is a number of
    numpy."""
    got, want = CALLS[name](np.int64, np.float32), CALLS[name](int, float)
    assert_trees_close(got, want)
    assert not any(isinstance(x, np.generic) for x in tree_leaves(got))
    if name in ("a table", "a feature", "a mesh"):
        assert got == want and "np." not in repr(got) and hash(got) == hash(want)
