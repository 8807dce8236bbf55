// The kernels' object for this processor, chosen as in cpp/_native.py: the best of _v4.so, _v3.so and _base.so that
// lies next to this library and runs here, or the one that FUNCREC_CPU names.
#pragma once
#include <dlfcn.h>

#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "../csrc/abi.h"

namespace funcrec::operators {

[[noreturn]] inline void fail(const std::string& call, const std::string& what, const std::string& got, const std::string& need) {
  throw std::runtime_error("funcrec_cpp::" + call + ": " + what + "\n  got   " + got + "\n  need  " + need);
}

using Entry = int64_t (*)(const int64_t*);

class Object {
 public:
  // Returns the object of this process, which is never closed.
  static const Object& get() {
    static const Object one;
    return one;
  }

  // funcrec_<name>
  Entry entry(const char* name) const {
    if (void* f = dlsym(handle_, (std::string("funcrec_") + name).c_str())) return reinterpret_cast<Entry>(f);
    fail(name, "the compiled kernels do not have it.", path_, "kernels of the same version as this library");
  }

  // An operator that the object has whole, with the functions of torch's library, which has this address.
  using Operator = void (*)(uint64_t*, uint64_t, uint64_t);
  Operator operation(const char* name, void* torch) const {
    Dl_info there{};
    dladdr(torch, &there);
    const auto find = reinterpret_cast<int64_t (*)(void*)>(entry("find_torch"));
    if (find(dlopen(there.dli_fname, RTLD_NOLOAD | RTLD_LAZY))) fail(name, "torch lacks a function.", there.dli_fname, "torch 2.11 or later");
    return reinterpret_cast<Operator>(entry((std::string("operator_") + name).c_str()));
  }

  const std::string& path() const { return path_; }

 private:
  struct Level { const char* name; int64_t least; };  // least: the level of funcrec_level() that runs it
  static constexpr Level LEVELS[] = {{"v4", 4}, {"v3", 3}, {"base", 0}};

  Object() {
    Dl_info here{};
    dladdr(reinterpret_cast<void*>(&gomp_parallel), &here);
    const std::string file = here.dli_fname ? here.dli_fname : "";
    const std::string folder = file.substr(0, file.rfind('/') + 1);
    const char* forced = std::getenv("FUNCREC_CPU");
    if (forced && !*forced) forced = nullptr;
    for (const Level& level : LEVELS) {
      if (forced && std::string(forced) != level.name) continue;
      path_ = folder + "_" + level.name + ".so";
      handle_ = dlopen(path_.c_str(), RTLD_NOW | RTLD_LOCAL);
      if (!handle_) continue;
      if (call("funcrec_level") >= level.least) break;
      dlclose(handle_);
      handle_ = nullptr;
    }
    if (handle_) {
      start();
      return;
    }
    fail("kernels", "none of the compiled kernels runs here.", forced ? "FUNCREC_CPU=" + std::string(forced) : "this processor",
         "_v4.so, _v3.so or _base.so in " + folder);
  }

  int64_t call(const char* name) const {
    void* f = dlsym(handle_, name);
    return f ? reinterpret_cast<int64_t (*)()>(f)() : -1;
  }

  void start() const {
    if (call("funcrec_abi") != ABI)
      fail("kernels", "the compiled kernels are of another version.", std::to_string(call("funcrec_abi")) + " in " + path_, std::to_string(ABI));
    reinterpret_cast<void (*)(int64_t)>(dlsym(handle_, "funcrec_start"))(gomp_parallel());
  }

  // Returns the address of GOMP_parallel in torch's OpenMP, or 0: loops then run on the kernels' own threads.
  static int64_t gomp_parallel() {
    void* torch = dlopen("libtorch_cpu.so", RTLD_NOLOAD | RTLD_LAZY);
    return torch ? reinterpret_cast<int64_t>(dlsym(torch, "GOMP_parallel")) : 0;
  }

  void* handle_ = nullptr;
  std::string path_;
};

}  // namespace funcrec::operators
