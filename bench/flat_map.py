"""A peer of vocabularies: boost::unordered_flat_map from ids to rows, compiled for this processor, behind ctypes.

`find` reads; `admit` gives a new id the next row, and adds 1 to the id's count. The map never removes an id.
"""

import ctypes
import hashlib
import subprocess
import sysconfig
from pathlib import Path

import torch

SOURCE = r"""
#include <boost/unordered/unordered_flat_map.hpp>
#include <cstdint>
#include <vector>

struct Rows {
  boost::unordered_flat_map<int64_t, int64_t> map;
  std::vector<uint32_t> counts;
};

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


def library() -> ctypes.CDLL:
    """Return the compiled map. Boost's headers are the system's, or those of the package `cmeel-boost`."""
    path = BUILD / f"flat_map-{hashlib.sha256(SOURCE.encode()).hexdigest()[:16]}.so"
    if not path.exists():
        headers = Path(sysconfig.get_path("purelib")) / "cmeel.prefix" / "include"
        command = ["g++", "-O3", "-march=native", "-DNDEBUG", "-std=c++17", "-shared", "-fPIC", f"-I{headers}"]
        subprocess.run([*command, "-x", "c++", "-", "-o", path], input=SOURCE, text=True, check=True)
    lib = ctypes.CDLL(str(path))
    lib.rows_new.restype = ctypes.c_void_p
    lib.rows_new.argtypes, lib.rows_free.argtypes = [ctypes.c_int64], [ctypes.c_void_p]
    for name in ("rows_find", "rows_admit"):
        getattr(lib, name).argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    return lib


class FlatMap:
    """A map with a row for each of some ids."""

    def __init__(self, held: torch.Tensor):
        self.library = library()
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
