"""House rules: folders and their order, sizes, bases, imports and the public names."""

import ast
import functools
import inspect
import re
import subprocess
import sys
import types
from graphlib import TopologicalSorter
from pathlib import Path

import funcrec as fr

ROOT = Path(__file__).parents[2]
PACKAGE, KERNELS = ROOT / "funcrec", ROOT / "kernels"
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60

# Folders in the order of the data flow: each imports from those in rows above its own, and by their faces.
ORDER = (
    ("kernels",),
    ("core",),
    ("tree", "files", "random"),
    ("jagged", "stores"),
    ("mesh",),
    ("tables",),
    ("grad", "invariance"),
    ("compile",),
    ("optim", "nn", "data", "metrics", "losses", "kinds"),
    ("sharding", "models", "retrieval"),
    ("train", "planner"),
    ("history", "cached", "dry"),
    ("checkpoint",),
    ("loop", "serve"),
    ("interop", "testing"),
    ("examples", "guide"),
    ("__main__",),
)
FLOORS = {folder: floor for floor, row in enumerate(ORDER) for folder in row}

# What a module may import at its top, besides the standard library and funcrec.
THIRD_PARTY = {"torch", "optree", "numpy", "tqdm"}
OPTIONAL = {f"testing.{m}": {"hypothesis"} for m in ("strategies", "_drawn", "_training_strategies")}
OPTIONAL |= {"testing.pytest_funcrec": {"pytest"}}

TOP = {"LICENSE", "Makefile", "README.md", "bench", "funcrec", "kernels", "pyproject.toml", "tests"}

# What the implementations are made with; nothing imports them before they are chosen.
PEERS = {"triton": "kernels.triton", "fbgemm_gpu": "kernels.fbgemm"}

BASES = {"NamedTuple", "Protocol", "Generic", "Enum", "IntEnum", "StrEnum", "Function", "TypedDict", "Exception"}
BASES |= {"Named", "Movable"}  # no code: what type checkers know of classes that `mapping` and `pytree` decorate
# A donated tensor is poisoned in place, which only a subclass of Tensor can do; a mode of torch is a class.
SUBCLASSES = {
    "Named": "Mapping",  # for type checkers alone
    "Donated": "Tensor",
    "Invariant": "TorchDispatchMode",
    "LeftToRight": "TorchFunctionMode",
    "TensorScalars": "TorchFunctionMode",
    "_Reads": "TorchFunctionMode",
    "NoHostMemory": "TorchFunctionMode",
    "_Lift": "TorchFunctionMode",
    "_Outside": "TorchFunctionMode",
    "_Watch": "TorchFunctionMode",
    "Readers": "TorchFunctionMode",
}

HEAVY = [
    "triton", "fbgemm_gpu", "torchrec", "hypothesis", "matplotlib", "pyarrow", "pandas", "scipy", "torch._dynamo",
    "torch._inductor", "safetensors", "faiss",
]  # fmt: skip


NO = r"(?<!here )\b(is|are) no (?!longer)"


def name_of(path):
    """funcrec/optim/_row.py -> optim._row; kernels/ops.py -> kernels.ops; an __init__ is its folder."""
    parts = path.relative_to(PACKAGE).parts if path.is_relative_to(PACKAGE) else path.relative_to(ROOT).parts
    return ".".join(parts).removesuffix(".py").removesuffix(".__init__")


FILES = {name_of(p): p for folder in (PACKAGE, KERNELS) for p in sorted(folder.rglob("*.py"))}
MODULES = {n: p for n, p in FILES.items() if n != "__init__"}
TEXTS = {n: p.read_text() for n, p in FILES.items()}


@functools.cache
def tree_of(name):
    return ast.parse(TEXTS[name])


def of_each(things):
    """Make one test of a law of each thing, which shows all breaches. A test of each would cost more than the law."""

    def decorate(law):
        def test():
            breaches = {}
            for thing in things:
                try:
                    law(thing)
                except AssertionError as error:
                    breaches[str(thing)] = str(error)
            assert breaches == {}

        test.__name__, test.__doc__ = law.__name__, law.__doc__
        return test

    return decorate


