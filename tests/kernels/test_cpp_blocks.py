"""gather_block and scatter_block_ in C++, one list of rows in several tables, and updates by rules that run on them."""

import pytest
import torch
from funcrec.kernels import cpp
from funcrec.kernels.forms import accumulation_dtype
from torch.utils._pytree import tree_map

import funcrec as fr
from funcrec.optim import _blocks
from funcrec.testing import assert_trees_close


@pytest.mark.parametrize("num_rows", [0, 1, 65, 700])
def test_blocks_are_rows_of_every_table(num_rows):
    """Law: gather_block reads, and scatter_block_ writes, the same rows of tables of any width and dtype. All other
    rows keep their bits."""
    dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
    tables = [torch.randn(900, dim).to(dtype) for dim in (1, 7, 64, 130) for dtype in dtypes]
    rows = torch.randperm(900)[:num_rows]
    asked = torch.cat([rows, torch.tensor([-1, 900, 2**40])])
    read = cpp.gather_block(tables, asked)
    for x, y in zip(tables, read, strict=True):
        assert torch.equal(y[:num_rows], x[rows].to(accumulation_dtype(x.dtype))) and (y[num_rows:] == 0).all()
    new = [torch.randn(x.shape[1], num_rows).t().to(y.dtype) for x, y in zip(tables, read, strict=True)]
    count = num_rows * 3 // 4
    wanted = [x.clone().index_copy_(0, rows[:count], y[:count].to(x.dtype)) for x, y in zip(tables, new, strict=True)]
    cpp.scatter_block_(tables, rows, torch.tensor(count), new)
    assert all(torch.equal(a, b) for a, b in zip(tables, wanted, strict=True))


FEATURES = [
    fr.FeatureConfig("a", "t"), fr.FeatureConfig("b", "t", pooling="mean"), fr.FeatureConfig("c", "u"),
    fr.FeatureConfig("d", "t", weighted=True)]  # fmt: skip
IDS = fr.KeyedJaggedTensor.from_lists(
    {"a": [[1, 2], [3, 1, 1]], "b": [[], [2, 5]], "c": [[0], [1, 2]], "d": [[4, 2], [7]]},
    weights={"d": [[0.5, 2.0], [0.25]]},
)


def in_blocks():
    """Return an optimizer whose rule sorts, which the kernel cannot."""

    def rule(row, grad, slots, hyper):
        mean = 0.5 * slots["mean"] + grad
        return row - hyper.lr * (mean + mean.sort().values), {"mean": mean}

    return fr.optim.row_optimizer(init=lambda t: {"mean": torch.zeros_like(t, dtype=torch.float32)}, rule=rule, lr=0.5)


def step(optimizer, tables, slots, ids=IDS, **kernel):
    factors = torch.arange(1.0, 17)
    loss = lambda p: (fr.lookup(p.tables, ids, FEATURES).values * factors).square().sum()
    return optimizer.update(fr.value_and_grad(loss)(fr.Params(tables, ()))[1].tables, slots, tables, 0, **kernel)


def tables_of(dtype=torch.float32):
    return {n: torch.linspace(-1, 1, 4 * rows).view(rows, 4).to(dtype) for n, rows in (("t", 10), ("u", 3))}


@pytest.mark.parametrize("ids", [IDS, IDS.pad_to(40)], ids=["exact", "padded"])
@pytest.mark.parametrize("block_bytes", [_blocks.BLOCK_BYTES, 32], ids=["one block", "blocks of 2 rows"])
@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_rule_in_blocks_is_the_reference(dtype, rounds, block_bytes, ids, monkeypatch):
    """A rule that the kernel lacks has the reference's bits in blocks of any size: for gradients of bags, padded or
    weighted, of several features of a table, and with stochastic rounding."""
    monkeypatch.setattr(_blocks, "BLOCK_BYTES", block_bytes)
    optimizer, tables = in_blocks(), tables_of(dtype)
    optimizer = fr.optim.stochastic_rounding(optimizer, key=fr.key(1)) if rounds else optimizer
    slots = optimizer.init(tables)
    with pytest.warns(UserWarning, match="not a part of the kernel"):
        got = step(optimizer, tables, slots, ids, implementation="cpp")
    assert_trees_close(got, step(optimizer, tables, slots, ids, implementation="reference"), rtol=0, atol=0)
    assert not torch.equal(got[0]["t"], tables["t"])


BY_NUMBER = torch.tensor([1j, 2.0, 0.0, -1.0])
LACKING = {
    "a quotient to the floor": lambda grad: grad.div(0.3, rounding_mode="floor"),
    "bounds by tensors": lambda grad: grad.clamp(min=grad.mean(), max=grad.amax()),
    "a complex factor": lambda grad: (grad * BY_NUMBER).real,
    "whole numbers": lambda grad: grad * (grad > 0).long().bitwise_left_shift(2).remainder(3),
}


@pytest.mark.parametrize("name", LACKING)
def test_rules_that_the_kernel_lacks(name):
    """A rule with such an operation says so, and has the reference's bits."""
    rule = lambda row, grad, slots, hyper: (row - hyper.lr * LACKING[name](grad), slots)
    optimizer, tables = fr.optim.row_optimizer(init=lambda t: {}, rule=rule, lr=0.5), tables_of()
    slots = optimizer.init(tables)
    with pytest.warns(UserWarning, match="not a part of the kernel"):
        got = step(optimizer, tables, slots, implementation="cpp")
    assert_trees_close(got, step(optimizer, tables, slots, implementation="reference"), rtol=0, atol=0)


def test_members_of_a_rule_in_blocks():
    """Under vmap, each member gets the bits of an update of its own."""
    optimizer, tables = in_blocks(), tables_of()
    slots = optimizer.init(tables)
    own = [({n: t * k for n, t in tables.items()}, slots) for k in (1, 2)]
    stacked = tree_map(lambda *x: torch.stack(x), *own)
    with pytest.warns(UserWarning, match="not a part of the kernel"):
        got = torch.func.vmap(lambda tables, slots: step(optimizer, tables, slots))(*stacked)
    assert_trees_close(got, tree_map(lambda *x: torch.stack(x), *(step(optimizer, *x) for x in own)), rtol=0, atol=0)
