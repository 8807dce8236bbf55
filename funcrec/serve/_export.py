"""Export of a trained model as a folder: a program that takes parameters as inputs, the parameters, and a manifest.

load_package(export(predict, params, example, path))(batch) = predict(params, batch)
"""

import os
import shutil
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from funcrec.checkpoint import save
from funcrec.compile import OPTIONS, apart, knowing, need_compiler, plain_device_names, two_products
from funcrec.core import Count, Problem, check, describe, fail, has_tracked, is_of_handler, message, typed
from funcrec.core import version as own_version
from funcrec.data import Encoding
from funcrec.files import folder_path, write_folder
from funcrec.jagged import KeyedJaggedTensor, dedup_bags, expand_bags
from funcrec.serve._export_checks import (
    encoding_problems,
    isa_problems,
    kept_problems,
    package_problems,
    product_problems,
)
from funcrec.serve._manifest import (
    BLANK,
    ENCODING,
    FORMAT,
    MANIFEST,
    MODEL,
    TURNED_FORMAT,
    digest_of,
    needs_of,
    sha256_of,
    text_of,
)
from funcrec.serve._package import Package, load_package
from funcrec.serve._trace import ANY_ROW, CALL, SINGLE, Form, Program, example_problems, form_of, trace, without_stacks
from funcrec.serve._weights import FILE, Version, named, params_problems, signature, write_weights
from funcrec.tables import Batch

ISA = {"native": {}, "portable": {"cpp.simdlen": 256, "cpp.march": "x86-64-v3"}}
# The tolerance for outputs that are computed in another order, by dtype.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}

STAGING = threading.RLock()  # the lock for patches of torch and settings of Inductor, which are global

PROBES = 5  # the number of bags that are answered together, and one by one
CANARY_BAGS, CANARY_IDS = 4, 4096  # the most bags and ids of the example that a package keeps
# The number of draws of such bags, and of draws in which a whole number may differ, because rounding decides ties.
DRAWS, TURNS = 6, 2


