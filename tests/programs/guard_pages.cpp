// A library, loaded before libc, that puts torch's buffers between inaccessible pages:
//
//   | no access | canary | buffer | canary | no access |     each buffer ends at most 63 bytes before such a page
//
// A read or write outside a buffer ends the process, at once or when the buffer is freed. So does an access to a freed
// buffer. The compiled code is the code that users run; with the address sanitizer, g++ would keep loops' ends that it
// otherwise drops. Only `posix_memalign`, which torch's allocator calls, returns such buffers.
#include <errno.h>
#include <execinfo.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <initializer_list>

extern "C" {
void __libc_free(void*);
void* __libc_malloc(size_t);
void* __libc_memalign(size_t, size_t);
void* __libc_realloc(void*, size_t);
}

namespace {
constexpr size_t page = 4096, kinds = 9, rooms = 2048;  // up to 2^kind pages per room; 2 · 18,432 mappings in all
constexpr unsigned char canary = 0xdb;

struct Room {
  unsigned char* buffer;  // null if the room is free
  size_t size;
};
struct Kind {
  unsigned char* start;
  size_t pages;  // pages of a room; an inaccessible page follows
  Room room[rooms];
  uint32_t ring[rooms], head, count;  // free rooms; the first one freed is used first
};
Kind all[kinds];
pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
uint64_t given = 0;
unsigned char stack[1 << 16];

unsigned char* end_of(const Kind& kind, size_t i) { return kind.start + (i + 1) * (kind.pages + 1) * page - page; }
size_t whole(size_t size) { return (size + page - 1) / page * page; }

Kind* kind_of(const void* x) {
  auto at = static_cast<const unsigned char*>(x);
  for (Kind& kind : all)
    if (kind.start && at >= kind.start && at < kind.start + rooms * (kind.pages + 1) * page) return &kind;
  return nullptr;
}

void say(const char* what, const Room& room, long bytes) {
  char line[256];
  const char* text = "guard pages: %s %ld bytes from the start of a buffer of %zu bytes\n";
  int n = snprintf(line, sizeof line, text, what, bytes, room.size);
  if (write(2, line, n) < 0) return;
  void* frames[24];
  backtrace_symbols_fd(frames, backtrace(frames, 24), 2);
}

void fault(int number, siginfo_t* info, void*) {
  signal(number, SIG_DFL);  // the fault comes again, and ends the process
  static const Room none{};
  if (number == SIGFPE) return say("a division that has no quotient,", none, 0);
  Kind* kind = kind_of(info->si_addr);
  if (!kind) return say("an access to no buffer,", none, reinterpret_cast<long>(info->si_addr));
  size_t i = (static_cast<unsigned char*>(info->si_addr) - kind->start) / ((kind->pages + 1) * page);
  const Room& room = kind->room[i];
  if (!room.buffer) return say("an access to a buffer that was freed,", room, 0);
  say("an access", room, static_cast<unsigned char*>(info->si_addr) - room.buffer);
}

__attribute__((constructor)) void begin() {
  void* frames[1];
  backtrace(frames, 1);  // its first call loads a library
  for (size_t k = 0; k < kinds; k++) {
    Kind& kind = all[k];
    kind.pages = size_t(1) << k, kind.head = 0, kind.count = rooms;
    for (uint32_t i = 0; i < rooms; i++) kind.ring[i] = i;
    constexpr int how = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* start = mmap(nullptr, rooms * (kind.pages + 1) * page, PROT_NONE, how, -1, 0);
    kind.start = start == MAP_FAILED ? nullptr : static_cast<unsigned char*>(start);
  }
  stack_t own{};
  own.ss_sp = stack, own.ss_size = sizeof stack;
  sigaltstack(&own, nullptr);
  struct sigaction action{};
  action.sa_sigaction = fault, action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (int number : {SIGSEGV, SIGBUS, SIGFPE}) sigaction(number, &action, nullptr);
}

// Return null if there is no room.
unsigned char* give(size_t alignment, size_t size) {
  if (!size || size > (page << (kinds - 1)) || alignment > 64) return nullptr;
  size_t k = 0;
  while ((page << k) < size) k++;
  Kind& kind = all[k];
  if (!kind.start || !kind.count) return nullptr;
  uint32_t i = kind.ring[kind.head];
  unsigned char* end = end_of(kind, i);
  if (mprotect(end - whole(size), whole(size), PROT_READ | PROT_WRITE)) return nullptr;
  kind.head = (kind.head + 1) % rooms, kind.count--;
  memset(end - whole(size), canary, whole(size));
  kind.room[i] = {end - (size + alignment - 1) / alignment * alignment, size};
  given++;
  return kind.room[i].buffer;
}

void take_back(Kind& kind, unsigned char* buffer) {
  size_t i = (buffer - kind.start) / ((kind.pages + 1) * page);
  Room& room = kind.room[i];
  unsigned char *end = end_of(kind, i), *start = end - whole(room.size);
  if (room.buffer != buffer) {
    say("freed, but no buffer begins there,", room, buffer - room.buffer);
    _exit(86);
  }
  for (unsigned char* x = start; x < end; x++)
    if (*x != canary && (x < buffer || x >= buffer + room.size)) {
      say("written", room, x - buffer);
      _exit(86);
    }
  madvise(start, whole(room.size), MADV_DONTNEED);
  mprotect(start, whole(room.size), PROT_NONE);
  room.buffer = nullptr;
  kind.ring[(kind.head + kind.count) % rooms] = i, kind.count++;
}
}  // namespace

extern "C" {
uint64_t guarded_buffers() { return given; }

int posix_memalign(void** out, size_t alignment, size_t size) {
  pthread_mutex_lock(&lock);
  unsigned char* own = give(alignment, size);
  pthread_mutex_unlock(&lock);
  *out = own ? own : __libc_memalign(alignment, size);
  return *out ? 0 : ENOMEM;
}

void free(void* x) {
  Kind* kind = x ? kind_of(x) : nullptr;
  if (!kind) return __libc_free(x);
  int before = errno;
  pthread_mutex_lock(&lock);
  take_back(*kind, static_cast<unsigned char*>(x));
  pthread_mutex_unlock(&lock);
  errno = before;
}

void* realloc(void* x, size_t size) {
  Kind* kind = x ? kind_of(x) : nullptr;
  if (!kind) return __libc_realloc(x, size);
  size_t i = (static_cast<unsigned char*>(x) - kind->start) / ((kind->pages + 1) * page), old = kind->room[i].size;
  void* out = __libc_malloc(size);
  if (out) memcpy(out, x, old < size ? old : size), free(x);
  return out;
}
}
