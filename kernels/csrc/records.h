// Reads and writes records of one size in a file: record r is the bytes [r · size, (r + 1) · size).
//
//   ascending rows  ─▶  runs of neighbours  ─▶  one pread or pwrite for each run
//
// Runs that the page cache holds are read by the caller. The others wait for the disk, which answers many requests at once faster than one after
// the other: they are read by workers, threads of their own, more than there are cores. Writes go to the page cache, and have no workers.
#pragma once
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <system_error>
#include <thread>
#include <vector>

#include "abi.h"

namespace funcrec {

constexpr int64_t RECORDS_AT_ONCE = 64;  // the most rows of a run
constexpr int64_t RUNS_A_WORKER = 4;     // with fewer runs for each, fewer workers start

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

// Reads n bytes if the page cache holds them all. Returns whether it did.
inline bool read_cached(int64_t fd, char* data, int64_t n, int64_t at) {
#ifdef RWF_NOWAIT
  const iovec to{data, size_t(n)};
  return preadv2(int(fd), &to, 1, at, RWF_NOWAIT) == n;
#else
  return false;
#endif
}

struct Run {
  int64_t first, count;  // of the rows
};

// fd, bytes of a record, whether to write, workers, rows (ascending), the records [n, size] in their order, where the status goes.
inline void records(Reader r) {
  r.number();  // torch's threads wait for nothing
  const int64_t fd = r.number(), size = r.number();
  const bool writes = r.number();
  const int64_t workers = r.number();
  const Ints rows(r.vector());
  char* data = r.pointer<char>();
  int64_t* status = r.pointer<int64_t>();
  std::vector<Run> waiting;
  const auto move = [&](Run run) { return move_bytes(fd, writes, data + run.first * size, run.count * size, rows[run.first] * size); };
  *status = 0;
  for (int64_t i = 0, j; i < rows.size; i = j) {
    for (j = i + 1; j < rows.size && j - i < RECORDS_AT_ONCE && rows[j] == rows[i] + (j - i);) j++;
    const Run run{i, j - i};
    if (writes) {
      if ((*status = move(run))) return;
    } else if (!read_cached(fd, data + i * size, run.count * size, rows[i] * size)) {
      waiting.push_back(run);
    }
  }
  std::atomic<size_t> next{0};
  std::atomic<int64_t> failed{0};
  const auto work = [&] {
    for (size_t k; !failed && (k = next.fetch_add(1)) < waiting.size();)
      if (const int64_t error = move(waiting[k])) failed = error;
  };
  std::vector<std::thread> others;
  try {
    const int64_t wanted = std::min(workers, int64_t(waiting.size() + RUNS_A_WORKER - 1) / RUNS_A_WORKER);
    others.reserve(size_t(std::max<int64_t>(0, wanted)));
    while (int64_t(others.size()) + 1 < wanted) others.emplace_back(work);
  } catch (const std::system_error&) {  // the system allows no more threads: the existing ones do the work
  }
  work();
  for (std::thread& t : others) t.join();
  *status = failed;
}

}  // namespace funcrec
