"""The manifest of a package: names, shapes, dtypes, versions, checksums.

digest = sha256(manifest.json, with zeros for the digits of `digest` and `files`)        also in model.pt2's metadata

So a reader in any language recognises a changed manifest, or a manifest of a different program.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from funcrec.core import Problem, check, fail
from funcrec.files import Folder
from funcrec.serve._json_forms import MOST, SPEC, OrNull, Whole, form_problems, wrong
from funcrec.serve._turned import turned_problems

FORMAT, TURNED_FORMAT = 2, 3  # of packages whose program takes weights as they are stored, or some of them turned
MANIFEST, MODEL, ENCODING = "manifest.json", "model.pt2", "encoding.frc"
BLANK = "0" * 64
DIGITS = re.compile(r'("(?:digest|model\.pt2|encoding\.frc)": )"[0-9a-f]{64}"')
# Instruction sets that compilers use for loops, by their names in Linux. The portable program is limited to x86-64-v3.
V3 = ("ssse3", "sse4_1", "sse4_2", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "popcnt")
ANY = Whole(-(1 << 63), (1 << 63) - 1)
HEAD = {"format": ANY, "digest": str, "funcrec": str, "torch": str, "isa": str}
FEATURE = {"name": str, "table": OrNull(str), "rows": Whole(0, (1 << 63) - 1), "weighted": bool}
TABLE = {
    "name": str, "param": OrNull(str), "rows": Whole(0, MOST), "dim": Whole(0, MOST), "bits": OrNull(Whole(1, 64)),
}  # fmt: skip
BODY = {
    "inputs": [SPEC], "params": [SPEC], "outputs": [SPEC], "max_batch": Whole(1, (1 << 31) - 1),
    "max_ids": Whole(0, MOST), "features": [FEATURE], "tables": [TABLE], "files": {MODEL: str},
}  # fmt: skip


def text_of(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=1) + "\n"


def digest_of(text: str) -> str:
    return hashlib.sha256(DIGITS.sub(rf'\1"{BLANK}"', text).encode()).hexdigest()


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def processor_flags() -> frozenset[str]:
    """Return the instruction sets of this processor, by their names in Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":")[1].split() for line in lines if line.startswith("flags")), ()))


def needs_of(isa: str) -> list[str]:
    """Return the instruction sets that a program may use. A native program may use those of this processor."""
    if isa == "portable":
        return list(V3)
    return sorted(f for f in processor_flags() if f in V3 or f.startswith("avx"))


def read_manifest(call: str, folder: Folder) -> dict[str, Any]:
    """Return the manifest of a package that this process can run. Raise if the package does not fit or is damaged."""
    path = folder.path / MANIFEST
    try:
        text = folder.open(MANIFEST).text()
    except (OSError, UnicodeDecodeError) as error:
        need = "a folder that fr.export wrote"
        hint = "fr.export(predict, params, example, path)"
        fail(call, f"`{folder.path}` is not a package.", got=f"{MANIFEST}: {error}", need=need, hint=hint,
            kind=FileNotFoundError if isinstance(error, FileNotFoundError) else ValueError)  # fmt: skip
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        fail(call, f"`{path}` is damaged.", got=str(error), need="the file that fr.export wrote", hint=AGAIN)
    check(call, form_problems(str(path), found, HEAD))
    check(call, format_problems(path, found))
    check(call, changed_problems(path, text, found))
    check(call, form_problems(str(path), found, {"needs": [str]}))
    check(call, place_problems(found))
    check(call, form_problems(str(path), found, BODY))
    if found["format"] == TURNED_FORMAT:
        check(call, form_problems(str(path), found, {"turned": [str]}))
        check(call, turned_problems(f"{path}.turned", found["turned"], found["params"]))
    check(call, name_problems(str(path), found["files"]))
    return found


AGAIN = "fr.export again, or the package's own copy"


# -- validators --------------------------------------------------------------------------------------------------


def format_problems(path: Path, found: dict) -> Iterator[Problem]:
    if found["format"] not in (FORMAT, TURNED_FORMAT):
        hint = "the funcrec that wrote it, or fr.export again"
        yield Problem(
            f"`{path}` is of another format.",
            f"format {found['format']!r}",
            f"format {FORMAT} or {TURNED_FORMAT}",
            hint,
        )


def name_problems(at: str, files: dict) -> Iterator[Problem]:
    """Yield a problem if the manifest names other files than those of a package."""
    if not files.keys() <= {MODEL, ENCODING}:
        yield wrong(f"{at}.files", "other files", f"{MODEL} and {ENCODING}")
    elif ENCODING in files:
        yield from form_problems(f"{at}.files.{ENCODING}", files[ENCODING], str)


def changed_problems(path: Path, text: str, found: dict) -> Iterator[Problem]:
    if (now := digest_of(text)) != found["digest"]:
        yield Problem(f"`{path}` was changed.", f"digest {now}", f"{found['digest']}", AGAIN)


def place_problems(found: dict) -> Iterator[Problem]:
    """Yield problems if this torch or this processor cannot run the program.

    A program of AOTInductor needs the minor version of torch that compiled it."""
    minor = lambda version: ".".join(str(version).split("+")[0].split(".")[:2])
    if minor(found["torch"]) != minor(torch.__version__):
        hint = "fr.export with this torch, or the torch that it was exported with"
        own = str(torch.__version__).split("+")[0]
        yield Problem("the package is of another torch.", f"torch {own}", found["torch"], hint)
    if absent := [f for f in found["needs"] if f not in processor_flags()]:
        hint = 'fr.export(..., isa="portable"), or on this processor'
        got, need = f"a processor without {', '.join(absent)}", f"isa {found['isa']}"
        yield Problem("the package needs instructions that this processor lacks.", got, need, hint)
