"""By which names users meet funcrec: dir, help, import *, pickles and the version."""

import dataclasses
import importlib
import inspect
import pickle
import pydoc
import re
import tomllib
import types
from pathlib import Path

import pytest

import funcrec as fr
from funcrec.core import version

ROOT = Path(__file__).parents[2]
NAMESPACES = [n for n in fr.__all__ if isinstance(getattr(fr, n), types.ModuleType) and n != "kernels"]
FACES = {"funcrec": fr, **{f"funcrec.{n}": getattr(fr, n) for n in NAMESPACES}}
PRIVATE = r"funcrec(?:\.\w+)*\._\w+"


@pytest.mark.parametrize("face", FACES)
def test_a_face_shows_its_public_names(face):
    """dir of a public module returns its public names and Python's own, and each of them exists. `import *` imports
    these."""
    module = FACES[face]
    shown = [n for n in dir(module) if not n.startswith("__")]
    assert set(module.__all__) <= set(shown) and all(hasattr(module, n) for n in dir(module))
    assert not any(n.startswith("_") for n in shown)
    if module is fr:
        source = (ROOT / "funcrec/__init__.py").read_text()
        explicit = re.findall(r"^from \S+ import (\w+) as \1$", source, re.M)
        assert module.__all__ == sorted([*explicit, "testing", "examples"]) == shown


@pytest.mark.parametrize("face", FACES)
def test_public_names_say_where_they_are(face):
    """A public function or class is found at the name that it reports. So it pickles, and messages use the name that
    users know."""
    for name in FACES[face].__all__:
        x = getattr(FACES[face], name)
        if isinstance(x, type | types.FunctionType):
            assert getattr(importlib.import_module(x.__module__), x.__qualname__) is x
            assert not re.match(PRIVATE, x.__module__), x
            assert pickle.loads(pickle.dumps(x)) is x


@pytest.mark.parametrize("face", FACES)
def test_messages_call_a_function_by_its_shortest_name(face):
    """For an unknown argument, a public function or class raises an error with its name in funcrec, or in its public
    module; only Python itself uses the bare name."""
    for name in FACES[face].__all__:
        x = getattr(FACES[face], name)
        is_class = isinstance(x, type) and not issubclass(x, BaseException) and not getattr(x, "_is_protocol", False)
        if is_class or isinstance(x, types.FunctionType):
            with pytest.raises(TypeError) as raised:
                x(no_such_argument=1)
            public = "funcrec" if getattr(fr, name, None) is x else face
            assert re.match(rf"{public}\.{name}: |[\w.]+\(\) ", str(raised.value)), str(raised.value)


@pytest.mark.parametrize("face", FACES)
def test_help_names_no_private_module(face):
    """The paths in help of a public module, and of each of its names, have no name that begins with an underscore."""
    module = FACES[face]
    for x in (module, *(getattr(module, n) for n in module.__all__)):
        text = pydoc.render_doc(x, renderer=pydoc.plaintext)
        assert set(re.findall(PRIVATE, text)) == set()
    assert not re.search(r"^ +_(?!_main__)\w+$", pydoc.render_doc(fr, renderer=pydoc.plaintext), re.M)


def test_help_shows_the_fields_of_values():
    """The signature of a public dataclass is its fields."""
    for x in (x for x in vars(fr).values() if isinstance(x, type) and dataclasses.is_dataclass(x)):
        assert list(inspect.signature(x).parameters) == [f.name for f in dataclasses.fields(x) if f.init], x


def test_help_lists_the_public_names():
    """help(fr) begins with every public name and the first words of its docstring, a line for each."""
    text = pydoc.render_doc(fr, renderer=pydoc.plaintext)
    lines = dict(re.findall(r"^ {8}(\w+) +(\S.*)$", text.split("PACKAGE CONTENTS")[0], re.M))
    assert list(lines) == fr.__all__
    later = ("testing", "examples")
    assert all(inspect.getdoc(getattr(fr, n)).startswith(lines[n][:30]) for n in fr.__all__ if n not in later)


def test_the_version_is_that_of_pyproject(tmp_path):
    """`__version__` is the version in pyproject.toml next to the package, or else that of the installed package."""
    said = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert fr.__version__ == version() == said and "__version__" in dir(fr)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "funcrec"\nversion = "9.8"\n')
    assert version(tmp_path) == "9.8"
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "another"\nversion = "9.8"\n')
    assert version(tmp_path) == version(tmp_path / "nowhere") != "9.8"


def test_a_name_that_is_not_there_is_an_attribute_error():
    """A missing name raises AttributeError with the module's name, and hasattr returns False."""
    with pytest.raises(AttributeError, match="module 'funcrec' has no attribute 'embedding'"):
        fr.embedding  # noqa: B018
    assert not hasattr(fr, "_private") and hasattr(fr.testing, "strategies") and hasattr(fr.examples, "ctr")
