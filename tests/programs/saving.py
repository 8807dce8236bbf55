"""States that ranks save and load, real and emulated."""

import os
from pathlib import Path

import torch

import funcrec as fr
from funcrec.checkpoint import _job
from programs import training
from programs.training import plan_of


def sharded(state, axes, plan, name, is_real, dense_axes=()):
    """Return (mesh, the state laid out on it)."""
    mesh = (fr.Mesh.distributed if is_real else fr.Mesh.emulated)(**axes)
    sparse = training.OPTIMIZERS[name]()
    return mesh, fr.reshard(state, plan, mesh=mesh, sparse=sparse, dense_axes=dense_axes)


def saved(path, state, axes, kind, name, dense_axes=(), is_real=True):
    """Save a tree that has the state. A mesh has the parts of the state."""
    mesh, own = sharded(state, axes, plan_of(kind, axes), name, is_real, dense_axes)
    tree = {"state": own, "position": (1, 2), "best": {"w": torch.arange(6.0)}, "history": [{"loss": 0.5}]}
    return fr.save(path, tree, mesh=mesh)


def loaded(path, axes, kind, name, dense_axes=()):
    """Return the tree that ranks load under a plan, and then once more like what they have loaded, gathered."""
    mesh = fr.Mesh.distributed(**axes)
    sparse = training.OPTIMIZERS[name]()
    planned = fr.load(path, plan=plan_of(kind, axes), mesh=mesh, sparse=sparse, dense_axes=dense_axes)
    tree = fr.load(path, like=planned, mesh=mesh)
    assert tree["state"].tables.layout == planned["state"].tables.layout
    return {**tree, "state": fr.gather_state(tree["state"], mesh)}


def square(folder, state, saves, loads, name):
    """Return the pairs of results when each of `saves` is loaded as each of `loads`, and whole."""
    out = []
    for i, (axes, kind, dense_axes) in enumerate(saves):
        path = saved(Path(folder) / f"{i}", state, axes, kind, name, dense_axes)
        out += [loaded(path, a, k, name, d)["state"] for a, k, d in loads]
        out.append(fr.load(path, mesh=fr.Mesh.distributed(**axes))["state"])
    return out


def told_of_failure(path, state, failing, stage):
    """Return (each rank's error, the loaded previous checkpoint, the folder's files) when one rank fails at a stage of
    a save."""
    mesh, own = sharded(state, {"x": 2}, plan_of("row_wise", {"x": 2}), "adam", True)
    fr.save(path, own, mesh=mesh)
    mine = mesh.coordinates["x"] == failing
    patched = {"write": (_job, "write_rank"), "manifest": (_job, "write_manifest")}

    def fail(*args):
        raise OSError(28, "No space left on device")

    said = ""
    before = None
    if stage == "tree":
        own = {"state": own, "bad": object()} if mine else {"state": own, "bad": 1}
    elif stage == "apart":
        own = {"state": own, "rank": torch.tensor(mesh.coordinates["x"])}
    elif stage == "structure":
        own = {"state": own, **({"more": torch.ones(2)} if mine else {})}
    elif mine:
        module, function = patched[stage]
        before = getattr(module, function)
        setattr(module, function, fail)
    try:
        fr.save(path, own, mesh=mesh)
    except (OSError, TypeError, ValueError) as error:
        said = f"{type(error).__name__}: {error}"
    finally:
        if before is not None:
            setattr(module, function, before)
    same = fr.load(path, mesh=mesh)
    return said, same, sorted(os.listdir(path))


# arguments that only the second rank passes, to a save, a load or both
WRONG = {
    "save keep": {"keep": "two"},
    "save copy_bytes": {"copy_bytes": 3},
    "save mesh": {"mesh": "x"},
    "save other mesh": {"mesh": None},
    "save asynchronous": {"asynchronous": True},
    "save rows": {},
    "load path": {"path": 3},
    "load device": {"device": "none"},
    "load sparse": {"plan": None, "sparse": None, "exact": True},
    "load mesh": {"mesh": "x"},
    "load plan": {"plan": fr.Plan({n: fr.column_wise("x") for n in training.SHAPES})},
    "load like": {"like": {}},
    "tensors name": {"tensors": 3},
    "tensors path": {"path": "a\0"},
}


