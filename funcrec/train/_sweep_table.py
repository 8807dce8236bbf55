"""sweep_table: what the members of a sweep came to, as rows, as text, as a figure, and as trials of Optuna.

Shapes: K members, T steps.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor

from funcrec.core import Form, Problem, check, describe, fail, html_table, new_figure, paths, sure, typed, typed_fields
from funcrec.train._sweep import swept_of

CALL = "funcrec.sweep_table"


@typed_fields
class SweepTable(NamedTuple):
    """The result of `sweep_table`.

    hyper: {name: f[K]}, the hyper-parameters.
    curves: {metric: f[T, K]}, the metrics of T steps, with nested names joined by dots.

    Example:
      >>> import torch, funcrec as fr
      >>> table = fr.SweepTable({"lr": torch.tensor([0.1, 0.5])}, {"loss": torch.tensor([[4.0, 4.0], [2.5, 0.0]])})
      >>> print(table.text())
      member   lr  loss
           0  0.1   2.5
           1  0.5     0
      >>> table.best(), table.rows[1]
      (1, {'member': 1, 'lr': 0.5, 'loss': 0.0})
    """

    hyper: Mapping[str, Annotated[Tensor, Form("f[K]")]]
    curves: Mapping[str, Annotated[Tensor, Form("n[T, K]")]]

    @property
    def rows(self) -> list[dict[str, float]]:
        """Return a dict for each member: "member", its hyper-parameters, and the metrics of the last step."""
        columns = {n: x.tolist() for n, x in self.hyper.items()} | {n: x[-1].tolist() for n, x in self.curves.items()}
        count = max(map(len, columns.values()), default=0)
        return [{"member": i, **{n: x[i] for n, x in columns.items()}} for i in range(count)]

    def text(self) -> str:
        """Return a line for each member, under a line of names."""
        head = ["member", *self.hyper, *self.curves]
        shown = [head, *([f"{row[n]:.4g}" for n in head] for row in self.rows)]
        widths = [max(len(line[i]) for line in shown) for i in range(len(head))]
        return "\n".join("  ".join(x.rjust(w) for x, w in zip(line, widths, strict=True)) for line in shown)

    def _repr_html_(self) -> str:
        """Return the table as HTML for a notebook."""
        head = ["member", *self.hyper, *self.curves]
        return html_table(head, [[f"{row[n]:.4g}" for n in head] for row in self.rows])

    @typed
    def best(self, metric: str = "loss", mode: Literal["max", "min"] = "min") -> int | None:
        """Return the first member with the best number at the last step; None if all numbers are NaN."""
        check("funcrec.SweepTable.best", metric_problems(metric, self.curves))
        sign = 1 if mode == "max" else -1
        found = [(sign * x, -i) for i, x in enumerate(self.curves[metric][-1].tolist()) if not math.isnan(x)]
        return -max(found)[1] if found else None

    @typed
    def plot(self, metric: str = "loss", x: str | None = None) -> Any:
        """Return a matplotlib Figure, which is not shown: the metric of the last step over a hyper-parameter.

        If there are several steps, a second panel has a curve for each member.

        Args:
          x: the hyper-parameter; None for the first. Its axis is logarithmic if its numbers span a factor of ten.

        Raises:
          ImportError: if matplotlib is not installed.
        """
        call = "funcrec.SweepTable.plot"
        check(call, metric_problems(metric, self.curves), hyper_problems(x, self.hyper))
        name, curves = x or next(iter(self.hyper), "member"), self.curves[metric]
        numbers = self.hyper[name].tolist() if name in self.hyper else list(range(curves.shape[1]))
        figure = new_figure(call, 4.5 * (1 + (len(curves) > 1)), 3.5)
        first, *others = figure.subplots(1, 1 + (len(curves) > 1), squeeze=False)[0]
        order = sorted(range(len(numbers)), key=numbers.__getitem__)
        first.plot([numbers[i] for i in order], [curves[-1, i].item() for i in order], marker="o")
        first.set(xlabel=name, ylabel=metric)
        if min(numbers, default=0) > 0 and max(numbers) >= 10 * min(numbers):
            first.set_xscale("log")
        for axes in others:
            for i in order:
                axes.plot(curves[:, i].tolist(), label=f"{numbers[i]:.3g}")
            axes.set(xlabel="step", ylabel=metric)
            axes.legend(title=name, fontsize="small")
        return figure

    @typed
    def add_trials(self, study: Any, metric: str = "loss", distributions: Mapping[str, Any] | None = None) -> None:
        """Add a finished trial for each member to a study of Optuna, which then suggests from all of them.

        Args:
          study: an `optuna.Study`. A member whose metric is NaN becomes a failed trial.
          distributions: {name: the distribution that the study suggests a hyper-parameter from}; for other names a
            FloatDistribution from the least to the greatest number.

        Raises:
          ImportError: if optuna is not installed.
        """
        call = "funcrec.SweepTable.add_trials"
        check(call, metric_problems(metric, self.curves), known_problems(distributions or {}, self.hyper))
        optuna = imported_optuna(call)
        ranges = {
            n: optuna.distributions.FloatDistribution(float(x.min()), float(x.max())) for n, x in self.hyper.items()
        }
        ranges |= distributions or {}
        for row in self.rows:
            is_number = not math.isnan(row[metric])
            state = optuna.trial.TrialState.COMPLETE if is_number else optuna.trial.TrialState.FAIL
            given = {"params": {n: row[n] for n in self.hyper}, "distributions": ranges}
            study.add_trial(optuna.trial.create_trial(state=state, value=row[metric] if is_number else None, **given))


@typed
def sweep_table(step: Callable[..., Any], metrics: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> SweepTable:
    """Return the hyper-parameters and metrics of a sweep's members.

    Args:
      step: the step that `sweep` returned, or `jit` of it.
      metrics: what the step returned, with loss f[K]; a list of such metrics, one for each step; or the metrics of
        `scan`, with loss f[T, K]. Tensors that are not one number for each member, such as logits, are left out.

    Example:
      >>> import torch, funcrec as fr
      >>> def make_step(lr):
      ...     dense = fr.optim.dense(torch.optim.SGD, lr=lr)
      ...     return fr.train_step(lambda params, batch: params.dense.square(), dense=dense)
      >>> swept = fr.sweep(make_step, {"lr": [0.1, 0.5]})
      >>> states, metrics = swept(swept.init(fr.Params({}, torch.tensor(2.0))), batch=None)
      >>> fr.sweep_table(swept, metrics).rows
      [{'member': 0, 'lr': 0.1, 'loss': 4.0}, {'member': 1, 'lr': 0.5, 'loss': 4.0}]
    """
    own = swept_of(step)
    check(CALL, step_problems(step, own), loss_problems(metrics))
    each = [metrics] if isinstance(metrics, Mapping) else list(metrics)
    dims = each[0]["loss"].dim()
    curves: dict[str, list[Tensor]] = {}
    for one in each:
        for path, x in paths(dict(one)):
            if isinstance(x, Tensor) and x.dim() == dims and x.shape == one["loss"].shape:
                curves.setdefault(plain_path(path), []).append(x.detach().cpu().reshape(-1, x.shape[-1]))
    table = SweepTable(
        {n: x.detach().cpu() for n, x in sure(own).hyper.items()}, {n: torch.cat(x) for n, x in curves.items()}
    )
    check(CALL, table_problems(table))
    return table


def plain_path(path: str) -> str:
    """Return a path such as ['aux']['auc'] as "aux.auc"."""
    return path.replace("['", ".").replace("']", "").lstrip(".")


def imported_optuna(call: str) -> Any:
    try:
        import optuna  # pyright: ignore[reportMissingImports] (tests run without it)
    except ImportError:
        what, need = "optuna is not installed.", "the package optuna"
        fail(call, what, got="no optuna", need=need, hint="pip install optuna", kind=ImportError)
    return optuna


# -- validators --------------------------------------------------------------------------------------------------


def step_problems(step: Any, own: Any) -> Iterator[Problem]:
    if own is None:
        hint = "fr.sweep(make_step, {...}), or fr.jit of it"
        yield Problem("`step` is not a sweep.", describe(step), "the result of fr.sweep", hint, TypeError)


def loss_problems(metrics: Any) -> Iterator[Problem]:
    each = [metrics] if isinstance(metrics, Mapping) else list(metrics)
    most = 2 if isinstance(metrics, Mapping) else 1
    for i, one in enumerate(each or [{}]):
        loss = one.get("loss") if isinstance(one, Mapping) else None
        is_float = isinstance(loss, Tensor) and loss.is_floating_point() and not loss.is_meta
        if loss is None or not is_float or not 1 <= loss.dim() <= most or 0 in loss.shape:
            got, need = describe(one if loss is None else loss), "f[K]" if most == 1 else "f[K], or f[T, K] from `scan`"
            where = "metrics" if isinstance(metrics, Mapping) else f"metrics[{i}]"
            yield Problem(
                f"`{where}['loss']` is not a loss of each member.",
                got,
                need,
                "the metrics that the step gave",
                TypeError,
            )
            return


def table_problems(table: SweepTable) -> Iterator[Problem]:
    sizes = {n: x.shape[-1] for n, x in (*table.hyper.items(), *table.curves.items())}
    if len(set(sizes.values())) > 1:
        yield Problem("`metrics` are those of another sweep.", f"{sizes}", "one number of members", "its own metrics")
    for n in table.hyper.keys() & table.curves.keys():
        hint = f"make_step=lambda my_{n}: ..."
        yield Problem(f"{n!r} is a hyper-parameter and a metric.", repr(n), "different names", hint)
    if "member" in {*table.hyper, *table.curves}:
        yield Problem("'member' is the name of the members' numbers.", "'member'", "another name", "'my_member'")


def metric_problems(metric: str, curves: Mapping[str, Tensor]) -> Iterator[Problem]:
    if metric not in curves:
        yield Problem("`metric` is not in the table.", repr(metric), f"among {list(curves)}", kind=KeyError)


def hyper_problems(x: str | None, hyper: Mapping[str, Tensor]) -> Iterator[Problem]:
    if x is not None and x not in hyper:
        yield Problem("`x` is not a hyper-parameter.", repr(x), f"among {list(hyper)}", kind=KeyError)


def known_problems(distributions: Mapping[str, Any], hyper: Mapping[str, Tensor]) -> Iterator[Problem]:
    for n in distributions:
        if n not in hyper:
            what = "`distributions` names no hyper-parameter."
            yield Problem(what, repr(n), f"among {list(hyper)}", kind=KeyError)