def folder_of(name):
    return name.split(".")[0]


def is_type_checking(node):
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imports(node, *, lazy):
    """(module, name or None) of the imports below `node`; those inside functions only when `lazy`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, None) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from ((child.module, alias.name) for alias in child.names)
        elif is_type_checking(child) or (isinstance(child, (ast.FunctionDef, ast.Lambda)) and not lazy):
            continue
        else:
            yield from imports(child, lazy=lazy)


@functools.cache
def found_imports(name, lazy):
    return list(imports(tree_of(name), lazy=lazy))


def imported(name):
    """(module, name or None) of all that a module imports of funcrec,
    inside functions too; modules by their names here."""
    for module, what in found_imports(name, True):
        if module and module.split(".")[0] == "funcrec":
            yield module.removeprefix("funcrec").removeprefix("."), what


def own_imports(name, *, lazy):
    """The modules of funcrec that a module imports, by their names here."""
    found = set()
    for module, what in found_imports(name, lazy):
        if module and module.split(".")[0] == "funcrec":
            inner = module.removeprefix("funcrec").removeprefix(".")
            whole = f"{inner}.{what}".removeprefix(".")
            found.add(whole if whole in FILES else inner)
    return found


def test_nothing_else_lies_at_the_top():
    """The files under version control lie in the four folders, or are one of the files that a project has."""
    out = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    names = {line.split("/")[0] for line in out.splitlines()}
    assert {n for n in names if not n.startswith(".")} == TOP


def test_every_folder_has_a_place():
    """The order and the listing agree. Besides the folders, the package has only its face and its command."""
    assert {folder_of(n) for n in MODULES} == set(FLOORS)
    assert sorted(p.name for p in PACKAGE.glob("*.py")) == ["__init__.py", "__main__.py"]


def test_laws_stand_in_the_folders_that_they_are_of():
    """A folder of tests/laws has the name of the folder of funcrec whose laws it tests."""
    found = {path.parent.name for path in (ROOT / "tests" / "laws").glob("*/test_*.py")}
    assert found <= set(FLOORS) and len(found) > 15


@of_each(MODULES)
def test_folders_import_from_those_above(name):
    """A module imports from its own folder and those above it in the order, inside functions too."""
    for other in own_imports(name, lazy=True):
        if folder_of(name) in ("examples", "guide") and other == "":
            continue  # examples and the site use the public names, as their reader will
        assert other in MODULES, f"{name} imports funcrec.{other}, which is not a module"
        mine, floor = FLOORS[folder_of(name)], FLOORS[folder_of(other)]
        assert folder_of(other) == folder_of(name) or floor < mine, (
            f"{name} imports {other}, which does not stand above it"
        )


@of_each(MODULES)
def test_folders_are_imported_by_their_faces(name):
    """A name that a module imports from another folder has no underscore: it comes from the folder's face or from a
    public module."""
    for module, what in imported(name):
        if folder_of(module or what or "") != folder_of(name):
            hidden = [part for part in (*module.split("."), what or "") if part.startswith("_")]
            assert not hidden, f"{name} imports {what} of funcrec.{module}"


def test_faces_export_what_others_import():
    """A folder that is not a public namespace exports only names that a module outside of it imports."""
    public = {what for module, what in imported("__init__") if not module}
    used = {(module, what) for name in FILES for module, what in imported(name) if folder_of(module) != folder_of(name)}
    for folder in set(FLOORS) - public - {"kernels", "testing", "examples", "guide", "__main__"}:
        exported = {a.asname for n in tree_of(folder).body if isinstance(n, ast.ImportFrom) for a in n.names}
        face = {"publish", "Later", "module_later", "version"}  # asked for as `_core.publish`
        named = {"Axis", "Block", "Sent", "Transport"}  # fields of public values: `help` calls them by their folder
        spare = {n for n in exported if (folder, n) not in used} - face - named
        assert not spare, f"funcrec.{folder} exports {sorted(spare)}"


def test_imports_have_no_cycle():
    """Modules can be read bottom-up: their imports have an order."""
    graph = {n: own_imports(n, lazy=False) & set(MODULES) for n in MODULES}
    tuple(TopologicalSorter(graph).static_order())


@of_each(MODULES)
def test_a_module_says_what_it_is_for(name):
    """A module has a docstring."""
    assert ast.get_docstring(tree_of(name))


@of_each(MODULES)
def test_imports_are_of_what_is_installed(name):
    """At its top, a module imports only the standard library, torch, optree, numpy, tqdm and funcrec. A kernel module
    imports only torch and its peer."""
    allowed = THIRD_PARTY | OPTIONAL.get(name, set()) | {"funcrec"}
    if name.startswith("kernels"):
        allowed = {"torch", "funcrec"} | {own for own, folder in PEERS.items() if name.startswith(folder)}
        assert own_imports(name, lazy=True) <= {n for n in MODULES if n.startswith("kernels")}
    found = {module.split(".")[0] for module, _ in found_imports(name, name.startswith("kernels"))}
    assert found <= allowed | sys.stdlib_module_names


@of_each(MODULES)
def test_torchs_private_levels_are_asked_in_one_place(name):
    """Only core/_levels.py names `torch._functorch` and `torch._C._functorch`, and for the kernels only tracked.py."""
    if "_functorch" not in TEXTS[name]:
        return
    named = [f"{m}.{what}" for m, what in found_imports(name, True)]
    named += [ast.unparse(node) for node in ast.walk(tree_of(name)) if isinstance(node, ast.Attribute)]
    found = [x for x in named if re.match(r"torch\.(_C\.)?_functorch\b", x)]
    assert not found or name in ("core._levels", "kernels.tracked")


@of_each(FILES)
def test_files_are_short(name):
    """No file is longer than 400 lines."""
    assert len(TEXTS[name].splitlines()) <= MAX_FILE_LINES


@of_each(FILES)
def test_functions_are_short(name):
    """No function is longer than 60 lines, without its docstring."""
    for node in ast.walk(tree_of(name)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            documented = isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant)
            doc = node.body[0].end_lineno - node.body[0].lineno + 1 if documented else 0
            assert node.end_lineno - node.lineno + 1 - doc <= MAX_FUNCTION_LINES, f"{name}.{node.name}"


@of_each(FILES)
def test_sections_of_docstrings_have_a_line_for_their_name(name):
    """Args, returns and errors stand below the name of their section, where pdoc reads them."""
    found = re.findall(r"^\s+(?:Args|Returns|Yields|Raises): \S.*$", TEXTS[name], re.M)
    assert found == []


@of_each(FILES)
def test_there_are_no_class_hierarchies(name):
    """A class has no base except those of records, protocols, type parameters, enumerations, errors and derivatives."""
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.ClassDef):
            bases = {ast.unparse(b).split("[")[0].split(".")[-1] for b in node.bases}
            bad = {b for b in bases if b not in BASES and not b.endswith("Error") and SUBCLASSES.get(node.name) != b}
            assert not bad, f"{name}.{node.name} has bases {sorted(bad)}"


def test_importing_funcrec_is_light():
    """`import funcrec` in a fresh process loads no optional package and no compiler. Tests and examples are imported at
    their first use. funcrec.testing without its strategies works where hypothesis is not installed."""
    own = ["funcrec.testing", "funcrec.testing.strategies", "funcrec.examples"]
    code = f"import sys, funcrec as fr; print([m for m in {HEAVY + own} if m in sys.modules]); "
    code += "sys.modules['hypothesis'] = None; from funcrec.testing import check_adjoint, assert_trees_close; "
    code += "del sys.modules['hypothesis']; "
    code += "print(fr.testing.check_grads.__module__, fr.examples.__name__, 'hypothesis' in sys.modules); "
    code += "print(fr.testing.strategies.jagged_tensors.__module__)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    found = ["[]", "funcrec.testing funcrec.examples False", "funcrec.testing.strategies"]
    assert out.stdout.splitlines() == found


def public_names():
    """What `funcrec/__init__.py` exports, as X as X."""
    nodes = [n for n in tree_of("__init__").body if isinstance(n, ast.ImportFrom)]
    return sorted({alias.asname for n in nodes for alias in n.names})


@of_each(public_names())
def test_public_names_are_documented(name):
    """Every public name has a docstring. Functions and values that hold tensors have an example; errors have none."""
    value = getattr(fr, name)
    doc = inspect.getdoc(value)
    assert doc
    is_error = inspect.isclass(value) and issubclass(value, Exception)
    if not isinstance(value, types.ModuleType) and not is_error:
        assert ">>>" in doc, f"funcrec.{name} has no example"


def test_public_names_are_in_the_readme():
    """The package's README has every public name in its tables, in backticks."""
    named = re.findall(r"`(?:fr\.|funcrec\.)?(\w+)", (PACKAGE / "README.md").read_text())
    assert sorted(set(public_names()) - set(named)) == []


