"""Wrong arguments of every public function. Each argument, field and element in turn is replaced by a wrong value."""

from collections import defaultdict

import pytest
import torch
from programs.may_return import MAY_RETURN, reasons
from programs.public_calls import public_calls
from programs.sweep import code_of, figures, public_functions, sweep, tried

import funcrec as fr
from funcrec.core._hints import EXAMPLES

pytestmark = pytest.mark.xdist_group("sweep")  # one group of tests makes the calls once
NOT_SWEPT = {
    "Mesh.distributed": "of processes: rows of test_dist_bad",
    "testing.RankPool.run": "of processes",
    "Mesh.bound_axes": "for shard_map",
    "TableConstraint.pooling_of": "for the planner",
    "SweepTable.add_trials": "of optuna: test_sweep of laws/train",
    "data.Place.refuse": "raises, which is its work",
    "data.Place.refuse_type": "raises, which is its work",
    "data.Fitted.apply": "a protocol",
    "data.RowData.take": "a protocol",
    **{
        f"{name}.get": "a dict's: any key that is absent gives the default"
        for name in ("DynamicTables", "FakeQuantizedTables", "QuantizedTables", "ShardedTables")
    },
}
LEAST_FOUR_PARTS, LEAST_OF_A_CALL, LEAST_CALLS, LEAST_NAMED = 0.97, 0.6, 20_000, 0.95


def name_of(path):
    """Return the name of the argument in a path: rows for rows[0] and for rows.values."""
    return path.split("[")[0].split(".")[0]


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        calls, codes = public_calls(folder), set()
        yield calls, list(sweep(calls, folder, codes)), codes


@pytest.fixture
def outcomes(swept):
    return swept[1]


def test_every_public_function_is_swept(swept):
    """A row calls each public function and method that takes an argument. A table has all other functions with a
    reason."""
    absent = {name for name, fn in public_functions() if code_of(fn) not in swept[2]}
    assert absent == set(NOT_SWEPT)


def test_errors_on_wrong_arguments_say_what_is_wrong(outcomes):
    """Every error for a wrong argument has got and need, and 97 % of the errors say what to try."""
    by_call = defaultdict(list)
    for o in outcomes:
        by_call[o.call].append(o)
    worst = sorted(by_call, key=lambda n: sum(o.kind == "raw" for o in by_call[n]), reverse=True)[:12]
    found = figures(outcomes)
    lines = [f"{n}: {figures(by_call[n])}" for n in worst]
    print(found, *lines, sep="\n")
    assert found["calls"] >= LEAST_CALLS
    assert [(o.call, o.path, o.wrong, o.text) for o in outcomes if o.kind == "raw"] == []
    assert found["all four"] >= LEAST_FOUR_PARTS, "\n".join(lines)


def test_errors_name_the_argument(outcomes):
    """For at least 95 % of the wrong arguments, a first line of the error has the argument's name."""
    named = [name_of(o.path) in "".join(x for x in o.text.split("\n") if x[:2] != "  ") for o in outcomes if o.text]
    assert sum(named) >= LEAST_NAMED * len(named)


def test_no_wrong_argument_hangs(outcomes):
    """A wrong argument raises within seconds."""
    assert [o for o in outcomes if "TimeoutError" in o.text] == []


def test_no_function_is_left_without_words(outcomes):
    """For at least 60 % of the wrong arguments of every public function, the error has got, need and try."""
    by_call = defaultdict(list)
    for o in outcomes:
        if o.kind != "returned":
            by_call[o.call].append(o.whole)
    shares = {n: sum(whole) / len(whole) for n, whole in by_call.items() if len(whole) > 20}
    assert {n: share for n, share in shares.items() if share < LEAST_OF_A_CALL} == {}


def test_what_is_accepted_is_allowed(outcomes):
    """A wrong argument that a call accepts has a class that the annotation names, or a reason in a reviewed table."""
    accepted = [o for o in outcomes if o.kind == "returned" and o.fits != "closed"]
    assert [(o.call, o.path, o.wrong) for o in accepted if not reasons(o.call, o.path, o.wrong)] == []


def test_nothing_is_allowed_in_vain(outcomes):
    """Each reason in the table, and each of the reason's values, belongs to a call that accepts the value."""
    seen = defaultdict(set)
    for o in outcomes:
        if o.kind == "returned" and o.fits != "closed":
            for row in reasons(o.call, o.path, o.wrong):
                seen[row.why].add(o.wrong)
    unused = {row.why: (row.wrong or set()) - seen[row.why] for row in MAY_RETURN}
    assert [row.why for row in MAY_RETURN if not seen[row.why] or unused[row.why]] == []


def test_what_errors_say_to_try_gets_further(swept):
    """A value that an error suggests, passed in place of the wrong value, does not raise the same error."""
    first = lambda o: o.text.split("\n")[0]
    pairs = list(tried(*swept[:2], {"fr": fr, "torch": torch}))
    assert len(pairs) >= 400
    assert [(first(a), b.wrong) for a, b in pairs if b.kind != "returned" and first(a) == first(b)] == []


def test_what_errors_say_to_try_is_python():
    """Each example of the table compiles. The example's names are those of the reader's program."""
    for name, text in EXAMPLES.items():
        compile(text, name, "eval")


@pytest.mark.parametrize("name", [n for n in EXAMPLES if n[0].isupper()])
def test_the_example_of_a_class_is_one(name):
    """An example of a class runs to a value of that class, or names a value that the reader has."""
    ids = fr.KeyedJaggedTensor.from_lists({"clicked": [[1], [2]]})
    tables = (fr.TableConfig("item", 4, 2),)
    mesh, plan = fr.Mesh.emulated(model=2), fr.Plan({"item": fr.row_wise("model")})
    kinds = {"sparse": fr.optim.sgd(), "dense": fr.optim.dense(torch.optim.SGD, lr=0.1)}
    step = fr.train_step(lambda params, batch: params.dense, **kinds)
    own = {
        "fr": fr, "torch": torch, "ids": ids, "mesh": mesh, "plan": plan, "step": step,
        "features": [fr.FeatureConfig(n, table="item") for n in ("clicked", "liked")], "loss_fn": lambda params,
        batch: 0, **kinds,
        "params": fr.Params({}, torch.ones(())),
        "tables": fr.init(fr.key(0), tables) if name == "ShardedTables" else tables,
    }  # fmt: skip
    assert type(eval(EXAMPLES[name], own)).__name__ == name


def test_a_loss_that_cannot_read_its_batch_says_what_it_was_given():
    """An error of a loss keeps its type. A note names the call and the loss's arguments, and says what to try."""
    with pytest.raises(AttributeError) as error:
        fr.value_and_grad(lambda params, batch: batch.label)(fr.Params({}, {}), [3])
    note = "\n".join(error.value.__notes__)
    assert note.startswith("funcrec.value_and_grad") and "got   Params, list" in note and "  try   " in note
