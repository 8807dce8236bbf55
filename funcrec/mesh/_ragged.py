"""ragged_all_to_all: every rank sends to every rank any number of rows, in buffers of fixed size.

    output[r][output_offsets[s][r] + j] = operand[s][input_offsets[s][r] + j]      for j < send_sizes[s][r]

Sizes stay on the device. For each pair of ranks a block of `capacity` rows travels, so that no shape depends on a
value.
Shapes: n ranks, N rows of the operand, M rows of the output, K the capacity.
"""

from collections.abc import Iterator
from typing import Annotated

import torch
from torch import Tensor

from funcrec.core import Form, Problem, Size, check, describe, device_problems, typed
from funcrec.mesh._collectives import all_to_all, axis_size

PerRank = Annotated[Tensor, Form("i[n]")]


@typed
def ragged_all_to_all(
    operand: Annotated[Tensor, Form("[N, ...]")],
    output: Annotated[Tensor, Form("[M, ...]")],
    input_offsets: PerRank,
    send_sizes: PerRank,
    output_offsets: PerRank,
    recv_sizes: PerRank,
    *,
    axis_name: str,
    capacity: Size | None = None,
) -> Tensor:
    """Return a copy of `output` with the rows that all ranks send to this rank.

    One sender s takes, for each rank r, `send_sizes[r]` rows of its operand from `input_offsets[r]` on. These rows land
    in r's output from `output_offsets[r]` on. One receiver r gets `recv_sizes[s]` rows from rank s. Places that no rank
    writes keep the rows of `output`. The caller guarantees that sender and receiver agree (`recv_sizes ==
    all_to_all(send_sizes)`), that all ranges are inside their buffers, and that no two ranges in one output overlap.

    Args:
      operand: [N, ...]. output: [M, ...], of the same dtype and trailing shape.
      input_offsets, send_sizes, output_offsets, recv_sizes: i32[n] or i64[n].
      capacity: the most rows that any pair of ranks exchanges; None for N. Every pair sends this many rows, so a
        small capacity saves bytes. Rows that exceed the capacity are lost. `capacity=None` loses no row.

    Returns:
      [M, ...].

    Law: the result is linear in operand and output. The transpose sends every row back.

    Cost: every rank sends n · K rows.

    Example: rank 0 holds [1, 2, 2]. It sends one row to itself and two rows to rank 1.
      Rank 1 holds [3, 4, 0]. It sends one row to each rank.
      >>> import torch, funcrec as fr
      >>> def f(x, starts, sizes, places, received):
      ...     out = fr.ragged_all_to_all(x, torch.zeros(4), starts[0], sizes[0], places[0], received[0], axis_name="x")
      ...     return out
      >>> starts, sizes = torch.tensor([[0, 1], [0, 1]]), torch.tensor([[1, 2], [1, 1]])
      >>> places, received = torch.tensor([[0, 0], [1, 2]]), torch.tensor([[1, 1], [2, 1]])
      >>> g = fr.shard_map(f, mesh=fr.Mesh.emulated(x=2), in_specs=fr.P("x"), out_specs=fr.P("x"))
      >>> g(torch.tensor([1.0, 2, 2, 3, 4, 0]), starts, sizes, places, received).reshape(2, 4)
      tensor([[1., 3., 0., 0.],
              [2., 2., 4., 0.]])

    Source: jax.lax.ragged_all_to_all.
    """
    call, n = "funcrec.ragged_all_to_all", axis_size(axis_name)
    check(call, operand_problems(operand, output, input_offsets, n))
    rows = operand.shape[0] if capacity is None else capacity
    within = torch.arange(rows, device=operand.device)
    blank = operand.new_zeros(1, *operand.shape[1:])
    source = torch.where(within < send_sizes[:, None], input_offsets[:, None] + within, operand.shape[0])
    sent = torch.cat([operand, blank])[source.clamp(max=operand.shape[0])]
    received, first = all_to_all((sent, output_offsets), axis_name)
    place = torch.where(within < recv_sizes[:, None], first[:, None] + within, output.shape[0])
    place = place.clamp(max=output.shape[0]).flatten()
    return torch.index_put(torch.cat([output, blank]), (place,), received.flatten(0, 1))[:-1]


def operand_problems(operand: Tensor, output: Tensor, input_offsets: Tensor, n: int) -> Iterator[Problem]:
    if operand.shape[1:] != output.shape[1:] or operand.dtype != output.dtype:
        got = f"{describe(operand)} and {describe(output)}"
        yield Problem("`operand` and `output` have different rows.", got, "one dtype and trailing shape")
    if input_offsets.shape[0] != n:
        yield Problem("`input_offsets` is not one number per rank.", describe(input_offsets), f"shape [{n}]")
    yield from device_problems(operand=operand, output=output, input_offsets=input_offsets)
