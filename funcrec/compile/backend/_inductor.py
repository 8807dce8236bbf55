"""Compile a graph with Inductor's options, and without the parts that torch 2.13 gets wrong.

compile_graph(graph, x)(*x) = graph(*x)
"""

import contextlib
import ctypes
import functools
import hashlib
import itertools
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from funcrec.compile._apart import apart
from funcrec.compile._raising import raising
from funcrec.compile._wrapping import wrapping
from funcrec.compile.backend._digest import digest
from funcrec.compile.backend._exchanges import fill_waits
from funcrec.compile.backend._index_strides import of_sums
from funcrec.compile.backend._one_library import Generated, generated, load, source
from funcrec.compile.backend._onednn import faster_products
from funcrec.compile.backend._scalars import once
from funcrec.core import fail
from funcrec.kernels import files

HEADER = "torch/csrc/inductor/cpp_prefix.h"
TORCH = ("torch_cpu", "torch", "torch_python")  # the libraries that Inductor links with loops
MANY = 8  # the number of libraries after which a process also compiles the header
COMPILED = itertools.count(1)
HEADERS: dict[str, str] = {}  # {digest of a command: path of its header}, as this process found them
PATCHING = threading.RLock()  # held by the one thread that replaces torch's functions
# In loops for a CPU, older versions read rows before they are written, and round 16-bit floats late, with any OPTIONS.
LEAST_FOR_CPU = (2, 13)


def remember_writes(steps: list) -> list:
    """Return the steps, with one more dependency for each step that reads a buffer written in place.

    When Inductor fuses loops of different shapes, it looks up again what a step reads, and forgets that another step
    has written to the buffer since. Without a dependency of this kind the step would run before the write. The pass
    runs before fusion.
    """
    from torch._inductor.dependencies import WeakDep

    for step in (s for group in steps for s in group.get_nodes()):
        written = {d.name for d in step.read_writes.reads} & set(step.mutation_renames.values())
        for name in sorted(written):
            step.add_fake_dep(WeakDep(name, mutating_buf=step.get_name(), is_fake=True))
    return steps


OPTIONS: dict[str, Any] = {
    "_pre_fusion_custom_pass": remember_writes,
    # This pass writes into rows that the computation of new values, or of parts of a cat, still reads.
    "disabled_passes": "reinplace_inplaceable_ops",
    "emulate_precision_casts": True,  # Casts to 16 bits round as in eager mode.
    # Ranks compute while values travel: exchanges start at once, and a rank awaits each result where it reads it.
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": [fill_waits],
    # Without this, a chain of derived keys would be inlined and grow eightfold with each link (torch's default is 30).
    "realize_opcount_threshold": 16,
    # funcrec keeps code itself, and compiles in this process.
    "fx_graph_cache": False,
    "compile_threads": 1,
}


def compile_graph(graph: torch.fx.GraphModule, arguments: list[Tensor]) -> Callable:
    """Return the graph as code for arguments of these forms.

    funcrec keeps code for a CPU on disk, in one file per graph. The file's name is a digest of everything that the code
    depends on. A process that stages the same graph loads the code in milliseconds.

    Raises:
      RuntimeError: if the loops are for a CPU, and Inductor of this torch is known to make wrong loops for a CPU.
    """
    refuse_old_torch(graph)
    return apart(lambda: code_of(faster_products(graph), arguments))


def code_of(graph: torch.fx.GraphModule, arguments: list[Tensor]) -> Callable:
    """Return code for a graph, loaded from disk or compiled now."""
    opened, constants = open_constants(graph)
    arguments = [*constants, *arguments]
    name = digest(opened, arguments, OPTIONS)
    if name is None:
        return compile_anew(graph, arguments[len(constants) :])
    try:
        call = files.load(f"{name}.program", lambda path: write_code(opened, arguments, path), load)
    except OtherCodeError as other:
        code = other.code
        call = lambda tensors: code(*tensors)
    return lambda *tensors: call([*constants, *tensors])  # Inductor's functions empty their list of arguments.


def refuse_old_torch(graph: torch.fx.GraphModule) -> None:
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    if version < LEAST_FOR_CPU and all(d == "cpu" for d in devices(graph)):
        what = "the code that this torch's Inductor makes for a CPU is known to be wrong."
        need, hint = f"torch {LEAST_FOR_CPU[0]}.{LEAST_FOR_CPU[1]} or newer", "a newer torch, or no fr.jit"
        fail("funcrec.jit", what, got=f"torch {torch.__version__}", need=need, hint=hint, kind=RuntimeError)


def devices(graph: torch.fx.GraphModule) -> set[str]:
    values = (node.meta.get("val") for node in graph.graph.nodes)
    return {x.device.type for x in values if isinstance(x, Tensor)}


