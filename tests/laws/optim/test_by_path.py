"""Combinators of dense optimizers: groups by path, clipping, frozen parameters, moving averages.

torch's own param_groups, clip_grad_norm_, clip_grad_value_ and AveragedModel are the oracles.
"""

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from programs.as_staged import staged_only
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import funcrec as fr
from funcrec.optim import averaged, by_path, clip, dense, ema, freeze
from funcrec.testing import assert_trees_close

STEPS = 4
SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW
BIASES = {"*.bias": dense(ADAMW, lr=0.1, weight_decay=0.0)}
COMBINED = {
    "by_path": lambda: by_path(BIASES, default=dense(SGD, lr=0.1, momentum=0.9)),
    "clip": lambda: clip(dense(ADAMW, lr=0.1), max_norm=0.5, max_value=0.4),
    "freeze": lambda: freeze(dense(ADAMW, lr=0.1), paths=["tower.0"]),
    "ema": lambda: ema(dense(ADAMW, lr=0.1), decay=0.8),
    "nested": lambda: ema(clip(freeze(by_path(BIASES, default=dense(SGD, lr=0.1, momentum=0.9)), paths=["scale"]),
        max_norm=0.5), decay=0.8),
}  # fmt: skip
every = pytest.mark.parametrize("name", COMBINED)


def generated(seed, dtype=torch.float64, steps=STEPS):
    """Return a tree of two layers and a scalar, and gradients of the tree for each step."""
    draw = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(shape, generator=draw, dtype=dtype)
    layer = lambda m, n: {"weight": normal(m, n), "bias": normal(n)}
    tree = lambda: {"tower": [layer(3, 2), layer(2, 1)], "scale": normal()}
    return tree(), [tree() for _ in range(steps)]


def run(opt, params, grads):
    state = opt.init(params)
    for step, g in enumerate(grads):
        params, state = opt.update(g, state, params, step)
    return params, state


def their_run(params, grads, make, before=lambda parameters: None, after=lambda parameters: None):
    """Return the parameters after steps of torch's own optimizer, which `make` makes of {path: parameter}."""
    names = ["tower.0.weight", "tower.0.bias", "tower.1.weight", "tower.1.bias", "scale"]
    theirs = {n: torch.nn.Parameter(p.clone()) for n, p in zip(names, fr.tree.leaves(params), strict=True)}
    opt = make(theirs)
    for g in grads:
        for p, d in zip(theirs.values(), fr.tree.leaves(g), strict=True):
            p.grad = d.clone()
        before(theirs.values())
        opt.step()
        after(theirs.values())
    return fr.tree.unflatten(fr.tree.structure(params), [p.detach() for p in theirs.values()])


@settings(max_examples=15)
@given(
    seed=st.integers(0, 10**6),
    pattern=st.sampled_from(["*.bias", "tower", "tower.1", "*.weight", "scale", "tower.?.bias"]),
)
def test_groups_are_param_groups(seed, pattern):
    """Groups by path equal one instance of the class with param_groups: here, weight decay with a mask."""
    params, grads = generated(seed)
    opt = by_path({pattern: dense(ADAMW, lr=0.1, weight_decay=0.0)}, default=dense(ADAMW, lr=0.1, weight_decay=0.3))
    inside = {"*.bias": ".bias", "tower": "tower", "tower.1": "tower.1", "*.weight": ".weight", "scale": "scale",
        "tower.?.bias": "bias"}[pattern]  # fmt: skip

    def make(theirs):
        groups = [[p for n, p in theirs.items() if (inside in n) == is_in] for is_in in (True, False)]
        return ADAMW([{"params": groups[0], "weight_decay": 0.0}, {"params": groups[1]}], lr=0.1, weight_decay=0.3)

    got, state = run(opt, params, grads)
    assert_trees_close(got, their_run(params, grads, make), rtol=1e-12, atol=1e-14)
    assert fr.tree.structure(fr.tree.map(lambda p, s: 0, params, state)) == fr.tree.structure(params)


def test_each_group_moves_as_if_it_were_alone():
    """Another class, another rate and another clip in each group act on the parameters of the group alone. The first
    pattern that fits counts, and the default gets its parameters at once."""
    params, grads = generated(1)
    inner = {"tower.0": clip(dense(SGD, lr=0.5), max_norm=0.1), "*.bias": dense(torch.optim.Adam, lr=0.2)}
    got, _ = run(by_path(inner, default=clip(dense(SGD, lr=0.3), max_norm=0.2)), params, grads)
    for opt, part in (
        (inner["tower.0"], lambda t: t["tower"][0]),
        (inner["*.bias"], lambda t: t["tower"][1]["bias"]),
        (clip(dense(SGD, lr=0.3), max_norm=0.2), lambda t: [t["tower"][1]["weight"], t["scale"]]),
    ):
        assert_trees_close(part(got), run(opt, part(params), [part(g) for g in grads])[0])


