"""python -m funcrec serve PATH.. [flags]: runs the server in C++, which replaces this process. PATH may be NAME=PATH.

`python -m funcrec serve --help` lists its flags. kernels/serving/README.md in the repository describes its answers.
"""

import os
import shutil
import sys
from pathlib import Path

from funcrec.core import fail
from funcrec.kernels import cpp

PROGRAM, BUILD = "funcrec-serve", "build/serving"


def main(words: list[str]) -> int:
    """Replace this process by the server, with the same arguments and signals. Return 2 if the server is not built."""
    program = _program()
    if program is not None:
        os.execv(program, [str(program), *words])
    build = f"cmake -S kernels -B {BUILD} -DFUNCREC_SERVING=ON -DPython_EXECUTABLE={sys.executable}"
    try:
        fail(
            "python -m funcrec serve",
            f"`{PROGRAM}` is not built.",
            got=f"none at {_places()[0]}, nor on the PATH",
            need="the program, compiled against this torch",
            hint=f"in the repository: {build} && cmake --build {BUILD}; or FUNCREC_SERVE=<the program>",
            kind=FileNotFoundError,
        )
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
    return 2


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
