"""Traces of a function of parameters and a batch, as a program for any batch size and any number of ids.

    program(*params, dense?, values, offsets, inverse?, weights?) = predict(params, batch)     for every B, U and N

The function is traced twice. First `fr.jit` stages it for one size. This refuses what no program can hold: branches on
values, writes, draws, and tensors that are closed over. Then torch.export traces it for all sizes.
Shapes: B examples, F keys, N ids; without inverse indices B bags of each key, with them U.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcrec.compile import DECOMPOSITIONS, FOR_EXPORT, imported, stage
from funcrec.core import (
    Problem,
    check,
    describe,
    fail,
    is_of_handler,
    own_errors,
    paths,
    replace,
    sure,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)
from funcrec.invariance import check_operators, plain_of, replacements
from funcrec.jagged import KeyedJaggedTensor, expand_bags, inverse_value_problems, with_bags
from funcrec.serve._turned import turn_weights
from funcrec.serve._weights import NAMES
from funcrec.tables import Batch, bounded, kind_of_tables, lookups_seen, table_shapes

CALL = "funcrec.export"
ANY_ROW = 2**63 - 1  # the rows of a column that is hashed, or that no lookup reads: every id is valid
LINSPACE = torch.ops.aten.linspace.default
SINGLE = "output"  # the name of an output without a name
SAMPLE_BAGS, SAMPLE_IDS, SAMPLE_SHARED = 5, 7, 9  # sizes that no other dimension of a program is likely to have


class Form(NamedTuple):
    """The form of all batches.

    dense: the number of columns of `dense`, or None. weighted: whether ids have weights. Ids of `unweighted` keys have
    none. shared: whether examples share bags by inverse indices. Every key then has U >= 2 bags, some of them empty.
    """

    keys: tuple[str, ...]
    dense: int | None
    weighted: bool
    unweighted: tuple[str, ...]
    shared: bool = False

    @property
    def weighted_keys(self) -> list[str]:
        return [k for k in self.keys if self.weighted and k not in self.unweighted]

    def batch(self, inputs: Sequence[Tensor]) -> Batch:
        left = list(inputs)
        dense = None if self.dense is None else left.pop(0)
        values, offsets = left[:2]
        more = {"weights": left[-1], "unweighted": self.unweighted} if self.weighted else {}
        ids = KeyedJaggedTensor.from_offsets(self.keys, values, offsets, **more)
        return Batch(replace(ids, inverse=left[2]) if self.shared else ids, dense=dense)

    def bags(self, ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return ids with the bags that a program takes: those of each example, or U of each key."""
        if not self.shared:
            return ids if ids.inverse is None else expand_bags(ids)
        if ids.inverse is None:
            ids = replace(ids, inverse=torch.arange(ids.num_bags).expand(len(ids.keys), -1))
        most = max(2, *map(ids.bags_of, ids.keys))
        return ids if ids.strides is None and ids.num_bags == most else with_bags(ids, [most] * len(ids.keys))

    def inputs(self, batch: Batch) -> list[Tensor]:
        """Return the tensors of a batch, as a program takes them."""
        ids = self.bags(batch.ids)
        dense = [] if self.dense is None else [batch.dense.contiguous()]
        weights = [sure(ids.weights).float().contiguous()] if self.weighted else []
        whole = [ids.values, ids.offsets, ids.inverse] if self.shared else [ids.values, ids.offsets]
        return [*dense, *(x.long().contiguous() for x in whole), *weights]

    def specs(self) -> list[dict]:
        dense = [] if self.dense is None else [("dense", "float32", ["B", self.dense])]
        weights = [("weights", "float32", ["N"])] if self.weighted else []
        ids = [("values", "int64", ["N"]), ("offsets", "int64", ["F*U+1" if self.shared else "F*B+1"])]
        ids += [("inverse", "int64", [len(self.keys), "B"])] if self.shared else []
        return [{"name": n, "dtype": d, "shape": s} for n, d, s in (*dense, *ids, *weights)]

    def sample(self) -> list[Tensor]:
        dense = [] if self.dense is None else [torch.zeros(SAMPLE_BAGS, self.dense)]
        zeros = lambda *size: torch.zeros(size, dtype=torch.int64)
        ids = [zeros(SAMPLE_IDS), zeros(len(self.keys) * (SAMPLE_SHARED if self.shared else SAMPLE_BAGS) + 1)]
        ids += [zeros(len(self.keys), SAMPLE_BAGS)] if self.shared else []
        return [*dense, *ids, *([torch.ones(SAMPLE_IDS)] if self.weighted else [])]