@settings(max_examples=15)
@given(seed=st.integers(0, 10**6), max_norm=st.floats(0.01, 20), max_value=st.floats(0.01, 3) | st.none())
def test_clip_is_torchs(seed, max_norm, max_value):
    """`clip` equals clip_grad_value_ and then clip_grad_norm_ over all parameters."""
    params, grads = generated(seed)

    def before(parameters):
        if max_value is not None:
            torch.nn.utils.clip_grad_value_(parameters, max_value)
        torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    need = their_run(params, grads, lambda theirs: SGD(theirs.values(), lr=0.1), before)
    got = run(clip(dense(SGD, lr=0.1), max_norm=max_norm, max_value=max_value), params, grads)[0]
    assert_trees_close(got, need, rtol=1e-9, atol=1e-11)


@settings(max_examples=10)
@given(seed=st.integers(0, 10**6), decay=st.floats(0, 0.999))
def test_ema_is_torchs(seed, decay):
    """The average equals AveragedModel's that began at the first parameters. The parameters keep every bit."""
    params, grads = generated(seed)
    inner = dense(SGD, lr=0.1)
    holder = torch.nn.ParameterList([p.clone() for p in fr.tree.leaves(params)])
    theirs = AveragedModel(holder, multi_avg_fn=get_ema_multi_avg_fn(decay))
    theirs.update_parameters(holder)  # the first call copies

    def after(parameters):
        theirs.update_parameters(torch.nn.ParameterList(parameters))

    their_run(params, grads, lambda own: SGD(own.values(), lr=0.1), after=after)
    got, state = run(ema(inner, decay=decay), params, grads)
    assert_trees_close(fr.tree.leaves(averaged(got, state)), [p.detach() for p in theirs.parameters()], rtol=1e-9)
    assert_trees_close(got, run(inner, params, grads)[0])


def test_ema_of_coarse_floats():
    """The average of 16-bit parameters is in f32, so that small changes count. `averaged` has the parameters' dtype."""
    params = {"w": torch.ones(2, dtype=torch.bfloat16)}
    opt = ema(dense(SGD, lr=1.0), decay=0.999)
    moved, state = run(opt, params, [{"w": torch.ones(2, dtype=torch.bfloat16)}])
    torch.testing.assert_close(state["w"]["ema"], torch.full((2,), 0.999))
    assert averaged(moved, state)["w"].dtype == torch.bfloat16


def test_frozen():
    """Frozen parameters are the same tensors, without a state. The others move as if they were alone."""
    params, grads = generated(2)
    got, state = run(freeze(dense(ADAMW, lr=0.1), paths=["tower.0", "scale"]), params, grads)
    assert got["scale"] is params["scale"] and state["scale"] == {} and state["tower"][0] == {"weight": {}, "bias": {}}
    part = lambda t: t["tower"][1]
    assert_trees_close(part(got), run(dense(ADAMW, lr=0.1), part(params), [part(g) for g in grads])[0])


def test_a_norm_counts_frozen_parameters_outside_only():
    """clip(freeze(f)) has the norm over all parameters, freeze(clip(f)) that over the trained ones."""
    params, grads = {"a": torch.zeros(1), "b": torch.zeros(1)}, {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}
    sgd = dense(SGD, lr=1.0)
    outside, _ = run(clip(freeze(sgd, paths=["a"]), max_norm=1.0), params, [grads])
    inside, _ = run(freeze(clip(sgd, max_norm=1.0), paths=["a"]), params, [grads])
    assert outside["b"].item() == pytest.approx(-0.8) and inside["b"].item() == pytest.approx(-1.0)


