"""check_transforms finds what is wrong under a transform; the table of the library's functions has no wrong cell."""

import pytest
import torch

import funcrec as fr
from funcrec.testing import TRANSFORMS, check_transforms, transform_cells, transforms

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


@pytest.mark.parametrize("name", transforms.rows())
def test_no_cell_of_the_table_is_wrong(name):
    """Where torch traces or linearises, and in second derivatives, each row is right. (Other modes are those of
    test_right_or_raises.) All floats of a row move at once. torch has no functionalize of functions with rules of their
    own."""
    row, refuses = transforms.rows()[name], name == "train_step, logged"  # a log keeps bits
    # A linearised rule or model takes a second: those of sgd, adam and dlrm stand for the others here.
    is_rule = name.startswith("update, ") and name not in ("update, sgd", "update, adam")
    is_large = len(fr.tree.leaves(row.args)) > 3 and name != "dlrm"
    modes = () if refuses else ("hessian",) if is_rule or is_large else ("linearize", "hessian")
    traced = () if is_rule or is_large or name == "dlrm" else ("make_fx", "functionalize")
    found = {mode: o for (_, mode), o in row.cells(modes + traced, together=modes + traced).items()}
    assert set(found) == {*modes, *traced}
    functional = found.pop("functionalize", "right")
    assert set(found.values()) <= {"right"}
    assert functional == "right" or "Functionalize rule for custom_function_call" in functional


@pytest.mark.parametrize("name", ["gru4rec", "hvp"])
def test_a_rule_with_a_forward_derivative_inside_of_torchs_own(name):
    """forward_ad's dual numbers pass through rules and products that are forward derivatives themselves."""
    assert set(transforms.rows()[name].cells(("dual",), together=("dual",)).values()) == {"right"}


def test_what_a_trace_cannot_read_is_named():
    """A GRU's second rule reads lengths, and hvp has levels of its own: linearize and export say so."""
    (text,) = transforms.rows()["gru4rec"].cells(("linearize",), together=("linearize",)).values()
    assert "funcrec.nn.gru: a further derivative of a GRU reads lengths, which a traced program cannot" in text
    (text,) = transforms.rows()["hvp"].cells(("export",)).values()
    assert "funcrec.hvp: `small_loss` maps or differentiates a rule of its own inside torch.export" in text


def test_a_sum_of_bags_takes_an_expanded_cotangent():
    """Cotangents and tangents of a plain sum are one number, expanded, in derivatives of every order."""
    assert set(transforms.rows()["bag_filter"].cells(("grad of jvp", "jvp of jvp")).values()) == {"right"}
    x = torch.ones(1, dtype=torch.float64).expand(3)
    bags = fr.JaggedTensor(x, torch.tensor([0, 1, 3]))
    assert fr.bag_reduce(bags, "sum").tolist() == [1.0, 2.0]


def test_the_command_prints_its_rows(capsys):
    """A row a line, under the names of the modes; unknown rows are refused."""
    transforms.main(["mse", "bce"])
    head, *found = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["grad", "autograd", "jvp"]
    assert [line.split()[0] for line in found] == ["mse", "bce"] and "WRONG" not in "".join(found)
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
