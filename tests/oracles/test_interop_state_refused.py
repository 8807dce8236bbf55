"""State dicts of TorchRec that do not fit raise with their names, in four parts, before any work."""

from dataclasses import replace

import pytest
import torch
from programs.refused import assert_refused

import funcrec as fr

pytest.importorskip("torchrec")
from programs.torchrec_states import LR, NUM_DENSE, TABLES, WIDTH, configs, fresh, models, our_step
from torchrec.modules.embedding_modules import EmbeddingBagCollection

load, to = fr.interop.load_torchrec_state_dict, fr.interop.to_torchrec_state_dict
EBC = EmbeddingBagCollection(configs())
HELD = EBC.state_dict()
NAMES = list(HELD)
STEP = our_step(fr.optim.adam(LR), fr.optim.dense(torch.optim.SGD, lr=LR))
STATE = STEP.init(fresh(dense={"w": torch.ones(WIDTH)}))
MOMENTS = {"state": {n: {"exp_avg": torch.zeros(t.shape), "exp_avg_sq": torch.zeros(t.shape)} for n, t in HELD.items()}}
one = lambda **more: {"state": {n: {**own, **more} for n, own in MOMENTS["state"].items()}}
DLRM_STATE = models()["dlrm"][0].state_dict()
ALL_KEPT = fr.models.dlrm(TABLES, tuple(fr.FeatureConfig(t.name, table=t.name) for t in TABLES), num_dense=NUM_DENSE,
                          bottom=(6, 4), sizes=(8, 7))  # fmt: skip
WRONG = {
    "no state": (lambda: load({"item": torch.ones(7, 4)}, HELD), TypeError, "`state` is not a Params"),
    "sharded state": (lambda: load(fr.Params(fr.shard_tables(fresh().tables, fr.Plan({t.name: fr.replicated() for t in
        TABLES}), fr.Mesh.emulated(x=1)), {}), HELD), TypeError, "`state.tables` are not whole"),
    "a module": (lambda: load(fresh(), EBC), TypeError, "`state_dict` is not a mapping"),
    "names of numbers": (lambda: load(fresh(), {1: torch.ones(1)}), TypeError, "a name in `state_dict` is not"),
    "a value": (lambda: load(fresh(), {**HELD, "more": "x"}), TypeError, "`state_dict['more']` is not a tensor"),
    "a table less": (lambda: load(fresh(), {NAMES[0]: HELD[NAMES[0]]}), KeyError, "is not in the state dict"),
    "a table more": (lambda: load(fresh(TABLES[:1]), HELD), ValueError, "has names that `state` lacks"),
    "a table twice": (lambda: load(fresh(), {**HELD, f"b.{NAMES[0]}": HELD[NAMES[0]]}), KeyError, "several times"),
    "another shape": (lambda: load(fresh((replace(TABLES[0], embedding_dim=3), TABLES[1])), HELD), ValueError,
        "has another shape"),
    "a weight more": (lambda: load(fresh(), {**HELD, "over.weight": torch.ones(1)}), ValueError, "that `state` lacks"),
    "a weight less": (lambda: load(fresh(dense={"w": torch.ones(2)}), HELD), KeyError, "has no counterpart"),
    "two of a name": (lambda: load(fresh(dense={"w": torch.ones(2)}), {**HELD, "a.w": torch.ones(2), "b.w":
        torch.ones(2)}), KeyError, "more than one counterpart"),
    "one for two": (lambda: load(fresh(dense={"a": {"w": torch.ones(2)}, "b": {"w": torch.ones(2)}}), {**HELD, "w":
        torch.ones(2)}), ValueError, "two places have one name"),
    "all vectors kept": (lambda: load(ALL_KEPT.init(fr.key(0)), DLRM_STATE), ValueError, "keep='dense'"),
    "followed": (lambda: load(fresh(), dict(EBC.state_dict(keep_vars=True))), TypeError, "torch.func tracks"),
    "in grad": (lambda: torch.func.grad(lambda x: load(fresh(), {**HELD, NAMES[0]: x}).tables["item"].sum())(
        torch.ones(7, 4)), TypeError, "torch.func tracks"),
    "back in grad": (lambda: torch.func.grad(lambda x: to(fr.Params({"item": x, "user": torch.ones(5, 4)}, {}),
        HELD)[NAMES[0]].sum())(torch.ones(7, 4)), TypeError, "torch.func tracks"),
    "step of params": (lambda: load(fresh(), HELD, step=3), TypeError, "`step` requires a TrainState"),
    "step in words": (lambda: load(STATE, MOMENTS, step="3"), TypeError, "`step` is not an integer"),
    "step below 0": (lambda: load(STATE, MOMENTS, step=-1), ValueError, "`step` is out of range"),
    "no step": (lambda: load(STATE, MOMENTS), ValueError, "how many steps were taken"),
    "two steps": (lambda: load(STATE, {"state": {n: {**own, "step": torch.tensor(float(i))} for i, (n, own) in
        enumerate(MOMENTS["state"].items())}}), ValueError, "counts of steps differ"),
    "no group": (lambda: load(STATE, MOMENTS, step=1, group="world"), TypeError, "`group` is not a ProcessGroup"),
    "optimizer of params": (lambda: load(fresh(), MOMENTS), TypeError, "belongs to an optimizer"),
    "optimizer without names": (lambda: load(STATE, {"state": {0: {"exp_avg": torch.ones(1)}}}), TypeError,
        "an optimizer without names"),
    "a slot less": (lambda: load(STATE, {"state": {n: {"exp_avg": own["exp_avg"]} for n, own in
        MOMENTS["state"].items()}}, step=1), ValueError, "slot 'square'"),
    "a slot more": (lambda: load(STATE, one(row_counter=torch.ones(7)), step=1), ValueError, "more than its slots"),
    "a state less": (lambda: load(STATE, {"state": {}}, step=1), KeyError, "is not in the state dict"),
    "a sum for each shard": (lambda: load(our_step(fr.optim.rowwise_adagrad(), fr.optim.dense(torch.optim.SGD,
        lr=LR)).init(fresh(dense={"w": torch.ones(WIDTH)})), {"state": {n: {"momentum1": torch.ones(2 * len(t))} for
        n, t in HELD.items()}}), ValueError, "has another shape"),
    "back from a module": (lambda: to(fresh(), EBC), TypeError, "`like_dict` is not a mapping"),
    "back, a table less": (lambda: to(fresh(TABLES[:1]), HELD), ValueError, "has names that `state` lacks"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_named(name):
    """A foreign state dict, or one for which the state has no place, raises before any work, in four parts."""
    assert_refused(*WRONG[name], parts=("got", "need", "try"))