@every
def test_every_transform(name):
    """Staged on shapes, an update gives the eager bits. A vmap gives each member's update. The derivative by the
    gradients equals central differences. A pickle gives the same bits. Arguments keep their values."""
    opt = COMBINED[name]()
    (params, grads), (other, others) = generated(3), generated(4)
    params, state = run(opt, params, grads[:1])
    other, other_state = run(opt, other, others[:1])
    before = fr.copy((grads[1], state, params))
    need = opt.update(grads[1], state, params, 1)
    assert_trees_close((grads[1], state, params), before)
    staged = make_fx(opt.update, tracing_mode="fake", _allow_non_fake_inputs=True)(
        grads[1], state, params, torch.tensor(1)
    )
    assert_trees_close(staged(grads[1], state, params, torch.tensor(1)), need)
    assert_trees_close(pickle.loads(pickle.dumps(opt)).update(grads[1], state, params, 1), need)
    stack = lambda x, y: fr.tree.map(lambda a, b: torch.stack([a, b]), x, y)
    got = torch.func.vmap(opt.update, in_dims=(0, 0, 0, None))(
        stack(grads[1], others[1]), stack(state, other_state), stack(params, other), 1
    )
    assert_trees_close(got, stack(need, opt.update(others[1], other_state, other, 1)), rtol=1e-12, atol=1e-14)
    loss = lambda g: sum(x.sin().sum() for x in fr.tree.leaves(opt.update(g, state, params, 1)[0]))
    moved = lambda e: fr.tree.map(lambda g, d: g + e * d, grads[1], grads[2])
    _, tangent = torch.func.jvp(lambda g: loss(g), (grads[1],), (grads[2],))
    reverse = sum((x * y).sum() for x, y in zip(*map(fr.tree.leaves, (torch.func.grad(loss)(grads[1]), grads[2]))))
    near = (loss(moved(1e-6)) - loss(moved(-1e-6))) / 2e-6
    torch.testing.assert_close(tangent, near, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(reverse, tangent, rtol=1e-9, atol=1e-12)


def test_a_rate_and_a_bound_are_swept():
    """vmap over the learning rate, the bound of the norm and the decay gives each member's own run."""
    params, grads = generated(5)
    make = lambda lr, c, d: ema(clip(dense(SGD, lr=lr), max_norm=c), decay=d)
    of = lambda lr, c, d: run(make(lr, c, d), params, grads)
    rates, bounds, decays = torch.tensor([0.1, 0.2]), torch.tensor([0.5, 50.0]), torch.tensor([0.5, 0.9])
    got = torch.func.vmap(of)(rates, bounds, decays)
    for i in range(2):
        member = fr.tree.map(lambda x: x[i], got)  # noqa: B023
        assert_trees_close(member, of(float(rates[i]), float(bounds[i]), float(decays[i])), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_stays_so(bad):
    """Under a clip by norm, NaN or infinity in one gradient has the effect that it has under torch's. By value,
    infinity is cut."""
    params, grads = {"a": torch.zeros(2), "b": torch.zeros(1)}, {"a": torch.tensor([bad, 1.0]), "b": torch.ones(1)}
    by_norm, _ = run(clip(dense(SGD, lr=1.0), max_norm=1.0), params, [grads])
    theirs = [torch.nn.Parameter(p.clone()) for p in params.values()]
    for p, g in zip(theirs, grads.values(), strict=True):
        p.grad = g.clone()
    torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    assert_trees_close([-x for x in by_norm.values()], [p.grad for p in theirs])
    by_value, _ = run(clip(dense(SGD, lr=1.0), max_value=0.5), params, [grads])
    assert by_value["b"].item() == -0.5 and (bad != bad or by_value["a"].tolist() == [-0.5, -0.5])


def test_small_trees():
    """One tensor is a tree whose path is empty, which `*` names. An empty tree stays. f16 norms do not overflow."""
    one = torch.ones(2)
    got, state = run(by_path({"*": ema(dense(SGD, lr=0.5))}), one, [one])
    assert got.tolist() == [0.5, 0.5] and state["ema"].shape == (2,)
    for opt in (clip(dense(SGD, lr=0.5), max_norm=1.0), ema(dense(SGD, lr=0.5)), by_path({}, default=dense(SGD, lr=1))):
        assert run(opt, {}, [{}]) == ({}, {})
    half = torch.full((2,), 300.0, dtype=torch.float16)
    got, _ = run(clip(dense(SGD, lr=1.0), max_norm=1.0), half, [half])
    torch.testing.assert_close(half - got, torch.full_like(half, 0.5**0.5), rtol=0, atol=0.25)


def test_a_donated_step():
    """A donated step gives the eager values: groups, a frozen parameter, a clip and an average."""
    loss_fn = lambda p, x: ((x @ p.dense["tower"][0]["weight"] + p.dense["tower"][0]["bias"]) * p.dense["scale"]).sum()
    params = fr.tree.to(generated(6)[0], torch.float32)
    params = fr.Params({}, {"tower": params["tower"][:1], "scale": params["scale"]})
    frozen = {"*.bias": freeze(dense(SGD, lr=0.1), paths=["*.bias"])}
    opt = ema(clip(by_path(frozen, default=dense(ADAMW, lr=0.1)), max_norm=0.5), decay=0.5)
    step = fr.train_step(loss_fn, dense=opt, max_norm=3.0)
    x, eager, fast = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), step.init(params), step.init(params)
    donated, fast = fr.jit(step, donate=("state",)), fr.copy(fast)
    with staged_only():
        for _ in range(3):
            eager, fast = step(eager, x)[0], donated(fast, x)[0]
    assert_trees_close(fast, eager, rtol=1e-5, atol=1e-6)
    assert donated.num_compiled() == 1
