// The CPU kernels as one object per instruction set (CMakeLists.txt): plain C functions that ctypes calls, no extension module.
#include "abi.h"
#include "jagged.h"
#include "lookup.h"
#include "objects.h"
#include "owners.h"
#include "parallel.h"
#include "records.h"
#include "rows.h"
#include "top_k.h"
#include "update.h"

using namespace funcrec;

FUNCREC_EXPORT int64_t funcrec_abi() { return ABI; }

// The version of the rules' formulas in these kernels: FORMULAS of kernels/rules.py.
FUNCREC_EXPORT int64_t funcrec_formulas() { return FORMULAS; }

FUNCREC_EXPORT void funcrec_start(int64_t gomp_parallel_address) { start_parallel(gomp_parallel_address); }

// Sets the functions of Python and torch that `planned` calls: the addresses of an Interpreter.
FUNCREC_EXPORT void funcrec_python(const int64_t* addresses) { std::memcpy(&interpreter(), addresses, sizeof(Interpreter)); }

FUNCREC_EXPORT int64_t funcrec_planned(int64_t (*entry)(const int64_t*), void* list, const int64_t* plan, int64_t threads) {
  try {
    return planned(entry, list, plan, threads);
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

// The best instruction set of this processor: 4 and 3 for x86-64-v4 and -v3, else 0.
FUNCREC_EXPORT int64_t funcrec_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  const bool v4 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl");
  return v3 && v4 ? 4 : v3 ? 3 : 0;
#else
  return 0;
#endif
}

// The entry points of quantised rows are in quantized.cpp.
FUNCREC_ENTRY(pooled_lookup)
FUNCREC_ENTRY(pooled_lookup_weights)
FUNCREC_ENTRY(gather_block)
FUNCREC_ENTRY(scatter_block)
FUNCREC_ENTRY(take_ranges)
FUNCREC_ENTRY(take_ranges_transpose)
FUNCREC_ENTRY(to_padded)
FUNCREC_ENTRY(from_padded)
FUNCREC_ENTRY(bucketize)
FUNCREC_ENTRY(owner_blocks)
FUNCREC_ENTRY(top_k)
FUNCREC_ENTRY(fused_update)
FUNCREC_ENTRY(write_out)
FUNCREC_ENTRY(records)
FUNCREC_ENTRY(quantized_lookup)
