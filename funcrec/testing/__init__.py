"""Property tests for jagged operations: strategies that draw values, and functions that check laws.

    ⟨Lx, y⟩ = ⟨x, Lᵀy⟩        op(x) = op(x with garbage in its padding)
    op'(x)·t = lim (op(x + h·t) - op(x - h·t)) / 2h

funcrec tests itself with these; use them also for your own operations. The checks need only torch. The strategies
(`from funcrec.testing import strategies as frs`) need hypothesis, which no other module imports.

Suppose that you have written the sum of each bag, and its transpose:

>>> import torch, funcrec as fr
>>> def bag_sums(x):
...     sums = x.values.new_zeros(x.num_bags + 1).scatter_add(0, x.bag_ids(), x.values)
...     return sums[: x.num_bags]
>>> def bag_sums_transpose(d, x):
...     d = torch.cat([d, d.new_zeros(1)]).index_select(0, x.bag_ids())
...     return fr.JaggedTensor(d, x.offsets)

Three laws test them: bag_sums sums, it does not read padding, and each function is the transpose of the other.

>>> from hypothesis import given, settings
>>> from funcrec.testing import assert_trees_close, check_adjoint, check_grads, garbage_padding, strategies as frs
>>> @settings(max_examples=20, deadline=None, derandomize=True, database=None)
... @given(frs.jagged_tensors(dtypes=(torch.float64,)))
... def test_bag_sums(x):
...     assert bag_sums(x).tolist() == [sum(bag) for bag in x.to_lists()]
...     assert_trees_close(bag_sums(garbage_padding(x)), bag_sums(x))
...     check_adjoint(bag_sums, lambda d: bag_sums_transpose(d, x), x)
>>> test_bag_sums()

A broken law reports where and by how much:

>>> assert_trees_close({"item": torch.zeros(2)}, {"item": torch.tensor([0.0, 0.5])})
Traceback (most recent call last):
AssertionError: the trees differ at `['item']`.
  got   f32[2], 1 of 2 elements differ; the worst is 0.5 apart, at [1]: 0.0 and 0.5
  need  equal within rtol=0, atol=0
  try   rtol=1e-5, atol=1e-6, where rounding may differ
"""

import funcrec.core as _core
from funcrec.testing._calculus import check_adjoint as check_adjoint
from funcrec.testing._calculus import check_grads as check_grads
from funcrec.testing._invariant import check_invariant as check_invariant
from funcrec.testing._invariant_step import check_invariant_step as check_invariant_step
from funcrec.testing._law import law as law
from funcrec.testing._law import law_tests as law_tests
from funcrec.testing._ranks import RankError as RankError
from funcrec.testing._ranks import RankPool as RankPool
from funcrec.testing._transforms import TRANSFORMS as TRANSFORMS
from funcrec.testing._transforms import check_transforms as check_transforms
from funcrec.testing._transforms import transform_cells as transform_cells
from funcrec.testing._trees import assert_trees_close as assert_trees_close
from funcrec.testing._trees import garbage_padding as garbage_padding
from funcrec.testing._trees import zero_padding as zero_padding

_core.publish(globals(), later={"strategies": _core.module_later("funcrec.testing.strategies")})
