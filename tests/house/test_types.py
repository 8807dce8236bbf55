"""Types that an editor shows: the package has them, its public names, and what the README's programs compute."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from programs.pages import blocks_of

pytestmark = pytest.mark.xdist_group("types")  # two tests read one run of the checker
ROOT = Path(__file__).parents[2]
KNOWN = ("jit", "value_and_grad", "train_step", "lookup", "shard_map", "scan", "cond", "checked")
PROGRAM = """
def mean(params: fr.Params, batch: fr.Batch) -> torch.Tensor:
    return params.dense["w"].mean()
def part(x: torch.Tensor) -> torch.Tensor:
    return fr.psum(x, "data")
model, sgd, x = fr.models.dlrm(tables, features), fr.optim.sgd(0.1), batch.label
towers = fr.models.two_tower(tables, features, features)
sasrec = fr.models.sasrec(tables, features[0], max_length=5)
"""
# What an editor shows of expressions after the README's programs.
SHOWN = {
    "fr.lookup(params.tables, ids, features)": "KeyedTensor",
    'fr.lookup(params.tables, ids, features)["clicked"]': "Tensor",
    'fr.lookup_sequence(params.tables, ids, features)["clicked"]': "JaggedTensor",
    'ids["clicked"]': "JaggedTensor",
    "ids[:2]": "KeyedJaggedTensor",
    "ids.to_lists()": "dict[str, list[list[Any]]]",
    "fr.pad_to_bucket(ids)": "KeyedJaggedTensor",
    'fr.init(fr.key(0), tables)["item"]': "Tensor",
    "params.to(torch.float16)": "Params",
    "fr.value_and_grad(loss_fn)(params, batch)": "tuple[Tensor, Params]",
    "fr.value_and_grad(mean)(params, batch)": "tuple[Tensor, Params]",
    "fr.accumulate_grads(mean, 2)(params, batch)": "tuple[Tensor, Params]",
    "fr.per_example_grads(mean)(params, batch)": "tuple[Tensor, Params]",
    "fr.hvp(mean)(params, params, batch)": "Params",
    "fr.member(states, 0)": "TrainState",
    "fr.models.loss(model)(params, batch, key=fr.key(0))": "tuple[Tensor, dict[str, Any]]",
    "fr.models.next_item_loss(sasrec)(params, batch, key=fr.key(0))": "Tensor",
    "fr.models.in_batch_softmax_loss(towers)(params, batch, key=fr.key(0))": "tuple[Tensor, dict[str, Any]]",
    "fr.jit(mean)": "Jitted[(params: Params, batch: Batch), Tensor]",
    "fr.jit(mean)(params, batch)": "Tensor",
    "fr.jit(mean).lower(params, batch).compile()": "(params: Params, batch: Batch) -> Tensor",
    "fr.jit(fr.value_and_grad(mean))(params, batch)": "tuple[Tensor, Params]",
    "fr.jit(lambda x: 1)(2)": "int",
    "torch.func.vmap(fr.value_and_grad(mean))(params, batch)": "tuple[Tensor, Params]",
    "fr.remat(mean)(params, batch)": "Tensor",
    "fr.invariant(mean)(params, batch)": "Tensor",
    "fr.checked(mean)(params, batch)": "Tensor",
    "fr.eval_shape(mean, params, batch)": "Tensor",
    "fr.cond(x.sum() > 0, lambda y: y + 1, lambda y: y, x)": "Tensor",
    "fr.while_loop(lambda y: y < 3, lambda y: y + 1, x)": "Tensor",
    "fr.fori_loop(0, 3, lambda i, y: y + i, x)": "Tensor",
    "step": "TrainStep[TrainState]",
    "step.init(params)": "TrainState",
    "fast(state, batch)": "tuple[TrainState, dict[str, Any]]",
    "state.params": "Params",
    'state.to("cpu")': "TrainState",
    "fr.copy(state)": "TrainState",
    "fr.scan(step, state, [batch])": "tuple[TrainState, Any]",
    "fr.logged(step)(fr.logged(step).init(params), batch)[0]": "Logged",
    "fr.fit(step, state, [batch], epochs=1)": "Fitted[TrainState]",
    "fr.fit(step, state, [batch], epochs=1).state": "TrainState",
    "model": "Model",
    "model.init(fr.key(0))": "Params",
    "model.apply(params, batch)": "Tensor",
    "sgd": "RowOptimizer",
    'sgd.init({"item": x})': "dict[str, dict[str, Tensor]]",
    "sgd.update({}, {}, {}, step=0)": "tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]",
    "fr.optim.dense(torch.optim.Adam, lr=1e-3)": "DenseOptimizer",
    "fr.metrics.auc()": "Metric",
    "fr.top_k(x, x, 2)": "tuple[Tensor, Tensor]",
    'fr.quantize(params.tables, "int8")': "QuantizedTables",
    'fr.psum(params, "data")': "Params",
    'fr.shard_map(part, mesh=mesh, in_specs=fr.P("data"), out_specs=fr.P())(x)': "Tensor",
    "fr.plan(tables, features, mesh, batch_size=8)": "Plan",
    'fr.shard_tables(params.tables, fr.Plan({"item": fr.row_wise("data")}), mesh)': "ShardedTables",
    'fr.save("state.pt", state)': "Path",
    'fr.save("state.pt", state, asynchronous=True)': "Saving",
    'fr.load("state.pt")': "Any",
    'fr.load("state.pt", like=state)': "TrainState",
    'fr.load("state.pt", like=step, device="cpu")': "TrainState",
    'fr.load("state.pt", like=fast)': "TrainState",
    'fr.export(model.apply, params, batch, "model")': "Path",
    'fr.load_package("model")': "Package",
}

# Calls that an editor marks, after the same programs.
WRONG = (
    'fr.TableConfig("item", "1000", 16)',
    'fr.FeatureConfig("clicked", table="item", pooling="avg")',
    'fr.KeyedJaggedTensor.from_lists({"clicked": [1, 2]})',
    "fr.Batch(ids, labels=x)",
    "fr.init(tables, fr.key(0))",
    "fr.lookup(params, ids, features)",
    "fr.lookup(params.tables, ids, features[0])",
    "fr.train_step(loss_fn, sparse=torch.optim.Adam)",
    "fr.train_step(loss_fn, sparse=fr.optim.sgd)",
    "step(batch, state)",
    "step.init()",
    "step.init(params, seed=3)",
    "fr.fit(step, params, [batch], epochs=1)",
    "fr.fit(step, state, batch, epochs=1)",
    'fr.evaluate(model, params, [batch], {"auc": fr.metrics.auc()})',
    'fr.export(model, params, batch, "model")',
    "fr.metrics.auc().update(x, x)",
    "fr.per_example_grads(mean)(params)",
    "fr.hvp(mean)(params, batch)",
    "fr.fisher_product(mean)(params, params)",
    "fr.gauss_newton_product(mean, mean)(params, batch)",
    "fr.models.loss(model)(params, key=fr.key(0))",
    "fr.invariant(mean)(params)",
    "fr.jit(mean)(batch, params)",
    "fr.value_and_grad(mean)(params)",
    "sgd.update({}, {})",
)

# Rules of a strict checker that the guide's programs do not keep, and why.
OFF = (
    "reportUnknownMemberType",  # torch's own types: `tolist` is list[Unknown]; a list that begins empty
    "reportUnknownArgumentType",  # the same values, where they are passed on
    "reportUnknownLambdaType",  # a lambda cannot say its types
    "reportRedeclaration",  # a section has a loss_fn of its own
    "reportPossiblyUnboundVariable",  # the names of a loop after the loop, as in `for ...: state, metrics = step(...)`
)
STRICT = "# pyright: strict, " + ", ".join(f"{rule}=false" for rule in OFF) + "\n"
LENIENT = "# pyright: basic, reportMissingImports=false\n"  # Ray and pandas are not installed for tests
WRITTEN = re.compile(r'Path\("(\w+\.py)"\)\.write_text\("""\n(.*?)"""\)', re.S)  # a page's module


@pytest.fixture(scope="module")
def check(tmp_path_factory):
    """Return a function that runs the type checker on arguments, next to an installed copy of the package."""
    folder = tmp_path_factory.mktemp("typed")
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "funcrec", folder / "funcrec", ignore=ignored)
    shutil.copytree(ROOT / "kernels", folder / "funcrec" / "kernels", ignore=ignored)
    (folder / "programs").mkdir()
    (folder / "pages").mkdir()
    for page in [*(ROOT / "funcrec" / "guide" / "pages").glob("*.md"), *(ROOT / "funcrec" / "examples").glob("*.md")]:
        modules = {f"{page.stem}.py": "".join(blocks_of(page.read_text()))} | dict(WRITTEN.findall(page.read_text()))
        for name, code in modules.items():
            (folder / "pages" / name).write_text((LENIENT if page.parent.name == "examples" else STRICT) + code)
    for root in (folder, folder / "programs"):
        (root / "pyrightconfig.json").write_text('{"typeCheckingMode": "basic"}')
    tools = Path(sys.executable).parent
    env = os.environ | {"PYTHONPATH": str(folder), "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}

    def run(*args: str, text: str = "", where: str = "programs") -> dict:
        (folder / "programs" / "program.py").write_text(text)
        command = [tools / "basedpyright", "--outputjson", *args]
        done = subprocess.run(command, cwd=folder / where, env=env, capture_output=True, text=True)
        return json.loads(done.stdout)

    return run


def test_public_names_have_types(check):
    """At least 95 of 100 exported names have types that a checker knows; none of the names below is an exception."""
    found = check("--verifytypes", "funcrec", "--ignoreexternal")["typeCompleteness"]
    assert found["pyTypedPath"] and found["completenessScore"] >= 0.95
    unknown = {s["name"] for s in found["symbols"] if s["isExported"] and not s["isTypeKnown"]}
    assert unknown & {f"funcrec.{name}" for name in KNOWN} == set()


@pytest.fixture(scope="module")
def found(check):
    """Return what the checker says of the package, of the guide's programs, and of the README's with SHOWN: one run."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    lines = "".join(f"reveal_type({x})\n" for x in SHOWN)
    text = "\n".join(blocks) + PROGRAM + lines + "".join(f"{call}\n" for call in WRONG)
    said = check("pages", "funcrec", "programs/program.py", text=text, where=".")
    return said | {"first_wrong": text.count("\n") - len(WRONG)}


