"""The compiler splits exchanges into smaller exchanges, with the same bits."""

import re

import pytest
import torch
from programs import exchange_programs

F32, F64 = torch.float32, torch.float64
# the number of elements of a block
LARGE = 20_000


def generated(count):
    """Return generated programs of up to five exchanges of earlier values, small and large, with four dtypes."""
    g = torch.Generator().manual_seed(0)
    pick = lambda xs: xs[int(torch.randint(0, len(xs), (), generator=g))]
    kinds = list(exchange_programs.KINDS)
    return [
        [
            (pick(kinds), pick(range(5)), pick((1, 7, 40, LARGE)), pick((F32, F64, torch.float16, torch.int64)))
            for _ in range(pick(range(1, 6)))
        ]
        for _ in range(count)
    ]


def same(xs, ys):
    return all(torch.equal(x, y) for x, y in zip(xs, ys, strict=True))


@pytest.mark.parametrize(("n", "count"), [(2, 2), (3, 1)])
def test_smaller_exchanges_change_no_bit(n, count, ranks):
    """A program with split exchanges has the values of the staged program. It sends no more bytes than the staged
    program. For three ranks no exchange is split."""
    for found in ranks(n).run(exchange_programs.compiled, generated(count), deadline_s=1800):
        for plain, fast, before, after in found:
            assert same(plain, fast)
            assert len(after) == len(before)
            assert sum(x.sent_bytes for x in after) <= sum(x.sent_bytes for x in before)
        assert any(after != before for _, _, before, after in found) == (n == 2)


def test_of_two_ranks_each_sends_what_the_other_has_not(ranks):
    """A large gather that is read block by block sends this rank's value once. The operand of the gather is not
    copied."""
    for found in ranks(2).run(exchange_programs.compiled, [[("ends", 0, LARGE, F64)]], deadline_s=300):
        ((_, _, before, after),) = found
        assert {x.shape for x in before} == {(2, LARGE)}
        assert {x.shape for x in after} == {(1, LARGE)}
        assert {x.sent_bytes for x in (*before, *after)} == {8 * LARGE}


def test_a_rank_computes_while_values_travel(ranks):
    """An operation that only the end of the program needs runs while the last exchange is in progress, not before or
    after it."""
    (code, _) = ranks(2).run(exchange_programs.code_of_two_rounds, deadline_s=300)
    call = code[code.index("def call(") :]
    marks = re.findall(r"(all_to_all_single|wait_tensor|mm)(?:\.default)?\(", call)
    assert [m[:4] for m in marks] == ["mm", "all_", "wait", "mm", "all_", "mm", "wait"]
