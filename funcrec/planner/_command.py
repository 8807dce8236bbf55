"""python -m funcrec plan spec.json: plans from a file, and runs nothing but the planner.

{"mesh": {"data": 16, "model": 8}, "batch_size": 65536, "hardware": "h100",
 "tables": [{"name": "item", "num_embeddings": 1000000, "embedding_dim": 64}],
 "features": [{"name": "clicked", "table": "item"}],
 "constraints": {"item": {"pooling_factor": 20.0}}}
"""

import argparse
import contextlib
import ctypes
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from funcrec import optim
from funcrec.core import Problem, check, describe, fail, nearest
from funcrec.mesh import Codec
from funcrec.planner._hardware import Hardware
from funcrec.planner._plan import plan
from funcrec.planner._short import NoPlanError
from funcrec.sharding import Placement, Plan
from funcrec.tables import FeatureConfig, TableConfig

CALL = "python -m funcrec plan"
WRONG = (OSError, ImportError, KeyError, TypeError, ValueError)
NEEDED = ("tables", "features", "mesh", "batch_size")
DENSE = "dense"  # the dry run's part of a file that both commands read


def main(argv: list[str] | None = None) -> int:
    """Run the command, and return its exit code.

    The code is 0 for a plan, 1 if no plan fits, and 2 for errors in the file or the options.
    """
    parser = argparse.ArgumentParser(prog="python -m funcrec", description="Recommendation models as pure functions.")
    commands = parser.add_subparsers(required=True, metavar="command")
    raw = argparse.RawDescriptionHelpFormatter
    own = commands.add_parser("plan", help="places tables on ranks", description=__doc__, formatter_class=raw)
    own.add_argument("spec", type=Path, help="a JSON file, or YAML where PyYAML is installed: the arguments of fr.plan")
    own.add_argument("--out", type=Path, help="the plan as JSON, for fr.Plan.from_json")
    own.add_argument("--picture", type=Path, help="ranks x tables, as PNG or SVG; needs matplotlib")
    options = parser.parse_args(argv)
    try:
        spec = read(CALL, options.spec)
        with solver_on_stderr():
            made = plan_of(spec)
    except WRONG as error:
        print(error, file=sys.stderr)
        return 1 if isinstance(error, NoPlanError) else 2
    print(made.table())
    try:
        if options.out:
            options.out.write_text(made.to_json())
        if options.picture:
            made.draw().savefig(options.picture)
    except WRONG as error:
        print(error, file=sys.stderr)
        return 2
    return 0


@contextlib.contextmanager
def solver_on_stderr() -> Iterator[None]:
    """Return a context in which the whole process writes to stderr instead of stdout.

    HiGHS prints lines of its own, which no option turns off. No other thread of this process prints.
    """
    library = ctypes.CDLL(None)
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        library.fflush(None)  # what C holds in its buffer goes to stderr, too
        os.dup2(kept, 1)
        os.close(kept)


def read(call: str, path: Path) -> Any:
    """Return the content of a file of JSON, or of YAML by the ending of the name."""
    text = path.read_text()
    if path.suffix not in (".yaml", ".yml"):
        try:
            return json.loads(text)
        except ValueError as error:
            fail(call, f"`{path}` is not JSON.", got=str(error), need="JSON, or YAML in a file of that ending")
    try:
        import yaml
    except ImportError:
        hint = "pip install 'funcrec[plan]', or the same as JSON"
        fail(call, f"`{path}` is YAML.", got="no module yaml", need="PyYAML", hint=hint, kind=ImportError)
    return yaml.safe_load(text)


def plan_of(spec: Any) -> Plan:
    """Return the plan for a specification."""
    return plan(**arguments_of(CALL, spec))


def arguments_of(call: str, spec: Any) -> dict[str, Any]:
    """Return the arguments of `plan` for a specification.

    `optimizer` is a name of `fr.optim`, and the `dtype` of a table is a name of torch. `placements` are those of
    `Plan.to_json`. A model of the same file, under `dense`, moves no table: only the dry run reads it.
    """
    check(call, spec_problems(spec))
    own = {k: x for k, x in spec.items() if k != DENSE}
    own["tables"] = [TableConfig(**{**t, **_dtype(t)}) for t in own["tables"]]
    own["features"] = [FeatureConfig(**f) for f in own["features"]]
    for name, make in (("hardware", Hardware), ("codec", Codec)):
        if isinstance(own.get(name), Mapping):
            own[name] = make(**own[name])
    if isinstance(own.get("hardware"), list):
        own["hardware"] = [Hardware(**h) if isinstance(h, Mapping) else Hardware.named(h) for h in own["hardware"]]
    if own.get("placements") is not None:
        placement = lambda kind, axes=(), ranks=(): Placement(kind, tuple(axes), tuple(ranks))
        own["placements"] = {n: placement(**p) for n, p in own["placements"].items()}
    if isinstance(own.get("optimizer"), str):
        own["optimizer"] = getattr(optim, own["optimizer"])()
    return own


