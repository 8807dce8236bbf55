"""A planner's report on a plan: the estimate, a bound on all plans, a line for each table, a line for each rank.

seconds ≥ bound_s;      gap = 1 - bound_s / seconds
"""

from typing import Any, NamedTuple

from funcrec.core import field_problems, html_table, new_figure

MB = 10**6


class TableLine(NamedTuple):
    """The line of a table. ranks: the ranks that hold a part of the table. shapes: (rows, columns) of a part of each
    block.

    bytes: on all ranks, with optimizer state. seconds: on the slowest rank of the table, with its exchange.
    cached: how many rows are in memory, if the others are in a store; else None. The shapes are those of these rows.
    """

    table: str
    placement: str
    ranks: tuple[int, ...]
    shapes: tuple[tuple[int, int], ...]
    bytes: int
    seconds: float
    reason: str
    cached: int | None = None

    @property
    def parts(self) -> str:
        """Return the shapes of the parts as text, each shape once: "2 of 50x8", "2 of 50x8 cached"."""
        many = f"{len(self.shapes)} of " if len(self.shapes) > 1 else ""
        return many + ", ".join(f"{r}x{c}" for r, c in dict.fromkeys(self.shapes)) + " cached" * bool(self.cached)


class RankLine(NamedTuple):
    """The line of a rank. bytes: of the banks, of their state, and of the buffers of a step's exchanges."""

    bytes: int
    lookup_s: float
    exchange_s: float
    update_s: float

    @property
    def seconds(self) -> float:
        return self.lookup_s + self.exchange_s + self.update_s


