"""Any process that stages the same graph loads the compiled code on disk. Any other graph does not load this code.

Damaged code is compiled again."""

import itertools
import os
import platform
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from funcrec.kernels import files
from torch._inductor import codecache, config, cpp_builder, cpu_vec_isa
from torch._inductor.dtype_propagation import DtypePropagationOpsHandler
from torch._inductor.runtime import cache_dir_utils
from torch.fx.experimental.proxy_tensor import make_fx

import funcrec as fr
from funcrec.compile.backend import _digest, _inductor

STEP = """
import sys, torch, funcrec as fr
c = torch.tensor([1.0, -2.0, 3.0])
f = fr.jit(lambda x, w: {"y": (x @ w).sin() * c, "x": x, "s": (x @ w).sum(0).exp()})
out = f(torch.arange(12.0).reshape(4, 3) / 7, torch.arange(9.0).reshape(3, 3) / 5)
print(out["y"].tolist(), out["s"].tolist(), "torch._inductor.compile_fx" in sys.modules)
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Return an empty folder for compiled code."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path / "funcrec"


@pytest.fixture
def made(monkeypatch):
    """Return the list of the paths for which code was compiled."""
    found = []

    def write_code(graph, arguments, path, real=_inductor.write_code):
        found.append(path)
        real(graph, arguments, path)

    monkeypatch.setattr(_inductor, "write_code", write_code)
    return found


def run(program, place, **more):
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(place), "OMP_NUM_THREADS": "1", **more}
    return subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)


def test_another_process_loads_what_one_compiled(tmp_path):
    """Of two processes that ask for one program at once, one compiles it, the other waits and loads it, and both have
    the same bits. A third process loads the code without Inductor and without a compiler."""
    both = [run(STEP, tmp_path) for _ in range(2)]
    loaded, compiled = sorted(p.communicate(timeout=600)[0].split("\n")[-2] for p in both)
    later = run(STEP, tmp_path, PATH="").communicate(timeout=100)[0].split("\n")[-2]
    assert loaded == later == compiled.replace("True", "False") != compiled
    assert [p.suffix for p in (tmp_path / "funcrec").iterdir()] == [".program"]


def test_threads_that_ask_for_one_file_make_it_once(place):
    """Threads that ask for one file at once get what one of them made. After an error in one, another makes the file.
    Files of other names are made meanwhile, and no lock is left."""
    made, begin = [], threading.Barrier(6)

    def make(path, name):
        made.append(name)
        if name == "x.so":
            files.load("inner.so", lambda path: path.write_bytes(b"inner"), Path.read_bytes)
            time.sleep(0.05)
            if made.count(name) == 1:
                raise KeyError(name)
        path.write_bytes(name.encode())

    def ask(name):
        begin.wait()
        try:
            return files.load(name, lambda path: make(path, name), Path.read_bytes)[:-32]
        except KeyError:
            return None

    with ThreadPoolExecutor(6) as pool:
        got = list(pool.map(ask, ["x.so"] * 5 + ["y.so"]))
    assert sorted(map(str, got[:5])) == ["None"] + ["b'x.so'"] * 4 and got[5] == b"y.so"
    assert sorted(made) == ["x.so", "x.so", "y.so"]
    assert sorted(p.name for p in place.iterdir()) == ["inner.so", "x.so", "y.so"]


def test_a_library_asks_for_torch_by_name(place):
    """A library names torch's operators, of which it calls one, and no other library of torch."""
    x = torch.rand(70)
    torch.testing.assert_close(fr.jit(lambda x: x.sin().exp())(x), x.sin().exp())
    (path,) = place.glob("*.program")
    content = path.read_bytes()
    assert b"Sleef_" in content or platform.machine() not in ("x86_64", "AMD64")
    assert content.count(b"\0libtorch_cpu.so\0") == 1 and b"libtorch_python" not in content