def told_of_arguments(path, state):
    """Return a rank's error for each call that the second rank makes differently, and the results of later correct
    calls."""
    mesh, own = sharded(state, {"x": 2}, plan_of("row_wise", {"x": 2}), "adam", True)
    other = fr.Mesh.distributed(y=2)
    fr.save(path, own, mesh=mesh)
    calls = {
        "save": lambda **kw: fr.save(kw.pop("path"), kw.pop("tree"), **kw),
        "load": lambda **kw: fr.load(kw.pop("path"), **kw),
        "tensors": lambda **kw: fr.save_safetensors(kw.pop("path") + ".st", kw.pop("tensors"), **kw),
    }
    right = {
        "save": {"path": str(path), "tree": own, "mesh": mesh},
        "load": {"path": str(path), "plan": plan_of("row_wise", {"x": 2}), "mesh": mesh},
        "tensors": {"path": str(path), "tensors": own.tables, "mesh": mesh},
    }
    said = {}
    for name, wrong in WRONG.items():
        call = name.split()[0]
        given = right[call]
        if mesh.coordinates["x"] == 1:
            given = given | wrong | ({"mesh": other} if "other" in name else {})
            if "rows" in name:
                given["tree"] = fr.core._tree.replace(own, step=torch.tensor([1, 2]))
        try:
            calls[call](**given)
            said[name] = ""
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    again = calls["load"](**right["load"])
    return said, fr.gather_state(again, mesh), calls["tensors"](**right["tensors"])


def told_of_damage(path, plan, damaged):
    """Return each rank's error for a folder with a damaged file."""
    mesh = fr.Mesh.distributed(x=2)
    if mesh.coordinates["x"] == 0:
        (file,) = (p for p in Path(path).iterdir() if p.name.startswith(f"rank-{damaged}"))
        content = bytearray(file.read_bytes())
        content[8 + int.from_bytes(content[:8], "little")] ^= 1  # the first byte after the header
        file.write_bytes(bytes(content))
    fr.loop.all_parts(torch.zeros(1), mesh)
    try:
        fr.load(path, plan=plan, mesh=mesh)
    except ValueError as error:
        return str(error)
    return ""


def copies_apart(path, state):
    """Return (the error of a save of replicas that trained apart, the state saved before they differed)."""
    axes = {"x": 2}
    mesh = fr.Mesh.distributed(**axes)
    plan = fr.Plan({n: fr.replicated() for n in training.SHAPES}, replicas="x")
    own = fr.reshard(state, plan, mesh=mesh, sparse=training.OPTIMIZERS["adam"]())
    fr.save(path, own, mesh=mesh)
    same = fr.load(path, mesh=mesh)
    own.tables.banks["a"][0] += mesh.coordinates["x"]
    try:
        fr.save(path, own, mesh=mesh)
    except ValueError as error:
        return str(error), same
    return "", same


def saved_beside(path, copy_bytes):
    """Return (the saved states, gathered, the loaded states). Training with donation continues while earlier states are
    saved in the background."""
    mesh = fr.Mesh.distributed(x=2)
    opts = training.optimizers("adam")
    step = fr.train_step(training.loss_fn, **opts, mesh=mesh, plan=plan_of("row_wise", {"x": 2}))
    state = step.init(training.params())
    fast = fr.jit(step, donate=("state",))
    wants, savings = [], []
    for i in range(3):
        wants.append(fr.gather_state(fr.copy(state), mesh))
        savings.append(fr.save(f"{path}-{i}", state, mesh=mesh, asynchronous=True, copy_bytes=copy_bytes))
        state, _ = fast(state, fr.shard(training.batch(i, 4), fr.P("x"), mesh=mesh))
    return wants, [fr.load(saving.wait(), mesh=mesh) for saving in savings]
