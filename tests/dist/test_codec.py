"""Sharded lookups with coded vectors are near the plain lookups, each direction separately.

The bits are the same emulated and on gloo ranks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import coded, training
from programs.placement_models import models

import funcrec as fr
from funcrec.mesh import _codec
from funcrec.testing import assert_trees_close

# the unit, relative to an element or to the largest element of a row
UNITS = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "int8": 1 / 254}


def direction(model):
    out = fr.lookup(model[2], model[3], model[4])
    return (torch.arange(out.values.numel(), dtype=out.values.dtype) * 0.37 + 1).sin().reshape(out.values.shape)


def greatest(x, kind):
    """Return |x|, or for int8 the largest |x| of each row. The largest bounds every part of the row that is sent
    separately."""
    return x.abs().amax(1, keepdim=True).expand_as(x).contiguous() if kind == "int8" and x.shape[1] else x.abs()


def bounds(model, d, kind, exact):
    """Return the bounds for errors of acts and gradients: the codec's unit times the sums of magnitudes."""
    mesh, plan, tables, ids, features = model
    sizes = fr.lookup(tables, ids, features).dims
    d_most = torch.cat([greatest(x, kind) for x in d.split(sizes, 1)], 1)
    most = {n: greatest(t, kind) for n, t in tables.items()}
    acts, grads = coded.looked_up((mesh, plan, most, ids, features), d_most, exact=exact)
    # float16 also has a least step of 2^-24, which is added for each part of a sum
    wide = lambda x: UNITS[kind] * 1.001 * x.double() + (2.0**-24 if kind == "float16" else 0) * (x > 0) * 16
    return wide(acts), {n: wide(g) for n, g in grads.items()}


def assert_within(got, want, bound):
    assert ((got.double() - want.double()).abs() <= bound + 1e-12).all()


@settings(max_examples=25)
@given(models(), st.sampled_from(list(UNITS)), st.booleans())
def test_coded_lookups_are_near(model, kind, exact):
    """Under every placement, coded lookups and coded gradients are within the codec's unit times the sums of
    magnitudes. A direction without a codec keeps every bit. Codec() changes no bit."""
    d = direction(model)
    acts, grads = coded.looked_up(model, d, exact=exact)
    there = coded.looked_up(model, d, fr.Codec(forward=kind), exact)
    back = coded.looked_up(model, d, fr.Codec(backward=kind), exact)
    acts_bound, grads_bound = bounds(model, d, kind, exact)
    assert_within(there[0], acts, acts_bound)
    assert_trees_close(there[1], grads)
    assert_trees_close(back[0], acts)
    for n, g in grads.items():
        assert_within(back[1][n], g, grads_bound[n])
    assert_trees_close(coded.looked_up(model, d, fr.Codec(), exact), (acts, grads))


@pytest.mark.parametrize("kind", UNITS)
def test_coded_sequences_are_near(kind):
    """Sequences receive coded rows and send coded gradients with small errors. Each codec leaves the bits of the other
    direction."""
    mesh = fr.Mesh.emulated(x=2)
    acts, grads = coded.sequences(mesh, "row_wise", None)
    there, back = (coded.sequences(mesh, "row_wise", c) for c in (fr.Codec(forward=kind), fr.Codec(backward=kind)))
    assert_trees_close(there[1], grads)
    assert_trees_close(back[0], acts)
    for name, x in acts.items():
        # the elements are rows of magnitude 1 times weights up to 2
        assert_trees_close(there[0][name], x, rtol=0.02, atol=0.02)
    for name, g in grads.items():
        # the elements are sums of up to ten terms of magnitude 1
        assert_trees_close(back[1][name], g, rtol=0.05, atol=0.05)
    assert not all(torch.equal(there[0][name], x) for name, x in acts.items())
    assert not all(torch.equal(back[1][name], g) for name, g in grads.items())


def test_copies_send_nothing():
    """A codec changes no bit of replicated tables, because their lookups send nothing."""
    mesh = fr.Mesh.emulated(x=2)
    assert_trees_close(
        coded.sequences(mesh, "replicated", fr.Codec("int8", "int8")), coded.sequences(mesh, "replicated", None)
    )


CODECS = (fr.Codec("bfloat16", "int8"), fr.Codec("int8", "float16"), fr.Codec(None, "bfloat16"))


@pytest.mark.parametrize(
    "axes, kinds", [({"x": 2}, ("row_wise", "column_wise")), ({"x": 2, "y": 2}, ("grid",))], ids=str
)
def test_coded_ranks_have_the_bits_of_emulated_ones(axes, kinds, ranks):
    """Coded lookups (pooled, exact and sequences) and their gradients have the same bits on gloo ranks as under
    emulation."""
    want = coded.cases(fr.Mesh.emulated(**axes), kinds, CODECS)
    for got in ranks(torch.Size(axes.values()).numel()).run(coded.real_cases, axes, kinds, CODECS):
        assert_trees_close(got, want)


def test_compiled_coding_rounds_as_eager_coding():
    """jit changes no bit of a coded lookup, because the compiler does not remove the two casts."""
    mesh, kind = fr.Mesh.emulated(x=2), "row_wise"
    _, plan, tables, ids, features = coded.fixed(mesh, kind)
    held = fr.shard_tables(tables, plan, mesh, codec=fr.Codec("bfloat16"))
    f = lambda held, ids: fr.lookup(held, ids, features[:1]).values
    mapped = fr.shard_map(f, mesh=mesh, in_specs=(held.specs(), fr.P("x")), out_specs=fr.P("x"))
    assert_trees_close(fr.jit(mapped)(held, ids), mapped(held, ids))