@pytest.mark.parametrize("harm", ["empty", "cut", "changed", "absent", "a library cut"])
def test_a_damaged_file_is_made_again(harm, place, made):
    """Code is compiled once more if its file was cut short, changed or deleted. A function that already loaded the code
    continues."""
    # a program without loops is stored as text, and any other program as a library
    fn = (lambda x: x.sin()) if "library" in harm else (lambda x: x @ x.T)
    x = torch.arange(6.0).reshape(2, 3)
    first = fr.jit(fn)
    need = first(x)
    (path,) = place.glob("*.program")
    whole = path.read_bytes()
    if harm == "absent":
        path.unlink()
    else:
        damaged = {"empty": b"", "cut": whole[:-10], "changed": whole[:50] + b"!" + whole[51:]}[harm.split()[-1]]
        # a new file replaces the loaded file, so that the memory of the loaded file does not change
        other = path.with_suffix(".other")
        other.write_bytes(damaged)
        other.replace(path)
    assert fr.jit(fn)(x).tolist() == first(x).tolist() == need.tolist()
    assert len(made) == 2 and files.is_whole(path)
    assert fr.jit(fn)(x).tolist() == need.tolist() and len(made) == 2


def test_a_file_that_cannot_be_loaded_is_made_again(place):
    """A whole file that this system cannot load is compiled once more. An error of the new file is raised."""
    write = lambda content: lambda path: path.write_bytes(content)

    def read(path):
        if not path.read_bytes().startswith(b"ours"):
            raise OSError("another system's")
        return "loaded"

    with pytest.raises(OSError, match="another system's"):
        files.load("x.so", write(b"theirs"), read)
    assert files.load("x.so", write(b"ours"), read) == files.load("x.so", None, read) == "loaded"


def test_code_does_not_hold_constants(place, made):
    """Functions that differ in the values of tensors that they make share code. Each function keeps its values."""
    for a in (2.0, 3.0):
        f = fr.jit(lambda x, a=a: (x @ x.T) @ torch.tensor([a, 1.0]))
        assert f(torch.eye(2)).tolist() == [a, 1.0]
    assert len(made) == 1


def test_caches_that_are_off_keep_nothing(place):
    """When torch's caches are off, no code is kept."""
    with config.patch(force_disable_caches=True):
        assert fr.jit(lambda x: x @ x)(torch.eye(2)).tolist() == torch.eye(2).tolist()
    assert not place.exists()


def test_the_folder_is_torchs(monkeypatch):
    """Without a variable, the folder lies in torch's folder for compiled code, named by the user."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    assert files.folder() == Path(cache_dir_utils.default_cache_dir(), "funcrec")
    monkeypatch.setattr("getpass.getuser", lambda: r"a\b:c")
    assert files.folder() == Path(cache_dir_utils.default_cache_dir(), "funcrec")
    monkeypatch.setattr("getpass.getuser", lambda: {}["a user without a name"])
    assert files.folder().parent.name == f"torchinductor_uid_{os.getuid()}"


def test_a_folder_without_locks_keeps_code(place, monkeypatch):
    """Where the system refuses a lock, as in some networks' folders, code is made and kept all the same."""

    def refuse(file, how):
        raise OSError(95, "not supported")

    monkeypatch.setattr(files.fcntl, "flock", refuse)
    write = lambda path: path.write_bytes(b"x" * 40)
    assert files.load("x.so", write, Path.read_bytes)[:40] == b"x" * 40
    assert files.load("x.so", None, Path.read_bytes)[:40] == b"x" * 40


def test_what_is_interrupted_leaves_no_file(place):
    """A compilation that fails leaves no file."""
    with pytest.raises(KeyboardInterrupt):
        files.load("x.so", lambda path: [path.write_bytes(b"half"), (_ for _ in ()).throw(KeyboardInterrupt)], None)
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("what", ["a file", "a folder of the file's name", "nowhere"])
def test_where_no_file_can_be_kept_the_error_says_so(what, tmp_path, monkeypatch):
    """An error before the compilation reports a folder that cannot be made, or a file in the folder's place."""
    place = Path("/proc/none") if what == "nowhere" else tmp_path / "cache"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(place))
    if what == "a file":
        place.touch()
    elif what == "a folder of the file's name":
        (place / "funcrec" / "x.so" / "y").mkdir(parents=True)
    with pytest.raises(OSError, match=r"cannot be kept\.\n  got   .*\n  need .*\n  try   TORCHINDUCTOR_CACHE_DIR"):
        files.load("x.so", None, None)


