"""Packages in Python. Opens a package, runs it on batches by names of keys, and replaces its weights while it runs.

package(batch) = predict(params, batch)          with the params of `package.version`
"""

import json
import operator
import os
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
import torch._C._aoti as _aoti
from torch import Tensor

from funcrec.checkpoint import load
from funcrec.core import Count, Problem, check, describe, fail, has_tracked, is_by_tree, is_wrapped, tree_leaves, typed
from funcrec.data import Encoding, encode
from funcrec.files import Folder, OpenFile, path_or_url, read_folder
from funcrec.jagged import KeyedJaggedTensor, bags_of_examples, inverse_value_problems
from funcrec.kernels import library
from funcrec.kernels.tracked import is_bare
from funcrec.serve._manifest import AGAIN, ENCODING, MANIFEST, MODEL, read_manifest, sha256_of
from funcrec.serve._trace import SINGLE, Form
from funcrec.serve._turned import turn_again
from funcrec.serve._weights import DTYPES, Weights, mapped, memory_of, read_weights
from funcrec.serve.freshness._apply import applied, permits
from funcrec.serve.freshness._published import follow
from funcrec.tables import Batch, batch_parts

LOAD, CALL, SWAP, ENCODE = "funcrec.load_package", "funcrec.Package", "funcrec.Package.swap", "funcrec.Package.encode"
INTS = (torch.int32, torch.int64)
ROWS = {"memory_format": torch.contiguous_format}  # a clone in this format has every row, even of an expanded view
APPLY, FOLLOW = "funcrec.Package.apply", "funcrec.Package.follow"


class Opened(NamedTuple):
    """The parts of a package that never change.

    run: the program, a function of a list of tensors. free: a queue of `threads` permits, of which each call that runs
    holds one. change: the lock for changes of the weights.
    """

    manifest: dict[str, Any]
    form: Form
    run: Any
    free: SimpleQueue
    encoding: Encoding | None
    threads: int
    change: threading.Lock


