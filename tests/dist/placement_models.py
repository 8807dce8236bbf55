"""Models, plans and meshes for laws of placements."""

import torch
from hypothesis import strategies as st

import funcrec as fr

MESHES = {"1": {"x": 1}, "2": {"x": 2}, "4": {"x": 4}, "2x2": {"x": 2, "y": 2}, "2x4": {"x": 2, "y": 4}}
KINDS = ("table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise", "grid", "replicated")


def placement(kind, mesh, number):
    """One of that kind on the mesh, the places chosen by `number`."""
    sizes = list(mesh.shape.values())
    axes = mesh.axis_names
    if kind in ("table_row_wise", "table_column_wise"):
        return getattr(fr, kind)(axes[:2], rank=number % sizes[0])
    if kind == "grid":
        return fr.grid(axes[:2], ranks=() if number % 2 else tuple(range(sizes[0]))[::-1])
    on = axes if number % 3 == 0 else axes[number % len(axes)]
    n = mesh.size if number % 3 == 0 else mesh.shape[on]
    if kind == "table_wise":
        return fr.table_wise(on, rank=number % n)
    if kind == "column_wise":
        return fr.column_wise(on, ranks=() if number % 2 else (number % n, (number + 1) % n))
    return fr.row_wise(on) if kind == "row_wise" else fr.replicated()


@st.composite
def models(draw, kinds=KINDS):
    """(mesh, plan, tables, ids, features): a few tables of odd sizes, several features each; shrinks to one table on one rank."""
    mesh = fr.Mesh.emulated(**MESHES[draw(st.sampled_from(list(MESHES)))])
    usable = [k for k in kinds if len(mesh.axis_names) > 1 or k not in ("table_row_wise", "table_column_wise", "grid")]
    names = ["a", "b", "c"][: draw(st.integers(1, 3))]
    shapes = {n: (draw(st.integers(1, 9)), draw(st.sampled_from([1, 2, 5, 8]))) for n in names}
    plan = fr.Plan({n: placement(draw(st.sampled_from(usable)), mesh, draw(st.integers(0, 7))) for n in names})
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16]))
    tables = fr.init(fr.key(draw(st.integers(0, 5))), [fr.TableConfig(n, *s, dtype=dtype) for n, s in shapes.items()])
    num_bags = mesh.size * draw(st.integers(1, 2))
    columns = ["u", "v"][: draw(st.integers(1, 2))]
    bags = st.lists(st.integers(-1, 10), max_size=4)
    lists = {c: draw(st.lists(bags, min_size=num_bags, max_size=num_bags)) for c in columns}
    weighted = draw(st.booleans())
    weights = {c: [[0.5 + 0.25 * (i % 5) for i in bag] for bag in b] for c, b in lists.items()} if weighted else None
    features = [
        fr.FeatureConfig(
            f"f{i}", table=draw(st.sampled_from(names)), column=draw(st.sampled_from(columns)),
            pooling=draw(st.sampled_from(["sum", "mean"])), weighted=weighted and draw(st.booleans()),
            hash=draw(st.sampled_from([None, None, fr.modulo(), fr.multiply_shift(3)])),
            max_length=draw(st.sampled_from([None, None, 2])),
        )
        for i in range(draw(st.integers(1, 4)))
    ]  # fmt: skip
    ids = fr.KeyedJaggedTensor.from_lists(lists, weights=weights, dtype=torch.int64)
    return mesh, plan, tables, ids, features


def zeros_like(table):
    return torch.zeros_like(table, dtype=torch.promote_types(table.dtype, torch.float32))
