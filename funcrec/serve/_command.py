"""python -m funcrec serve PATH.. [flags]: runs the server in C++, which replaces this process. PATH may be NAME=PATH.

A PATH before the flags may be the URL of a package in a store: it is copied to the folder of temporary files.

`python -m funcrec serve --help` lists its flags. kernels/serving/README.md in the repository describes its answers.
"""

import os
import shutil
import sys
import tempfile
from itertools import takewhile
from pathlib import Path

from funcrec.core import fail
from funcrec.files import URL, Folder, Url, path_or_url, read_folder
from funcrec.kernels import cpp
from funcrec.serve._manifest import MANIFEST, read_manifest
from funcrec.serve._weights import FILE

CALL = "python -m funcrec serve"
PROGRAM, BUILD = "funcrec-serve", "build/serving"


def main(words: list[str]) -> int:
    """Replace this process by the server, with the same arguments and signals. Return 2 if the server is not built."""
    program = _program()
    if program is not None:
        paths = list(takewhile(lambda word: not word.startswith("-"), words))
        os.execv(program, [str(program), *map(_here, paths), *words[len(paths) :]])
    build = f"cmake -S kernels -B {BUILD} -DFUNCREC_SERVING=ON -DPython_EXECUTABLE={sys.executable}"
    try:
        fail(
            CALL,
            f"`{PROGRAM}` is not built.",
            got=f"none at {_places()[0]}, nor on the PATH",
            need="the program, compiled against this torch",
            hint=f"in the repository: {build} && cmake --build {BUILD}; or FUNCREC_SERVE=<the program>",
            kind=FileNotFoundError,
        )
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
    return 2


def _here(word: str) -> str:
    """Return PATH or NAME=PATH with a path of this machine. A package in a store is copied."""
    name, mark, path = ("", "", word) if URL.match(word) else word.partition("=")
    if not URL.match(path):
        return word
    own = path_or_url(CALL, path, "folder")
    if isinstance(own, Url):
        folder = Path(tempfile.mkdtemp(prefix="funcrec-"), own.name)
        read_folder(CALL, own, lambda found: copied(CALL, found, folder))
        own = folder
    return f"{name}{mark}{own}"


def copied(call: str, found: Folder, into: Path) -> None:
    """Copy the files of an open package, which must be whole."""
    files = [MANIFEST, FILE, *read_manifest(call, found)["files"]]
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir()
    for name in files:
        file = found.open(name)  # held, so that its path stays open
        shutil.copyfile(file.own_path, into / name)


def _places() -> list[Path]:
    """Return the paths where the program may be.

    This is FUNCREC_SERVE alone if set. Otherwise it is the build folder, then the installed package."""
    named = os.environ.get("FUNCREC_SERVE")
    built = Path(__file__).resolve().parents[2] / BUILD / PROGRAM
    return [Path(named)] if named else [built, Path(cpp.__file__).with_name(PROGRAM)]


def _program() -> Path | None:
    found = [p for p in _places() if os.access(p, os.X_OK) and p.is_file()]
    if not found and "FUNCREC_SERVE" not in os.environ and (path := shutil.which(PROGRAM)):
        found = [Path(path)]
    return found[0] if found else None
