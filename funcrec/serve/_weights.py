"""Weights as two files: tensors one after the other, and what they are.

weights.bin    each tensor's bytes from a multiple of 4096 on: mapped, and shared by all processes that map it
weights.json   names, dtypes, shapes, places, CRCs, a version, and a digest of all this
"""

import hashlib
import json
import mmap
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcrec.core import Problem, check, describe, fail, paths
from funcrec.files import DTYPE_NAMES, Folder, OpenFile, crc_of, write_bytes
from funcrec.serve._json_forms import PLACED, form_problems, placed_problems, text_of, wrong
from funcrec.serve._manifest import ANY, BLANK, format_problems

FORMAT, PAGE = 1, 4096
WEIGHTS, INDEX = "weights.bin", "weights.json"
DTYPES = {
    str(x).removeprefix("torch."): x
    for x in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
              torch.int8, torch.uint8, torch.bool)
}  # fmt: skip
NAMES = {x: n for n, x in DTYPES.items()}
STORED = {DTYPE_NAMES[x]: x for x in NAMES}  # by what files call them
DIGIT = re.compile(r'("digest": )"[0-9a-f]{64}"')


class Weights(NamedTuple):
    """Tensors by name, the version that they are of, whence they are, and where their memory begins."""

    tensors: dict[str, Tensor]
    version: str
    file: OpenFile
    entries: list[dict]
    memory: frozenset[int]
    is_changed: bool = False  # in this process's memory, by deltas


def named(params: Any) -> dict[str, Tensor]:
    """The tensors of a tree by their paths, in the order of these: that in which a program takes them."""
    return dict(sorted(paths(params)))


def signature(tensors: Mapping[str, Tensor]) -> list[dict]:
    return [{"name": n, "dtype": NAMES[x.dtype], "shape": list(x.shape)} for n, x in tensors.items()]


def write_weights(folder: Path, tensors: Mapping[str, Tensor], version: str | None) -> None:
    """Both files; without a version it is a name of the values."""
    entries = []
    with (folder / WEIGHTS).open("wb") as file:
        for entry, x in zip(signature(tensors), tensors.values(), strict=True):
            file.write(b"\0" * (-file.tell() % PAGE))
            offset = file.tell()
            crc = write_bytes(file, x)
            entries.append({**entry, "offset": offset, "nbytes": file.tell() - offset, "crc32": crc})
    version = version or hashlib.sha256(json.dumps(entries).encode()).hexdigest()[:12]
    text = json.dumps({"format": FORMAT, "digest": BLANK, "version": version, "tensors": entries}, indent=1) + "\n"
    (folder / INDEX).write_text(text.replace(BLANK, hashlib.sha256(text.encode()).hexdigest()))


def read_weights(call: str, folder: Folder, wanted: Sequence[dict], *, checksums: bool) -> Weights:
    """The weights of a folder, mapped; what they are must be what a package wants."""
    path = folder.path / INDEX
    file = folder.open(WEIGHTS) if folder.has(WEIGHTS) else None  # before the folder loses any
    index = read_index(call, folder)
    check(call, signature_problems(path, index["tensors"], wanted))
    placed = {e["name"]: e for e in index["tensors"]}
    entries = [placed[e["name"]] for e in wanted]  # in the order in which a program takes them
    check(call, size_problems(folder.path / WEIGHTS, file, entries))
    tensors = mapped(file, entries)
    if checksums:
        check(call, value_problems(file.path, entries, tensors))
    return Weights(tensors, index["version"], file, entries, frozenset(map(memory_of, tensors.values())))


def memory_of(x: Tensor) -> int:
    """Where the storage of a tensor begins."""
    return x.untyped_storage().data_ptr()