def is_of_readme(diagnostic):
    return Path(diagnostic["file"]).name == "program.py"


def line_of(diagnostic):
    return diagnostic["range"]["start"]["line"]


def test_the_programs_of_the_readme_have_types(found):
    """A checker finds no fault in the README's programs, and an editor shows the types of what functions return."""
    of_readme = [d for d in found["generalDiagnostics"] if is_of_readme(d) and line_of(d) < found["first_wrong"]]
    assert [d for d in of_readme if d["severity"] == "error"] == []
    told = [re.search(r'is "(.*)"', d["message"], re.S) for d in of_readme if d["message"].startswith("Type of")]
    assert dict(zip(SHOWN, [m[1] for m in told if m], strict=True)) == SHOWN
    assert not any("Unknown" in shown for shown in SHOWN.values())


def test_an_editor_marks_wrong_calls(found):
    """A checker finds a fault in each call that is wrong."""
    errors = [d for d in found["generalDiagnostics"] if is_of_readme(d) and d["severity"] == "error"]
    marked = {line_of(d) - found["first_wrong"] for d in errors}
    assert [call for i, call in enumerate(WRONG) if i not in marked] == []


def test_the_package_and_pages_have_no_type_errors(found):
    """A checker finds no fault in the package nor in the examples' pages, a strict one none in the guide's programs."""
    assert found["summary"]["filesAnalyzed"] > 500
    at = lambda d: f"{'/'.join(Path(d['file']).parts[-3:])}:{d['range']['start']['line'] + 1}: {d['message']}"
    errors = [d for d in found["generalDiagnostics"] if d["severity"] == "error"]
    assert [at(d) for d in errors if not is_of_readme(d)] == []