def test_exports_are_explicit():
    """Each public name is exported as `X as X`, and none begins with an underscore."""
    for node in tree_of("__init__").body:
        if isinstance(node, ast.ImportFrom):
            assert all(a.asname == a.name and not a.name.startswith("_") for a in node.names)


@of_each(sorted((ROOT / "tests").rglob("test_*.py")))
def test_tests_say_their_law(path):
    """The first line of every test's docstring is the law in words. Test files do not import one another."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            assert ast.get_docstring(node), f"{path.name}: {node.name}"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            assert not any(name.startswith(("tests", "test_")) for name in names)


def test_a_benchmark_that_is_asked_for_help_measures_nothing():
    """`--help` prints what a script of `bench` is for: each has a parser of arguments, or calls `explain` first."""
    bench, mute = ROOT / "bench", []
    for path in bench.glob("*.py"):
        before, guard, main = path.read_text().partition('if __name__ == "__main__":')
        if guard and "ArgumentParser" not in before + main and not main.startswith("\n    explain(__doc__)"):
            mute.append(path.name)
    assert mute == ["server_peer.py"]  # a server that `server.py` starts
    kept = (bench / "results" / "donation.jsonl").read_bytes()
    done = subprocess.run([sys.executable, bench / "donation.py", "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.startswith("Measures a donated step"), done.stderr
    assert (bench / "results" / "donation.jsonl").read_bytes() == kept


def test_what_tests_share_is_a_package():
    """Files in the folders of tests are tests, or stand in `tests/programs`, which is on the path. No file changes the
    path."""
    files = [p for p in (ROOT / "tests").rglob("*.py") if p.parent.name != "programs"]
    assert [p.name for p in files if not re.match(r"test_|conftest", p.name)] == []
    assert [p.name for p in (ROOT / "tests").rglob("*.py") if "sys" + ".path" in p.read_text()] == []


@of_each(FILES)
def test_errors_have_one_word_for_no(name):
    """An error says "is not a name", never "is no name"."""
    if not re.search(NO, re.sub(r'"\s+f?"', "", TEXTS[name])):  # strings on two lines are one
        return
    spoken = ast.walk(tree_of(name))
    texts = [ast.unparse(n) for n in spoken if isinstance(n, ast.Call | ast.Assign | ast.Raise)]
    assert [t[:200] for t in texts if re.search(NO, t)] == []


def test_every_test_file_is_collected(request):
    """pytest, as `make test` calls it, skips no folder and no file of tests, also none whose name is on pytest's own
    list, such as "dist" and "build"."""
    config = request.config
    ignored = lambda path: config.hook.pytest_ignore_collect(collection_path=path, config=config)
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    assert {p.parent.name for p in files} >= {"dist", "compile", "kernels", "laws"}
    for path in files:
        assert not any(ignored(p) for p in (path, *path.parents) if p.is_relative_to(ROOT / "tests")), path
        assert any(path.match(pattern) for pattern in config.getini("python_files")), path
    assert config.getini("testpaths") == ["tests", "funcrec"]
    commands = re.findall(r"-m pytest (.*)", (ROOT / "Makefile").read_text().split("# About")[0])
    assert "-q -n 3 --dist loadgroup" in commands  # of test: the whole
    assert len(commands) == 3  # and of check and of coverage
