"""Cross entropy over classes, and over the candidates of a batch.

cross_entropy: log Σ_c exp z_c - z_y          in_batch_softmax: this loss of z_ij = ⟨q_i, c_j⟩ / T - log Q_j, y_i = i
contrastive: in_batch_softmax of two views of each example, both ways, without a view's score with itself

Q_j is the probability that the batch holds candidate j. Without this correction, popular items get lower scores.
Shapes: B batch, C classes, D dim.
"""

from collections.abc import Iterator
from typing import Annotated

import torch
from torch import Tensor

from funcrec.core import Form, PositiveMagnitude, Problem, Scalar, check, element_problems, or_nan, typed
from funcrec.grad import refuse_in_micro_batches
from funcrec.losses._mean import Numbers, Reduction, Weights, can_be_read, reduce, weight_problems, where_it_jumps
from funcrec.tables import blank_padding, jump_problems

Scores = Annotated[Tensor, Form("f[B, C]")]
Classes = Annotated[Tensor, Form("n[B]")]
Vectors = Annotated[Tensor, Form("f[B, D]")]


@typed
def cross_entropy(logits: Scores, label: Classes, weight: Weights = None, *, reduction: Reduction = "mean") -> Tensor:
    """Return the cross entropy with logits. Each example has one class.

    Args:
      logits: f[B, C].
      label: [B], the classes as numbers, 0 <= label < C: integers, or whole floats.
      weight: f[B] >= 0, or None. An example of weight 0 is padding and is not read, unless the weights are
        differentiated (`weighted_mean`).
      reduction: "mean" for `weighted_mean`, f[]; "none" for the loss of each example, f[B], 0 for padding.

    Raises:
      ValueError: a label is not a class. If no value can be read (under `jit`, on a GPU), the loss is NaN instead.

    Example:
      >>> import torch, funcrec as fr
      >>> fr.losses.cross_entropy(torch.zeros(2, 4), torch.tensor([0, 3]))
      tensor(1.3863)

    Source: torch.nn.functional.cross_entropy, whose weight is one number for each class.
    """
    call = "funcrec.losses.cross_entropy"
    check(call, weight_problems(weight), class_problems(label, logits.shape[1], weight))
    z, y = blank_padding(logits, weight), blank_padding(label, weight)
    is_class = (y >= 0) & (y < z.shape[1]) & (y == y.floor() if y.is_floating_point() else True)
    own = torch.log_softmax(z, 1).gather(1, torch.where(is_class, y, 0).long()[:, None])[:, 0]
    return reduce(torch.where(is_class, -own, torch.nan), weight, reduction)


