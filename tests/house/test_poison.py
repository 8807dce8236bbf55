"""The memory that the tests poison is poisoned for funcrec's modules, and only for them."""

import torch

import funcrec as fr
from funcrec.tables import _init


def test_empty_memory_is_nan_inside_funcrec():
    """A module of funcrec that reads torch.empty before writing it reads NaN."""
    made = eval("torch.empty(3), torch.zeros(2).new_empty(2), torch.empty_like(torch.zeros(4))", vars(_init))
    assert all(bool(x.isnan().all()) for x in made)
    whole = torch.empty(2, dtype=torch.int64)
    assert whole.shape == (2,)
    assert not bool(fr.init(fr.key(0), [fr.TableConfig("t", 3, 2)])["t"].isnan().any())
