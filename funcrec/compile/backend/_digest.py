"""Compute a name from everything that a graph's code depends on. Graphs with one name have equal code in any process.

digest(graph, arguments, options) = hash(operations, forms, options, surroundings, torch, funcrec, processor)
"""

import functools
import hashlib
import importlib
import operator
import os
import platform
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from funcrec.compile._ambient import SEEN

KNOWN = {"aten", "prims", "_c10d_functional"}  # namespaces whose operators each version of torch lowers in one way
PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
CONFIGS = ("torch._inductor.config", "torch._functorch.config", "torch._dynamo.config")
# VARIABLES are prefixes of variables that torch and compilers read. PLACES are paths, which do not change the code.
VARIABLES = ("TORCH", "ATEN_", "PYTORCH_", "CXX", "CPATH", "CPLUS_", "C_INCLUDE", "CFLAGS", "CPPFLAGS", "GCC_")
PLACES = ("TORCHINDUCTOR_CACHE_DIR", "TORCH_HOME", "TORCHELASTIC_")


def digest(graph: GraphModule, arguments: Sequence[Tensor], options: dict[str, Any]) -> str | None:
    """Return the name of a graph's code, or None if a value without a name may change the code.

    Such values are operators, passes and lowerings of other libraries.
    """
    try:
        parts = [*operations(graph), *map(form, arguments), *surroundings(), *map(setting, sorted(options.items()))]
    except Unnamed:
        return None
    return hashlib.sha256("\n".join([*parts, *system()]).encode()).hexdigest()


class Unnamed(Exception):
    """Raised for a value that its text does not determine."""


def named(x: Any) -> Any:
    """Return x with sorted dicts. Raise Unnamed if the text of x does not determine x."""
    if isinstance(x, (tuple, list)):
        return [named(y) for y in x]
    if isinstance(x, dict):
        return {named(k): named(v) for k, v in sorted(x.items())}
    if type(x) not in PLAIN or (isinstance(x, torch.device) and x.type != "cpu"):  # funcrec keeps code for a CPU only
        raise Unnamed
    return x


def form(x: Tensor) -> str:
    if x.device.type != "cpu":
        raise Unnamed
    return f"{x.dtype} {tuple(x.shape)} {x.stride()}"


def operations(graph: GraphModule) -> Iterator[str]:
    """Yield the text of each node. The text refers to other nodes by number."""
    number: dict[Node, int] = {}
    for node in graph.graph.nodes:
        number[node] = len(number)
        arguments = map_arg((node.args, node.kwargs), lambda n: ("%", number[n]))
        yield f"{node.op} {target(node)} {named(arguments)}"


def target(node: Node) -> str:
    if node.op == "placeholder" or node.op == "output":
        return ""
    is_known = isinstance(node.target, torch._ops.OpOverload) and (
        node.target.namespace in KNOWN or node.target.namespace.startswith("funcrec_")
    )
    if node.op != "call_function" or not (is_known or node.target is operator.getitem):
        raise Unnamed
    return str(node.target)


def surroundings() -> Iterator[str]:
    """Yield the texts of torch's settings and of the variables that change the code.

    They leave out meshes, because the graph shows the mesh.
    """
    yield from (f"{name} {x}" for name, x in ((n, read()) for n, read in SEEN.items()) if isinstance(x, PLAIN))
    for module in CONFIGS:
        yield from map(setting, changed(importlib.import_module(module)))
    for name, value in sorted(os.environ.items()):
        if value and name.startswith(VARIABLES) and not name.startswith(PLACES):
            yield f"{name}={value}"


def changed(config: Any) -> list[tuple[str, Any]]:
    """Return the settings of a module that differ from torch's defaults."""
    entries = config._config
    now = {name: getattr(config, name) for name in sorted(entries) if not config._is_default(name)}
    # torch does not count a setting as default after a change back to its default value.
    return [(name, x) for name, x in now.items() if x != entries[name].default]


def setting(item: tuple[str, Any]) -> str:
    """Return the text of a setting. For a function of funcrec it is a name, since the digest covers the sources."""
    name, value = item
    own = [x for x in (value if isinstance(value, list) else [value]) if callable(x)]
    if any(not getattr(x, "__module__", "").startswith("funcrec.") or "<" in x.__qualname__ for x in own):
        raise Unnamed
    return f"{name} {[x.__qualname__ for x in own] if own else named(value)}"


@functools.cache
def system() -> tuple[str, ...]:
    """Return the versions of torch and Python, the processor, and a digest of the sources of funcrec that make code."""
    import funcrec.kernels

    text = hashlib.sha256()
    sources = [*Path(__file__).parents[1].rglob("*.py"), *Path(funcrec.kernels.__file__).parent.glob("*.py")]
    for path in sorted(sources):
        text.update(path.read_bytes())
    versions = (torch.__version__, torch.version.git_version, sys.version, sysconfig.get_config_var("SOABI"))
    machine = (platform.machine(), *platform.libc_ver(), torch.backends.cpu.get_cpu_capability(), processor())
    return (*map(str, versions), *machine, text.hexdigest())


def processor() -> str:
    """Return a text with the facts about the processor that a compiler can see."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    kinds = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU ")
    return "\n".join(line for line in first if line.startswith(kinds))
