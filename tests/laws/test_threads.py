"""The number of threads and the hash seed may change some results. All other results keep their bits.

sparse stages    nothing changes: the same bits on any number of threads, for the same cotangents
whole steps      on one number of threads nothing changes, whatever PYTHONHASHSEED is. On another number, torch splits
                 its own long sums (a mean loss, norms, the gradients of batch and layer norm) into as
                 many parts, which rounds differently.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from programs import surroundings

import funcrec as fr
from funcrec.core._tree import replace
from funcrec.testing import assert_trees_close

NUM_BAGS = 1500
TABLES = (
    fr.TableConfig("item", num_embeddings=300, embedding_dim=33),
    fr.TableConfig("user", num_embeddings=900, embedding_dim=16, dtype=torch.bfloat16),
)
FEATURES = (
    fr.FeatureConfig("clicked", table="item", pooling="mean"),
    fr.FeatureConfig("shown", table="item", max_length=3),
    fr.FeatureConfig("user", table="user", weighted=True),
)


def inputs():
    """Return tables, slots, ids with many repeats, and cotangents, large enough for several threads."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 9, (3 * NUM_BAGS,), generator=draw)
    n = int(lengths.sum())
    values, weights = torch.randint(0, 320, (n,), generator=draw), torch.rand(n, generator=draw)
    ids = fr.KeyedJaggedTensor.from_lengths(["clicked", "shown", "user"], values, lengths, weights=weights)
    tables = fr.init(fr.key(0), TABLES)
    return tables, ids, torch.randn(NUM_BAGS, 2 * 33 + 16, generator=draw)


def sparse_stages(sparse):
    """Return a function (tables, slots, ids, d): all stages of a step that touch tables, without the loss."""

    def stages(tables, slots, ids, d):
        acts = fr.lookup(tables, ids, FEATURES)
        grads = fr.lookup_transpose(replace(acts, values=d), ids, FEATURES, TABLES)
        summed = {name: g.coalesce() for name, g in grads.items()}
        return acts, summed, sparse.update(grads, slots, tables, step=3)

    return stages


def on_threads(number, call):
    with surroundings.on_threads(number):
        return call()


@pytest.mark.parametrize("rule", ["rowwise_adagrad", "adam", "lamb"])
def test_threads_change_no_bit_of_sparse_stages(rule):
    """Lookups, their transposes, sums by row and updates give the same bits on one, two and three threads."""
    sparse, (tables, ids, d) = getattr(fr.optim, rule)(lr=0.1), inputs()
    stages, slots = sparse_stages(sparse), sparse.init(tables)
    first, *others = [on_threads(n, lambda: stages(tables, slots, ids, d)) for n in (1, 2, 3)]
    for other in others:
        assert_trees_close(other, first)


def test_threads_change_no_bit_of_compiled_sparse_stages():
    """Stages that are compiled for each number of threads agree with the eager stages."""
    sparse, (tables, ids, d) = fr.optim.rowwise_adagrad(lr=0.1), inputs()
    stages, slots = sparse_stages(sparse), sparse.init(tables)
    fast, eager = fr.jit(stages), stages(tables, slots, ids, d)
    for n in (1, 2, 3):
        assert_trees_close(on_threads(n, lambda: fast(tables, slots, ids, d)), eager)


def digest_of_steps() -> str:
    """Return a digest of the state and the losses after three eager and two compiled steps."""
    tables, ids, _ = inputs()
    draw = torch.Generator().manual_seed(1)
    dense = {
        k: torch.randn(n, m, generator=draw) / 10 for k, (n, m) in {"a": (82, 32), "b": (32, 8), "c": (8, 1)}.items()
    }
    batch = fr.Batch(ids, torch.randint(0, 2, (NUM_BAGS,), generator=draw).float())

    def loss_fn(params, batch):
        x = fr.lookup(params.tables, batch.ids, FEATURES).values
        for name in ("a", "b", "c"):
            x = torch.relu(x) @ params.dense[name]
        return torch.nn.functional.binary_cross_entropy_with_logits(x[:, 0], batch.label)

    step = fr.train_step(loss_fn, sparse=fr.optim.adam(lr=0.1), dense=fr.optim.dense(torch.optim.Adam, lr=0.01))
    state, seen = step.init(fr.Params(tables, dense)), []
    for run in (step, step, step, fast := fr.jit(step), fast):
        state, metrics = run(state, batch)
        seen.append(metrics)
    leaves = [x for x in torch.utils._pytree.tree_leaves((state, seen)) if isinstance(x, torch.Tensor)]
    data = [x.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes() for x in leaves if x.numel()]
    return hashlib.sha256(b"".join(data)).hexdigest()


def test_the_hash_seed_changes_no_bit():
    """Two processes with different PYTHONHASHSEEDs on two threads give the same bits after eager and compiled steps."""
    code = "import runpy, sys, torch; torch.set_num_threads(2); print(runpy.run_path(sys.argv[1])['digest_of_steps']())"
    command = [sys.executable, "-c", code, __file__]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    start = lambda seed: subprocess.Popen(
        command, env={**env, "PYTHONHASHSEED": seed}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    said = [p.communicate(timeout=600) for p in [start("1"), start("2")]]
    assert said[0][0] == said[1][0] and len(said[0][0].strip()) == 64, said


def test_threads_may_be_the_first_to_call():
    """In a fresh process, several threads may make the first call at once, as the workers of a loader do. The results
    are right."""
    code = """
import threading, torch, funcrec as fr
bags, start, found = fr.JaggedTensor.from_lists([[1, 2], [], [3]]), threading.Barrier(8), []
def run():
    start.wait()
    found.append(bags.select(torch.tensor([2, 0]), capacity=4).to_lists())
threads = [threading.Thread(target=run) for _ in range(8)]
[t.start() for t in threads], [t.join() for t in threads]
assert found == [[[3], [1, 2]]] * 8, found
"""
    subprocess.run([sys.executable, "-c", code], check=True)
