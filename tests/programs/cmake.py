"""Build programs of kernels/serving whose sources changed. At most one build of a folder runs at a time."""

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def build(name: str, source: str, *, sanitize: str = "", given=(), anew: bool = False, targets=("all",)) -> Path:
    """Return build/name, or a separate folder for `sanitize`, after a build of the targets of ROOT/source.

    sanitize: "address,undefined" or "thread". given: definitions for CMake's cache. An existing folder keeps its old
    definitions unless `anew` is true.
    """
    folder = ROOT / "build" / "-".join([name, *sanitize.replace(",", " ").split()])
    find = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    cmake = shutil.which("cmake", path=find)
    if cmake is None:
        sys.exit("cmake.py: there is no cmake\n  try   pip install cmake ninja")
    make = ("-G", "Ninja") if shutil.which("ninja", path=find) else ()
    run = lambda *words: subprocess.run([cmake, *map(str, words)], check=True, stdout=sys.stderr)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:  # this open waits until other tests end their builds
        fcntl.flock(lock, fcntl.LOCK_EX)
        if anew or not (folder / "CMakeCache.txt").exists():
            own = (f"FUNCREC_SANITIZE={sanitize}", f"Python_EXECUTABLE={sys.executable}")
            definitions = [f"-D{x}" for x in (*own, *given)]
            run(*make, "-S", ROOT / source, "-B", folder, *definitions)
        run("--build", folder, "--parallel", "2", "--target", *targets)
    return folder
