"""Peers of vocabularies: hash maps in C++ from ids to rows, compiled for this processor, behind ctypes.

`find` reads; `admit` gives a new id the next row, and adds 1 to the id's count. A map never removes an id.
boost::unordered_flat_map needs Boost's headers: the system's, or those of `pip install cmeel-boost`.
absl::flat_hash_map needs Abseil's sources, which grpcio's source package has:

    pip download --no-deps --no-binary grpcio --no-build-isolation grpcio -d build
    tar xzf build/grpcio-*.tar.gz -C build --strip-components 2 --wildcards '*/third_party/abseil-cpp'
"""

import ctypes
import hashlib
import subprocess
import sysconfig
from pathlib import Path

import torch

SOURCE = r"""
#include <cstdint>
#include <vector>

struct Rows {
  MAP<int64_t, int64_t> map;
  std::vector<uint32_t> counts;
};

#pragma GCC visibility push(default)
extern "C" {
void* rows_new(int64_t room) {
  auto* r = new Rows;
  r->map.reserve(room);
  return r;
}
void rows_free(void* p) { delete static_cast<Rows*>(p); }
void rows_find(void* p, const int64_t* ids, int64_t n, int64_t* out) {
  const auto& map = static_cast<Rows*>(p)->map;
  for (int64_t i = 0; i < n; i++) {
    const auto it = map.find(ids[i]);
    out[i] = it == map.end() ? -1 : it->second;
  }
}
void rows_admit(void* p, const int64_t* ids, int64_t n, int64_t* out) {
  auto* r = static_cast<Rows*>(p);
  for (int64_t i = 0; i < n; i++) {
    const auto [it, is_new] = r->map.try_emplace(ids[i], int64_t(r->counts.size()));
    if (is_new) r->counts.push_back(0);
    r->counts[it->second]++;
    out[i] = it->second;
  }
}
}
"""
BUILD = Path(__file__).parents[1] / "build"
BOOST, ABSL = "boost::unordered_flat_map", "absl::flat_hash_map"
HEADERS = {BOOST: "boost/unordered/unordered_flat_map.hpp", ABSL: "absl/container/flat_hash_map.h"}
ABSEIL = BUILD / "abseil-cpp"
PARTS = (  # of Abseil, which its map needs
    "base", "base/internal", "container/internal", "debugging", "debugging/internal", "hash/internal", "numeric",
    "profiling/internal", "strings", "strings/internal", "strings/internal/str_format", "synchronization",
    "synchronization/internal", "time", "time/internal/cctz/src",
)  # fmt: skip
NOT_COMPILED = ("test", "benchmark", "mock", "_win", "win32", "scoped", "tracker", "print_hash_of", "allocator", "cord")
FLAGS = ["-O3", "-march=native", "-DNDEBUG", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffunction-sections"]


def flat_maps() -> list[str]:
    """Return the maps whose sources are here. Boost's are expected; Abseil's may be absent."""
    return [BOOST, ABSL] if ABSEIL.exists() else [BOOST]


def objects() -> list[Path]:
    """Return Abseil's compiled parts, of which the linker drops what is not called."""
    out = []
    for source in (f for part in PARTS for f in sorted((ABSEIL / "absl" / part).glob("*.cc"))):
        if any(x in source.name for x in NOT_COMPILED):
            continue
        out.append(ABSEIL / "objects" / f"{'-'.join(source.relative_to(ABSEIL).parts)}.o")
        if not out[-1].exists():
            out[-1].parent.mkdir(exist_ok=True)
            subprocess.run(["g++", *FLAGS, f"-I{ABSEIL}", "-c", source, "-o", out[-1]], check=True)
    return out


def library(name: str) -> ctypes.CDLL:
    """Return the compiled map."""
    path = BUILD / f"flat_map-{hashlib.sha256((name + SOURCE).encode()).hexdigest()[:16]}.so"
    if not path.exists():
        headers = Path(sysconfig.get_path("purelib")) / "cmeel.prefix" / "include"
        own, parts = [f"-DMAP={name}", f"-I{headers}", f"-I{ABSEIL}"], objects() if name == ABSL else []
        link = ["-shared", "-Wl,--gc-sections", "-Wl,--no-undefined", "-x", "c++", "-", "-x", "none", *parts]
        source = f"#include <{HEADERS[name]}>\n{SOURCE}"
        subprocess.run(["g++", *FLAGS, *own, *link, "-o", path], input=source, text=True, check=True)
    lib = ctypes.CDLL(str(path))
    lib.rows_new.restype = ctypes.c_void_p
    lib.rows_new.argtypes, lib.rows_free.argtypes = [ctypes.c_int64], [ctypes.c_void_p]
    for fn in ("rows_find", "rows_admit"):
        getattr(lib, fn).argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    return lib


class FlatMap:
    """A map with a row for each of some ids."""

    def __init__(self, name: str, held: torch.Tensor):
        self.library = library(name)
        self.rows = self.library.rows_new(held.shape[0])
        self.admit(held)

    def find(self, ids: torch.Tensor) -> torch.Tensor:
        return self._call(self.library.rows_find, ids)

    def admit(self, ids: torch.Tensor) -> torch.Tensor:
        return self._call(self.library.rows_admit, ids)

    def _call(self, fn, ids: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(ids)
        fn(self.rows, ids.data_ptr(), ids.shape[0], out.data_ptr())
        return out

    def __del__(self):
        self.library.rows_free(self.rows)