class Package:
    """A model that `export` wrote: a function of batches, whose weights can be replaced while other threads call it.

    Columns of ids go by their names, in any order. An id that is not in its table (-1, say) reads zeros. Each answer
    uses one version of the weights. Examples may share bags, as `dedup_bags` stores them: the answers are the bits of a
    bag for each example. A package whose example had inverse indices pools shared bags once; others copy their ids.
    `load_package` returns a package.

    Example:
      >>> import tempfile, torch, funcrec as fr
      >>> clicked = fr.FeatureConfig("clicked", table="item")
      >>> predict = lambda params, batch: fr.lookup(params.tables, batch.ids, [clicked]).values.sum(1)
      >>> batch = fr.Batch(fr.KeyedJaggedTensor.from_lists({"clicked": [[1, 2], []]}))
      >>> params = fr.Params({"item": torch.eye(3)}, {})
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     package = fr.load_package(fr.export(predict, params, batch, folder + "/model", version="monday"))
      ...     tuesday = fr.save_weights(folder + "/tuesday", fr.tree.map(lambda x: 2 * x, params), version="tuesday")
      ...     package.swap(tuesday)
      >>> package(batch), package.version
      (tensor([4., 0.]), 'tuesday')
    """

    __slots__ = ("_opened", "_weights")

    def __init__(self, opened: Any, weights: Any):
        self._opened, self._weights = opened, weights

    def __repr__(self) -> str:
        own = self._opened.manifest
        outputs = ", ".join(x["name"] for x in own["outputs"])
        keys = ", ".join(x["name"] for x in own["features"])
        return f"Package({keys} -> {outputs}; version {self.version!r})"

    @property
    def manifest(self) -> dict[str, Any]:
        """Return the content of manifest.json."""
        return dict(self._opened.manifest)

    @property
    def version(self) -> str:
        """Return the version of the weights that the next call reads."""
        return self._weights.version

    @property
    def params(self) -> dict[str, Tensor]:
        """Return {path: tensor} of the present version. Writes to these tensors do not reach the package."""
        with self._opened.change:
            weights = self._weights
            if weights.is_changed:  # a delta changed them in this process's memory
                return {n: x.clone() for n, x in weights.tensors.items()}
            return mapped(weights.file, weights.places)

    def __call__(self, batch: Batch) -> Any:
        """Return what `predict` answers: a tensor [B, ...], or {name: tensor}. Label and weight are not read."""
        manifest, form, run, free, *_ = self._opened
        if not is_usual(batch, manifest, form):
            check(CALL, batch_problems(batch, manifest, form))
        ids = batch.ids if batch.ids.keys == form.keys else batch.ids.permute(form.keys)
        tensors = form.inputs(Batch(ids, dense=batch.dense))
        if ids.num_examples == 0:  # a program takes one bag or more
            out = [torch.empty(0, *x["shape"][1:], dtype=DTYPES[x["dtype"]]) for x in manifest["outputs"]]
        else:
            weights = self._weights  # the weights of one version
            memory = weights.memory.union(map(memory_of, tensors))
            take, give = permits(free, 1)
            try:
                take()
                with torch._C._AutoDispatchBelowAutograd():  # so operators need not check for derivatives
                    out = run([*weights.given, *tensors])
                out = own(out, memory)
            finally:
                give()
        names = [x["name"] for x in manifest["outputs"]]
        return out[0] if names == [SINGLE] else dict(zip(names, out, strict=True))

    def encode(self, rows: Any) -> Batch:
        """Return raw rows as a batch, encoded by the encoding that the package was exported with.

        Args:
          rows: as for `fr.data.encode` (a dict of columns, a data frame), or a list of dicts, one dict for each row.
        """
        encoding, form = self._opened.encoding, self._opened.form
        if encoding is None:
            hint = "fr.export(..., encoding=encoding), or a batch"
            fail(ENCODE, "the package has no encoding.", got="none", need="that of the training data", hint=hint)
        if isinstance(rows, list) and rows and all(isinstance(row, Mapping) for row in rows):
            rows = {n: [row.get(n) for row in rows] for n in dict.fromkeys(n for row in rows for n in row)}
        examples = encode(encoding, rows)
        batch = examples.take(torch.arange(examples.categorical.shape[0]))
        return Batch(batch.ids.permute(form.keys), dense=None if form.dense is None else batch.dense)

    @typed
    def swap(self, path: str | os.PathLike[str], *, checksums: bool = True) -> None:
        """Replace the weights by those of another folder, from `save_weights` or a package of the same model.

        A folder in a store is copied to a file of this machine that is removed when nothing uses it.

        Calls that have begun end with the weights that they began with. If the new weights do not fit, nothing changes.
        The call does not try the values of the weights. A server first runs the example of the package on them.

        Args:
          checksums: whether to read all weights once and compare their checksums.
        """
        own = self._opened.manifest

        def read(folder: Folder) -> Weights:
            check(SWAP, other_problems(folder, own["digest"]))
            return read_weights(SWAP, folder, own, checksums=checksums)

        with self._opened.change:
            self._weights = read_folder(SWAP, path, read)

    @typed
    def apply(self, path: str | os.PathLike[str]) -> None:
        """Apply a file of `write_delta`, also by its URL, that was made from the version of these weights.

        It takes effect between two calls, so every answer uses one version. A file that does not fit, or was changed,
        is refused before anything changes.

        Cost: it reads the file. Calls wait while its rows are written. The files of the weights are never written to.
        """
        own = self._opened
        with own.change:
            old = self._weights

            def name(version: str) -> None:
                turn_again(old.tensors, old.turned)
                self._weights = old._replace(version=version, is_changed=old.is_changed or version != old.version)

            where, alone = path_or_url(APPLY, path), permits(own.free, own.threads)
            applied(APPLY, where, own.manifest, old.tensors, old.version, alone, name)

    @typed
    def follow(self, folder: str | os.PathLike[str]) -> None:
        """Load the newest weights that `publish` wrote to a folder. If the package has them, do nothing.

        It applies the deltas after this version, or loads whole weights and applies the deltas after those. The folder
        may be the URL of one in a store.

        Raises:
          FileNotFoundError: if the folder has no weights.
          ValueError: if files do not fit.
        """
        take = lambda path: self.swap(path) if path.is_dir() else self.apply(path)
        follow(FOLLOW, path_or_url(FOLLOW, folder, "folder"), self.version, take)