def need_compiler(call: str) -> None:
    """Raise if there is no C++ compiler. Loops for a CPU need a compiler; code on disk needs none."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        got, need = f"{error}".splitlines()[0], "g++ or clang++ on the PATH, or CXX=<the compiler>"
        hint = "install one: loops for a CPU are compiled where they run"
        fail(call, "there is no C++ compiler.", got=got, need=need, hint=hint, kind=RuntimeError)


def open_constants(graph: torch.fx.GraphModule) -> tuple[torch.fx.GraphModule, list[Tensor]]:
    """Return the graph with its constants as first arguments, and the constants.

    So the code does not depend on the values of the constants.
    """
    found = {n: getattr(graph, n.target) for n in graph.graph.find_nodes(op="get_attr")}
    if not found or not all(type(x) is Tensor for x in found.values()):
        return graph, []
    own = torch.fx.Graph()
    copies = {n: own.placeholder(f"constant_{i}") for i, n in enumerate(found)}
    for node in graph.graph.nodes:
        if node not in found:
            copies[node] = own.node_copy(node, copies.__getitem__)
    return torch.fx.GraphModule({}, own), list(found.values())


class OtherCodeError(Exception):
    """Raised with the code of a graph if Inductor made more than loops; a file cannot hold such code."""

    def __init__(self, code: Callable[..., Any]):
        super().__init__()
        self.code = code


def write_code(graph: torch.fx.GraphModule, arguments: list[Any], path: Path) -> None:
    """Compile the graph into a file for `load`."""
    import torch._inductor.codecache as codecache
    from torch._inductor.cpu_vec_isa import pick_vec_isa
    from torch._inductor.select_algorithm import extern_kernels
    from torch._inductor.virtualized import V

    if "cpu" in devices(graph):
        need_compiler("funcrec.jit")
    found: list[Generated] = []

    def taken(load: Callable[..., Any]) -> Callable[..., Any]:
        def instead(key, file, linemap=None, attrs=None, **rest):
            code = None if attrs else generated(Path(file).read_text(), extern_kernels)
            if code is None or len(V.graph.graph_input_names) != len(arguments):
                return load(key, file, linemap, attrs, **rest)
            found.append(code)
            # torch before 2.13 needs a function here, but nothing calls it.
            return SimpleNamespace(call=found.append, __file__=file)

        return instead

    with knowing():
        with replaced(codecache.PyCodeCache, "load_by_key_path", taken):
            whole = cast(Any, torch._inductor.compile(graph, arguments, OPTIONS))
        if len(found) != 1:
            raise OtherCodeError(compile_anew(graph, arguments) if found else whole)
        if not found[0].kernels:
            path.write_text(found[0].text)
        else:
            build(source(found[0]), path, pick_vec_isa())


def compile_anew(graph: torch.fx.GraphModule, arguments: list[Any]) -> Any:
    """Return the graph as code, which no file keeps."""
    import torch._inductor  # The import is slow, and only compiling needs it.

    with knowing():
        return torch._inductor.compile(graph, arguments, OPTIONS)


@contextlib.contextmanager
def knowing() -> Iterator[None]:
    """Return a context in which Inductor knows facts that it would take seconds to find out.

    It also hides torch's warnings about deprecated calls in torch.
    """
    import torch._inductor.codecache as codecache
    import torch.utils._sympy.solve as solve
    from torch._inductor import compile_fx
    from torch._inductor.codegen import common, cpp
    from torch._inductor.cpu_vec_isa import VecISA
    from torch._inductor.fx_passes import joint_graph
    from torch._inductor.graph import GraphLowering
    from torch._inductor.runtime import triton_compat

    with contextlib.ExitStack() as known:
        known.enter_context(warnings.catch_warnings())  # No code of a user runs here.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        known.enter_context(replaced(solve, "try_solve", in_integers))
        for patch in (*wrapping(), *raising()):
            known.enter_context(replaced(*patch))
        known.enter_context(replaced(cpp, "stride_at_vec_range", of_sums))
        known.enter_context(replaced(GraphLowering, "run_node", once))
        known.enter_context(replaced(compile_fx, "joint_graph_passes", without_scaled_softmax))
        # It takes x * 0 for 0, where inf * 0 is NaN: https://github.com/pytorch/pytorch/pull/186281
        folder = joint_graph.UniformValueConstantFolder
        known.enter_context(replaced(folder, "_add_peephole_patterns", lambda _: lambda _: None))
        # torch has one handler of dtypes, and fills its table of 300 rules again for each operation of a loop.
        known.enter_context(replaced(common, "DtypePropagationOpsHandler", functools.cache))
        if platform.machine() in ("x86_64", "AMD64"):
            known.enter_context(replaced(VecISA, "check_build", lambda build: runs))
        if not torch.cuda.is_available():  # torch hashes Triton's sources, but does not use the hash.
            owner = codecache if hasattr(codecache, "triton_key") else triton_compat  # torch < 2.13
            known.enter_context(replaced(owner, "triton_key", lambda key: lambda: None))
        yield


def without_scaled_softmax(passes: Callable) -> Callable:
    """Return Inductor's first passes without the one that turns x/t - max(x/t) into (x - max x)/t.

    It rounds otherwise than eager mode, and reads x once more to see whether all of it is finite.
    """

    def run(*args, **kwargs):
        from torch._inductor import config

        with config.patch(disabled_passes=f"{config.disabled_passes},pass_pattern_1"):
            return passes(*args, **kwargs)

    return run


def in_integers(solve: Callable) -> Callable:
    """Return a `solve` whose solutions have one division and no fractions.

    For s = 3 B + 1 Inductor would write B = s/3 - 1/3 in integers.
    """

    def solved(*args, **kwargs):
        import sympy
        from torch.utils._sympy.functions import FloorDiv

        found = solve(*args, **kwargs)
        if found is None:
            return None
        relation, value = found
        over, under = sympy.fraction(sympy.together(value))
        return relation, value if under == 1 else FloorDiv(over, under)

    return solved


def runs(isa: Any, code: str) -> bool:
    """Return whether the compiler knows the instructions, and torch has vector functions of this size.

    Inductor has already asked the processor. Its own check would build and load a program for each of six instruction
    sets, which takes 7 s.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler

    command = [get_cpp_compiler(), *isa.build_arch_flags().split(), "-fsyntax-only", "-x", "c++", os.devnull]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        return False
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    return hasattr(library, f"Sleef_expf{isa.bit_width() // 32}_u10")