def test_without_a_compiler_the_error_says_so(place, monkeypatch):
    """Without a compiler, and with no code on disk to load, an error is raised before anything is compiled."""
    monkeypatch.setenv("PATH", "")
    cpp_builder.cpp_compiler_search.cache_clear()
    with config.patch({"cpp.cxx": (None, "g++")}), pytest.raises(RuntimeError, match="there is no C") as error:
        fr.jit(lambda x: x * 2)(torch.ones(3))
    said = str(error.value)
    assert "funcrec.jit: there is no C++ compiler." in said and "\n  need  g++ or clang++" in said
    assert not list(place.rglob("*.program"))


def test_one_compiled_header_serves_all_processes(tmp_path, monkeypatch):
    """The eighth program of a process compiles the header. The process asks torch for the header once, unless its file
    is deleted. The first program of a later process includes it, with any folder for code."""
    asked = []

    def compiled(header, command, **flags):
        asked.append(header)
        (tmp_path / "h.h.gch").touch()
        return f"{tmp_path}/h.h"

    def begin(folder):
        monkeypatch.setattr(_inductor, "MANY", 8)
        monkeypatch.setattr(_inductor, "COMPILED", itertools.count(1))
        monkeypatch.setattr(_inductor, "HEADERS", {})
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / folder))

    monkeypatch.setattr(codecache, "_precompile_header", compiled)
    monkeypatch.setattr(codecache, "_HEADER_DIR", str(tmp_path))
    flags = {"vec_isa": cpu_vec_isa.pick_vec_isa(), "device_type": "cpu", "include_pytorch": False, "shared": True}
    path = f"{tmp_path}/h.h"
    begin("one")
    assert [_inductor.compiled_header(flags) for _ in range(9)] == [None] * 7 + [path] * 2
    (tmp_path / "h.h.gch").unlink()
    assert _inductor.compiled_header(flags) == path and len(asked) == 2
    begin("another")
    assert _inductor.compiled_header(flags) == _inductor.compiled_header(flags) == path and len(asked) == 3
    with config.patch({"aot_inductor.enable_line_tables": False}):
        assert _inductor.compiled_header(flags) is None  # another command


# -- names -------------------------------------------------------------------------------------------------------


def name(fn, *arguments, options=_inductor.OPTIONS):
    return _digest.digest(make_fx(fn)(*arguments), arguments, options)


