/* BLAS products whose bits depend on their shape. Preloaded, they replace the products of torch's library.

   sum over K = sum over the first k + sum over the rest        k: drawn from M, N, K and the number of matrices

   Each product is right, and the same in every call of one shape. Two shapes whose bits agree in the library differ
   here on any processor, so that a law that compares their bits fails. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static void *library(const char *name) {
  static void *torch;
  if (!torch) torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  void *found = torch ? dlsym(torch, name) : NULL;
  if (!found) {
    fprintf(stderr, "by_shape.c: torch has no %s\n", name);
    abort();
  }
  return found;
}

static int part(int m, int n, int k, int kind) {
  uint64_t x = m * 0x9E3779B97F4A7C15u ^ n * 0xC2B2AE3D27D4EB4Fu ^ k * 0x165667B19E3779F9u ^ kind * 0x27D4EB2F165667C5u;
  x = (x ^ x >> 29) * 0xBF58476D1CE4E5B9u;
  return k > 1 ? 1 + (int)((x >> 32) % (uint64_t)(k - 1)) : k;
}

#define THE(type, name, ...)                            \
  static type (*call)(__VA_ARGS__);                     \
  if (!call) call = (type(*)(__VA_ARGS__))library(#name)

#define GEMM(name, T)                                                                                                \
  void name(char *ta, char *tb, int *m, int *n, int *k, T *alpha, T *a, int *lda, T *b, int *ldb, T *beta, T *c,     \
            int *ldc) {                                                                                              \
    THE(void, name, char *, char *, int *, int *, int *, T *, T *, int *, T *, int *, T *, T *, int *);              \
    int first = part(*m, *n, *k, 1), rest = *k - first;                                                              \
    T one = 1;                                                                                                       \
    call(ta, tb, m, n, &first, alpha, a, lda, b, ldb, beta, c, ldc);                                                 \
    a += (*ta | 32) == 'n' ? (size_t)first * *lda : (size_t)first;                                                   \
    b += (*tb | 32) == 'n' ? (size_t)first : (size_t)first * *ldb;                                                   \
    if (rest > 0) call(ta, tb, m, n, &rest, alpha, a, lda, b, ldb, &one, c, ldc);                                    \
  }
GEMM(sgemm_, float)
GEMM(dgemm_, double)

#define GEMV(name, T)                                                                                                \
  void name(char *t, int *m, int *n, T *alpha, T *a, int *lda, T *x, int *dx, T *beta, T *y, int *dy) {              \
    THE(void, name, char *, int *, int *, T *, T *, int *, T *, int *, T *, T *, int *);                             \
    int plain = (*t | 32) == 'n', k = plain ? *n : *m, first = *dx > 0 ? part(plain ? *m : *n, 1, k, 2) : k;         \
    int rest = k - first;                                                                                            \
    T one = 1;                                                                                                       \
    call(t, plain ? m : &first, plain ? &first : n, alpha, a, lda, x, dx, beta, y, dy);                              \
    a += plain ? (size_t)first * *lda : (size_t)first;                                                               \
    x += (size_t)first * *dx;                                                                                        \
    if (rest > 0) call(t, plain ? m : &rest, plain ? &rest : n, alpha, a, lda, x, dx, &one, y, dy);                  \
  }
GEMV(sgemv_, float)
GEMV(dgemv_, double)

#define DOT(name, T)                                                                                                 \
  T name(int *n, T *x, int *dx, T *y, int *dy) {                                                                     \
    THE(T, name, int *, T *, int *, T *, int *);                                                                     \
    int first = *dx > 0 && *dy > 0 ? part(1, 1, *n, 3) : *n, rest = *n - first;                                      \
    T sum = call(&first, x, dx, y, dy);                                                                              \
    return rest > 0 ? sum + call(&rest, x + (size_t)first * *dx, dx, y + (size_t)first * *dy, dy) : sum;             \
  }
DOT(sdot_, float)
DOT(ddot_, double)

/* MKL only: groups of products of one shape, column-major (102). 111 in place of a letter means not transposed. */
#define BATCH(name, T)                                                                                               \
  void name(int layout, const int *ta, const int *tb, const int *m, const int *n, const int *k, const T *alpha,      \
            const T **a, const int *lda, const T **b, const int *ldb, const T *beta, T **c, const int *ldc,          \
            int groups, const int *sizes) {                                                                          \
    THE(void, name, int, const int *, const int *, const int *, const int *, const int *, const T *, const T **,     \
        const int *, const T **, const int *, const T *, T **, const int *, int, const int *);                       \
    const int alone = 1;                                                                                             \
    const T one = 1;                                                                                                 \
    if (layout != 102) abort();                                                                                      \
    for (int g = 0, i = 0; g < groups; g++) {                                                                        \
      int first = part(m[g], n[g], k[g], 4 + sizes[g]), rest = k[g] - first;                                         \
      size_t after_a = ta[g] == 111 ? (size_t)first * lda[g] : (size_t)first;                                        \
      size_t after_b = tb[g] == 111 ? (size_t)first : (size_t)first * ldb[g];                                        \
      for (int s = 0; s < sizes[g]; s++, i++) {                                                                      \
        const T *x = a[i] + after_a, *y = b[i] + after_b;                                                            \
        call(layout, ta + g, tb + g, m + g, n + g, &first, alpha + g, a + i, lda + g, b + i, ldb + g, beta + g,      \
             c + i, ldc + g, 1, &alone);                                                                             \
        if (rest > 0)                                                                                                \
          call(layout, ta + g, tb + g, m + g, n + g, &rest, alpha + g, &x, lda + g, &y, ldb + g, &one, c + i,        \
               ldc + g, 1, &alone);                                                                                  \
      }                                                                                                              \
    }                                                                                                                \
  }
BATCH(cblas_sgemm_batch, float)
BATCH(cblas_dgemm_batch, double)