@typed
def export(
    predict: Callable[..., Any],
    params: Any,
    example: Batch,
    path: str | os.PathLike[str],
    *,
    encoding: Encoding | None = None,
    version: Version | None = None,
    max_batch: Count = 4096,
    max_ids: Count = 1 << 24,
    isa: Literal["native", "portable"] = "native",
    overwrite: bool = False,
) -> Path:
    """Return the folder of a compiled model, which `load_package` runs, and also C++ without Python.

    Args:
      predict: a pure function (params, batch) -> a tensor with a row for each of B bags, or {name: such a tensor}. Its
        batches have neither label nor weight.
      params: any tree of tensors that `predict` takes, such as `state.params`, or quantised tables in place of the
        tables.
      example: any batch with the keys, dense inputs and weights of ids that requests have. Its sizes do not matter. The
        package keeps its first four bags. A server refuses weights that do not answer these bags with finite numbers.
        With inverse indices, as `dedup_bags` makes them, the program pools a bag once that many examples have: a
        user's bags, for one of 100 candidates each. Such a package runs in Python only.
      path: a folder that does not exist yet. It is written whole or not at all.
      encoding: the encoding of raw rows, for `Package.encode`.
      version: a name of the parameters. The default is made from their values.
      max_batch: the largest number of bags that the program takes.
      max_ids: the largest number of ids that the program takes in one batch.
      isa: "native", for processors like this one; "portable", for all with AVX2 (x86-64-v3).
      overwrite: whether a package at `path` may be replaced. Processes that have it open keep the old package.

    Returns:
      the folder. It holds model.pt2 (AOTInductor, with the parameters as inputs), weights.safetensors and
      manifest.json. With an encoding it also holds encoding.frc.

    Raises:
      TypeError, ValueError: if `predict` cannot be one program for all batches. It cannot if it branches on values or
        sizes, writes to arguments, draws from torch's generators, closes over tensors (put these into `params`), or
        takes derivatives. The error is also raised if the answer of a bag depends on other bags of its batch, because a
        server joins requests. To check this, five bags are answered together and one by one, with ids of the example
        and other ids. Numbers with a fraction must agree within 1e-4 (for f32). Whole numbers must be equal in four of
        six draws. If `predict` refuses keys of different lengths, keys whose bags are equal in the example keep equal
        bags.
      FileExistsError: if `path` exists and `overwrite` is False, or if `path` is not a package.

    Law: load_package(export(predict, params, batch, path))(batch) == predict(params, batch), up to rounding. With
      `fr.invariant(predict)` it is equal.

    Cost: a program of `fr.invariant(predict)` takes the weights of its linear layers turned: a package that is opened
      holds them twice, and a product of one to sixteen rows takes half to a third of the time.

    Example:
      >>> import tempfile, torch, funcrec as fr
      >>> clicked = fr.FeatureConfig("clicked", table="item")
      >>> predict = lambda params, batch: fr.lookup(params.tables, batch.ids, [clicked]).values.sum(1)
      >>> batch = fr.Batch(fr.KeyedJaggedTensor.from_lists({"clicked": [[1, 2], []]}))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = fr.export(predict, fr.Params({"item": torch.eye(3)}, {}), batch, folder + "/model")
      ...     package = fr.load_package(path)
      >>> package(batch)
      tensor([2., 0.])
    """
    check(CALL, params_problems(params), example_problems(example))
    check(CALL, kept_problems(params), isa_problems(isa), product_problems(predict))
    where = folder_path(CALL, path, overwrite=overwrite, marks=(MANIFEST,))
    example = Batch(example.ids, dense=example.dense)
    if has_tracked(params, example):
        got, need = "a tensor that grad or jvp follows", "plain tensors: a package has no derivative"
        fail(CALL, "an argument is being differentiated.", got=got, need=need, hint="x.detach()", kind=TypeError)
    apart(lambda: need_compiler(CALL))
    form, tensors = form_of(example), named(params)
    check(CALL, encoding_problems(encoding, form) if encoding is not None else ())
    with STAGING, without_stacks():
        program = trace(predict, params, form, max_batch, max_ids)
    count, plain = min(PROBES, max_batch), example
    if form.shared:
        plain = Batch(expand_bags(example.ids), dense=example.dense)
    compare_alone(predict, params, probes(predict, params, plain, program.features, count), count)
    canary = canary_of(predict, params, plain, form, min(CANARY_BAGS, max_batch), min(CANARY_IDS, max_ids))
    shows = canary["finite"] or not any("float" in x["dtype"] for x in program.outputs)
    unseen = tables_unseen(canary, program.features)
    if not shows or not canary["values"] or unseen:
        warnings.warn(message(CALL, [canary_problem(canary, shows, unseen)]), stacklevel=3)
    content = {
        **{"format": FORMAT, "digest": BLANK, "funcrec": own_version(), "torch": torch.__version__},
        **{"isa": isa, "needs": needs_of(isa), "inputs": form.specs(), "params": signature(tensors)},
        **{"outputs": program.outputs, "features": program.features, "tables": program.tables},
        **{"max_batch": max_batch, "max_ids": max_ids, "example": canary},
    }
    if program.turned:
        content |= {"format": TURNED_FORMAT, "turned": program.turned}

    def write(folder: Path) -> None:
        write_weights(folder, tensors, version)
        if encoding is not None:
            save(folder / ENCODING, encoding)
        content["files"] = {n: BLANK for n in (MODEL, ENCODING) if n == MODEL or encoding is not None}
        content["digest"] = digest_of(text_of(content))
        compile_program(program, folder / MODEL, isa, content["digest"])
        content["files"] = {n: sha256_of(folder / n) for n in content["files"]}
        (folder / MANIFEST).write_text(text_of(content))
        compare(predict, params, plain, load_package(folder, checksums=False), form.shared)

    write_folder(CALL, where, write)
    return where


@typed
def save_weights(
    path: str | os.PathLike[str], params: Any, *, version: Version | None = None, overwrite: bool = False
) -> Path:
    """Return a folder of parameters that a package can load in place of its own: `package.swap(path)`.

    Args:
      params: a tree like the exported tree, with values that were trained further.
      version: a name of the parameters. The default is made from their values.
      overwrite: whether weights at `path` may be replaced. The whole folder is then replaced.

    Returns:
      the folder, with weights.safetensors, here or in a store (see `save`). It is written whole or not at all.

    Example:
      >>> import pathlib, tempfile, torch, funcrec as fr
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = fr.save_weights(folder + "/monday", fr.Params({"item": torch.eye(3)}, {}), version="monday")
      ...     sorted(x.name for x in pathlib.Path(path).iterdir())
      ['weights.safetensors']
    """
    call = "funcrec.save_weights"
    check(call, params_problems(params), kept_problems(params))
    where = folder_path(call, path, overwrite=overwrite, marks=(FILE,))
    check(call, package_problems(where))
    write_folder(call, where, lambda folder: write_weights(folder, named(params), version))
    return where