@typed
def load_package(path: str | os.PathLike[str], *, threads: Count = 1, checksums: bool = True) -> Package:
    """Return the package in a folder that `export` wrote. Its weights are mapped into memory that processes share.

    Args:
      path: the folder, or the URL of one in a store, whose files are copied to this machine while they are in use.
      threads: how many calls may run at the same time. Other calls wait.
      checksums: whether to read all weights once and compare their checksums.

    Raises:
      ValueError: the package has another format or needs another minor version of torch; this processor lacks
        instructions; a file was changed or cut off; or weights have another signature. The error names the reason.
      FileNotFoundError: if the folder or one of its files is missing.

    Cost: it takes about 20 ms, and one pass over the weights for their checksums.

    Example:
      >>> import tempfile, torch, funcrec as fr
      >>> batch = fr.Batch(fr.KeyedJaggedTensor.from_lists({"clicked": [[1], []]}), dense=torch.ones(2, 3))
      >>> predict = lambda params, batch: {"click": torch.sigmoid(batch.dense @ params["w"])}
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     package = fr.load_package(fr.export(predict, {"w": torch.zeros(3)}, batch, folder + "/model"))
      >>> package(batch)
      {'click': tensor([0.5000, 0.5000])}
    """
    return read_folder(LOAD, path, lambda folder: open_package(folder, threads, checksums))


def open_package(folder: Folder, threads: int, checksums: bool) -> Package:
    manifest = read_manifest(LOAD, folder)
    files = {name: folder.open(name) for name in manifest["files"] if folder.has(name)}
    check(LOAD, file_problems(folder, files, manifest["files"]))
    library.load("cpp")  # the operators of the program
    program = _aoti.AOTIModelPackageLoader(str(files[MODEL].own_path), "model", False, threads, -1)
    check(LOAD, program_problems(program.get_metadata().get("funcrec_digest"), manifest["digest"]))
    weights = read_weights(LOAD, folder, manifest, checksums=checksums)
    encoding = load(files[ENCODING].own_path) if ENCODING in files else None
    free = SimpleQueue()
    for _ in range(threads):
        free.put(True)
    form = form_of_manifest(manifest)
    return Package(Opened(manifest, form, program.run, free, encoding, threads, threading.Lock()), weights)


def own(out: Sequence[Tensor], memory: Collection[int]) -> list[Tensor]:
    """Return answers in memory of their own. A write to them changes neither the weights nor the batch."""
    return [x.clone(**ROWS) if memory_of(x) in memory else x.contiguous() for x in out]


def form_of_manifest(manifest: Mapping) -> Form:
    shapes = {x["name"]: x["shape"] for x in manifest["inputs"]}
    features = manifest["features"]
    weighted = "weights" in shapes
    bare = tuple(f["name"] for f in features if not f["weighted"]) if weighted else ()
    dense = shapes["dense"][1] if "dense" in shapes else None
    return Form(tuple(f["name"] for f in features), dense, weighted, bare, "inverse" in shapes)


# -- validators --------------------------------------------------------------------------------------------------


def file_problems(folder: Folder, files: Mapping[str, OpenFile], digests: Mapping[str, str]) -> Iterator[Problem]:
    for name, digest in digests.items():
        now = sha256_of(files[name].own_path) if name in files and files[name].size() >= 0 else "no file"
        if now != digest:
            yield Problem(f"`{folder.path / name}` was changed.", f"sha256 {now}", digest, AGAIN)


