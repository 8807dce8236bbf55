"""Bags of one id each, which have their own loops, return the bits of their rows."""

import functools
import itertools

import pytest
import torch
from funcrec.kernels import cpp, ops
from programs.surroundings import on_threads

DIMS = (1, 4, 8, 15, 16, 33, 48, 64, 128, 144, 256)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def bits_of(x):
    return x.contiguous().view(torch.uint8)


def table_of(dtype, dim):
    """Return a table that contains zeros of both signs, infinities and NaN."""
    table = torch.randn(40, dim, generator=torch.Generator().manual_seed(dim), dtype=torch.float64).to(dtype)
    table[1], table[2, 0], table[3, -1], table[4, 0] = -0.0, torch.inf, torch.nan, 0.0
    return table


def rows_of(table, ids):
    """Return the sums of single rows: 0 + x, and zeros for ids outside the table."""
    wide = table.to(torch.promote_types(table.dtype, torch.float32))
    return torch.where(((ids >= 0) & (ids < len(table)))[:, None], wide[ids.clamp(0, len(table) - 1)], 0) + 0


SHAPES = {
    "single": torch.arange(141) + 7,
    "to the buffer's end": torch.arange(141) + 10,
    "one empty, one of two": torch.cat([torch.arange(70), torch.tensor([69]), torch.arange(71, 141)]),
    "beyond the buffer": torch.arange(141) + 20,
    "before the buffer": torch.arange(141) - 5,
}
IDS = torch.randint(-1, 41, (150,), generator=torch.Generator().manual_seed(1))
IDS[10:15] = torch.arange(5)


@pytest.mark.parametrize("dtype", [*DTYPES, 8, 4, 2])
def test_a_bag_of_one_id_is_its_row(dtype, on_every_level):
    """Each bag of one id is the id's row, or zeros for an id outside. This holds for every dtype and width, sums and
    means, cut or not, and both widths of ids. Offsets may start above 0. Blocks may mix single bags with longer
    bags."""
    calls = []
    for dim in DIMS:
        table = table_of(torch.float32 if dtype in (8, 4, 2) else dtype, dim)
        coded = cpp.quantize_rows(table[5:], dtype) if dtype in (8, 4, 2) else None
        table = table if coded is None else ops.quantized_rows(coded, torch.arange(len(coded)), dtype, dim)
        rows = rows_of(table, IDS)
        for offsets in SHAPES.values():
            ends = offsets.clamp(0, 150).tolist()
            counts = offsets.clamp(0, 150).diff()[:, None]
            want = torch.stack([rows[i:j].sum(0) for i, j in itertools.pairwise(ends)])
            for ints, mean, cut in ((torch.int64, False, 0), (torch.int32, True, 2), (torch.int64, True, 0)):
                given = [IDS.to(ints)], offsets.to(ints), None, [ops.Feature(0, 0, 0, cut, mean, False, 0)], 140
                if coded is None:
                    call = functools.partial(ops.pooled_lookup, [table], *given)
                else:
                    call = functools.partial(ops.quantized_lookup, [coded], *given, [dtype], [dim])
                calls.append((call, bits_of(want / counts.clamp(1) if mean else want)))

    def run():
        return all(torch.equal(bits_of(call()), want) for call, want in calls)

    found = on_every_level(run)
    assert found and all(found.values())


def test_a_large_output_of_single_bags():
    """An output of 12 MB, which the kernel writes past the caches, is right on one thread and on two."""
    table, ids = torch.randn(100, 64), torch.randint(-1, 101, (3 * 2**14,))
    offsets = torch.arange(len(ids) + 1)
    for n in (1, 2):
        with on_threads(n):
            got = ops.pooled_lookup([table], [ids], offsets, None, [ops.Feature(*[0] * 7)], len(ids))
            assert torch.equal(got, rows_of(table, ids))
