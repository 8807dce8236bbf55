// What this processor runs: asked at run time, and by CMake, which builds no more than that for one machine.
#pragma once

namespace funcrec {

// The best instruction set of this processor: 4 and 3 for x86-64-v4 and -v3, else 0.
inline int level() {
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

}  // namespace funcrec