def test_a_codec_goes_where_its_tables_go():
    """shard_tables, reshard and a step's init keep the codec. A step with its own codec uses that codec. The state's
    codec does not change."""
    mesh, codec = fr.Mesh.emulated(x=2), fr.Codec("int8", "bfloat16")
    plan, opts = training.plan_of("row_wise", {"x": 2}), training.optimizers("by_table")
    make = lambda **kwargs: fr.train_step(training.loss_fn, **opts, mesh=mesh, plan=plan, **kwargs)
    one, plain = make(codec=codec), make()
    state = one.init(training.params())
    assert state.tables.transport.codec == codec and state.tables.specs().transport.codec == codec
    whole = fr.gather_state(state, mesh)
    moved = fr.reshard(whole, plan, mesh=mesh, sparse=opts["sparse"], codec=codec)
    assert_trees_close(moved, state)
    batch = training.batch(0, 8)
    want = one(state, batch)[0]
    assert want.tables.transport.codec == codec
    assert_trees_close(plain(moved, batch)[0], want)
    bare = fr.reshard(whole, plan, mesh=mesh, sparse=opts["sparse"])
    after = one(bare, batch)[0]
    assert after.tables.transport.codec is None
    assert_trees_close(fr.gather_state(after, mesh), fr.gather_state(want, mesh))
    assert not torch.equal(plain(bare, batch)[0].tables["a"], want.tables["a"])


# -- training ----------------------------------------------------------------------------------------------------


def logistic(num_bags, steps, codec):
    """Return (the table after each step, counts f[steps, B, R]) of gradient descent on logits ⟨v, bag⟩. The loss is
    convex in the table."""
    rows, dim, mesh = 9, 4, fr.Mesh.emulated(x=2)
    g = torch.Generator().manual_seed(3)
    v = torch.linspace(0.5, 1.5, dim)
    feature = fr.FeatureConfig("f", table="t")
    lists = [[torch.randint(0, rows, (3,), generator=g).tolist() for _ in range(num_bags)] for _ in range(steps)]
    label = torch.randint(0, 2, (steps, num_bags), generator=g).float()
    counts = torch.stack([torch.nn.functional.one_hot(torch.tensor(bags), rows).sum(1) for bags in lists]).double()
    smooth = 0.25 / num_bags * max(float(torch.linalg.matrix_norm(c, 2)) ** 2 for c in counts) * float(v.square().sum())
    loss_fn = lambda p, b: torch.nn.functional.binary_cross_entropy_with_logits(
        fr.lookup(p.tables, b.ids, [feature]).values @ v, b.label
    )
    step = fr.train_step(
        loss_fn, sparse=fr.optim.sgd(1 / smooth), dense=fr.optim.dense(torch.optim.SGD, lr=0.0),
        mesh=mesh, plan=fr.Plan({"t": fr.row_wise("x")}), codec=codec,
    )  # fmt: skip
    state, tables = step.init(fr.Params({"t": torch.randn(rows, dim, generator=g)}, {})), []
    for bags, y in zip(lists, label, strict=True):
        tables.append(fr.gather_tables(state.tables, mesh)["t"])
        state, _ = step(state, fr.Batch(fr.KeyedJaggedTensor.from_lists({"f": bags}), y))
    return [*tables, fr.gather_tables(state.tables, mesh)["t"]], counts, v.double(), 1 / smooth


def test_coded_training_stays_near():
    """20 steps with bfloat16 in both directions end within Σ lr · |error of a step's gradient|. Two tables do not move
    apart in descent on a smooth convex loss with lr = 1 / L."""
    num_bags, steps, unit = 8, 20, UNITS["bfloat16"]
    want = logistic(num_bags, steps, None)[0][-1]
    tables, counts, v, lr = logistic(num_bags, steps, fr.Codec("bfloat16", "bfloat16"))
    bound = 0.0
    for table, count in zip(tables, counts, strict=False):
        # each owner's part is rounded
        in_logits = unit * (count @ table.double().abs()) @ v
        # the slope of the sigmoid is at most 1/4, and |sigmoid - y| at most 1
        in_loss = (in_logits / 4 + unit) / num_bags
        bound += lr * float(torch.linalg.vector_norm((count.T @ in_loss)[:, None] * v))
    apart = float(torch.linalg.vector_norm((tables[-1] - want).double()))
    assert 0 < apart <= bound * (1 + 2 * unit) + 1e-4
    assert apart < 0.1 * float(torch.linalg.vector_norm((want - tables[0]).double()))


WRONG = {
    "cotangents travel as values do": (fr.Codec, "transposed", lambda self: self),
    "cotangents are not coded": (fr.sharding._transport.Transport, "codec_back", None),
    "values are cut, not rounded": (_codec, "_encode", lambda x, *how: torch.ops.funcrec_codec.encode(x * 0.996, *how)),
    "rows have another row's scale": (
        _codec,
        "_decode",
        lambda x, *how: torch.ops.funcrec_codec.decode(x.roll(1, -2), *how),
    ),
}


@pytest.mark.parametrize("which", WRONG)
def test_a_wrong_rule_is_seen(which, monkeypatch):
    """A law fails if a part of the coding is left out."""
    owner, name, wrong = WRONG[which]
    mesh = fr.Mesh.emulated(x=2)
    want = coded.cases(mesh, ("row_wise",), CODECS)
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises(AssertionError):
        assert_trees_close(coded.cases(mesh, ("row_wise",), CODECS), want)
