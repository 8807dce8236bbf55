"""The operators of C++ in a Python that has not defined funcrec's own: python -m programs.other_operators LIBRARY

The program prints each schema that differs from kernels/library.py, each answer that differs from the reference, and
each wrong call that is accepted. With --bare it imports nothing of funcrec, for a torch without funcrec. It then checks
only that the operators exist and answer.
"""

import sys
from collections.abc import Iterator

import torch

OFFSETS = torch.tensor([0, 2, 2, 5, 7, 7])
ROWS = torch.tensor([3, -1, 0, 9, 2, 2, 2**62])
TABLE = torch.arange(30.0).view(6, 5)
TAGS = torch.arange(1, 129).to(torch.uint8)  # a vocabulary of one bucket
ENTRIES = torch.tensor([3, 7]).repeat(128, 1)
ORDERED = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def calls() -> Iterator[tuple]:
    """Yield (operator, arguments) for every dtype and pooling, with weights, stacks, and rows outside every table."""
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        tables = [TABLE.to(dtype), (TABLE[:, :3] + 1).contiguous().to(dtype)]
        for rows in (ROWS, ROWS.clamp(-2, 30).int()):
            for mean, weights in ((0, None), (1, None), (0, torch.rand(7)), (1, torch.rand(7).double())):
                weighted = int(weights is not None)
                features = [0, 0, 0, 0, mean, weighted, 0, 1, 0, 2, 1, mean, weighted, 5]
                yield "pooled_lookup", (tables, [rows], OFFSETS, weights, features, 3)
                alike = [tables[0], tables[0].flip(0)]
                yield "pooled_lookup", (alike, [rows.flip(0)], OFFSETS.int(), weights, features, 2, 2)
            yield "gather_rows", (tables[1], rows)
    stack = torch.stack([TABLE, TABLE + 1])
    yield "pooled_lookup", ([stack], [ROWS], OFFSETS, None, [0, 0, 0, 0, 0, 0, 0], 5)
    yield "pooled_lookup", ([TABLE], [torch.stack([ROWS, ROWS.flip(0)])], OFFSETS, None, [0, 0, 0, 0, 0, 0, 0], 5)
    for bits in (8, 4, 2):
        codes = torch.randint(0, 256, (6, 4 + -(-5 * bits // 8)), dtype=torch.uint8)
        codes[:, :4] = torch.tensor([0.5, -1.25], dtype=torch.float16).view(torch.uint8)
        given = [codes, TABLE], [ROWS], OFFSETS, None, [0, 0, 0, 0, 0, 0, 0, 1, 0, 2, 0, 1, 0, 5], 3
        yield "quantized_lookup", (*given, [bits, 32], [5, 5])
        yield "quantized_rows", (codes, ROWS, bits, 5)
        yield "top_k", (torch.rand(2, 5), codes, None, None, 3, bits)
    yield "top_k", (torch.rand(2, 5), TABLE, ROWS[2:5], torch.tensor([0, 1, 3]), 4)
    yield "top_k", (torch.rand(2, 5).double(), TABLE.half(), None, None, 9)
    for values in (ROWS, TABLE[:, :2].repeat(2, 1)[:7], ROWS > 0, ROWS.short()):
        yield "to_padded", (values, OFFSETS, 2, 7.0)
        yield "to_padded", (values, OFFSETS.int(), 3, 0.0, 1)
        yield "take_ranges", (values, torch.tensor([5, 0, 3]), torch.tensor([2, 9, 1]), 8)
        yield "from_padded", (values[:6].view(3, 2, *values.shape[1:]), OFFSETS[:4], 6)
    yield "to_padded", (ROWS, OFFSETS, 2, 0.0, 2**63 - 1)
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        x, times = torch.rand(7, 2, 3, dtype=torch.float64).to(dtype), torch.tensor([0, 9, 1, 5, 99, 3, 3])
        whole = x, x + 1, torch.rand(7, 2, 4).to(dtype), OFFSETS, OFFSETS.int()
        yield "jagged_attention", (*whole, None, None, None, None, None, 0.5, 1.0, True, True)
        biases = torch.rand(2, 3), torch.rand(1, 4), times, times.double()
        yield "jagged_attention", (*whole, *biases, torch.tensor([1, 0, 2, 9, 0]), 0.5, 7.0, False, True)
        kept = x[:3], x, x, torch.tensor([0, 1, 1, 2, 3, 3]), OFFSETS
        yield "jagged_attention", (*kept, biases[0], None, None, None, None, 2.0, 1.0, True, False)
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, *ORDERED):
        x = torch.tensor([[3, 1], [3, 0], [2, 5], [7, 7], [7, 9], [0, 1], [4, 2]]).to(dtype)
        yield "bag_extrema", (x, OFFSETS, True, True)
        yield "bag_extrema", (x[:, :1].contiguous(), OFFSETS.int(), False, False)
        if dtype.is_floating_point:
            yield "dot_interaction", ([x[:, None], torch.stack([x, x + 1, x * x], 1)],)
            yield "dot_interaction", ([x[:, None].transpose(1, 2)],)
    for dtype in (torch.float32, torch.float64):
        a, b = (torch.rand(2, n, 300, generator=torch.Generator().manual_seed(n)).to(dtype) for n in (3, 5))
        yield "invariant_bmm", (a, b.mT)
        yield "invariant_bmm", (a.mT.contiguous().mT[:, :, 1:], b.mT.contiguous()[:, 1:])
        yield "invariant_bmm", (a[:, ::2], b[:, :0].mT)
        yield "invariant_sum", (a,)
        yield "invariant_sum", (a.mT,)
    for ids in (ROWS, ROWS.clamp(-2, 30).int(), torch.arange(200) - 50, ROWS[:0]):
        for tags in (TAGS, TAGS + 127):  # id 3 is in every row, and one row of the two has its tag
            yield "find_ids", (tags, ENTRIES, ids, torch.tensor(len(ids)), 3, 0)
        yield "find_ids", (TAGS, ENTRIES, ids, torch.tensor(len(ids) // 2), 0, 5)
        yield "find_columns", ([TAGS, ENTRIES] * 2, ids, OFFSETS, [3, 0, 0, 5], [0, 0, 0, 2, 1, 1, 0, 2, 3, 0])
    yield "bucketize", (ROWS, OFFSETS, None, 3, 2)
    yield "bucketize", (ROWS.clamp(-2, 30).int(), OFFSETS, torch.rand(7), 2, 3)


def attention(**other: torch.Tensor) -> tuple[str, list]:
    """Return a call of attention of 6 queries over themselves, with other tensors in place of some."""
    x, none = TABLE.view(6, 1, 5), ("position_bias", "time_bias", "query_times", "key_times", "num_targets")
    whole = {"queries": x, "keys": x, "values": x, "offsets": OFFSETS, "key_offsets": OFFSETS, **dict.fromkeys(none)}
    return "jagged_attention", [*(whole | other).values(), 1.0, 1.0, True, True]


WRONG = {
    "a table that is not there": ("pooled_lookup", ([TABLE], [ROWS], OFFSETS, None, [1, 0, 0, 0, 0, 0, 0], 5)),
    "rows that are not there": ("pooled_lookup", ([TABLE], [ROWS], OFFSETS, None, [0, 1, 0, 0, 0, 0, 0], 5)),
    "too few offsets": ("pooled_lookup", ([TABLE], [ROWS], OFFSETS, None, [0, 0, 1, 0, 0, 0, 0], 5)),
    "a gap": ("pooled_lookup", ([TABLE], [ROWS], OFFSETS, None, [0, 0, 0, 0, 0, 0, 2], 5)),
    "a negative column": ("pooled_lookup", ([TABLE], [ROWS], OFFSETS, None, [0, 0, 0, 0, 0, 0, -(2**40)], 5)),
    "six numbers": ("pooled_lookup", ([TABLE], [ROWS], OFFSETS, None, [0] * 6, 5)),
    "negative bags": ("pooled_lookup", ([TABLE], [ROWS], OFFSETS, None, [0] * 7, -5)),
    "short weights": ("pooled_lookup", ([TABLE], [ROWS], OFFSETS, torch.rand(3), [0, 0, 0, 0, 0, 1, 0], 5)),
    "a table of ints": ("pooled_lookup", ([TABLE.long()], [ROWS], OFFSETS, None, [0] * 7, 5)),
    "no boundary": ("pooled_lookup", ([TABLE], [ROWS], OFFSETS[:0], None, [], 0)),
    "a short member": ("pooled_lookup", ([torch.stack([TABLE] * 3)], [ROWS.expand(2, -1)], OFFSETS, None, [0] * 7, 5)),
    "rows of floats": ("gather_rows", (TABLE, ROWS.double())),
    "a vector for a table": ("gather_rows", (TABLE[0], ROWS)),
    "codes of another width": ("quantized_rows", (TABLE.byte(), ROWS, 8, 5)),
    "codes of floats": ("quantized_rows", (torch.rand(6, 9), ROWS, 8, 5)),
    "too many columns": ("quantized_rows", (TABLE.byte(), ROWS, 8, 2**60)),
    "one dim for two": ("quantized_lookup", ([TABLE, TABLE], [ROWS], OFFSETS, None, [0] * 7, 5, [32, 32], [5])),
    "heads that differ": attention(values=TABLE.view(3, 2, 5)),
    "attention to fewer bags": attention(key_offsets=OFFSETS[:3]),
    "a bias without times": attention(time_bias=torch.rand(1, 2)),
    "a bias of three heads": attention(position_bias=torch.rand(3, 2)),
    "queries of ints": attention(queries=ROWS[:6].view(6, 1, 1)),
    "a matrix of offsets": ("to_padded", (ROWS, OFFSETS.view(2, 3), 2, 0.0)),
    "a negative length": ("to_padded", (ROWS, OFFSETS, -1, 0.0)),
    "other bags": ("from_padded", (ROWS[:6].view(3, 2), OFFSETS, 6)),
    "the greatest bool": ("bag_extrema", (ROWS > 0, OFFSETS, True, True)),
    "vectors of ints": ("dot_interaction", ([ROWS.view(7, 1, 1)],)),
    "vectors of other dims": ("dot_interaction", ([TABLE.view(6, 1, 5), TABLE.view(6, 5, 1)],)),
    "operands of two sizes": ("invariant_bmm", (torch.rand(1, 2, 3), torch.rand(1, 4, 2))),
    "operands of two dtypes": ("invariant_bmm", (torch.rand(1, 2, 3), torch.rand(1, 3, 2).double())),
    "one matrix": ("invariant_bmm", (torch.rand(2, 3), torch.rand(3, 2))),
    "a sum of halves": ("invariant_sum", (torch.rand(1, 2, 3).half(),)),
    "tags of half a bucket": ("find_ids", (TAGS[:64], ENTRIES[:64], ROWS, torch.tensor(7), 0, 0)),
    "fewer entries": ("find_ids", (TAGS, ENTRIES[:64], ROWS, torch.tensor(7), 0, 0)),
    "ids of floats": ("find_ids", (TAGS, ENTRIES, ROWS.double(), torch.tensor(7), 0, 0)),
    "several numbers of ids": ("find_ids", (TAGS, ENTRIES, ROWS, torch.tensor([7, 7]), 0, 0)),
    "bags that are not there": ("find_columns", ([TAGS, ENTRIES], ROWS, OFFSETS, [0, 0], [0, 0, 0, 6, 0])),
    "no such vocabulary": ("find_columns", ([TAGS, ENTRIES], ROWS, OFFSETS, [0, 0], [1, 0, 0, 1, 0])),
    "a number of two": ("find_columns", ([TAGS, ENTRIES], ROWS, OFFSETS, [0], [])),
    "fewer lengths": ("take_ranges", (ROWS, OFFSETS, OFFSETS[:2], 6)),
    "a negative capacity": ("take_ranges", (ROWS, OFFSETS, OFFSETS, -6)),
    "queries of another dim": ("top_k", (torch.rand(2, 4), TABLE, None, None, 3)),
    "codes of no bits": ("top_k", (torch.rand(2, 5), TABLE.byte(), None, None, 3)),
    "fewer bags of rows": ("top_k", (torch.rand(2, 5), TABLE, ROWS, OFFSETS[:2], 3)),
    "floats as codes": ("top_k", (torch.rand(2, 5), TABLE, None, None, 3, 32)),
    "a bag beyond counting": ("pooled_lookup", ([TABLE], [ROWS], OFFSETS, None, [0, 0, 2**63 - 1, 0, 0, 0, 0], 1)),
    "shards beyond counting": ("bucketize", (ROWS, OFFSETS[:5], None, 2**62, 2)),
    "less than none": ("top_k", (torch.rand(2, 5), TABLE, None, None, -3)),
    "shards without rows": ("bucketize", (ROWS, OFFSETS, None, 3, 0)),
    "fewer weights": ("bucketize", (ROWS, OFFSETS, torch.rand(2), 3, 2)),
}  # fmt: skip


def answers(name: str, given: tuple) -> list[torch.Tensor]:
    out = getattr(torch.ops.funcrec_cpp, name)(*given)
    return list(out) if isinstance(out, (tuple, list)) else [out]


def findings() -> Iterator[str]:
    from funcrec.kernels import library, stacks

    reference = library.load("reference")
    called = set()
    for name, given in calls():
        called.add(name)
        run = library.operator("reference", name)
        if name == "pooled_lookup":
            run = stacks.lookup_of_members(run)
        want = run(*given)
        want = list(want) if isinstance(want, (tuple, list)) else [want]
        for i, (x, y) in enumerate(zip(answers(name, given), want, strict=True)):
            near = {"rtol": 1e-6, "atol": 1e-6} if y.is_floating_point() else {"rtol": 0, "atol": 0}
            try:
                torch.testing.assert_close(x, y, **near)
            except AssertionError as error:
                yield f"{name}[{i}] of {[getattr(a, 'dtype', a) for a in given]}: {error}"
    for name in sorted(called):
        found = torch._C._get_schema(f"funcrec_cpp::{name}", "")
        want = torch._C.parse_schema(f"funcrec_cpp::{name}{library.SCHEMAS[name]}")
        if str(found) != str(want):
            yield f"{found}, not {want}"
    for what, (name, given) in WRONG.items():
        try:
            answers(name, given)
            yield f"{what} in {name} is not refused"
        except (RuntimeError, ValueError) as error:
            if "got" not in str(error) or "need" not in str(error):
                yield f"{what} in {name}: {error}"
    assert reference


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.ops.load_library(sys.argv[1])
    if "--bare" in sys.argv:
        print(sum(float(x.double().nan_to_num().sum()) != 0 for n, given in calls() for x in answers(n, given)))
    else:
        print(*findings(), sep="\n", end="")
