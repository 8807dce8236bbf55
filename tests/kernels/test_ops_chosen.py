"""The choice of an operation's implementation. No implementation has derivatives."""

import pytest
import torch
from funcrec.kernels import ops

TABLE, ROWS = torch.ones(1, 1), torch.tensor([0])


def test_the_implementation_is_a_choice():
    """A name, `using` or the device chooses the implementation. An unknown implementation, or one without the
    operation, raises an error."""
    device = torch.device("cpu")
    assert ops.chosen(None, device) == "cpp" and ops.chosen("triton", device) == "triton"
    with ops.using("reference"):
        assert ops.chosen(None, device) == "reference" and ops.ambient() == "reference"
    assert ops.chosen(None, torch.device("cuda")) == "triton" and ops.chosen(None, torch.device("meta")) == "reference"
    with pytest.raises(TypeError, match="no implementation runs on Apple's GPUs"):
        ops.chosen(None, torch.device("mps"))
    with pytest.raises(ValueError, match="'nothing'"):
        ops.gather_rows(TABLE, ROWS, implementation="nothing")
    with pytest.raises(NotImplementedError, match="'reference' has no fused_update"):
        ops.fused_update(
            [TABLE], [[]], ops.Terms([], [], [], [], []), *[None] * 3, "sgd", [0.0], implementation="reference"
        )


@pytest.mark.needs("gather_rows", without="reference")
def test_a_kernel_is_not_differentiated(known, implementation):
    """grad and jvp through an implementation raise, because the derivative would silently be zero."""
    table, rows = torch.ones(2, known.dims[-1]), torch.tensor([0])
    take = lambda x: ops.gather_rows(x, rows, implementation=implementation).sum()
    for ask in (lambda: torch.func.grad(take)(table), lambda: torch.func.jvp(take, (table,), (table,)),
                lambda: take(table.clone().requires_grad_()),
                lambda: torch.func.vmap(torch.func.grad(take))(table[None])):  # fmt: skip
        with pytest.raises(TypeError, match="has no derivative"):
            ask()
