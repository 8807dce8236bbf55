"""eval_shape gives the forms of a function's results, and does no work."""

import pytest
import torch

import funcrec as fr

READ = [fr.FeatureConfig("a", table="t"), fr.FeatureConfig("b", table="t", pooling="none", column="a")]
IDS = fr.KeyedJaggedTensor.from_lists({"a": [[1, 2], [], [0]]})
PARAMS = fr.Params({"t": torch.randn(5, 4, dtype=torch.bfloat16)}, {"w": torch.randn(4)})


def loss_fn(params, batch):
    x = fr.lookup(params.tables, batch.ids, READ[:1]).values.float() @ params.dense["w"]
    return fr.losses.bce(x, batch.label)


STEP = fr.train_step(loss_fn)
BATCH = fr.Batch(IDS, torch.ones(3))
FUNCTIONS = {
    "lookup": (lambda p: fr.lookup(p.tables, IDS, READ[:1]), PARAMS),
    "sequence": (lambda p: fr.lookup_sequence(p.tables, IDS, READ)["b"], PARAMS),
    "gradient": (lambda p, b: fr.value_and_grad(loss_fn)(p, b)[1].dense, PARAMS, BATCH),
    "step": (STEP, STEP.init(PARAMS), BATCH),
    "jitted step": (fr.jit(STEP), STEP.init(PARAMS), BATCH),
    "examples": (lambda p, b: fr.per_example_grads(loss_fn, max_ids=2)(p, b)[0], PARAMS, BATCH),
    "draws": (lambda key: (fr.random.normal(key, (3,)), fr.random.permutation(key, 4)), fr.key(0)),
    "nothing": (lambda x: {"n": 3, "none": None, "empty": x[:0]}, torch.ones(2, 3)),
}


def forms(tree):
    leaves = fr.tree.leaves(tree)
    return [(x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x for x in leaves]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_forms_are_those_of_the_call(name):
    """Shapes, strides and dtypes are those of the call, the arguments keep their values, and no result has any."""
    f, *args = FUNCTIONS[name]
    before = fr.tree.copy(args)
    found = fr.eval_shape(f, *args)
    assert fr.tree.equal(args, before)
    called = f.fn(*args) if name == "jitted step" else f(*args)
    assert fr.tree.structure(found) == fr.tree.structure(called) and forms(found) == forms(called)
    assert all(x.is_meta for x in fr.tree.leaves(found) if isinstance(x, torch.Tensor))


def test_a_model_of_a_terabyte_is_tried():
    """Tables that fit on no machine give the shapes of predictions; the tables on the device meta stay there."""
    model = fr.models.mlperf_dlrmv3()
    params = model.init(fr.key(0).to("meta"))
    assert fr.tree.nbytes(params) > 1e12
    norms = fr.eval_shape(lambda p: {n: t[:7].float().square().sum(1) for n, t in p.tables.items()}, params)
    assert {x.shape for x in norms.values()} == {(7,)}


def test_what_it_refuses():
    """A value read on the host, a tracked argument, and a function's own errors."""
    with pytest.raises(TypeError, match="reads a tensor's value on the host"):
        fr.eval_shape(lambda x: x.sum().item(), torch.ones(2))
    with pytest.raises(TypeError, match="inside a transform"):
        torch.func.grad(lambda x: fr.eval_shape(torch.sum, x))(torch.ones(2))
    with pytest.raises(TypeError, match="an argument requires grad"):
        fr.eval_shape(torch.sum, torch.ones(2, requires_grad=True))
    with pytest.raises(RuntimeError):
        fr.eval_shape(lambda x: x @ torch.ones(3), torch.ones(2))
