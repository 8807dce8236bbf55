"""A dry run tells what a rank holds and sends; `python -m funcrec dryrun` does it for a file."""

import json

import pytest
import torch

import funcrec as fr
from funcrec.dry import main
from funcrec.dry._memory import most_live_bytes

SPEC = {
    "mesh": {"data": 2, "model": 2},
    "batch_size": 64,
    "hardware": "cpu",
    "optimizer": "rowwise_adagrad",
    "tables": [
        {"name": "item", "num_embeddings": 1000, "embedding_dim": 8},
        {"name": "user", "num_embeddings": 50, "embedding_dim": 8},
    ],
    "features": [{"name": "clicked", "table": "item"}, {"name": "user", "table": "user"}],
    "constraints": {"item": {"pooling_factor": 3.0, "kinds": ["row_wise"]}},
}
READ = [fr.FeatureConfig("a", table="t"), fr.FeatureConfig("b", table="u")]
IDS = fr.KeyedJaggedTensor.from_lists({"a": [[1, 2], [3]], "b": [[0], [5]]})


def run(tmp_path, spec, *more):
    path = tmp_path / "spec.json"
    path.write_text(spec if isinstance(spec, str) else json.dumps(spec))
    return main([str(path), *more])


def dry(num, **how):
    plan = fr.Plan({"t": fr.row_wise("x"), "u": fr.table_wise("x", rank=0)})
    loss = lambda params, ids: fr.lookup(params.tables, ids, READ).values.square().mean()
    shapes = {"t": (100, 4), "u": (9, 4)}
    params = fr.Params({n: torch.zeros(s) for n, s in shapes.items()}, {})
    make = lambda mesh: fr.train_step(loss, sparse=fr.optim.adam(), mesh=mesh, plan=plan, **how)
    return fr.dry_run(make, {"x": num}, params, IDS), make, params


def test_a_rank_holds_its_part_of_the_state():
    """The bytes of tables and of their slots are those of a rank of an emulated mesh: all ranks have equal parts."""
    found, make, params = dry(4)
    state = make(fr.Mesh.emulated(x=4)).init(params)
    size = lambda tree: sum(x.nbytes for x in fr.core.tree_leaves(tree) if isinstance(x, torch.Tensor))
    assert found.memory["tables"] * 4 == size(state.tables.banks)
    assert found.memory["optimizer state"] * 4 == size(state.slots)
    assert found.memory["activations and buffers"] >= max(x.operand_bytes for x in found.exchanges)


def test_messages_grow_with_ranks_and_bytes_with_capacity():
    """A rank sends a message to each other rank in an exchange. With a capacity for its share, blocks of n ranks take
    what those of one rank take."""
    for num in (4, 12):
        found = dry(num, capacity=1)[0]
        swaps = [x for x in found.exchanges if x.kind == "all_to_all_single"]
        assert swaps and {x.messages for x in swaps} == {num - 1}
        ids = swaps[0]
        lanes = 2  # a rank serves both tables at most: a row and the lengths of two bags for each of them
        assert ids.operand_bytes == num * 4 * (1 + lanes * 2)


def test_every_rank_tells_the_same():
    """All ranks have one program. So their dry runs are equal."""
    plan = fr.Plan({"t": fr.row_wise("x"), "u": fr.table_wise("x", rank=0)})
    loss = lambda params, ids: fr.lookup(params.tables, ids, READ).values.square().mean()
    make = lambda mesh: fr.train_step(loss, sparse=fr.optim.sgd(), mesh=mesh, plan=plan)
    params = fr.Params({"t": torch.zeros(100, 4), "u": torch.zeros(9, 4)}, {})
    assert fr.dry_run(make, {"x": 3}, params, IDS, rank=2) == fr.dry_run(make, {"x": 3}, params, IDS)


def test_live_bytes_are_those_of_a_walk_over_the_graph():
    """Values live from their operation to their last reader. A view keeps the memory that it shows; arguments do not
    count."""

    def f(x):  # 4 bytes each: a (100) and b (100) live together, then b alone with c (50), which is read by d
        a = x + 1
        b = a * 2
        c = (b[:50] + b[50:]) * 1.0
        return c.sum()

    graph = fr.jit(f).lower(torch.zeros(100)).graph.graph
    assert most_live_bytes(graph) == 4 * (100 + 100)


