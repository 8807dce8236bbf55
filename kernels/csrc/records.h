// Reads and writes records of one size in a file: record r is the bytes [r · size, (r + 1) · size).
//
//   ascending rows  ─▶  runs of neighbours  ─▶  one pread or pwrite for each run, of several workers at once
//
// A disk answers many requests at once faster than one after the other, so the workers are threads of their own, more than there are cores.
#pragma once
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <system_error>
#include <thread>
#include <vector>

#include "abi.h"

namespace funcrec {

constexpr int64_t RECORDS_AT_ONCE = 64;  // a worker takes so many rows; a run does not go beyond them

// Moves n bytes between memory and the file. Returns 0, the system's error number, or -1 if the file ends before them.
inline int64_t move_bytes(int64_t fd, bool writes, char* data, int64_t n, int64_t at) {
  while (n > 0) {
    const ssize_t moved = writes ? pwrite(int(fd), data, size_t(n), at) : pread(int(fd), data, size_t(n), at);
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0) return errno;
    if (moved == 0) return -1;
    data += moved, n -= moved, at += moved;
  }
  return 0;
}

// fd, bytes of a record, whether to write, workers, rows (ascending), the records [n, size] in their order, where the status goes.
inline void records(Reader r) {
  r.number();  // torch's threads wait for nothing
  const int64_t fd = r.number(), size = r.number();
  const bool writes = r.number();
  const int64_t workers = r.number();
  const Ints rows(r.vector());
  char* data = r.pointer<char>();
  int64_t* status = r.pointer<int64_t>();
  const int64_t n = rows.size, blocks = (n + RECORDS_AT_ONCE - 1) / RECORDS_AT_ONCE;
  std::atomic<int64_t> next{0}, failed{0};
  auto work = [&] {
    for (int64_t b; !failed && (b = next.fetch_add(1)) < blocks;) {
      const int64_t end = std::min(n, (b + 1) * RECORDS_AT_ONCE);
      for (int64_t i = b * RECORDS_AT_ONCE, j; i < end; i = j) {
        for (j = i + 1; j < end && rows[j] == rows[i] + (j - i);) j++;
        if (const int64_t error = move_bytes(fd, writes, data + i * size, (j - i) * size, rows[i] * size)) {
          failed = error;
          return;
        }
      }
    }
  };
  std::vector<std::thread> others;
  try {
    others.reserve(size_t(std::max<int64_t>(0, workers)));
    while (int64_t(others.size()) + 1 < std::min(workers, blocks)) others.emplace_back(work);
  } catch (const std::system_error&) {  // the system allows no more threads: the existing ones do the work
  }
  work();
  for (std::thread& t : others) t.join();
  *status = failed;
}

}  // namespace funcrec
