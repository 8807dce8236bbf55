"""Of which tables the rows are that an optimizer is shown in another place (`RowGrads.origin`): random bits go by it.

element (r, c) of a table [R, D]: bits 16 · (c mod 4), ... of word r · ⌈D / 4⌉ + c // 4 of the table's key
"""

import torch

from funcrec.tables._init import name_number

PER_WORD = 4  # columns that share the 64 bits of one random number
BEHIND = (0, 0, torch.iinfo(torch.int64).max, 0, 0)  # a segment of no row


def origin_of(table: str, dim: int, row=0, column=0, begin=0) -> tuple:
    """A segment, of integers or i64[M]: the rows from `begin` on are those of a table [R, dim] from `row` on, and their
    columns the table's from `column` on. (the table's number, the words before row 0 of what is shown, `begin`, the
    first column's place in its word, the words of a whole row).
    """
    words = -(-dim // PER_WORD)
    return name_number(table), (row - begin) * words + column // PER_WORD, begin, column % PER_WORD, words
