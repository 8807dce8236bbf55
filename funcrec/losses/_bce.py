"""Binary cross entropy of a logit.

    l(z, y) = softplus(z) - y z

Shapes: B batch.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from funcrec.core import check, typed
from funcrec.losses._mean import Labels, Numbers, Reduction, Weights, can_be_read, reduce, weight_problems
from funcrec.tables import blank_padding, label_value_problems


@typed
def bce(logits: Numbers, label: Labels, weight: Weights = None, *, reduction: Reduction = "mean") -> Tensor:
    """Return the binary cross entropy with logits. A label is 0, 1 or a probability between them.

    Args:
      logits: f[B].
      label: [B] in [0, 1], of any real dtype.
      weight: f[B] >= 0, or None. An example of weight 0 is padding: its logit and label are not read, unless the
        weights are differentiated (`weighted_mean`).
      reduction: "mean" for `weighted_mean`, f[]; "none" for the loss of each example, f[B], 0 for padding.

    Raises:
      ValueError: a label is outside [0, 1]. If no value can be read (under `jit`, on a GPU), the loss is NaN instead.

    Example:
      >>> import torch, funcrec as fr
      >>> fr.losses.bce(torch.tensor([0.0, 5.0]), torch.tensor([1.0, 1.0]))
      tensor(0.3499)

    Source: torch.nn.functional.binary_cross_entropy_with_logits.
    """
    call = "funcrec.losses.bce"
    check(call, weight_problems(weight))
    check(call, label_value_problems(label, "label", weight=weight) if can_be_read(label, weight) else ())
    z, y = (blank_padding(x, weight) for x in (logits, label if label.is_floating_point() else label.float()))
    y = torch.where((y >= 0) & (y <= 1), y, torch.nan).to(z.dtype)
    if weight is None:
        return with_logits(z, y, reduction)
    return reduce(with_logits(z, y, "none"), weight, reduction)


def with_logits(z: Tensor, y: Tensor, reduction: str) -> Tensor:
    """Return torch's binary cross entropy. For jvp of jvp, where torch has no derivative, it uses a formula.

    torch's own jvp writes to a zero tensor there, and raises.
    """
    try:
        return F.binary_cross_entropy_with_logits(z, y, reduction=reduction)
    except RuntimeError as error:
        if "ZeroTensors are immutable" not in str(error):
            raise
    values = (y - 1) * F.logsigmoid(-z) - y * F.logsigmoid(z)
    return values.mean() if reduction == "mean" else values
