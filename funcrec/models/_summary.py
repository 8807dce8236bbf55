"""The parts of a model as text: its tables, the features that read these tables, and their bytes."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from funcrec.core import Problem, check, describe, tree_leaves, typed
from funcrec.grad import params_problems
from funcrec.models._model import Model, num_parameters
from funcrec.models._two_tower import TwoTower
from funcrec.tables import HEAD, Params, in_units, table_lines


@typed
def summary(model: Model | TwoTower, params: Params | None = None) -> str:
    """Return a text table of the model's tables: rows, dim, bytes, and the features that read each table.

    Args:
      params: the parameters of the model. With `params`, the summary also counts dense parameters.

    Raises:
      ValueError: `params` has other tables than the model.

    Example:
      >>> import funcrec as fr
      >>> tables = (fr.TableConfig("item", 100_000, 64), fr.TableConfig("user", 2_000, 64))
      >>> read = {"clicked": "item", "seen": "item", "user": "user"}
      >>> features = [fr.FeatureConfig(name, table=table) for name, table in read.items()]
      >>> print(fr.models.summary(fr.models.deepfm(tables, features)))
      table      rows  dim    bytes  features
      item    100,000   64  25.6 MB  clicked, seen
      user      2,000   64   512 kB  user
      in all  102,000       26.1 MB
    """
    check("funcrec.models.summary", table_problems(model, params))
    lines = side_by_side([HEAD, *table_lines(model.tables, model.features)])
    return "\n".join([*lines, *dense_line(params)])


def side_by_side(lines: Sequence[Sequence[str]]) -> list[str]:
    """Return lines whose columns are aligned two spaces apart, with numbers on the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    place = lambda i, text: text.rjust(widths[i]) if i in (1, 2, 3) else text.ljust(widths[i])
    return ["  ".join(place(i, text) for i, text in enumerate(line)).rstrip() for line in lines]


def dense_line(params: Params | None) -> list[str]:
    if params is None:
        return []
    dense = num_parameters(Params({}, params.dense))
    size = sum(x.nbytes for x in tree_leaves(params.dense) if isinstance(x, Tensor))
    return [f"{dense:,} dense parameters, {in_units(size)}"]


def table_problems(model: Model | TwoTower, params: Params | None) -> Iterator[Problem]:
    if params is None:
        return
    found = list(params_problems(params))
    yield from found
    want = {t.name: t.shape for t in model.tables}
    if not found and {n: tuple(t.shape) for n, t in params.tables.items()} != want:
        got = f"{ {n: describe(t) for n, t in params.tables.items()} }"
        yield Problem("`params` are another model's.", got, f"{want}", "model.init(key)")