BASE = (lambda x, y: (x + 2 * y).sum(0), torch.ones(4, 3), torch.ones(4, 3))
ONES = torch.ones(4, 3)
OTHERS = {
    "a number": (lambda x, y: (x + 3 * y).sum(0), ONES, ONES),
    "its kind": (lambda x, y: (x + 2.0 * y).sum(0), ONES, ONES),
    "an operation": (lambda x, y: (x - 2 * y).sum(0), ONES, ONES),
    "a dim": (lambda x, y: (x + 2 * y).sum(1), ONES, ONES),
    "operands": (lambda x, y: (y + 2 * x).sum(0), ONES, ONES),
    "a shape": (BASE[0], torch.ones(5, 3), torch.ones(5, 3)),
    "a dtype": (BASE[0], ONES.double(), ONES.double()),
    "strides": (BASE[0], torch.ones(3, 4).T, ONES),
    "outputs": (lambda x, y: [(x + 2 * y).sum(0)] * 2, ONES, ONES),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_graph_has_another_name(other):
    """A graph's name depends on each operation, argument and form of the graph."""
    assert name(*BASE) != name(*OTHERS[other])


def test_the_same_graph_has_the_same_name():
    """A graph that is staged twice, with other variable names and other values, has the same name both times."""
    assert name(*BASE) == name(lambda left, right: (left + 2 * right).sum(0), torch.zeros(4, 3), torch.zeros(4, 3))


def surrounded(change):
    """Return the name of the graph after `change(patch)`."""
    with pytest.MonkeyPatch.context() as patch:
        _digest.system.cache_clear()
        change(patch)
        try:
            return name(*BASE)
        finally:
            _digest.system.cache_clear()


def another(capability):
    return "default" if capability == "avx2" else "avx2"


SURROUNDINGS = {
    "torch": lambda m: m.setattr(torch, "__version__", "2.99"),
    "the processor": lambda m: m.setattr(_digest, "processor", lambda: "flags: avx"),
    "sources": lambda m: m.setattr(_digest, "__file__", __file__),
    "a variable": lambda m: m.setenv("ATEN_CPU_CAPABILITY", another(os.environ.get("ATEN_CPU_CAPABILITY"))),
    "the compiler": lambda m: m.setenv("CXX", "another"),
    "threads": lambda m: m.setitem(_digest.SEEN, "the number of threads", lambda: 7),
    "determinism": lambda m: m.setitem(_digest.SEEN, "deterministic algorithms", lambda: True),
}


@pytest.mark.parametrize("what", SURROUNDINGS)
def test_other_surroundings_have_another_name(what):
    """A graph's name depends on torch, funcrec's sources, the processor, and the settings of the compilation."""
    assert len({name(*BASE), surrounded(SURROUNDINGS[what]), name(*BASE)}) == 2


def test_options_are_part_of_the_name():
    """A graph's name depends on Inductor's options, both the passed options and those in Inductor's config."""
    names = [name(*BASE), name(*BASE, options=_inductor.OPTIONS | {"realize_opcount_threshold": 30})]
    with config.patch({"cpp.enable_floating_point_contract_flag": "fast"}):
        names.append(name(*BASE))
    assert len({*names}) == 3 and name(*BASE) == names[0]


def test_what_has_no_name_is_not_kept(place, made):
    """Code has no name if the graph uses a foreign operator, a user's pass or another device. Such code is compiled in
    each process."""
    with torch.library._scoped_library("somebody", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: 2 * x, "CompositeExplicitAutograd")
        assert name(lambda x: torch.ops.somebody.twice(x), torch.ones(2)) is None
    with config.patch(post_grad_custom_post_pass=lambda graph: None):
        assert name(*BASE) is None
    assert name(*BASE, options={"pass": print}) is None and name(*BASE, options={"pass": lambda: 0}) is None
    assert name(lambda x: x + 1, torch.ones(2, device="meta")) is None


def test_rules_of_dtypes_are_listed_once_for_a_program(place, monkeypatch):
    """A compilation makes torch's handler of dtypes once, whatever the number of operations."""
    made = []
    begin = DtypePropagationOpsHandler.__init__
    monkeypatch.setattr(DtypePropagationOpsHandler, "__init__", lambda self: (made.append(1), begin(self))[1])
    x = torch.linspace(0.5, 1.5, 5)
    f = lambda x: (x.sin() + x.exp() * x).cos() / x
    torch.testing.assert_close(fr.jit(f)(x), f(x))
    assert len(made) == 1


def test_instructions_are_what_inductor_would_find():
    """funcrec gives Inductor the instruction sets that Inductor would find by a test program."""
    isa = cpu_vec_isa.pick_vec_isa()
    assert _inductor.runs(isa, isa._avx_code) and isa.check_build(isa._avx_code)
    unknown = SimpleNamespace(build_arch_flags=lambda: "-mno-such-thing", bit_width=isa.bit_width)
    # torch has no program for vectors of 32 bits
    narrow = SimpleNamespace(build_arch_flags=isa.build_arch_flags, bit_width=lambda: 32)
    assert not _inductor.runs(unknown, isa._avx_code) and not _inductor.runs(narrow, isa._avx_code)
