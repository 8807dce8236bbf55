"""Target attention against a loop over bags, with garbage in the padding, under transforms."""

import pytest
import torch
from torch.func import grad, jvp, vmap

import funcrec as fr
from funcrec import nn

OFFSETS = torch.tensor([0, 3, 3, 5])
X = torch.randn(6, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
GARBAGE = torch.cat([X[:5], torch.full((1, 2), torch.nan, dtype=torch.float64)])
TARGET = torch.randn(3, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def make(normalize):
    layer = nn.target_attention(2, sizes=(4,), normalize=normalize)
    return layer, fr.tree.map(lambda x: x.double() + 0.1, layer.init(fr.key(0)))


def loop(params, x, target, normalize):
    """Compute each bag's weighted sum from the formula."""
    first, last = params["linear"]
    out = []
    for b, t in enumerate(target):
        total, scores = torch.zeros(2, dtype=torch.float64), []
        bag = x[OFFSETS[b] : OFFSETS[b + 1]]
        for h in bag:
            hidden = torch.sigmoid(first["weight"] @ torch.cat([h, t, h - t, h * t]) + first["bias"])
            scores.append((last["weight"] @ hidden + last["bias"]).squeeze())
        if normalize and scores:
            scores = torch.stack(scores).softmax(0)
        for score, h in zip(scores, bag, strict=True):
            total = total + score * h
        out.append(total)
    return torch.stack(out)


@pytest.mark.parametrize("normalize", [False, True])
def test_it_is_a_loop_over_bags(normalize):
    """The layer is the loop over bags, and so is its gradient, whatever stands in the padding. An empty bag has 0."""
    layer, params = make(normalize)
    bags = fr.JaggedTensor(GARBAGE, OFFSETS)
    got = layer.apply(params, bags, TARGET)
    torch.testing.assert_close(got, loop(params, X, TARGET, normalize))
    assert not got[1].any()
    ours = lambda p, x, t: layer.apply(p, fr.JaggedTensor(x, OFFSETS), t).sin().sum()
    plain = lambda p, x, t: loop(p, x, t, normalize).sin().sum()
    found, want = (grad(f, argnums=(0, 1, 2))(params, x, TARGET) for f, x in ((ours, GARBAGE), (plain, X)))
    fr.testing.assert_trees_close(found, want, rtol=1e-7, atol=1e-9)
    twice = [jvp(lambda x, f=f: grad(f, argnums=1)(params, x, TARGET)[:5], (x,), (torch.ones_like(X),))[1] for f, x in
             ((ours, X), (plain, X))]  # fmt: skip
    torch.testing.assert_close(*twice)


@pytest.mark.parametrize("normalize", [False, True])
def test_it_composes_with_transforms(normalize, interpreted):
    """vmap over members, jit and an empty batch agree with the plain call."""
    layer, params = make(normalize)
    bags = fr.JaggedTensor(GARBAGE, OFFSETS)
    want = layer.apply(params, bags, TARGET)
    stacked = fr.tree.map(lambda x: torch.stack([x, 2 * x]), params)
    torch.testing.assert_close(vmap(layer.apply, in_dims=(0, None, None))(stacked, bags, TARGET)[0], want)
    torch.testing.assert_close(fr.jit(layer.apply)(params, bags, TARGET), want)
    none = fr.JaggedTensor(X[:0], torch.zeros(1, dtype=torch.int64))
    assert layer.apply(params, none, TARGET[:0]).shape == (0, 2)


def test_it_refuses_what_does_not_fit():
    """For another width or another number of targets, the error names them."""
    layer, params = make(False)
    with pytest.raises(ValueError, match="another width"):
        layer.apply(params, fr.JaggedTensor(X[:, :1], OFFSETS), TARGET)
    with pytest.raises(ValueError, match="has another shape"):
        layer.apply(params, fr.JaggedTensor(X, OFFSETS), TARGET[:2])


def test_din_refuses_sequences_of_other_bags():
    """Sequences whose bags differ raise; where they cannot be read, the logits are NaN."""
    tables, features = (fr.TableConfig("item", 9, 2),), (fr.FeatureConfig("item", table="item"),)
    history = [fr.FeatureConfig(n, table="item", pooling="none") for n in ("seen", "bought")]
    model = fr.models.din(tables, features, history=history, target=["item", "item"], attention=(3,), sizes=(3,))
    params = model.init(fr.key(0))
    batch = lambda *bought: fr.Batch(
        fr.KeyedJaggedTensor.from_lists({"item": [[1], [2]], "seen": [[3, 4], []], "bought": list(bought)})
    )
    assert model.apply(params, batch([5, 6], [])).isfinite().all()
    with pytest.raises(ValueError, match="differ in their bags"):
        model.apply(params, batch([5], [6]))
    fast = fr.jit(model.apply)
    torch.testing.assert_close(fast(params, batch([5, 6], [])), model.apply(params, batch([5, 6], [])))
    assert fast(params, batch([5], [6])).isnan().all()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"history": []}, "`history` is empty"),
        ({"history": [fr.FeatureConfig("seen", table="item")]}, "is not a sequence"),
        ({"target": ["color"]}, "`target` names features"),
        ({"target": ["item", "item"]}, "`target` does not match"),
        ({"target": ["user"]}, "another width"),
    ],
)
def test_din_names_settings_that_do_not_fit(changes, told):
    """For a history without sequences, and for a target that is missing or has another width, the error names them."""
    tables = (fr.TableConfig("item", 9, 2), fr.TableConfig("user", 9, 3))
    features = (fr.FeatureConfig("item", table="item"), fr.FeatureConfig("user", table="user"))
    good = {"history": [fr.FeatureConfig("seen", table="item", pooling="none")], "target": ["item"]}
    with pytest.raises(ValueError, match=told):
        fr.models.din(tables, features, **{**good, **changes})
