"""Checks of what `export` takes: an encoding, parameters, paths, instruction sets."""

import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.utils._pytree as torch_tree

from funcrec.compile import lowered_products
from funcrec.core import Problem
from funcrec.data import Encoding
from funcrec.invariance import plain_of
from funcrec.kinds import DynamicTables, stored_problems
from funcrec.serve._manifest import MANIFEST
from funcrec.serve._trace import Form
from funcrec.tables import KINDS, kind_of_tables, layout_in


def encoding_problems(encoding: Encoding, form: Form) -> Iterator[Problem]:
    """Yield problems if batches of the encoding have another form than the example."""
    schema, columns = encoding.schema, [column for column, _ in encoding.tables]
    hint = "fr.data.fit_encoding(table, schema) of the data that `example` is of"
    if absent := [k for k in form.keys if k not in columns]:
        yield Problem("`encoding` lacks keys of `example`.", f"{columns}", f"{absent} among them", hint)
    if form.dense is not None and len(schema.dense) != form.dense:
        need = f"{form.dense}, as in `example.dense`"
        yield Problem("`encoding` has other dense columns.", f"{len(schema.dense)}", need, hint)
    weighted, wanted = [k for k in form.keys if k in dict(schema.weights)], form.weighted_keys
    if weighted != wanted:
        need = f"of {wanted}, as in `example.ids`"
        yield Problem("`encoding` has weights of other keys.", f"of {weighted}", need, hint)


def kept_problems(params: Any) -> Iterator[Problem]:
    """Yield a problem if tables lie on ranks or in stores, or have a batch's rows: they are not all rows."""
    is_kind = lambda x: type(x) in KINDS and type(x) is not dict
    for x in filter(is_kind, torch_tree.tree_leaves(params, is_leaf=is_kind)):
        if isinstance(x, DynamicTables):
            yield from stored_problems(x)
        elif layout_in(x) is not None or kind_of_tables(x).follows(x):
            what, hint = "`params` have sharded tables, or rows of one batch.", "fr.gather_tables, or cached.gather"
            yield Problem(what, type(x).__name__, "whole tables, or quantised ones", hint, TypeError)


def package_problems(path: Path) -> Iterator[Problem]:
    if os.path.exists(path / MANIFEST):
        need, hint = "a folder of weights", "another path, and package.swap(path)"
        yield Problem(f"`{path}` is a package.", "a folder with a program", need, hint, FileExistsError)


def isa_problems(isa: str) -> Iterator[Problem]:
    if isa == "portable" and platform.machine() not in ("x86_64", "AMD64"):
        need, hint = "an x86-64 processor", 'isa="native"'
        yield Problem("`isa` does not fit this kind of processor.", platform.machine(), need, hint)


def product_problems(predict: Callable) -> Iterator[Problem]:
    """Yield a problem if this process rounds operands of products: a package has no such setting, and a server f32."""
    how = lowered_products().get("cpu")
    if how == "bf16" and plain_of(predict) is None:
        need = "torch.backends.mkldnn.matmul.fp32_precision 'ieee': a package does not keep the setting"
        hint = "'ieee' before the export; for products of bf16 in a package, torch.autocast inside of `predict`"
        yield Problem("products of f32 round their operands in this process.", f"{how!r}", need, hint)
