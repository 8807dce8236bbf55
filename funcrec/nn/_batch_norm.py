"""Batch norm as a pure function that takes and returns the running statistics.

    y = scale · (x - mean) / √(var + eps) + shift

In training, mean and var are those of the batch (var divides by B), and stats' = (1 - momentum) · stats + momentum ·
(mean, var with divisor B - 1). In evaluation they are the running statistics. With a mask, B counts its true rows.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from funcrec.core import Count, Magnitude, Problem, UnitInterval, check, describe, fail, remade, typed
from funcrec.nn._layer import Layer, ones, param_problems, width_problems, zeros


@remade
@typed
def batch_norm(dim: Count, *, momentum: UnitInterval = 0.1, eps: Magnitude = 1e-5) -> Layer[Tensor]:
    """Return a layer x f[B, dim] -> f[B, dim] that normalises each column over the batch.

    Returns:
      Layer with params {"scale", "shift"} and stats {"mean", "var"}, f[dim] each. Its functions are
      apply(params, x, stats) and train_apply(params, x, key, stats, mask=None) -> (y, stats), which does not use its
      key. mask: bool[B], False for rows of padding, which do not count in the statistics. With fewer than two rows of
      data, the stats stay as they are.

    Raises:
      ValueError: a training batch has one row, so its variance is unknown.

    Example:
      >>> import torch, funcrec as fr
      >>> norm = fr.nn.batch_norm(1)
      >>> x = torch.tensor([[1.0], [3.0]])
      >>> y, stats = norm.train_apply(norm.init(fr.key(0)), x, None, norm.init_stats())
      >>> y.flatten(), stats["mean"]
      (tensor([-1.0000,  1.0000]), tensor([0.2000]))

    Source: Ioffe and Szegedy, "Batch Normalization" (2015), algorithm 1; torch.nn.BatchNorm1d.
    """
    call = "funcrec.nn.batch_norm"

    def check_call(params: object, x: object, stats: object) -> None:
        found = param_problems(params, {"scale": (dim,), "shift": (dim,)})
        check(call, width_problems(x, dim), found, param_problems(stats, {"mean": (dim,), "var": (dim,)}, "stats"))

    def init(key: Tensor) -> dict[str, Tensor]:
        return {"scale": ones(key, (dim,)), "shift": zeros(key, (dim,))}

    def init_stats() -> dict[str, Tensor]:
        return {"mean": torch.zeros(dim), "var": torch.ones(dim)}

    def normalise(params: dict[str, Tensor], x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        return (x - mean) * (torch.rsqrt(var + eps) * params["scale"]) + params["shift"]

    def apply(params: dict[str, Tensor], x: Tensor, stats: dict[str, Tensor]) -> Tensor:
        check_call(params, x, stats)
        return normalise(params, x, stats["mean"], stats["var"])

    def train_apply(params, x: Tensor, key, stats, mask: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        check_call(params, x, stats)
        count = x.shape[0]
        if count < 2:
            need = "at least two rows, for a variance"
            fail(call, "`x` is too small a batch to train on.", got=describe(x), need=need, hint="apply(...)")
        if mask is not None:
            check(call, mask_problems(mask, count))
            x = torch.where(mask[:, None], x, 0)  # rows of padding must not count
            count = mask.sum().clamp(min=1).to(x.dtype)
        mean = x.mean(0) if mask is None else x.sum(0) / count
        square = (x - mean).square()
        var = square.mean(0) if mask is None else torch.where(mask[:, None], square, 0).sum(0) / count
        known = 1.0 if mask is None else torch.as_tensor(count > 1).to(x.dtype)
        new = {"mean": mean, "var": var * (count / (count - known))}
        mixed = {k: stats[k] + momentum * known * (new[k] - stats[k]) for k in ("mean", "var")}
        return normalise(params, x, mean, var), mixed

    return Layer(init, apply, train_apply, init_stats)


def mask_problems(mask: object, count: int) -> Iterator[Problem]:
    need, hint = f"bool[{count}], or None", "mask=weight != 0"
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        yield Problem("`mask` is not a mask.", describe(mask), need, hint, TypeError)
    elif mask.shape != (count,):
        yield Problem("`mask` does not match the rows of `x`.", describe(mask), need, hint)
