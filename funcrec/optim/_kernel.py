"""The fused form of a rule: its kernel, the calls that fit the kernel, and facts from the formula of the rule."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcrec.core import sure
from funcrec.kernels import ops
from funcrec.optim._checks import choices_of, may_be_absent
from funcrec.tables import RowGrads


class Kernel(NamedTuple):
    """The fused form of a rule."""

    name: str
    form: ops.Rule | None  # None until the kernel is written
    is_elementwise: bool
    is_gradient_wise: bool

    def fits(self, hyper: Mapping[str, Any], grads: Mapping[str, RowGrads]) -> bool:
        """Return whether the kernel fits the call.

        A tensor fits if no part of the rule is absent at 0. If the rule counts entries, each entry must also stand for
        one id."""
        if self.form is None:
            return False
        optional = {name for _, name in self.form.optional}
        if any(isinstance(x, Tensor) and (n in optional or may_be_absent(n)) for n, x in hyper.items()):
            return False
        return not (self.form.counts_entries and any(g.has_repeats for g in grads.values()))

    def numbers(self, hyper: Mapping[str, Any]) -> dict[str, Any]:
        """Return `hyper` of `ops.fused_update` for hyper-parameters, and `numbers` if some of them are tensors."""
        tensors = {n: x.to(torch.float64) for n, x in hyper.items() if isinstance(x, Tensor)}
        form = sure(self.form)
        fixed = numbers_of(form, {**hyper, **dict.fromkeys(tensors, 1.0)})
        if not tensors:
            return {"hyper": fixed}
        device = next(iter(tensors.values())).device
        full = lambda x: torch.full((), x, dtype=torch.float64, device=device)
        own = [tensors[n] if n in tensors else full(x) for n, x in zip(form.hyper, fixed, strict=True)]
        return {"hyper": fixed, "numbers": torch.stack(own)}


def numbers_of(form: ops.Rule, hyper: Mapping[str, Any]) -> list[float]:
    """Return hyper-parameters as numbers for a kernel: a name becomes its index, None and False become 0."""
    as_number = lambda k, x: float(choices_of(k).index(x) if isinstance(x, str) else x or 0)
    return [as_number(name, hyper[name]) for name in form.hyper]


def facts_of(kernel: Kernel | None) -> dict[str, Any]:
    """Return the fields of RowOptimizer that state its facts. A rule without a formula gets the safe values."""
    if kernel is None:
        return {"is_elementwise": False, "is_gradient_wise": False, "counts_entries": True, "has_equal_slots": False}
    counts = kernel.form is None or kernel.form.counts_entries
    own = {"is_elementwise": kernel.is_elementwise, "is_gradient_wise": kernel.is_gradient_wise}
    return {**own, "counts_entries": counts, "has_equal_slots": True}