def read_index(call: str, folder: Folder) -> dict[str, Any]:
    path = folder.path / INDEX
    try:
        text = folder.open(INDEX).text()
        found = json.loads(text)
    except FileNotFoundError as error:
        need, hint = "a folder of fr.save_weights or fr.export", "fr.save_weights(path, params)"
        fail(call, f"`{path.parent}` has no weights.", got=str(error), need=need, hint=hint, kind=FileNotFoundError)
    except (OSError, ValueError, RecursionError) as error:
        fail(call, f"`{path}` is damaged.", got=str(error), need="the file that fr.save_weights wrote", hint=AGAIN)
    check(call, form_problems(str(path), found, {"format": ANY, "digest": str}))
    check(call, format_problems(path, found))
    now = hashlib.sha256(DIGIT.sub(rf'\1"{BLANK}"', text).encode()).hexdigest()
    if now != found["digest"]:
        fail(call, f"`{path}` was changed.", got=f"digest {now}", need=found["digest"], hint=AGAIN)
    check(call, form_problems(str(path), found, {"tensors": [PLACED], "version": str}))
    for i, e in enumerate(found["tensors"]):
        at = f"{path}.tensors[{i}]"
        check(call, placed_problems(at, e, PAGE))
        if any(e["name"] == other["name"] for other in found["tensors"][:i]):
            check(call, [wrong(at, f"{e['name']} twice", "once")])
    return found


def mapped(file: OpenFile, entries: Sequence[dict]) -> dict[str, Tensor]:
    """Tensors whose memory is the file's: what is written to them stays in this mapping."""
    size = os.fstat(file.fd).st_size
    memory = mmap.mmap(file.fd, size, access=mmap.ACCESS_COPY) if size else b""
    out = {}
    for e in entries:
        dtype, count = DTYPES[e["dtype"]], e["nbytes"] // DTYPES[e["dtype"]].itemsize
        empty = torch.empty(0, dtype=dtype)
        flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=e["offset"]) if count else empty
        out[e["name"]] = flat.view(e["shape"])
    return out


AGAIN = "fr.save_weights again, or the folder's own copy"


# -- validators --------------------------------------------------------------------------------------------------


def params_problems(params: Any) -> Iterator[Problem]:
    """Every leaf is a tensor that bytes tell."""
    leaves = paths(params)
    if not leaves:
        hint = "fr.Params(tables=fr.init(fr.key(0), tables), dense={})"
        yield Problem("`params` have no tensor.", describe(params), "a tree of tensors", hint, TypeError)
    for path, x in leaves:
        at = f"`params.{path}`"
        if not isinstance(x, Tensor):
            hint = "torch.tensor(x), or closed over by `predict`, as a number"
            yield Problem(f"{at} is not a tensor.", describe(x), "a tree of tensors", hint, TypeError)
        elif x.device.type != "cpu" or x.layout != torch.strided or x.is_nested:
            hint = 'params.to("cpu")'
            yield Problem(f"{at} is not a tensor of this memory.", describe(x), "strided tensors on the CPU", hint)
        elif x.dtype not in NAMES:
            yield Problem(f"{at} has a dtype that packages have not.", describe(x), f"{list(DTYPES)}", kind=TypeError)


def version_problems(version: str | None) -> Iterator[Problem]:
    if version is not None and not (version and version.isprintable()):
        yield Problem("`version` is not a name.", repr(version), "printable text", 'version="2026-11-22"')


def signature_problems(path: Path, found: Sequence[dict], wanted: Sequence[dict]) -> Iterator[Problem]:
    """The same names, each with its dtype and shape."""
    got, want = ({e["name"]: text_of(e) for e in own} for own in (found, wanted))
    hint = "fr.save_weights of the parameters that the package was exported with, trained further"
    what = f"`{path}` is of other parameters than the package."
    if differ := [n for n in want if got.get(n) != want[n]]:
        yield Problem(what, f"{differ[0]}: {got.get(differ[0], 'none')}", f"{differ[0]}: {want[differ[0]]}", hint)
    elif more := sorted(got.keys() - want.keys(), key=os.fsencode):
        yield Problem(what, more[0], "no such parameter", hint)


def size_problems(path: Path, file: OpenFile | None, entries: Sequence[dict]) -> Iterator[Problem]:
    size = -1 if file is None else file.size()
    need = max((e["offset"] + e["nbytes"] for e in entries if e["nbytes"]), default=0)
    if size < need:
        got = f"{size} bytes" if size >= 0 else "no file"
        yield Problem(f"`{path}` is cut off.", got, f"{need} bytes", AGAIN)


def value_problems(path: Path, entries: Sequence[dict], tensors: Mapping[str, Tensor]) -> Iterator[Problem]:
    for e in entries:
        crc = crc_of(tensors[e["name"]])
        if crc != e["crc32"]:
            what = f"`{path}` was changed, in {e['name']}."
            yield Problem(what, f"CRC {crc:08x}", f"{e['crc32']:08x}", AGAIN)
