"""Weights as a file of named tensors, with the text `version`.

Each tensor's bytes begin at a multiple of 4096: they are mapped, and shared by all processes that map them.
"""

import hashlib
import json
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from funcrec.core import Problem, Within, check, describe, fail, paths
from funcrec.files import (
    DTYPE_NAMES,
    FileError,
    Folder,
    OpenFile,
    Placed,
    check_crc,
    read_header,
    tensor_at,
    write_tensors,
)  # fmt: skip
from funcrec.kinds import Vocabulary
from funcrec.serve._json_forms import text_of
from funcrec.serve._turned import turned

KIND, PAGE = "funcrec weights 2", 4096
is_name = lambda text: bool(text) and text.isprintable()
Version = Annotated[str, Within("printable text", is_name, "is not a name")]
FILE = "weights.safetensors"
UNNAMED = "0" * 12  # stands for the version until the values are hashed
DTYPES = {
    str(x).removeprefix("torch."): x
    for x in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
              torch.int8, torch.uint8, torch.bool)
}  # fmt: skip
NAMES = {x: n for n, x in DTYPES.items()}
STORED = {DTYPE_NAMES[x]: x for x in NAMES}  # by their names in files


class Weights(NamedTuple):
    """Tensors by name, their version, their file, their places in it, and the addresses of their memory.

    turned: the copies that a program reads in place of some tensors. given: what it takes, in its order.
    """

    tensors: dict[str, Tensor]
    version: str
    file: OpenFile
    places: list[Placed]
    memory: frozenset[int]
    turned: dict[str, Tensor]
    given: list[Tensor]
    is_changed: bool = False  # in this process's memory, by deltas


def named(params: Any) -> dict[str, Tensor]:
    """Return {path: tensor} of a tree, sorted by path. A program takes the tensors in this order.

    The path of a vocabulary's ids ends with its seed, which the program holds: weights of another seed do not fit it.
    """
    is_vocabulary = lambda x: isinstance(x, Vocabulary)
    seeds = {p: x.seed for p, x in paths(params, is_leaf=is_vocabulary) if is_vocabulary(x) and x.seed}
    ends = {f"{p}.entries": f" of seed {seed}" for p, seed in seeds.items()}
    return {n + ends.get(n, ""): x for n, x in sorted(paths(params))}


def signature(tensors: Mapping[str, Tensor]) -> list[dict]:
    return [{"name": n, "dtype": NAMES[x.dtype], "shape": list(x.shape)} for n, x in tensors.items()]


def write_weights(folder: Path, tensors: Mapping[str, Tensor], version: str | None) -> None:
    """Write the file. Without a version, the version is a hash of the values."""
    specs = [(n, x.dtype, x.shape) for n, x in tensors.items()]
    values = lambda places: hashlib.sha256(json.dumps(places, default=str).encode()).hexdigest()
    late = lambda places: {} if version else {"version": values(places)[: len(UNNAMED)]}
    with (folder / FILE).open("wb") as file:
        write_tensors(file, KIND, specs, tensors.values(), {"version": version or UNNAMED}, PAGE, late)


def read_weights(call: str, folder: Folder, manifest: Mapping[str, Any], *, checksums: bool) -> Weights:
    """Return the mapped weights of a folder, which must have the names, dtypes and shapes that the package wants."""
    wanted = manifest["params"]
    file, found, version = read_index(call, folder)
    check(call, signature_problems(file.path, found, wanted))
    places = [found[e["name"]] for e in wanted]  # in the order in which a program takes them
    tensors = mapped(file, places)
    try:
        for p in places if checksums else ():
            check_crc(p, tensors[p.name])
    except FileError as error:
        fail_damaged(call, file.path, error)
    copies = turned(tensors, manifest.get("turned", ()))
    given = [copies.get(n, x) for n, x in tensors.items()]
    return Weights(tensors, version, file, places, frozenset(map(memory_of, given)), copies, given)


def read_index(call: str, folder: Folder) -> tuple[OpenFile, dict[str, Placed], str]:
    """Open the weights of a folder; return (file, {name: tensor} in it, version)."""
    path = folder.path / FILE
    try:
        file = folder.open(FILE)
        if file.size() < 0:
            raise OSError(0, "a folder, a pipe or a device")
        found, texts = read_header(KIND, file.size(), file.read, PAGE, STORED)
        if "version" not in texts:
            raise FileError("is damaged", 'no text "version"', "the file as it was written")
        return file, found, texts["version"]
    except FileNotFoundError as error:
        need, hint = "a folder of fr.save_weights or fr.export", "fr.save_weights(path, params)"
        fail(call, f"`{path.parent}` has no weights.", got=str(error), need=need, hint=hint, kind=FileNotFoundError)
    except OSError as error:
        got = error.strerror or str(error)
        fail(call, f"`{path}` cannot be read.", got=got, need="a file that funcrec wrote", hint="the folder's own copy")
    except FileError as error:
        fail_damaged(call, path, error)


def fail_damaged(
    call: str, path: Path, error: FileError, hint: str = "fr.save_weights again, or the folder's own copy"
) -> NoReturn:
    what, got, need = error.args
    fail(call, f"`{path}` {what}.", got=got, need=need, hint=hint)


def memory_of(x: Tensor) -> int:
    """Return the address of a tensor's storage."""
    return x.untyped_storage().data_ptr()


def mapped(file: OpenFile, places: Sequence[Placed]) -> dict[str, Tensor]:
    """Return tensors in the memory of the mapped file. Writes to them stay in this mapping."""
    memory = mmap.mmap(file.fd, 0, access=mmap.ACCESS_COPY)
    return {p.name: tensor_at(memory, p) for p in places}


# -- validators --------------------------------------------------------------------------------------------------


def params_problems(params: Any) -> Iterator[Problem]:
    """Report leaves that are not plain tensors on the CPU, or whose dtype the file cannot hold."""
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
            yield Problem(f"{at} is not a strided tensor on the CPU.", describe(x), "strided tensors on the CPU", hint)
        elif x.dtype not in NAMES:
            yield Problem(f"{at} has a dtype that packages lack.", describe(x), f"{list(DTYPES)}", kind=TypeError)


def signature_problems(path: Path, found: Mapping[str, Placed], wanted: Sequence[dict]) -> Iterator[Problem]:
    """Report names, dtypes and shapes that differ from those of the package."""
    got = {n: text_of({"dtype": NAMES[p.dtype], "shape": p.shape}) for n, p in found.items()}
    want = {e["name"]: text_of(e) for e in wanted}
    hint = "fr.save_weights of the parameters that the package was exported with, trained further"
    what = f"`{path}` is of other parameters than the package."
    if differ := [n for n in want if got.get(n) != want[n]]:
        yield Problem(what, f"{differ[0]}: {got.get(differ[0], 'none')}", f"{differ[0]}: {want[differ[0]]}", hint)
    elif more := sorted(got.keys() - want.keys(), key=os.fsencode):
        yield Problem(what, more[0], "no such parameter", hint)
