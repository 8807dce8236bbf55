"""Counts the bytes that a rank of a step sends between nodes and within its node, with towers on nodes and without.

    python bench/towers.py                       # a DLRM of 26 tables, 512 examples a rank: the table in README.md
    python bench/towers.py --bags 2048 --dim 128

The model is a DLRM whose 26 features form towers. A tower's layer maps the pooled vectors of its features to `--kept`
vectors. These, and that of the dense inputs, meet in dot products and the last layers. With `axis=None` every rank runs
all layers on its own bags, after a lookup that sends each pooled vector to it; with `axis="node"` the towers run on
their nodes. Both have the same parameters, plan and answers.

The bytes are those of `fr.jit(...).lower(...)`, which compiles and sends nothing: one process stands for rank 0 of a
process group that torch fakes. They do not depend on the machine. `layers` are bytes of the sum of dense gradients over
all ranks, which towers do not change.
"""

import argparse
import json
import multiprocessing
from pathlib import Path

import torch
import torch.distributed as dist

import funcrec as fr
from funcrec.mesh import LEAVES

NUM_TABLES, NUM_DENSE = 26, 13
AXES = ("node", "local")


def model_of(num_towers: int, dim: int, kept: int, axis: str | None):
    """Return (the towers, init, loss) of a DLRM. The tables have few rows: no byte depends on their number."""
    features = [fr.FeatureConfig(f"f{i}", table=f"t{i}", max_length=1) for i in range(NUM_TABLES)]
    parts = [features[NUM_TABLES * i // num_towers : NUM_TABLES * (i + 1) // num_towers] for i in range(num_towers)]
    layers = {n: fr.nn.linear(n * dim, kept * dim) for n in sorted(set(map(len, parts)))}
    towers = {f"tower{i}": fr.Tower(own, layers[len(own)]) for i, own in enumerate(parts)}
    many = num_towers * kept + 1
    both = fr.towers(towers, axis=axis)
    bottom, top = fr.nn.mlp((NUM_DENSE, 64, dim)), fr.nn.mlp((dim + many * (many - 1) // 2, 64, 1))

    def init(key):
        keys = fr.split(key, 4)
        tables = fr.init(keys[0], [fr.TableConfig(f.table, 100, dim) for f in features])
        dense = {"towers": both.init(keys[1]), "bottom": bottom.init(keys[2]), "top": top.init(keys[3])}
        return fr.Params(tables, dense)

    def loss(params, batch):
        x = bottom.apply(params.dense["bottom"], batch.dense)
        y = both.apply(params.dense["towers"], params.tables, batch.ids)
        dots = fr.nn.dot_interaction(torch.cat([x, y], 1).unflatten(1, (many, dim)))
        return fr.losses.bce(top.apply(params.dense["top"], torch.cat([x, dots], 1))[:, 0], batch.label)

    return towers, init, loss


def counted(
    sizes: tuple[int, int], num_towers: int, bags: int, dim: int, kept: int, axis: str | None
) -> dict[str, int]:
    """Return {axis of the mesh: bytes that rank 0 of a step sends over it, "layers": those of dense gradients}."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=sizes[0] * sizes[1], store=FakeStore())
    mesh = fr.Mesh.distributed(node=sizes[0], local=sizes[1])
    towers, init, loss = model_of(num_towers, dim, kept, axis)
    plan = fr.Plan(fr.tower_placements(towers, mesh))
    params = init(fr.key(0))
    held = fr.shard_tables(params.tables, plan, mesh)
    ids = fr.KeyedJaggedTensor.from_lists({f"f{i}": [[1]] * bags for i in range(NUM_TABLES)})
    batch = fr.Batch(ids, torch.ones(bags), torch.ones(bags, NUM_DENSE))
    everywhere = fr.P(AXES)

    def gradients(tables, dense, batch):
        value, grads = fr.value_and_grad(loss)(fr.Params(tables, dense), batch)
        rows = [x.coalesce().grads for x in grads.tables.values()]
        return value[None], rows, fr.psum(grads.dense, AXES)

    specs = {"in_specs": (held.specs(), fr.P(), everywhere), "out_specs": (everywhere, everywhere, fr.P())}
    program = fr.jit(fr.shard_map(gradients, mesh=mesh, **specs, check=False)).lower(held, params.dense, batch)
    names = {a.group: a.name for a in mesh.bound_axes(AXES, torch.device("cpu"))}
    nodes = [n for n in program.graph.graph.nodes if n.target in LEAVES]
    found = dict.fromkeys((*AXES, "layers"), 0)
    for node, sent in zip(nodes, program.exchanges, strict=True):
        found["layers" if "reduce" in sent.kind else names[node.args[-1]]] += sent.sent_bytes
    return found


def in_process(pipe, *how) -> None:
    pipe.send(counted(*how))


def fresh(*how) -> dict[str, int]:
    """Return `counted(*how)` from a process of its own: a process has one process group."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=in_process, args=(theirs, *how))
    process.start()
    found = ours.recv()
    process.join()
    return found


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    for name, default in (("bags", 512), ("dim", 64), ("kept", 4)):
        options.add_argument(f"--{name}", type=int, default=default)
    how = options.parse_args()
    out = Path(__file__).parent / "results" / "towers.jsonl"
    for sizes in ((2, 2), (2, 8), (4, 8)):
        for num_towers in {2, sizes[0]}:
            plain, own = (fresh(sizes, num_towers, how.bags, how.dim, how.kept, axis) for axis in (None, "node"))
            line = {"nodes": sizes[0], "ranks": sizes[1], "towers": num_towers, **vars(how), "plain": plain, "own": own}
            with out.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(line, f"between nodes {plain['node'] / own['node']:.2f} x less", flush=True)