class Report(NamedTuple):
    """The report on a plan made by `fr.plan`. memory_bytes: the bytes that a rank may use."""

    mesh: tuple[tuple[str, int], ...]
    hardware: str
    batch_size: int
    memory_bytes: int
    seconds: float
    bound_s: float
    tables: tuple[TableLine, ...]
    ranks: tuple[RankLine, ...]

    @property
    def gap(self) -> float:
        return max(0.0, 1 - self.bound_s / self.seconds) if self.seconds > 0 else 0.0

    @property
    def imbalance(self) -> float:
        """Return the work of the slowest rank, divided by the mean over ranks; 1 if all ranks have the same work."""
        own = [r.lookup_s + r.update_s for r in self.ranks]
        return max(own) * len(own) / sum(own) if sum(own) > 0 else 1.0

    def headline(self) -> str:
        """Return one line with the mesh, the estimate and the bound on all plans."""
        return (
            f"{' x '.join(f'{a}={n}' for a, n in self.mesh)} of {self.hardware}, batch {self.batch_size}: "
            f"{self.seconds * 1e3:.4g} ms, no plan below {self.bound_s * 1e3:.4g} (gap {self.gap:.2%}), "
            f"imbalance {self.imbalance:.3f}"
        )

    def html(self) -> str:
        """Return an HTML table with a row for each table."""
        number = lambda x: f"{x:.4g}"
        rows = [
            (t.table, t.placement, _short(t.ranks), t.parts, number(t.bytes / MB), number(t.seconds * 1e3), t.reason)
            for t in self.tables
        ]
        return html_table(("table", "placement", "ranks", "parts", "MB", "ms", "why"), rows, self.headline())

    def text(self) -> str:
        """Return a text with a line for each table and each rank. Equal ranks share a line."""
        width = max([5, *(len(t.table) for t in self.tables)])
        kinds = max([9, *(len(t.placement) for t in self.tables)])
        lines = [
            self.headline(),
            "",
            f"{'table':{width}}  {'placement':{kinds}}  {'ranks':12}  {'parts':22}  {'MB':>10}  {'ms':>9}  why",
        ]
        for t in self.tables:
            lines.append(
                f"{t.table:{width}}  {t.placement:{kinds}}  {_short(t.ranks):12}  {t.parts:22}  "
                f"{t.bytes / MB:10.2f}  {t.seconds * 1e3:9.4f}  {t.reason}"
            )
        rest = (sum(r.bytes for r in self.ranks) - sum(t.bytes for t in self.tables)) / MB
        what = f"{'padding of banks, exchanges and vocabularies, all ranks':{width + kinds + 40}}"
        lines += [f"{what}  {rest:10.2f}"] if rest > 0.005 else []
        lines += [
            "",
            f"{'rank':>12}  {'MB':>10}  {'of':>10}  {'lookup ms':>10}  {'exchange':>9}  {'update':>9}  {'in all':>9}",
        ]
        alike: dict[str, list[int]] = {}
        for i, r in enumerate(self.ranks):
            ms = f"{r.lookup_s * 1e3:10.4f}  {r.exchange_s * 1e3:9.4f}  {r.update_s * 1e3:9.4f}  {r.seconds * 1e3:9.4f}"
            alike.setdefault(f"{r.bytes / MB:10.2f}  {self.memory_bytes / MB:10.2f}  {ms}", []).append(i)
        lines += [f"{_short(tuple(numbers)):>12}  {text}" for text, numbers in alike.items()]
        top = lambda name: max((getattr(r, name) for r in self.ranks), default=0.0) * 1e3
        path = " + ".join(f"{n[:-2]} {top(n):.4g}" for n in ("lookup_s", "exchange_s", "update_s"))
        return "\n".join([*lines, "", f"critical path: {path} ms, each of its slowest rank"])

    def draw(self) -> Any:
        """Return a matplotlib Figure of ranks × tables, which shows how much of each table each rank holds."""
        figure = new_figure("funcrec.Plan.draw", max(5, min(16, 0.25 * len(self.tables) + 3)), 5)
        axes, times = figure.subplots(1, 2, width_ratios=(3, 1), sharey=True)
        share = [[0.0] * len(self.tables) for _ in self.ranks]
        for j, t in enumerate(self.tables):
            for r in t.ranks:
                share[r][j] = t.bytes / len(t.ranks) / MB
        shown = axes.imshow(share, aspect="auto", cmap="Blues", interpolation="nearest")
        figure.colorbar(shown, ax=axes, label="MB of a rank")
        axes.set(xlabel="table", ylabel="rank", title=f"{self.seconds * 1e3:.3g} ms, gap {self.gap:.1%}")
        if len(self.tables) <= 40:
            axes.set_xticks(range(len(self.tables)), [t.table for t in self.tables], rotation=90)
        left = [0.0] * len(self.ranks)
        for name in ("lookup_s", "exchange_s", "update_s"):
            own = [getattr(r, name) * 1e3 for r in self.ranks]
            times.barh(range(len(own)), own, left=left, label=name[:-2])
            left = [a + b for a, b in zip(left, own, strict=True)]
        times.set(xlabel="ms")
        times.legend()
        return figure

    def to_dict(self) -> dict[Any, Any]:
        """Return the report as a dict that JSON can hold."""
        own = self._asdict()
        return {**own, "tables": [t._asdict() for t in self.tables], "ranks": [r._asdict() for r in self.ranks]}

    @staticmethod
    def from_dict(given: dict[Any, Any]) -> "Report":
        pairs = lambda x: tuple(tuple(p) for p in x)
        table = lambda t: TableLine(**{**t, "ranks": tuple(t["ranks"]), "shapes": pairs(t["shapes"])})
        tables, ranks = tuple(map(table, given["tables"])), tuple(RankLine(**r) for r in given["ranks"])
        return Report(**{**given, "mesh": pairs(given["mesh"]), "tables": tables, "ranks": ranks})


def report_problem(given: Any, names: list[str]) -> str | None:
    """Return the reason why a dict is not a report of these tables; None if it is such a report."""
    try:
        report = Report.from_dict(given)
    except (TypeError, KeyError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    for line in (report, *report.tables, *report.ranks):
        found = [p.what for p in field_problems(line)]
        found += [
            f"`{n}` is {x}" for n, x in zip(line._fields, line)
            if isinstance(x, bool) or (isinstance(x, int | float) and not 0 <= x < float("inf"))
        ]  # fmt: skip
        if found:
            return found[0]
    if [t.table for t in report.tables] != names:
        return "a report of other tables"
    numbers = [r for t in report.tables for r in t.ranks]
    return None if all(0 <= r < len(report.ranks) for r in numbers) else "ranks that are not there"


def _short(ranks: tuple[int, ...]) -> str:
    """Return the ranks as a short text: 0-3,6 for (0, 1, 2, 3, 6)."""
    runs: list[list[int]] = []
    for r in sorted(ranks):
        if runs and r == runs[-1][1] + 1:
            runs[-1][1] = r
        else:
            runs.append([r, r])
    text = ",".join(f"{a}-{b}" if b > a else f"{a}" for a, b in runs)
    return text if len(text) <= 12 else f"{len(ranks)} ranks"