def compile_program(program: Program, path: Path, isa: str, digest: str) -> None:
    """Compile the program to a package of AOTInductor at `path`.

    The intermediate files lie in a separate folder. Otherwise another export of this function at the same time would
    write to the same files while they are packed. The loops use one thread: an index outside its tensor throws, and a
    throw from several threads would end the process.
    """
    options = {**OPTIONS, **ISA[isa], "cpp.threads": 1, "aot_inductor.check_lowerbound": False}
    options["aot_inductor.metadata"] = {"funcrec_digest": digest}

    def work() -> None:
        from torch._inductor import aoti_compile_and_package, config

        own = tempfile.TemporaryDirectory()
        by_rows = two_products(program.exported, is_native=isa == "native")
        with STAGING, own, knowing(), by_rows, warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            with plain_device_names(), without_stacks(), config.patch({"aot_inductor.output_path": own.name}):
                made = aoti_compile_and_package(
                    program.exported, package_path=f"{own.name}/{path.name}", inductor_configs=options
                )
            shutil.move(made, path)  # an interrupted call leaves no folder

    apart(work)


def canary_of(predict: Callable, params: Any, example: Batch, form: Form, most_bags: int, most_ids: int) -> dict:
    """Return the request that other weights must answer: first bags of the example, and the names of finite outputs."""
    ids, bags = example.ids, min(most_bags, example.ids.num_bags)
    while bags and int(ids[:bags].lengths.sum()) > most_ids:
        bags -= 1
    cut = ids[:bags]
    begin, end = int(cut.offsets[0]), int(cut.offsets[-1])
    weights = None if cut.weights is None else cut.weights[begin:end].nan_to_num()
    parts = {"weights": weights, "unweighted": cut.unweighted} if weights is not None else {}
    own = KeyedJaggedTensor.from_offsets(cut.keys, cut.values[begin:end], cut.offsets - begin, **parts)
    batch = Batch(own, dense=None if example.dense is None else example.dense[:bags].nan_to_num())
    finite = []
    if bags:
        with torch.no_grad():
            out = predict(params, batch)
        finite = [name for name, x, _ in outputs(out, out) if x.is_floating_point() and bool(x.isfinite().all())]
    form = form._replace(shared=False)  # a bag for each example
    inputs = {spec["name"]: x.reshape(-1).tolist() for spec, x in zip(form.specs(), form.inputs(batch), strict=True)}
    return {"bags": bags, **inputs, "finite": finite}


def tables_unseen(canary: Mapping, features: Sequence[Mapping]) -> list[str]:
    """Return the tables of which the canary has ids, and no id inside the table: such ids read zeros."""
    inside: dict[str, bool] = {}
    for i, feature in enumerate(features):
        first, last = (canary["offsets"][j * canary["bags"]] for j in (i, i + 1))
        ids, table = canary["values"][first:last], feature["table"]
        rows = feature["rows"]
        if ids and table is not None:
            inside[table] = inside.get(table, False) or rows == ANY_ROW or any(0 <= x < rows for x in ids)
    return [table for table, shows in inside.items() if not shows]


def canary_problem(canary: Mapping, shows: bool, unseen: Sequence[str]) -> Problem:
    """Return the problem that a server cannot recognise weights that diverged."""
    what = "`example` shows no finite answer that depends on the tables: a server will take any weights."
    got = "NaN or infinite answers" if canary["values"] else "no id in its first bags"
    if shows and unseen:
        what = "`example` shows no answer that depends on some tables: a server will take any weights for these."
        got = f"only ids outside table {unseen[0]!r} in its first bags"
        got += f", and so for {len(unseen) - 1} more tables" if len(unseen) > 1 else ""
    return Problem(
        what, got, "a bag of ids with a finite answer", "an example of the training data, and trained parameters"
    )


def compare(predict: Callable, params: Any, example: Batch, package: Package, is_shared: bool) -> None:
    """Raise if the answers of the program differ from those of `predict`, on the example or on its first bag alone."""
    most = min(example.ids.num_bags, package.manifest["max_batch"])
    for count in sorted({min(1, most), most} - {0}):
        ids = dedup_bags(example.ids[:count]) if is_shared else example.ids[:count]
        batch = Batch(ids, dense=None if example.dense is None else example.dense[:count])
        with torch.no_grad():
            want = predict(params, batch)
        got = package(batch)
        for at, far in differences(got, want):
            what = f"{at} of {count} bags is not what the compiled program gives."
            need = "one function for all batch sizes"
            hint = "no branch on the number of bags, no squeeze() without a dimension"
            fail(CALL, what, got=far, need=need, hint=hint)


