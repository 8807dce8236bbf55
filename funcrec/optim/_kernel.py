"""The fused form of a rule: which kernel has it, when it takes a call, and what is known of the rule by its formula."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from funcrec.kernels import ops
from funcrec.optim._checks import choices_of
from funcrec.tables import RowGrads


class Kernel(NamedTuple):
    """The fused form of a rule."""

    name: str
    form: ops.Rule | None  # None before it is written
    is_elementwise: bool
    is_gradient_wise: bool

    def fits(self, hyper: Mapping[str, Any], grads: Mapping[str, RowGrads]) -> bool:
        """Kernels take numbers, and count entries: neither tensors
        among `hyper`, nor entries that stand for several ids."""
        if self.form is None or any(isinstance(x, Tensor) for x in hyper.values()):
            return False
        return not (self.form.counts_entries and any(g.has_repeats for g in grads.values()))

    def numbers(self, hyper: Mapping[str, Any]) -> list[float]:
        return numbers_of(self.form, hyper)


def numbers_of(form: ops.Rule, hyper: Mapping[str, Any]) -> list[float]:
    """Hyper-parameters as a kernel takes them: names by their place, None and False as 0."""
    as_number = lambda k, x: float(choices_of(k).index(x) if isinstance(x, str) else x or 0)
    return [as_number(name, hyper[name]) for name in form.hyper]


def facts_of(kernel: Kernel | None) -> dict[str, bool]:
    """Fields of RowOptimizer; of a rule that nobody has looked into what is safe: it may do anything."""
    if kernel is None:
        return {"is_elementwise": False, "is_gradient_wise": False, "counts_entries": True}
    counts = kernel.form is None or kernel.form.counts_entries
    own = {"is_elementwise": kernel.is_elementwise, "is_gradient_wise": kernel.is_gradient_wise}
    return {**own, "counts_entries": counts}
