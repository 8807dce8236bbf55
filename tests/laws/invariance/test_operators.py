"""torch's operators under invariant: right, or refused. The samples are those of torch's own tests (OpInfo)."""

import warnings

import torch
from torch.testing._internal.common_methods_invocations import op_db

import funcrec as fr

EVERY = 8  # 1 for all 600 operators
UNKNOWN = ("empty", "rmatmul", "jiterator")  # values of new memory, a result that is no tensor, kernels for CUDA


def test_an_operator_is_right_or_refused():
    """The first sample of every eighth operator gives torch's values, up to rounding, or an error of `invariant`;
    nothing else is raised."""
    refused, right = [], []
    ops = [op for op in op_db if torch.float32 in op.supported_dtypes("cpu")]
    for op in [op for op in ops if not any(n in op.name for n in UNKNOWN)][::EVERY]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sample = next(iter(op.sample_inputs("cpu", torch.float32, requires_grad=False)))
            call = lambda op=op, s=sample: op.op(s.input, *s.args, **s.kwargs)
            try:
                got = fr.invariant(call)()
            except TypeError as error:
                assert "funcrec.invariant" in str(error), op.name
                refused.append(op.name)
                continue
            torch.testing.assert_close(got, call(), rtol=2e-4, atol=2e-5, equal_nan=True, msg=op.name)
            right.append(op.name)
    assert len(right) > len(refused) > 10