def _dtype(table: Mapping) -> dict:
    name = table.get("dtype")
    return {"dtype": getattr(torch, name)} if name is not None else {}


# -- validators --------------------------------------------------------------------------------------------------


def spec_problems(spec: Any) -> Iterator[Problem]:
    if not isinstance(spec, Mapping):
        need = f"{list(NEEDED)} and more of fr.plan"
        yield Problem("the file is not a mapping.", describe(spec), need, kind=TypeError)
        return
    names = [*inspect.signature(plan).parameters, DENSE]
    for name in (n for n in NEEDED if n not in spec):
        yield Problem(f"the file lacks `{name}`.", f"{list(spec)}", f"{list(NEEDED)}", kind=KeyError)
    for name in (n for n in spec if n not in names):
        near = nearest(str(name), names)
        yield Problem(f"the file has an unknown `{name}`.", f"{name!r}", f"one of {names}", f"{near!r}", KeyError)
    for key, config in (("tables", TableConfig), ("features", FeatureConfig)):
        yield from _config_problems(key, spec.get(key, []), config)
    codec, known = spec.get("codec"), list(inspect.signature(Codec).parameters)
    for name in (n for n in (codec if isinstance(codec, Mapping) else ()) if n not in known):
        yield Problem("`codec` has an unknown key.", f"{name!r}", f"one of {known}", kind=KeyError)
    yield from _placement_problems(spec.get("placements") or {})
    name = spec.get("optimizer")
    if name is not None and (not isinstance(name, str) or name.startswith("_") or name not in OPTIMIZERS):
        yield Problem("`optimizer` is unknown.", repr(name), f"one of {list(OPTIMIZERS)}")


def _placement_problems(given: Any) -> Iterator[Problem]:
    """Report placements that are not {table: {"kind", "axes", "ranks"}}, as `Plan.to_json` writes them."""
    if not isinstance(given, Mapping):
        yield Problem("`placements` is not a mapping.", describe(given), "{table: {'kind': ...}}", kind=TypeError)
        return
    fields = ("kind", "axes", "ranks")
    for table, p in given.items():
        is_form = isinstance(p, Mapping) and "kind" in p and not set(p) - set(fields)
        if not is_form or not all(isinstance(p.get(k, []), list) for k in fields[1:]):
            got, need = describe(p) if not isinstance(p, Mapping) else f"{dict(p)}", '{"kind": .., "axes": [..]}'
            hint = '{"kind": "row_wise", "axes": ["model"]}, and "ranks" for some kinds'
            yield Problem(f"`placements[{table!r}]` is not a placement.", got, need, hint, TypeError)


def _config_problems(key: str, given: Any, config: Callable) -> Iterator[Problem]:
    fields = list(inspect.signature(config).parameters)
    if not isinstance(given, list) or not all(isinstance(x, Mapping) for x in given):
        need = f"[{{{fields[0]!r}: ...}}]"
        yield Problem(f"`{key}` is not a list of mappings.", describe(given), need, kind=TypeError)
        return
    for i, x in enumerate(given):
        for name in (n for n in x if n not in fields):
            near = nearest(str(name), fields)
            yield Problem(f"`{key}[{i}]` has an unknown key.", f"{name!r}", f"one of {fields}", f"{near!r}", KeyError)
        dtype = x.get("dtype")
        if dtype is not None and not (isinstance(dtype, str) and isinstance(getattr(torch, dtype, 0), torch.dtype)):
            need = "the name of one of torch"
            yield Problem(f"`{key}[{i}]['dtype']` is not a dtype.", f"{dtype!r}", need, '"bfloat16"')


OPTIMIZERS = ("sgd", "momentum", "adagrad", "rowwise_adagrad", "adam", "adamw", "partial_rowwise_adam", "lamb",
    "partial_rowwise_lamb", "lars_sgd", "ftrl", "rmsprop", "lion")  # fmt: skip
