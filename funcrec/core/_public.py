"""Public modules: the names that each module shows to `dir`, `help`, `import *`, pickles and messages."""

import dataclasses
import importlib
import importlib.metadata
import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, cast

from funcrec.core._errors import ROOMS, STAGES

ROOT = Path(__file__).parents[2]


class Later(NamedTuple):
    """The maker of a value that a module makes at the first use of its name.

    says: the name's line in the list of names; "" leaves the name out.
    """

    make: Callable[[], Any]
    says: str = ""


def publish(face: dict[str, Any], *, later: Mapping[str, Later] | None = None, is_listed: bool = False) -> None:
    """Make a module show its public names only.

    The module's classes, the methods of these classes and the module's functions get the module's name. Pickles,
    messages and `help` then show that name.

    Args:
      face: the module's `globals()`.
      later: {name: the maker of a value that is made at the first use of the name}.
      is_listed: whether the module's docstring ends with a list of the names, one line each.
    """
    here, later = face["__name__"], later or {}
    shown = {n: x for n, x in face.items() if not n.startswith("_") and not _is_inner(x)}
    for x in shown.values():
        if isinstance(x, type | FunctionType) and x.__module__.startswith(f"{here}."):
            _rename(x, here)
    face["__all__"] = sorted([*shown, *(n for n, x in later.items() if x.says)])
    if is_listed:
        says = {n: (inspect.getdoc(x) or "").partition("\n\n")[0].replace("\n", " ") for n, x in shown.items()}
        says |= {n: x.says for n, x in later.items() if x.says}
        width = max(map(len, says))
        face["__doc__"] += "\n" + "".join(f"    {n:{width}}  {says[n]}\n" for n in face["__all__"])

    def find(name: str) -> Any:
        if name not in later:
            raise AttributeError(f"module {here!r} has no attribute {name!r}")
        face[name] = later[name].make()
        return face[name]

    face["__getattr__"] = find
    face["__dir__"] = lambda: sorted({*face["__all__"], *later, *(n for n in face if n.startswith("__"))})


def _is_inner(x: Any) -> bool:
    """Return whether x is the module of a folder that public names leave out."""
    return isinstance(x, ModuleType) and x.__name__.removeprefix("funcrec.") in STAGES | ROOMS


def _rename(x: type | FunctionType, here: str) -> None:
    inside = (getattr(m, "__func__", m) for m in (vars(x).values() if isinstance(x, type) else ()))
    for m in [m for m in inside if isinstance(m, FunctionType) and m.__module__ == x.__module__]:
        m.__module__ = here
    x.__module__ = here
    if dataclasses.is_dataclass(x) and "__new__" in vars(x):  # Else `help` shows __new__'s signature, not the fields.
        made, shown = inspect.signature(x.__init__), cast(Any, x)
        shown.__signature__ = made.replace(parameters=list(made.parameters.values())[1:])


def module_later(name: str, says: str = "") -> Later:
    """Return a `Later` that imports a module at the first use of its name."""
    return Later(lambda: importlib.import_module(name), says)


def version(root: Path = ROOT) -> str:
    """Return the version of funcrec.

    In a source tree or an editable install, pyproject.toml lies next to the package and states the version. Otherwise
    the result is the version of the installed package.
    """
    source = root / "pyproject.toml"
    found = re.search(r'^name = "funcrec"\nversion = "(.+)"', source.read_text(), re.M) if source.is_file() else None
    return found[1] if found else importlib.metadata.version("funcrec")