def program_problems(got: str | None, need: str) -> Iterator[Problem]:
    if got != need:
        yield Problem(f"`{MODEL}` is not the manifest's program.", f"digest {got}", need, AGAIN)


def other_problems(folder: Folder, need: str) -> Iterator[Problem]:
    """Yield a problem if a package whose weights are swapped in has another program.

    Another program may give its weights another meaning, and the swap does not load the program.
    """
    try:
        got = json.loads(folder.open(MANIFEST).text())["digest"]
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError, RecursionError, TypeError, KeyError) as error:
        got = f"{type(error).__name__}: {error}"
    if got != need:
        what = f"`{folder.path}` is a package of another program."
        yield Problem(what, f"digest {got}", need, "fr.load_package(path)")


def is_usual(batch: Any, manifest: Mapping, form: Form) -> bool:
    """Return whether a batch has the most frequent form and fits the package.

    For other batches, `batch_problems` looks for faults, which takes ten times as long.
    """
    ids, dense = getattr(batch, "ids", None), getattr(batch, "dense", None)
    if type(batch) is not Batch or type(ids) is not KeyedJaggedTensor or ids.keys != form.keys or form.weighted:
        return False
    if ids.unweighted or any(x is not None for x in (ids.weights, batch.label, batch.weight)):
        return False
    values, offsets, inverse = ids.values, ids.offsets, ids.inverse
    if not is_bare([x for x in (values, offsets, inverse, dense) if x is not None]):
        return False
    if not (values.dtype in INTS and offsets.dtype in INTS and values.dim() == offsets.dim() == 1):
        return False
    bags, rest = divmod(offsets.shape[0] - 1, len(form.keys))
    if inverse is not None or ids.strides is not None:
        counts = ids.strides or (bags,) * len(form.keys)
        if not form.shared or sum(counts) != offsets.shape[0] - 1 or max(counts) > manifest["max_batch"]:
            return False
        if inverse is None or not names_bags(inverse, counts):
            return False
        bags, rest = inverse.shape[1], 0
    if rest or not 0 <= bags <= manifest["max_batch"] or values.shape[0] > manifest["max_ids"]:
        return False
    got = None if dense is None else (dense.dtype, dense.shape, dense.requires_grad)
    return got == (None if form.dense is None else (torch.float32, (bags, form.dense), False))


def names_bags(inverse: Tensor, counts: tuple[int, ...]) -> bool:
    """Return whether there are indices i[F, E] of examples, each of a bag of its key."""
    if inverse.dtype not in INTS or inverse.dim() != 2 or inverse.shape[0] != len(counts) or not inverse.shape[1]:
        return False
    least, most = inverse.aminmax(dim=1)
    return min(least.tolist()) >= 0 and all(map(operator.lt, most.tolist(), counts))


