#include "weights.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>


namespace funcrec::serving {
namespace {

// The names of mapped files, for a signal handler, which may not allocate or wait. A file beyond the last place is not
// named.
struct Mapped {
  std::atomic<const char*> begin = nullptr;
  size_t size = 0;
  char path[1024] = "";
};
Mapped mapped[64];
std::atomic<bool> taken[64];

void remember(const char* base, size_t size, const File& file) {
  for (size_t i = 0; i < std::size(mapped); i++) {
    if (taken[i].exchange(true)) continue;
    const ssize_t n = readlink(own_path(file).c_str(), mapped[i].path, sizeof mapped[i].path - 1);
    mapped[i].path[std::max<ssize_t>(n, 0)] = 0, mapped[i].size = size, mapped[i].begin = base;
    return;
  }
}

void forget(const char* base) {
  for (size_t i = 0; i < std::size(mapped); i++)
    if (base && mapped[i].begin == base) mapped[i].begin = nullptr, taken[i] = false;
}

void say(const char* text) {
  if (write(STDERR_FILENO, text, std::strlen(text)) < 0) return;
}

void on_bus_error(int number, siginfo_t* about, void*) {
  const char* at = static_cast<const char*>(about->si_addr);
  for (const Mapped& m : mapped) {
    const char* begin = m.begin;
    if (!begin || at < begin || at >= begin + m.size) continue;
    say("funcrec: `"), say(m.path), say("` was cut short while it is open, or its disk failed (SIGBUS)\n");
  }
  signal(number, SIG_DFL), raise(number);
}

}  // namespace

void name_bus_errors() {
  struct sigaction action {};
  action.sa_sigaction = on_bus_error;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGBUS, &action, nullptr);
}

Gate::Gate() {
  pthread_rwlockattr_t kind;
  pthread_rwlockattr_init(&kind);
  pthread_rwlockattr_setkind_np(&kind, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
  pthread_rwlock_init(&lock_, &kind);
  pthread_rwlockattr_destroy(&kind);
}

Weights::Weights(const Folder& folder, const Manifest& manifest, bool checksums) {
  const File file = folder.file("weights.safetensors");
  index_ = read_index(file, manifest);
  version = index_.version;
  size_ = size_t(file.bytes);  // private: pages are shared with the file until this process writes to them
  void* at = mmap(nullptr, size_, PROT_READ, MAP_PRIVATE | MAP_NORESERVE, file.descriptor.number(), 0);
  if (at == MAP_FAILED) throw Failed("`" + file.path + "` cannot be mapped: " + std::strerror(errno));
  base_ = static_cast<char*>(at);
  remember(base_, size_, file);
  if (checksums) try {
    for (const Placed& p : index_.tensors) check_crc(file.path, p, address(p));
  } catch (const Bad&) {
    unmap();
    throw;
  }
}

void Weights::unmap() {
  forget(base_);
  if (base_) munmap(base_, size_);
}

}  // namespace funcrec::serving
