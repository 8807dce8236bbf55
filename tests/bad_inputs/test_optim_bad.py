"""The arguments that optimizers refuse, and the messages of the errors."""

import pytest
import torch
from programs.refused import assert_refused

import funcrec as fr
from funcrec import optim as o

TABLES = {"user": torch.zeros(4, 2), "item": torch.zeros(3, 1)}
GRADS = {"user": fr.RowGrads.from_entries(torch.tensor([1, 1]), torch.ones(2, 2), num_embeddings=4)}
ADAM, SGD = o.adam(), o.sgd()
SLOTS = ADAM.init(TABLES)
TALLER = ADAM.init({"user": torch.zeros(9, 2), "item": torch.zeros(3, 1)})
ONE = {"t": torch.zeros(2, 1)}
ONE_GRAD = {"t": fr.RowGrads.from_entries(torch.tensor([0]), torch.ones(1, 1), num_embeddings=2)}
WAIT = o.accumulate(SGD, every=2, capacity=1)
DENSE = o.dense(torch.optim.Adam)
W = {"w": torch.zeros(2)}


def update(opt=ADAM, grads=GRADS, slots=SLOTS, tables=TABLES, step=0):
    return opt.update(grads, slots, tables, step)


def ruled(rule, init=lambda t: {"m": torch.zeros_like(t)}):
    opt = o.row_optimizer(init=init, rule=rule)
    return opt.update(ONE_GRAD, opt.init(ONE), ONE, 0)


def dense_update(opt=DENSE, grads=W, state=None, dense=W, step=0):
    return opt.update(grads, opt.init(W) if state is None else state, dense, step)


