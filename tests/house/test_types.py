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

ROOT = Path(__file__).parents[2]
KNOWN = ("jit", "value_and_grad", "train_step", "lookup", "shard_map", "scan", "cond", "checked")
PROGRAM = """
def mean(params: fr.Params, batch: fr.Batch) -> torch.Tensor:
    return params.dense["w"].mean()
reveal_type(fr.lookup(params.tables, ids, features)["clicked"])
reveal_type(fr.value_and_grad(mean)(params, batch))
reveal_type(fast(state, batch))
reveal_type(fr.jit(lambda x: 1)(2))
reveal_type(fr.logged(step)(fr.logged(step).init(params), batch)[0])
reveal_type(ids["clicked"])
reveal_type(ids[:2])
"""
REVEALED = [
    "Tensor",
    "tuple[Tensor, Params]",
    "tuple[TrainState, dict[str, Any]]",
    "int",
    "Logged",
    "JaggedTensor",
    "KeyedJaggedTensor",
]


# Rules of a strict checker that the guide's programs do not keep, and why.
OFF = (
    "reportUnknownMemberType",  # torch's own types: `tolist` is list[Unknown]; a list that begins empty
    "reportUnknownArgumentType",  # the same values, where they are passed on
    "reportUnknownLambdaType",  # a lambda cannot say its types
    "reportRedeclaration",  # a section has a loss_fn of its own
    "reportPossiblyUnboundVariable",  # the names of a loop after the loop, as in `for ...: state, metrics = step(...)`
)
STRICT = "# pyright: strict, " + ", ".join(f"{rule}=false" for rule in OFF) + "\n"
WRITTEN = re.compile(r'Path\("(\w+\.py)"\)\.write_text\("""\n(.*?)"""\)', re.S)  # a page's module


# Folders that a type checker does not pass yet. Take a name out when its folder is clean; add none.
UNCLEAN = {
    "kernels",
}  # fmt: skip


@pytest.fixture(scope="module")
def check(tmp_path_factory):
    """Return a function that runs the type checker on arguments, next to an installed copy of the package."""
    folder = tmp_path_factory.mktemp("typed")
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "funcrec", folder / "funcrec", ignore=ignored)
    shutil.copytree(ROOT / "kernels", folder / "funcrec" / "kernels", ignore=ignored)
    (folder / "programs").mkdir()
    (folder / "pages").mkdir()
    for page in (ROOT / "funcrec" / "guide" / "pages").glob("*.md"):
        modules = {f"{page.stem}.py": "".join(blocks_of(page.read_text()))} | dict(WRITTEN.findall(page.read_text()))
        for name, code in modules.items():
            (folder / "pages" / name).write_text(STRICT + code)
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


def test_the_programs_of_the_readme_have_types(check):
    """A checker finds no fault in the README's programs, and knows what transforms and lookups return."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    found = check("program.py", text="\n".join(blocks) + PROGRAM)["generalDiagnostics"]
    assert [d for d in found if d["severity"] == "error"] == []
    told = [re.search(r'is "(.*)"', d["message"], re.S) for d in found if d["message"].startswith("Type of")]
    assert [m[1] for m in told if m] == REVEALED


def test_folders_and_pages_have_no_type_errors(check):
    """A checker finds no fault in the folders that are clean. A strict one finds none in the guide's programs."""
    folders = {p.name for p in (ROOT / "funcrec").iterdir() if (p / "__init__.py").exists()} | {"kernels", "guide"}
    assert folders >= UNCLEAN
    found = check("pages", *(f"funcrec/{name}" for name in sorted(folders - UNCLEAN)), where=".")
    assert found["summary"]["filesAnalyzed"] > 300
    at = lambda d: f"{'/'.join(Path(d['file']).parts[-3:])}:{d['range']['start']['line'] + 1}: {d['message']}"
    assert [at(d) for d in found["generalDiagnostics"] if d["severity"] == "error"] == []