def compare_alone(predict: Callable, params: Any, draw: Callable[[int], Callable], count: int) -> None:
    """Raise unless predict(params, bags)[i] = predict(params, bags[i:i+1])[0], so that requests may be joined."""
    turned: Counter[str] = Counter()
    for seed in range(DRAWS):
        bags = draw(seed)
        with torch.no_grad():
            joined = predict(params, bags(slice(count)))
            rows = [{name: x[i : i + 1] for name, x, _ in outputs(joined, joined)} for i in range(count)]
            pairs = [(predict(params, bags(slice(i, i + 1))), row) for i, row in enumerate(rows)]
        found = dict(x for pair in pairs for x in differences(*pair))
        whole = dict(x for pair in pairs for x in whole_differences(*pair))
        turned.update(whole.keys())
        for at, far in (*found.items(), *((at, far) for at, far in whole.items() if turned[at] > TURNS)):
            need = "the answer that a bag has alone: a server joins requests"
            hint = "no mean, softmax or sort over bags; what was learned of many, as a tensor in `params`"
            got = f"alone and in a batch of {count}: {far}"
            fail(CALL, f"{at} of a bag depends on the other bags.", got=got, need=need, hint=hint)
        if all(y.dtype in TOLERANCE for _, _, y in outputs(joined, joined)):
            return


def probes(predict: Callable, params: Any, example: Batch, features: Sequence[Mapping], count: int) -> Callable:
    """Return a function from a seed to a `probe` that `predict` takes.

    Each key has bags of other lengths. If `predict` refuses these, keys whose bags are equal in the example have equal
    bags: they may be columns of one sequence.
    """
    try:
        with torch.no_grad():
            predict(params, probe(example, features, 0)(slice(count)))
    except ValueError as error:
        if is_of_handler(error):
            raise
        lengths = [tuple(example.ids[feature["name"]].lengths.tolist()) for feature in features]
        turns = [lengths.index(own) for own in lengths]
        return lambda seed: probe(example, features, seed, turns)
    return lambda seed: probe(example, features, seed)


def probe(
    example: Batch, features: Sequence[Mapping], seed: int, turns: Sequence[int] | None = None
) -> Callable[[slice], Batch]:
    """Return a function from a slice to a batch of these bags, of PROBES bags that all differ.

    A bag has 0 to 3 ids for each key: ids of the example and, if the rows of the table are known, other ids. Dense
    inputs are those of the example plus a fraction that keeps the floors of whole numbers. Keys with the same number in
    `turns` have equal bags; by default each key has its own.
    """
    random = torch.Generator().manual_seed(seed)
    draw = lambda n: int(torch.randint(n, (), generator=random))
    ids, weights = {}, {}
    for k, feature in enumerate(features):
        name, rows = feature["name"], feature["rows"]
        known = example.ids[name]
        found = known.values[int(known.offsets[0]) : int(known.offsets[-1])][:PROBES].tolist()
        found += [draw(rows) for _ in range(PROBES if 0 < rows < ANY_ROW else 0)]
        turn = k if turns is None else turns[k]
        found = [0] if turns is not None and not found else found
        ids[name] = [
            [found[draw(len(found))] for _ in range((i + turn + 1) % 4 if found else 0)] for i in range(PROBES)
        ]
        if feature["weighted"]:
            weights[name] = [[(j + 1) / 4 for j in range(len(bag))] for bag in ids[name]]
    dense = example.dense
    if dense is not None:
        places = torch.arange(PROBES)
        rows = dense[places % len(dense)] if len(dense) else dense.new_zeros(PROBES, dense.shape[1])
        dense = rows + ((places + seed) / 8)[:, None]

    def bags(at: slice) -> Batch:
        cut, by = ({n: x[at] for n, x in part.items()} for part in (ids, weights))
        own = KeyedJaggedTensor.from_lists(cut, weights=by or None)
        return Batch(own, dense=None if dense is None else dense[at])

    return bags


def outputs(got: Tensor | Mapping, want: Tensor | Mapping) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield (name, one, other) for each output of two answers. An output without a name is called SINGLE."""
    one, other = ({SINGLE: x} if isinstance(x, Tensor) else x for x in (got, want))
    return ((name, x, other[name]) for name, x in one.items())


def called(name: str) -> str:
    return "`predict(...)`" if name == SINGLE else f"`predict(...)[{name!r}]`"


def differences(got: Tensor | Mapping, want: Tensor | Mapping) -> Iterator[tuple[str, str]]:
    """Yield (output, how far apart) for outputs that differ by more than the tolerance."""
    for name, x, y in outputs(got, want):
        near = TOLERANCE.get(y.dtype)
        if x.shape != y.shape or (near and not torch.allclose(x, y, near, near, equal_nan=True)):
            far = f"{(x - y).abs().max():.3g} apart" if x.shape == y.shape else f"{describe(x)}, not {describe(y)}"
            yield called(name), far


def whole_differences(got: Tensor | Mapping, want: Tensor | Mapping) -> Iterator[tuple[str, str]]:
    """Yield (output, how many numbers differ) for outputs of integers or booleans that differ."""
    for name, x, y in outputs(got, want):
        if y.dtype not in TOLERANCE and not torch.equal(x, y):
            yield called(name), f"{describe(x)}, {int((x != y).sum())} of its numbers others"