@typed
def in_batch_softmax(
    query: Vectors,
    candidate: Vectors,
    weight: Weights = None,
    *,
    log_q: Numbers | None,
    temperature: PositiveMagnitude | Scalar = 1.0,
    candidate_ids: Annotated[Tensor, Form("i[B]")] | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """Return the mean cross entropy of each query's own candidate among all candidates of the batch, f[].

    Args:
      query, candidate: f[B, D]. Row i of `query` and row i of `candidate` belong together.
      weight: f[B] >= 0, or None. An example of weight 0 is padding, and is not a negative of other examples. At weight
        0 the loss is not continuous, so a derivative with respect to the weights raises there.
      log_q: f[B], the logarithm of the probability that each candidate is in a batch. `fr.data.log_q` computes it from
        counts. None means no correction. This is right if all candidates are equally likely. Otherwise popular
        candidates get lower scores.
      temperature: T > 0, a number or f[]. The loss is NaN for a tensor that is not > 0.
      candidate_ids: i[B]. Another row with the same candidate is left out of the sum, and does not count as a negative.
      reduction: "mean", or "none" for the loss of each example, f[B], 0 for padding.

    Raises:
      ValueError: log_q is not the logarithm of a probability, finite and <= 0. If no value can be read (under `jit`, on
        a GPU), the loss is NaN instead.

    On a mesh, the candidates are those in the rank's part of the batch. In micro-batches (`accumulate_grads`) the loss
    raises.

    Example:
      >>> import torch, funcrec as fr
      >>> x = torch.eye(2)
      >>> fr.losses.in_batch_softmax(x, x, log_q=None, temperature=0.5)
      tensor(0.1269)

    Source: Yi et al., "Sampling-bias-corrected neural modeling" (RecSys 2019), eq. 3 and 5; Bengio and Senécal, "Quick
      training of probabilistic neural nets" (2003).
    """
    call = "funcrec.losses.in_batch_softmax"
    check(call, weight_problems(weight), log_q_problems(log_q, weight))
    refuse_in_micro_batches(call, "the candidates")
    check(call, jump_problems(weight, "a loss over the batch's candidates"))
    q, c = blank_padding(query, weight), blank_padding(candidate, weight)
    logits = q @ c.T / or_nan(temperature)
    if log_q is not None:
        chance = blank_padding(log_q, weight)
        logits = logits - torch.where((chance <= 0) & (chance > -torch.inf), chance, torch.nan)
    other = ~torch.eye(logits.shape[0], dtype=torch.bool, device=logits.device)
    if candidate_ids is not None:
        logits = torch.where((candidate_ids[:, None] == candidate_ids) & other, -torch.inf, logits)
    if weight is not None:
        logits = torch.where((weight == 0) & other, -torch.inf, logits)
    own = -torch.log_softmax(logits, 1).diagonal()
    return reduce(own if weight is None else where_it_jumps(own, weight), weight, reduction)


@typed
def contrastive(
    one: Vectors,
    other: Vectors,
    weight: Weights = None,
    *,
    temperature: PositiveMagnitude | Scalar = 1.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """Return the mean cross entropy of each vector's other view among the views of all examples, f[].

    Args:
      one, other: f[B, D]. Row i of `one` and row i of `other` are two views of example i. For cosines, pass
        `F.normalize(one, dim=-1)`.
      weight, reduction: as in `in_batch_softmax`. With "none", an example's loss is the mean of its two views, f[B].
      temperature: T > 0, a number or f[]. The loss is NaN for a tensor that is not > 0.

    The 2 B - 2 views of other examples are the negatives. On a mesh they are those in the rank's part of the batch. In
    micro-batches (`accumulate_grads`) the loss raises.

    Law: it is the mean of -log(e^⟨z_i, z_j⟩ / Σ_{k ≠ i} e^⟨z_i, z_k⟩) over all 2 B views i, whose other views are j.

    Example:
      >>> import torch, funcrec as fr
      >>> fr.losses.contrastive(torch.eye(2), torch.eye(2))
      tensor(0.5514)

    Source: Chen et al., "A simple framework for contrastive learning of visual representations" (ICML 2020), eq. 1;
      Xie et al., "Contrastive learning for sequential recommendation" (ICDE 2022), eq. 3.
    """
    count = one.shape[0]
    twice = lambda x, y: torch.cat([x, y])
    example = torch.arange(count, device=one.device)
    each = in_batch_softmax(
        twice(one, other), twice(other, one), None if weight is None else twice(weight, weight), log_q=None,
        temperature=temperature, candidate_ids=twice(example, example), reduction=reduction,
    )  # fmt: skip
    return each if reduction == "mean" else (each[:count] + each[count:]) / 2


# -- validators --------------------------------------------------------------------------------------------------


def class_problems(label: Tensor, num_classes: int, weight: Tensor | None) -> Iterator[Problem]:
    if can_be_read(label, weight):
        is_whole = label == label.floor() if label.is_floating_point() else True
        wrong = blank_padding(~((label >= 0) & (label < num_classes) & is_whole), weight)
        what, hint = "`label` has values that are not classes.", "logits f[B, C] of more classes"
        yield from element_problems(what, "label", label, wrong, f"0 <= label < {num_classes}", hint)


def log_q_problems(log_q: Tensor | None, weight: Tensor | None, name: str = "log_q") -> Iterator[Problem]:
    """Yield a problem if a value is not the logarithm of a probability, such as a count or a probability."""
    if log_q is not None and can_be_read(log_q, weight):
        wrong = ~((log_q <= 0) & (log_q > -torch.inf)) & (True if weight is None else weight != 0)
        what, hint = f"`{name}` is not the logarithm of a probability.", "fr.data.log_q(counts)[ids], of counts"
        yield from element_problems(what, name, log_q, wrong, "finite numbers <= 0", hint)
