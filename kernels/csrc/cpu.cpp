// The CPU kernels as one object per instruction set (CMakeLists.txt): plain C functions that ctypes calls, no extension module.
#include "abi.h"
#include "jagged.h"
#include "level.h"
#include "lookup.h"
#include "lookup_weights.h"
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

FUNCREC_EXPORT int64_t funcrec_level() { return level(); }

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