def form_of(example: Batch) -> Form:
    ids = example.ids
    dense = None if example.dense is None else example.dense.shape[1]
    return Form(ids.keys, dense, ids.weights is not None, ids.unweighted, ids.inverse is not None)


class Program(NamedTuple):
    """A traced program. exported: a program of flat tensors. outputs, features, tables, turned: as in the manifest."""

    exported: torch.export.ExportedProgram
    outputs: list[dict]
    features: list[dict]
    tables: list[dict[Any, Any]]
    turned: list[str]


def trace(predict: Callable, params: Any, form: Form, max_batch: int, max_ids: int) -> Program:
    """Return predict(params, batch) as a program, for parameters and batches of these forms."""
    leaves, structure = tree_flatten(params)
    names = [n for n, _ in paths(params)]
    order = sorted(range(len(names)), key=names.__getitem__)
    flat = [leaves[i].detach() for i in order]  # a tensor that occurs twice is two inputs, which may differ later
    seen: list = []  # values of the last trace

    def run(predict: Callable, *xs: Tensor) -> tuple[Tensor, ...]:
        own = dict(zip(order, xs, strict=False))
        batch = form.batch(xs[len(order) :])
        with lookups_seen() as lookups:
            out = called(predict, tree_unflatten([own[i] for i in range(len(order))], structure), batch)
        check(CALL, output_problems(out, batch.ids.num_examples))
        seen[:] = [xs, batch, out, lookups]
        return tuple(out.values()) if isinstance(out, Mapping) else (out,)

    with torch.no_grad():
        said = [f"params.{names[i]}" for i in order] + [f"batch.{x['name']}" for x in form.specs()]
        with own_errors(CALL, predict, params, form.batch(form.sample()), need="parameters and a batch that it reads"):
            staged = stage(CALL, functools.partial(run, predict), [*flat, *form.sample()], said)
        check(CALL, captured_problems(staged.captured))
        exported = export_of(run, predict, [*flat, *form.sample()], form, max_batch, max_ids)
    xs, batch, out, lookups = seen
    param_names = {id(x): names[i] for x, i in zip(xs, order, strict=False)}
    turned = turn_weights(exported, [names[i] for i in order])
    return Program(exported, outputs_of(out), features_of(batch.ids, lookups), tables_of(lookups, param_names), turned)


@contextlib.contextmanager
def without_stacks() -> Iterator[None]:
    """Return a context in which torch does not write into each node of a program which lines of Python made it.

    A program has thousands of nodes for its sizes, and nothing reads these lines: they are an eighth of an export.
    """
    from torch.fx import config

    before, config.do_not_emit_stack_traces = config.do_not_emit_stack_traces, True
    try:
        yield
    finally:
        config.do_not_emit_stack_traces = before


def called(predict: Callable, params: Any, batch: Batch) -> Any:
    """Return predict(params, batch). If `predict` reads a label or a weight, the error says so."""
    try:
        return predict(params, batch)
    except (TypeError, AttributeError) as error:
        if not is_of_handler(error) and reads_examples(predict, params, batch):
            got, need = f"{type(error).__name__}: {str(error)[:120]}", "ids and dense inputs: a request has no more"
            hint = "the logits, as `model.apply(params, batch)` gives them, not their loss"
            fail(CALL, "`predict` reads the label or the weight of examples.", got=got, need=need, hint=hint,
                kind=TypeError)  # fmt: skip
        raise