ROWS = [
    ("adam(lr=-1)", lambda: o.adam(lr=-1), ValueError, "optim.adam: `lr` is out of range"),
    ("adam(b1=1.0)", lambda: o.adam(b1=1.0), ValueError, "`b1` is out of range"),
    ("adam(b2=-0.1)", lambda: o.adam(b2=-0.1), ValueError, "need  a number in [0, 1)"),
    ("adam(lr=nan)", lambda: o.adam(lr=float("nan")), ValueError, "`lr` is out of range"),
    ("adam(lr=inf)", lambda: o.adam(lr=float("inf")), ValueError, "`lr` is out of range"),
    ("adam(b1=1, b2=2)", lambda: o.adam(b1=1, b2=2), ValueError, "`b2` is out of range"),
    ("momentum(1.0)", lambda: o.momentum(momentum=1.0), ValueError, "optim.momentum: `momentum` is out of range"),
    ("adagrad(eps=-1)", lambda: o.adagrad(eps=-1.0), ValueError, "`eps` is out of range"),
    ("rowwise_adagrad(decay)", lambda: o.rowwise_adagrad(decay="L2"), ValueError, "need  'l2' or 'decoupled'"),
    ("rowwise_adagrad(max_norm)", lambda: o.rowwise_adagrad(max_norm=0.0), ValueError, "`max_norm` is out of range"),
    ("counter(half_life=0)", lambda: o.rowwise_adagrad_counter(half_life=0), ValueError, "`half_life` is out of range"),
    ("row_optimizer(step=)", lambda: o.row_optimizer(init=dict, rule=max, step=1), ValueError, "`step` is taken"),
    ("init(list)", lambda: ADAM.init([]), TypeError, "`tables` is not a dict of tables"),
    ("init(ints)", lambda: ADAM.init({"t": torch.zeros(2, 2, dtype=torch.int64)}), TypeError,
        "`tables['t']` is not a table"),
    ("init makes a list", lambda: ruled(max, init=lambda t: [t]), TypeError, "`init` made no slots"),
    ("init makes [D]", lambda: ruled(max, init=lambda t: {"m": torch.zeros(t.shape[1])}), TypeError, "need  f[2, ...]"),
    ("rule gives a scalar", lambda: ruled(lambda r, g, s, h: (r.sum(), s)), ValueError, "another shape of row"),
    ("rule drops a slot", lambda: ruled(lambda r, g, s, h: (r, {})), ValueError, "need  ['m']"),
    ("rule shrinks a slot", lambda: ruled(lambda r, g, s, h: (r, {"m": h.lr})), ValueError,
        "another shape of slot 'm'"),
    ("unknown table", lambda: update(grads={"page": GRADS["user"]}), KeyError, "`row_grads['page']` is for no table"),
    ("dense gradient", lambda: update(grads={"user": torch.zeros(4, 2)}), TypeError,
        "`row_grads['user']` is not a row gradient"),
    ("gradient of a list", lambda: update(grads=[]), TypeError, "`row_grads` is not a dict"),
    ("gradient of item", lambda: update(grads={"item": GRADS["user"]}), ValueError, "got   RowGrads of [4, 2]"),
    ("slots of sgd", lambda: update(slots=SGD.init(TABLES)), ValueError, "`slots['user']` are another optimizer's"),
    ("slots of adagrad", lambda: update(slots=o.adagrad().init(TABLES)), ValueError, "got   names ['sum']"),
    ("slots of other rows", lambda: update(slots=TALLER), ValueError,
        "`slots['user']['mean']` has another shape"),
    ("slots of rowwise", lambda: update(slots=o.partial_rowwise_adam().init(TABLES)), ValueError,
        "`slots['user']['square']`"),
    ("no slots for item", lambda: update(slots={"user": SLOTS["user"]}), ValueError, "`slots['item']` is missing"),
    ("slots for page", lambda: update(slots={**SLOTS, "page": {}}), KeyError, "`slots['page']` is for no table"),
    ("slots None", lambda: update(slots=None), TypeError, "`slots` is not a dict of slots"),
    ("step 1.5", lambda: update(step=1.5), TypeError, "`step` is not a step"),
    ("step -1", lambda: update(step=-1), TypeError, "`step` is not a step"),
    ("step [1]", lambda: update(step=torch.tensor([1])), TypeError, "`step` is not a step"),
    ("by_table({user: 1})", lambda: o.by_table({"user": 1}), TypeError, "`optimizers['user']` is not a RowOptimizer"),
    ("by_table(page)", lambda: o.by_table({"page": SGD}, default=SGD).init(TABLES), KeyError, "names no table"),
    ("by_table without item", lambda: o.by_table({"user": SGD}).init(TABLES), ValueError,
        "table 'item' has no optimizer"),
    ("by_table slots", lambda: update(o.by_table({}, default=ADAM), slots=SGD.init(TABLES)), ValueError,
        "`slots['user']`"),
    ("clip(None)", lambda: o.clip(SGD), ValueError, "nothing is clipped"),
    ("clip(max_norm=0)", lambda: o.clip(SGD, max_norm=0), ValueError, "`max_norm` is out of range"),
    ("clip(max_value=-1)", lambda: o.clip(SGD, max_value=-1), ValueError, "`max_value` is out of range"),
    ("freeze(twice)", lambda: o.freeze(SGD, tables=["user", "user"]), ValueError, "['user'] more than once"),
    ("freeze(page)", lambda: o.freeze(SGD, tables=["page"]).init(TABLES), KeyError, "`tables` names no table"),
    ("freeze(rows, paths)", lambda: o.freeze(SGD, paths=["w"]), TypeError, "a row optimizer takes `tables`"),
    ("freeze(dense, tables)", lambda: o.freeze(DENSE, tables=["w"]), TypeError, "a dense optimizer takes `paths`"),
    ("freeze(dense, page)", lambda: o.freeze(DENSE, paths=["page"]).init(W), KeyError,
        "`paths` has a pattern that fits no parameter"),
    ("freeze keeps a state", lambda: dense_update(o.freeze(DENSE, paths=["w"]), state=DENSE.init(W)), ValueError,
        "`state` of 'w', which is frozen, is another optimizer's"),
    ("by_path(page)", lambda: o.by_path({"page": DENSE}, default=DENSE).init(W), KeyError, "fits no parameter"),
    ("by_path in vain", lambda: o.by_path({"*": DENSE, "w": DENSE}).init(W), KeyError, "gets no parameter"),
    ("by_path without w", lambda: o.by_path({"b": DENSE}).init({**W, "b": W["w"]}), ValueError,
        "parameter 'w' has no optimizer"),
    ("by_path(rows)", lambda: o.by_path({"w": SGD}), TypeError, "`optimizers['w']` is not a DenseOptimizer"),
    ("two of one path", lambda: o.by_path({"*": DENSE}).init({"a.b": W["w"], "a": {"b": W["w"]}}), ValueError,
        "two parameters have one path"),
    ("by_path state", lambda: dense_update(o.by_path({"w": DENSE}), state={}), ValueError,
        "`state` has other parameters"),
    ("ema(ema)", lambda: o.ema(o.ema(DENSE)).init(W), ValueError, "the optimizer keeps an average already"),
    ("ema(decay=1)", lambda: o.ema(DENSE, decay=1.0), ValueError, "`decay` is out of range"),
    ("ema of rows", lambda: o.ema(SGD), TypeError, "`optimizer` is not a DenseOptimizer"),
    ("ema without one", lambda: dense_update(o.ema(DENSE), state=DENSE.init(W)), ValueError,
        "`state['w']['ema']` is not the average"),
    ("averaged of other shapes", lambda: o.averaged({"w": torch.ones(5)}, o.ema(DENSE).init(W)), ValueError,
        "need  f32[5]\n"),
    ("averaged of Adam", lambda: o.averaged(W, DENSE.init(W)), ValueError, "`state` holds no average"),
    ("averaged of others", lambda: o.averaged({"v": W["w"]}, o.ema(DENSE).init(W)), ValueError,
        "`state` has other parameters"),
    ("clipped dense cut", lambda: fr.train_step(lambda p, b: p.dense.sum(), dense=o.clip(DENSE, max_norm=1.0),
        mesh=fr.Mesh.emulated(x=2), plan=fr.Plan({}), dense_axes=("x",)), ValueError,
        "`dense` does not update each element on its own"),
    ("a norm of replicas", lambda: fr.train_step(lambda p, b: p.dense.sum(), max_norm=1.0,
        mesh=fr.Mesh.emulated(x=2), plan=fr.Plan({}, replicas=("x",))), TypeError,
        "groups of ranks have gradients of their own"),
    ("a norm of 0", lambda: fr.train_step(lambda p, b: p.dense.sum(), max_norm=0.0), ValueError,
        "`max_norm` is out of range"),
    ("accumulate(every=0)", lambda: o.accumulate(SGD, every=0, capacity=1), ValueError, "`every` is out of range"),
    ("accumulate(accumulate)", lambda: o.accumulate(o.clip(WAIT, max_norm=1.0), every=2, capacity=1), ValueError,
        "`optimizer` accumulates already"),
    ("accumulate without item", lambda: o.accumulate(SGD, every=2, capacity={"user": 1}).init(TABLES), KeyError,
        "`capacity['item']` is missing"),
    ("accumulate over capacity", lambda: update(WAIT, slots=WAIT.init(TABLES)), ValueError, "got   2 entries"),
    ("accumulate without buffers", lambda: update(WAIT, slots=SGD.init(TABLES)), ValueError,
        "`slots['user']['pending_rows']` is missing"),
    ("accumulate of 3", lambda: update(WAIT, slots=o.accumulate(SGD, every=3, capacity=1).init(TABLES)), ValueError,
        "need  [2, 1]"),
    ("Stage('cosine')", lambda: o.Stage("cosine"), ValueError, "`policy` is unknown"),
    ("Stage(max_iters=0)", lambda: o.Stage("linear", 0), ValueError, "`max_iters` is out of range"),
    ("Stage('interpolate')", lambda: o.Stage("interpolate", 5), ValueError, "lacks its start or its end value"),
    ("Stage(start too late)", lambda: o.Stage("interpolate", 5, end_value=1.0, start_interpolating_iters=5), ValueError,
        "too late"),
    ("schedule(falling)", lambda: o.schedule([o.Stage(max_iters=3), o.Stage(max_iters=3)]), ValueError, "[3, 3]"),
    ("schedule(lr=[2])", lambda: o.schedule([], lr=torch.ones(2)), ValueError, "`lr` is not a number of"),
    ("clip_by_global_norm([2])", lambda: fr.clip_by_global_norm(GRADS, torch.ones(2)), ValueError,
        "`max_norm` is not a number of"),
    ("RowGrads.clip([2])", lambda: GRADS["user"].clip(torch.ones(2)), ValueError, "`max_value` is not a number of"),
    ("huber(delta=[2])", lambda: fr.losses.huber(torch.ones(2), torch.ones(2), delta=torch.ones(2)), ValueError,
        "`delta` is not a number of"),
    ("dense(betas=([2], b2))", lambda: o.dense(torch.optim.Adam, betas=(torch.ones(2), 0.9)), ValueError,
        "`betas` is not one number"),
    ("dense(betas=[2])", lambda: o.dense(torch.optim.Adam, betas=torch.ones(2)), ValueError,
        "`betas` is not one number"),
    ("dense(momentum=int)", lambda: o.dense(torch.optim.SGD, momentum=torch.tensor(1)), ValueError,
        "`momentum` is not one number"),
    ("schedule(lr=-1)", lambda: o.schedule([], lr=-1), ValueError, "`lr` is out of range"),
    ("dense(adam)", lambda: o.dense(ADAM), TypeError, "`cls` is not a class of torch.optim"),
    ("dense(LBFGS)", lambda: o.dense(torch.optim.LBFGS), TypeError, "`LBFGS` cannot be run"),
    ("dense(SparseAdam)", lambda: o.dense(torch.optim.SparseAdam), TypeError, "`SparseAdam` cannot be run"),
    ("dense(Adafactor)", lambda: o.dense(torch.optim.Adafactor), TypeError, "`Adafactor` cannot be run"),
    ("dense(fused=True)", lambda: o.dense(torch.optim.Adam, fused=True), ValueError, "`fused` cannot be set"),
    ("dense(lr=-1)", lambda: o.dense(torch.optim.Adam, lr=-1.0), ValueError, "`lr` is out of range"),
    ("dense(betas)", lambda: o.dense(torch.optim.Adam, betas=(0.9, 1.0)), ValueError, "beta"),
    ("dense(speed=1)", lambda: o.dense(torch.optim.Adam, speed=1), TypeError, "speed"),
    ("dense init ints", lambda: DENSE.init({"n": torch.tensor([1])}), TypeError, "`dense['n']` cannot be trained"),
    ("dense init None", lambda: DENSE.init({"n": None}), TypeError, "`dense['n']` cannot be trained"),
    ("dense other leaves", lambda: dense_update(grads={"v": torch.zeros(2)}), TypeError,
        "`grads` is not a tree like `dense`"),
    ("dense other shape", lambda: dense_update(grads={"w": torch.zeros(3)}), ValueError, "`grads['w']` does not match"),
    ("dense state of sgd", lambda: dense_update(state=o.dense(torch.optim.SGD).init(W)), ValueError,
        "`state['w']` is another optimizer's"),
    ("dense state of v", lambda: dense_update(state=DENSE.init({"v": torch.zeros(2)})), ValueError,
        "`state` has other parameters"),
    ("dense state of [3]", lambda: dense_update(state=DENSE.init({"w": torch.zeros(3)})), ValueError,
        "`state['w']['exp_avg']` has another shape"),
    ("dense state ()", lambda: dense_update(state=()), ValueError, "`state` has other parameters"),
    ("dense step None", lambda: dense_update(step=None), TypeError, "`step` is not a step"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "fragment"), [r[1:] for r in ROWS], ids=[r[0] for r in ROWS])
def test_refused(call, kind, fragment):
    """A bad argument raises with its type of error and its name, before any work."""
    assert_refused(call, kind, fragment)


def test_all_at_once():
    """One message reports every violation, each violation with its path."""
    with pytest.raises(KeyError) as caught:
        update(grads={"page": GRADS["user"], "item": GRADS["user"]}, slots={"user": SLOTS["user"]}, step=-1)
    said = caught.value.args[0]
    assert all(part in said for part in ("row_grads['page']", "row_grads['item']", "slots['item']", "`step`"))