def build(text: str, path: Path, isa: object) -> None:
    """Compile the C++ `text` to a library at `path`, with the compiler and flags of Inductor's own loops."""
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions

    flags = {"vec_isa": isa, "device_type": "cpu", "include_pytorch": False, "shared": True}
    options = CppTorchDeviceOptions(**flags)
    options.precompiled_header = compiled_header(flags)
    with tempfile.TemporaryDirectory() as place:
        file = Path(place, "loops.cpp")
        file.write_text(text)
        link_by_name(options, place)
        builder = CppBuilder(name="loops", sources=[str(file)], BuildOption=options, output_dir=place)
        builder.build()
        shutil.move(builder.get_target_file_path(), path)


def link_by_name(options: Any, place: str) -> None:
    """Let the linker find an empty library of torch's name in the folder, in place of torch's libraries.

    The linker would read all names of torch's libraries, which takes a third of the time of a program with few loops. A
    library for Linux may leave names open. Where it is loaded, torch is loaded, and its name is all that is needed.
    """
    if (library := empty_library()) is None:
        return
    for name in TORCH:
        Path(place, f"lib{name}.so").write_bytes(library)
    options.get_libraries_dirs().insert(0, place)
    options.get_ldflags().append(f"Wl,--push-state,--no-as-needed,-l{TORCH[0]},--pop-state")


@functools.cache
def empty_library() -> bytes | None:
    """Return a library without content that has the name of torch's operators, or None where linkers differ."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    if sys.platform != "linux":
        return None
    with tempfile.TemporaryDirectory() as place:
        path = Path(place, f"lib{TORCH[0]}.so")
        form = ["-shared", "-nostdlib", f"-Wl,-soname,{path.name}", "-x", "c++", os.devnull, "-o", str(path)]
        made = subprocess.run([get_cpp_compiler(), *form], capture_output=True, check=False)
        return path.read_bytes() if made.returncode == 0 else None


def compiled_header(flags: dict[str, Any]) -> str | None:
    """Return the path of the compiled header that loops include, or None.

    Compiling the header takes 5 s once, and saves 1.8 s per program. A process that compiles many programs compiles the
    header, and every later process uses it. A note says that torch has the header. It lies beside the header, in one
    folder for all values of TORCHINDUCTOR_CACHE_DIR.
    """
    from torch._inductor import codecache, config
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions

    if getattr(codecache, "_precompile_header", None) is None or not config.cpp_cache_precompile_headers:
        return None
    command = CppBuilder(name="o", sources="i", BuildOption=CppTorchDeviceOptions(**flags)).get_command_line()
    name = hashlib.sha256(f"{torch.__version__} {command}".encode()).hexdigest()
    note = Path(codecache._HEADER_DIR, f"{name}.funcrec")
    if next(COMPILED) < MANY and not note.exists():
        return None
    if name not in HEADERS or not Path(f"{HEADERS[name]}.gch").exists():
        # torch keeps the header under a digest of its content, for which it runs the preprocessor.
        HEADERS[name] = codecache._precompile_header(HEADER, command, **flags)
        if not files.is_off():
            note.touch()
    return HEADERS[name]


@contextlib.contextmanager
def replaced(owner: object, name: str, make: Callable[[Callable], Callable]) -> Iterator[None]:
    """Return a context in which make(f) replaces the owner's function f, for this thread only."""
    mine, kept, original = threading.get_ident(), vars(owner)[name], getattr(owner, name)
    own = make(original)

    def chosen(*args, **kwargs):
        return (own if threading.get_ident() == mine else original)(*args, **kwargs)

    with PATCHING:
        setattr(owner, name, staticmethod(chosen) if isinstance(kept, classmethod | staticmethod) else chosen)
        try:
            yield
        finally:
            setattr(owner, name, kept)
