"""Make what notebooks show for a value: an HTML table, or a figure.

html_table(("name", "rows"), [("item", 3)])  =  <table> ... </table>, every cell escaped
"""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from funcrec.core._errors import fail


def html_table(head: Sequence[Any], rows: Iterable[Sequence[Any]], caption: str = "") -> str:
    """Return an HTML table with a line of names above the rows."""
    line = lambda tag, cells: f"<tr>{''.join(f'<{tag}>{escape(str(x))}</{tag}>' for x in cells)}</tr>"
    above = f"<caption>{escape(caption)}</caption>" if caption else ""
    body = "".join(line("td", row) for row in rows)
    return f"<table>{above}<thead>{line('th', head)}</thead><tbody>{body}</tbody></table>"


def new_figure(call: str, width: float, height: float) -> Any:
    """Return an empty matplotlib Figure, which belongs to no window and to no list of figures.

    Raises:
      ImportError: if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        what, need = "matplotlib is not installed.", "the package matplotlib"
        fail(call, what, got="no matplotlib", need=need, hint="pip install 'funcrec[plots]'", kind=ImportError)
    return Figure(figsize=(width, height), layout="constrained")