def batch_problems(batch: Any, manifest: Mapping, form: Form) -> Iterator[Problem]:
    """Yield problems if a batch differs from the form of the package. Ids may have any values."""
    if not isinstance(batch, Batch):
        hint = "package.encode(rows), or fr.Batch(ids, dense=dense)"
        yield Problem("`batch` is not a batch.", describe(batch), "a Batch", hint, TypeError)
        return
    found = [*batch_parts(batch, "batch"), *plain_problems(batch)] or list(key_problems(batch, form))
    yield from found
    if found:
        return
    ids, dense, bags = batch.ids, batch.dense, batch.ids.num_examples
    if form.dense is None and dense is not None:
        yield Problem("`batch.dense` would not be read.", describe(dense), "None", "fr.Batch(ids)")
    elif form.dense is not None and dense is None:
        yield Problem("`batch.dense` is missing.", "None", f"f32[{bags}, {form.dense}]", "fr.Batch(ids, dense=dense)")
    elif dense is not None and tuple(dense.shape) != (bags, form.dense):
        hint = "the columns that the package was exported with, a row for each bag"
        yield Problem("`batch.dense` does not fit.", describe(dense), f"f32[{bags}, {form.dense}]", hint)
    elif dense is not None and dense.dtype != torch.float32:
        yield Problem("`batch.dense` is not f32.", describe(dense), "f32", "dense.float()", TypeError)
    most_bags = max([bags, *map(ids.bags_of, ids.keys)] if form.shared else [bags])
    num_ids = ids.capacity
    if ids.inverse is not None and not form.shared:  # they are expanded
        num_ids = int(ids.lengths.index_select(0, bags_of_examples(ids)).sum())
    for name, most, n in (("bags", manifest["max_batch"], most_bags), ("ids", manifest["max_ids"], num_ids)):
        if n > most:
            hint = f"parts of it, or fr.export(..., max_{'batch' if name == 'bags' else 'ids'}={n})"
            yield Problem(f"the batch has too many {name}.", f"{n}", f"at most {most}", hint)


def plain_problems(batch: Batch) -> Iterator[Problem]:
    tensors = [x for x in tree_leaves(batch) if isinstance(x, Tensor)]
    if has_tracked(batch) or any(map(is_wrapped, tensors)):
        hint = "the model's own `predict`, which has derivatives and maps"
        got = "a tensor that grad, jvp or vmap follows"
        yield Problem("the batch is under a transform.", got, "plain tensors", hint, TypeError)
    elif is_by_tree():
        hint = "fr.export(fr.invariant(predict), ...), whose package has these bits in any call"
        got = "a call inside of fr.invariant"
        yield Problem("the order of a package's sums is fixed already.", got, "a call outside", hint, TypeError)
    elif is_traced(tensors):
        hint = "the package outside of `fr.jit`, torch.compile and torch.export: it is compiled already"
        got = "a tensor without values, or a mode that follows operators"
        yield Problem("the batch is being traced.", got, "plain tensors", hint, TypeError)
    elif any(x.device.type != "cpu" for x in tensors):
        got = f"{sorted({str(x.device) for x in tensors})}"
        yield Problem("the batch is on another device.", got, "the CPU", 'batch.to("cpu")')


def is_traced(tensors: Sequence[Tensor]) -> bool:
    """Return whether a program of these tensors is being staged: they have no memory that a program could read."""
    plain = all(type(x) in (Tensor, torch.nn.Parameter) for x in tensors)
    return not plain or torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack() > 0


def key_problems(batch: Batch, form: Form) -> Iterator[Problem]:
    ids, need = batch.ids, f"{list(form.keys)}"
    if absent := [k for k in form.keys if k not in ids.keys]:
        got = f"no {absent} among {list(ids.keys)}"
        yield Problem("`batch.ids` lacks keys.", got, need, "[] for a bag without ids", KeyError)
    if more := [k for k in ids.keys if k not in form.keys]:
        hint = f"ids.permute({list(form.keys)})"
        yield Problem("`batch.ids` has keys that the package does not read.", f"{more}", need, hint, KeyError)
    if ids.strides is not None and ids.inverse is None:
        hint = "[] for a bag without ids; or inverse indices, as `fr.dedup_bags` makes them"
        yield Problem("the keys have different numbers of bags.", f"{ids!r:.60}", "B bags per key", hint)
    yield from inverse_value_problems(ids)
    weighted = [k for k in ids.keys if ids.weights is not None and k not in ids.unweighted]
    if sorted(weighted) != sorted(form.weighted_keys) and not absent and not more:
        hint = "KeyedJaggedTensor.from_lists(ids, weights={key: ...}) of these keys"
        got, need = f"weights of {weighted}", f"of {form.weighted_keys}"
        yield Problem("other keys have weights than the package reads.", got, need, hint)