def reads_examples(predict: Callable, params: Any, batch: Batch) -> bool:
    """Return whether a call that failed without label and weight works with them."""
    ones = torch.ones(batch.ids.num_examples)
    try:
        predict(params, replace(batch, label=ones, weight=ones))
    except Exception as error:
        if is_of_handler(error):
            raise
        return False
    return True


def export_of(run: Callable, predict: Callable, inputs: list[Tensor], form: Form, max_batch: int, max_ids: int):
    """Return a program of flat tensors, exported by torch.export without known faults of Inductor.

    torch.export records above the mode of `invariant`, whose table then replaces operators in the program.
    """
    plain = plain_of(predict)
    bags = torch.export.Dim("B", min=1, max=max(max_batch, 2 * SAMPLE_BAGS))
    num_ids = torch.export.Dim("N", min=0, max=max(max_ids, 2 * SAMPLE_IDS))
    shared = torch.export.Dim("U", min=1, max=max(max_batch, 2 * SAMPLE_SHARED))
    sizes = {"B": bags, "N": num_ids, "F*B+1": len(form.keys) * bags + 1, "F*U+1": len(form.keys) * shared + 1}
    open_sizes = [{i: sizes[n] for i, n in enumerate(spec["shape"]) if n in sizes} for spec in form.specs()]
    shapes = (None,) * (len(inputs) - len(open_sizes)) + tuple(open_sizes)
    module = torch.nn.Module()
    module.forward = functools.partial(run, predict if plain is None else plain)
    imported(FOR_EXPORT)
    try:
        with warnings.catch_warnings():  # torch warns of its own old calls
            warnings.simplefilter("ignore", FutureWarning)
            exported = torch.export.export(module, tuple(inputs), dynamic_shapes=(shapes,), strict=False)
            known = {**DECOMPOSITIONS, LINSPACE: no_whole_linspace}
            if plain is None:
                return exported.run_decompositions(known)
            program = exported.run_decompositions({**known, **replacements()})
            check_operators(program.graph)
            return program
    except Exception as error:
        if str(error).startswith((CALL, "funcrec.invariant")) or is_of_handler(error):
            raise
        said = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        need = "a function of tensors that is the same for every batch size and number of ids"
        hint = "no int(), list or branch of a size of the batch; `fr.jit` away, which export does not need"
        what = "`predict` is not one program for all batch sizes."
        fail(CALL, what, got=f"{type(error).__name__}: {said[:200]}", need=need, hint=hint)