def test_the_command_prints_the_dry_run_of_its_plan(tmp_path, capsys):
    """The command prints the exchanges, the memory and the estimate for the planner's plan, or for a given one, and the
    seconds that it took itself."""
    assert run(tmp_path, SPEC) == 0
    told = capsys.readouterr().out
    assert "one of 4 ranks, data=2 x model=2" in told and "this dry run:" in told
    for word in ("all_to_all_single", "tables", "optimizer state", "activations and buffers", "estimate:", "lookups"):
        assert word in told
    plan = fr.Plan({"item": fr.row_wise("data"), "user": fr.replicated()})
    (tmp_path / "plan.json").write_text(plan.to_json())
    assert run(tmp_path, SPEC, "--plan", str(tmp_path / "plan.json"), "--ranks", "8", "--backend", "nccl") == 0
    told = capsys.readouterr().out
    assert "one of 8 ranks, data=4 x model=2" in told and "all_gather_into_tensor" in told and "lookups" in told


def test_the_command_stages_a_dlrm_with_its_dense_part(tmp_path, capsys):
    """With "dense" the step is that of a DLRM, whose dense gradients travel too. With a capacity the ids without room
    are counted."""
    dense = {"num_dense": 3, "bottom": [8], "sizes": [4]}
    assert run(tmp_path, SPEC | {"dense": dense, "capacity_factor": 2.0}) == 0
    told = capsys.readouterr().out
    (line,) = [x for x in told.splitlines() if x.startswith("dense")]
    assert float(line.split()[1]) >= 0 and "int64[" in told  # ids without room are counted


@pytest.mark.parametrize("change, more, part", [
    ({"optimizer": None}, (), "lacks `optimizer`"),
    ({"batch_size": 63}, (), "is not cut by the ranks"),
    ({}, ("--ranks", "7"), "do not lie on the mesh"),
    ({}, ("--ranks", "0"), "do not lie on the mesh"),
    ({"mesh": 4}, (), "has no mesh"),
    ({"hardware": ["cpu"] * 4}, (), "the ranks differ"),
    ({"dense": [1]}, (), "`dense` is not a mapping"),
    ({"dense": {"sizes": [4], "x": 1}}, (), "x"),
    ({"tabels": []}, (), "'tables'"),
    ("{", (), "is not JSON"),
    ({"memory_bytes": 100}, (), "do not fit into memory"),
], ids=str)  # fmt: skip
def test_what_is_wrong_with_a_file_is_told(tmp_path, capsys, change, more, part):
    """For a file that describes no step, the command exits with 2, and says on stderr what is wrong."""
    assert run(tmp_path, change if isinstance(change, str) else SPEC | change, *more) == 2
    assert part in capsys.readouterr().err


def test_a_step_that_is_none_of_the_mesh_is_refused():
    """dry_run raises if `make` returns no step, or a step without the mesh, or if the rank does not exist. The mesh is
    of no use outside of the call."""
    params, kept = fr.Params({"t": torch.zeros(4, 2)}, {}), []
    loss = lambda params, batch: params.tables["t"].sum()
    with pytest.raises(TypeError, match="does not return a step"):
        fr.dry_run(lambda mesh: None, {"x": 2}, params, IDS)
    with pytest.raises(TypeError, match="does not run on the mesh"):
        fr.dry_run(lambda mesh: kept.append(mesh) or fr.train_step(loss), {"x": 2}, params, IDS)
    with pytest.raises(ValueError, match="no such rank"):
        fr.dry_run(lambda mesh: None, {"x": 2}, params, IDS, rank=2)
    with pytest.raises(ValueError, match="exists in no process"):
        fr.shard_map(lambda x: fr.psum(x, "x"), mesh=kept[0], in_specs=fr.P("x"), out_specs=fr.P())(torch.ones(2))
