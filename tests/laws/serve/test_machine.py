"""Any sequence of steps, rewinds, saves, loads, moves and publications equals training of a dense model."""

import copy
import os

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from programs import fresh
from programs.moving import bits

import funcrec as fr
from funcrec.testing import assert_trees_close
from funcrec.testing import strategies as frs

pytestmark = pytest.mark.xdist_group("packages")
LR, EPS, KEPT, BAGS = 0.05, 0.1, 3, 4


class Dense:
    """The model on dense tables in f64, trained by torch's own optimizers."""

    def __init__(self, params: fr.Params):
        named = {**params.tables, **{f"dense {n}": x for n, x in params.dense.items()}}
        self.leaves = {n: x.detach().double().clone().requires_grad_() for n, x in named.items()}
        own = lambda names: [self.leaves[n] for n in names]
        self.of_tables = torch.optim.Adagrad(own(params.tables), lr=LR, eps=EPS)
        self.of_rest = torch.optim.SGD(own(f"dense {n}" for n in params.dense), lr=LR)

    @property
    def params(self) -> fr.Params:
        tables = {n: x.detach().float() for n, x in self.leaves.items() if not n.startswith("dense ")}
        return fr.Params(tables, {n[6:]: x.detach().float() for n, x in self.leaves.items() if n.startswith("dense ")})

    def step(self, batch: fr.Batch) -> float:
        """Take a step over the lists of the batch."""
        lists, rows = batch.ids.to_lists(), []
        for f in fresh.FEATURES:
            rows.append(torch.stack([self.leaves[f.table][bag].sum(0) for bag in lists[f.key]]))
        scores = torch.cat(rows, 1) @ self.leaves["dense w"] + self.leaves["dense b"]
        loss = (scores - batch.label).square().mean()
        self.of_tables.zero_grad(), self.of_rest.zero_grad()
        loss.backward()
        self.of_tables.step(), self.of_rest.step()
        return float(loss.detach())

    def copy(self) -> "Dense":
        other = Dense(self.params)
        for n, x in self.leaves.items():
            other.leaves[n].data.copy_(x.data)
        other.of_tables.load_state_dict(copy.deepcopy(self.of_tables.state_dict()))
        other.of_rest.load_state_dict(copy.deepcopy(self.of_rest.state_dict()))
        return other


@st.composite
def places(draw):
    """Draw (mesh, plan), or (None, None) for one process, to which it shrinks."""
    if not draw(st.booleans()):
        return None, None
    mesh = draw(frs.meshes(max_ranks=4).filter(lambda m: BAGS % m.size == 0))
    return mesh, draw(frs.plans(fresh.TABLES, mesh))


class Machine(RuleBasedStateMachine):
    """A run, next to the dense model at each state that a rewind can reach. folder: for the files of a sequence."""

    def __init__(self, folder, package):
        super().__init__()
        self.folder = folder / f"{len(list(folder.iterdir()))}"
        self.folder.mkdir()
        self.package, self.saved, self.batches = fr.load_package(package), [], 0

    def go_to(self, place):
        """Make the step, and the publisher, of a place."""
        self.mesh, plan = place
        where = {} if self.mesh is None else {"mesh": self.mesh, "plan": plan}
        self.plan, self.sparse = plan, fr.optim.adagrad(LR, eps=EPS)
        dense = fr.optim.dense(torch.optim.SGD, lr=LR)
        self.step = fr.logged(
            fr.train_step(fresh.loss_fn, sparse=self.sparse, dense=dense, **where), steps=KEPT, rows=12
        )
        self.tell = fr.publish(self.folder / "published", self.package, every_steps=1, keep=3, mesh=self.mesh)

    def whole(self):
        """Return the run's state, gathered."""
        state = self.run.state
        return state if self.mesh is None else fr.gather_state(state, self.mesh)

    @initialize(place=places())
    def begin(self, place):
        params = fresh.begun().params
        self.go_to(place)
        self.run, self.past = self.step.init(params), []
        self.now = (Dense(params), bits(fr.copy(self.whole())))

    @rule(seed=st.integers(0, 2**16), count=st.integers(1, 3))
    def train(self, seed, count):
        for i in range(count):
            batch = fresh.batch(seed + i, BAGS)
            own = batch if self.mesh is None else fr.shard(batch, fr.P(self.mesh.axis_names), mesh=self.mesh)
            self.run, metrics = self.step(self.run, own)
            model = self.now[0].copy()
            assert abs(model.step(batch) - float(metrics["loss"].mean())) < 1e-3
            self.past = [*self.past, self.now][-KEPT:]
            self.now = (model, bits(fr.copy(self.whole())))

    @precondition(lambda self: self.past)
    @rule(data=st.data())
    def rewind(self, data):
        k = data.draw(st.integers(1, len(self.past)))
        self.run = fr.rewind(self.run, k, mesh=self.mesh)
        self.now, self.past = self.past[-k], self.past[:-k]

    @rule()
    def save(self):
        path = fr.save(self.folder / f"saved-{len(self.saved)}", self.run.state, mesh=self.mesh)
        self.saved.append((path, self.now, self.run.state))

    @precondition(lambda self: self.saved)
    @rule(place=places(), data=st.data())
    def load(self, place, data):
        """A saved state, under any plan, in a run that begins."""
        path, now, _ = data.draw(st.sampled_from(self.saved))
        self.go_to(place)
        where = {} if self.mesh is None else {"mesh": self.mesh, "plan": self.plan, "sparse": self.sparse}
        self.run, self.now, self.past = self.step.init(fr.load(path, **where)), now, []

    @rule(place=places())
    def reshard(self, place):
        whole, before, old = self.whole(), self.run.state, self.mesh
        self.go_to(place)
        if self.mesh is None:
            state = whole
        else:
            state = fr.reshard(before, self.plan, mesh=self.mesh, sparse=self.sparse, from_mesh=old)
        self.run, self.past = self.step.init(state), []

    @rule()
    def publish(self):
        """A server that follows has the bits of the state, whichever files lead to it."""
        self.batches += 1
        self.tell(fr.loop.Record("step", 0, int(self.run.state.step), {}, self.run))
        self.package.follow(self.folder / "published")
        params = self.whole().params
        need = {f"{part}[{n!r}]": x for part in ("tables", "dense") for n, x in getattr(params, part).items()}
        assert fresh.bits(dict(self.package.params)) == fresh.bits(need)

    @invariant()
    def is_the_dense_model(self):
        """The bits are those of the state when it was made. The numbers are the dense model's."""
        if hasattr(self, "now"):
            whole = self.whole()
            assert_trees_close(bits(whole), self.now[1])
            assert_trees_close(whole.params, self.now[0].params, rtol=1e-3, atol=1e-3)


def test_any_course_of_training_is_that_of_a_dense_model(plain, tmp_path):
    """FUNCREC_MACHINES asks for more sequences."""
    few = settings(max_examples=int(os.environ.get("FUNCREC_MACHINES", "12")), stateful_step_count=10)
    run_state_machine_as_test(lambda: Machine(tmp_path, plain), settings=few)
