"""check_transforms finds what is wrong under a transform; the table of the library's functions has no wrong cell."""

import re
from collections import Counter
from pathlib import Path

import pytest
import torch

import funcrec as fr
from funcrec.testing import TRANSFORMS, _peers, check_transforms, transform_cells, transforms
from funcrec.testing._modes import RANKED

ROOT = Path(__file__).parents[3]
X = torch.linspace(0.5, 1.5, 3)


class Unmapped(torch.autograd.Function):
    """sin with a reverse rule alone: no jvp, no vmap."""

    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, d):
        return d * ctx.saved_tensors[0].cos()


def cut_in_second(x):
    """Return sin(x), whose derivative is right once and dropped twice."""

    class Cut(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return x.sin()

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, d):
            return d * ctx.saved_tensors[0].detach().cos()

    return Cut.apply(x)


@pytest.mark.parametrize(
    ("f", "wrong"),
    [
        (lambda x: x.detach() ** 2, {"grad", "jvp", "hessian", "vjp", "linearize"}),
        (lambda x: (x * 0).sum() + float(x.detach().sum()) * x.detach(), {"grad"}),
        (cut_in_second, {"grad of grad", "hessian"}),
        (Unmapped.apply, {"jvp", "vmap"}),
        (lambda x: x.round() + x - x.detach(), {"grad"}),
    ],
)
def test_what_is_wrong_is_found(f, wrong):
    """A dropped gradient, a value read on the host, a missing rule: their modes fail, and the error has them."""
    found = transform_cells(f, X)
    assert wrong <= {mode for (_, mode), o in found.items() if o != "right"}
    with pytest.raises(AssertionError, match="is wrong under some transforms") as error:
        check_transforms(f, X)
    assert all(f"args[0] under {mode}: " in str(error.value) for mode in wrong)


def test_what_may_raise_is_not_silently_wrong():
    """`may_raise` allows an error, and no wrong number."""
    check_transforms(Unmapped.apply, X, modes=["grad", "jvp", "vmap"], may_raise=["jvp", "vmap"])
    with pytest.raises(AssertionError):
        check_transforms(lambda x: x.detach(), X, modes=["grad"], may_raise=["grad"])


def test_inputs_are_the_float_leaves_of_trees():
    """Each float leaf of each argument is an input, under its path; ids and numbers stay as they are."""
    ids = fr.KeyedJaggedTensor.from_lists({"a": [[1, 2], [0]]})
    read = [fr.FeatureConfig("a", table="t")]
    f = lambda params, ids, k: fr.lookup(params.tables, ids, read).values @ params.dense["w"] * k
    params = fr.Params({"t": torch.randn(3, 2)}, {"w": torch.randn(2)})
    found = transform_cells(f, params, ids, 3, modes=["grad", "vmap of grad"])
    assert set(found) == {(f"args[0].{p}", m) for p in ("tables['t']", "dense['w']") for m in ("grad", "vmap of grad")}
    assert set(found.values()) == {"right"}


# each optimizer's update is a case of test_right_or_raises
TABLE = [n for n in transforms.rows() if not n.startswith("update") or n in ("update, sgd", "update, lamb")]


@pytest.mark.parametrize("name", TABLE)
def test_no_cell_of_the_table_is_wrong(name):
    """Where torch traces or linearises, on emulated ranks, and in second derivatives, each row is right. (Other modes
    are those of test_right_or_raises.) torch has no functionalize of functions with rules of their own, and no export
    of torch.func.grad. A log keeps bits, and says that it has no derivative."""
    row = transforms.rows()[name]
    cells = transform_cells(row.f, *row.args, modes=["linearize", "make_fx", "hessian", *RANKED]).items()
    wrong = {mode: o for (_, mode), o in cells if o != "right" and not (row.apart and mode in RANKED)}
    assert not wrong or all("funcrec.logged: the state is differentiated" in o for o in wrong.values())
    assert not wrong or name == "train_step, logged"
    for mode, text in (("functionalize", "Functionalize rule for custom_function_call"), ("export", "not registered")):
        assert all(o == "right" or text in o for o in transform_cells(row.f, *row.args, modes=[mode]).values())


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_rows_of_peers_are_theirs():
    """Each peer's function has the values of its twin in f64. F.embedding is right, as a control."""
    assert dict(_peers.cells(["grad", "hessian"]))["F.embedding"] == {"grad": "right", "hessian": "right"}
    with _peers.group_of_one():
        for own in ({**_peers.of_torch(), **_peers.of_fbgemm(), **_peers.of_collectives()}).values():
            torch.testing.assert_close(own.f(own.x), (own.smooth or own.f)(own.x), rtol=1e-6, atol=1e-6)


def test_torch_maps_over_no_members_not_even_a_product():
    """vmap over size 0 raises in torch itself, wherever a product is mapped: so the table has no such column."""
    with pytest.raises(IndexError):
        torch.func.vmap(lambda t: t * X)(torch.zeros(0))


def test_the_guide_has_the_table_on_record():
    """The counts of each row in the guide are those of the recorded table, which has a line for each row today."""
    record = (ROOT / "bench" / "results" / "TRANSFORM_TABLE.txt").read_text().splitlines()
    page = (Path(fr.__file__).parent / "guide" / "pages" / "transforms.md").read_text().splitlines()
    rows = [line[2:].split(" | ") for line in page if line.startswith("| ")]
    said = {name: counts for names, *counts in rows for name in names.split("; ")}
    cut = re.compile(r"  +(?=(?:right|raises|WRONG|apart)\b)")
    found = {cut.split(x)[0]: Counter(c.strip() for c in cut.split(x)[1:]) for x in record if len(cut.split(x)) == 25}
    assert set(transforms.rows()) <= set(found) and set(found) <= set(said)
    assert "WRONG" not in "".join(x for n in transforms.rows() for x in found[n])
    for name, own in found.items():
        rest = [own["raises"] + own["apart"]] if name in transforms.rows() else [own["raises"], own["WRONG"]]
        assert [int(re.match(r"\d+", x)[0]) for x in said[name]] == [own["right"], *rest], name


def test_the_command_prints_its_rows(capsys):
    """A row a line, under the names of the modes; unknown rows are refused."""
    transforms.main(["mse", "bce"])
    head, *found = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["grad", "autograd", "jvp"]
    assert [line.split()[0] for line in found[:2]] == ["mse", "bce"] and "WRONG" not in "".join(found)
    assert found[2] == "apart: weights of examples are divided by their sum over all ranks  (bce)"
    with pytest.raises(SystemExit):
        transforms.main(["no such row"])


def test_bad_input():
    """Unknown modes and arguments without floats are refused."""
    with pytest.raises(ValueError, match="`modes` has no transform's name"):
        check_transforms(torch.sin, X, modes=["gradd"])
    with pytest.raises(TypeError, match="`args` have no float tensor"):
        check_transforms(lambda x: x, torch.arange(3))
    with pytest.raises(TypeError):
        check_transforms(lambda x, y: x, X)
    assert {"grad", "jit", "make_fx"} <= set(TRANSFORMS)
