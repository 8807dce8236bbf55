"""Show tables as lines of text: rows, dim, bytes, and the features that read each table.

bytes of a table = R · D · bytes of a number
"""

from collections.abc import Sequence

from funcrec.tables._configs import FeatureConfig, TableConfig

HEAD = ["table", "rows", "dim", "bytes", "features"]
UNITS = ("B", "kB", "MB", "GB", "TB")


def table_lines(tables: Sequence[TableConfig], features: Sequence[FeatureConfig]) -> list[list[str]]:
    """Return a line for each table, in the columns of HEAD, and a last line with the sums of rows and bytes."""
    size = lambda t: t.num_embeddings * t.embedding_dim * t.dtype.itemsize
    read = lambda t: ", ".join(f.name for f in features if f.table == t.name)
    lines = [
        [t.name, f"{t.num_embeddings:,}", f"{t.embedding_dim}", in_units(size(t)), read(t)] for t in tables
    ]  # fmt: skip
    total = sum(t.num_embeddings for t in tables)
    return [*lines, ["in all", f"{total:,}", "", in_units(sum(map(size, tables))), ""]]


def in_units(size: int) -> str:
    """Return a size with three digits or more, such as 8 kB or 25.6 MB."""
    value, unit = float(size), 0
    while value >= 999.5 and unit + 1 < len(UNITS):
        value, unit = value / 1000, unit + 1
    return f"{value:.3g} {UNITS[unit]}" if value < 999.5 else f"{value:,.0f} {UNITS[unit]}"
