"""Parameters that are one tensor at export, and two tensors in later weights."""

import torch

import funcrec as fr
from funcrec.serve._trace import form_of, trace


def test_a_tensor_that_stands_twice_is_two_inputs():
    """A program of tied parameters has an input for each parameter. With untied weights the program gives predict's
    outputs."""
    predict = lambda params, batch: batch.dense @ params["a"] + 10 * (batch.dense @ params["b"])
    tied, ids = torch.ones(3), fr.KeyedJaggedTensor.from_lists({"clicked": [[1], []]})
    batch = fr.Batch(ids, dense=torch.ones(2, 3))
    program = trace(predict, {"a": tied, "b": tied}, form_of(batch), 16, 16)
    other = {"a": tied, "b": 2 * tied}
    (got,) = program.exported.module()(other["a"], other["b"], *form_of(batch).inputs(batch))
    torch.testing.assert_close(got, predict(other, batch))