def no_whole_linspace(*args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    """Refuse linspace of whole numbers: `fr.jit` makes it a constant, and torch.export has no such decomposition."""
    if dtype is None or dtype.is_floating_point or dtype.is_complex:
        return NotImplemented
    what, need = "`predict` makes whole numbers by torch.linspace.", "a tensor of `params`, or torch.arange"
    return fail(CALL, what, got=f"torch.linspace(..., dtype={dtype})", need=need, hint="put the numbers in `params`")


def outputs_of(out: Tensor | Mapping[str, Tensor]) -> list[dict]:
    named = out if isinstance(out, Mapping) else {SINGLE: out}
    return [{"name": n, "dtype": NAMES[x.dtype], "shape": ["B", *map(int, x.shape[1:])]} for n, x in named.items()]


def features_of(ids: KeyedJaggedTensor, lookups: Sequence) -> list[dict]:
    """Return for each key its name, the table that reads it, the rows of this table, and whether its ids have weights.

    If several tables read a key without a hash, the least number of rows counts."""
    read: dict[str, list[tuple[str, int]]] = {key: [] for key in ids.keys}
    for tables, given, features in lookups:
        shapes = table_shapes(tables)
        for f in bounded(features, tables) if given.values is ids.values and given.keys == ids.keys else ():
            read[f.key].append((f.table, ANY_ROW if f.hash is not None else shapes[f.table][0]))
    return [
        {
            "name": key,
            "table": next((t for t, _ in own), None),
            "rows": min((rows for _, rows in own), default=ANY_ROW),
            "weighted": ids.weights is not None and key not in ids.unweighted,
        }
        for key, own in read.items()
    ]


def tables_of(lookups: Sequence, names: Mapping[int, str]) -> list[dict]:
    """Return each table that is read, with the name of the parameter that holds its rows."""
    found = {}
    for tables, _, features in lookups:
        shapes, parts = table_shapes(tables), dict(tables)
        coded = {n: bits for n, (bits, _) in kind_of_tables(tables).forms(tables).items()}
        for table in dict.fromkeys(f.table for f in features):
            x = parts.get(table)  # None for kinds whose parts are no tables
            name, (rows, dim) = names.get(id(x)), shapes[table]
            bits = coded.get(table, None if x is None else 8 * x.element_size())
            found[table, name] = {"name": table, "param": name, "rows": rows, "dim": dim, "bits": bits}
    return list(found.values())


# -- validators --------------------------------------------------------------------------------------------------


def example_problems(example: Batch) -> Iterator[Problem]:
    """Yield problems if the example has a form that not all batches can have."""
    ids, hint = example.ids, "batches of one number of bags for each key"
    if not ids.keys:
        what = "`example.ids` has no key."
        yield Problem(what, "no key", "one key or more", 'fr.KeyedJaggedTensor.from_lists({"item": [[1]]})')
    if ids.strides is not None and ids.inverse is None:
        yield Problem("`example.ids` has another number of bags for each key.", f"{ids!r:.60}", "B bags per key", hint)
    yield from inverse_value_problems(ids)
    if example.dense is not None and (example.dense.dim() != 2 or example.dense.dtype != torch.float32):
        got = describe(example.dense)
        yield Problem("`example.dense` is not f32[B, D].", got, "f32[B, D]", "dense.float()", TypeError)
    away = [x for x in (*tree_leaves(ids), example.dense) if isinstance(x, Tensor) and x.device.type != "cpu"]
    if away:
        need, hint = "the CPU, where packages run", 'example.to("cpu")'
        yield Problem("`example` is on another device.", f"{away[0].device}", need, hint)
    if ids.weights is not None and (ids.weights.dim() != 1 or not ids.weights.is_floating_point()):
        yield Problem("`example.ids.weights` are not numbers.", describe(ids.weights), "f[N]", kind=TypeError)


def output_problems(out: Any, num_bags: Any) -> Iterator[Problem]:
    named = out if isinstance(out, Mapping) else {SINGLE: out}
    need, hint = "a tensor [B, ...], or a dict of them", 'return {"click": torch.sigmoid(logits)}'
    if not named or not all(isinstance(n, str) for n in named):
        yield Problem("`predict` returns no named tensors.", f"keys {list(named)}", need, hint, TypeError)
    for n, x in named.items():
        at = f"`predict(...)[{n!r}]`" if isinstance(out, Mapping) else "`predict(...)`"
        if not isinstance(x, Tensor):
            yield Problem(f"{at} is not a tensor.", describe(x), need, hint, TypeError)
        elif x.dtype not in NAMES:
            need = f"{list(NAMES.values())}"
            yield Problem(f"{at} has a dtype that packages lack.", describe(x), need, "x.float()")
        elif not x.dim() or x.shape[0] != num_bags:
            got = f"[{', '.join(map(str, x.shape))}] of a batch of {num_bags}"
            hint = "the logits of each bag, not their loss"
            yield Problem(f"{at} has no row for each bag.", got, need, hint)


def captured_problems(captured: Sequence[Tensor]) -> Iterator[Problem]:
    """Yield a problem if `predict` closes over a tensor: no swap of weights would reach its copy in the program."""
    if captured:
        got = ", ".join(map(describe, captured[:3])) + (f" and {len(captured) - 3} more" if len(captured) > 3 else "")
        hint = "into `params`, whose values are the package's weights"
        yield Problem("`predict` closes over tensors.", got, "all tensors from `params` and `batch`", hint)
