#include "weights.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>

#include "digest.h"

namespace funcrec::serving {
namespace {

std::string said(uint32_t crc) {
  char out[9];
  std::snprintf(out, sizeof out, "%08x", crc);
  return out;
}

// Mapped files, for a handler of signals: nothing in it allocates or waits. A file beyond the last place has no name there.
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
  const File index = folder.file("weights.json"), bytes = folder.file("weights.bin");  // both, before the folder loses any
  index_ = read_index(index, manifest);
  version = index_.version;
  const std::string& path = bytes.path;
  int64_t need = 0;
  for (const Placed& p : index_.tensors) need = std::max(need, p.nbytes ? p.offset + p.nbytes : 0);
  if (bytes.bytes < need) throw Bad("`" + path + "` is cut off.", std::to_string(bytes.bytes) + " bytes", std::to_string(need) + " bytes");
  if (need > 0) {  // private: its pages are the file's, shared, until this process writes to one
    void* at = mmap(nullptr, size_t(need), PROT_READ, MAP_PRIVATE | MAP_NORESERVE, bytes.descriptor.number(), 0);
    if (at == MAP_FAILED) throw Failed("`" + path + "` cannot be mapped: " + std::strerror(errno));
    base_ = static_cast<char*>(at), size_ = size_t(need);
    remember(base_, size_, bytes);
  }
  if (!checksums) return;
  for (const Placed& p : index_.tensors) {
    const uint32_t now = crc32({address(p), size_t(p.nbytes)});
    if (now == p.crc32) continue;
    unmap();
    throw Bad("`" + path + "` was changed, in " + p.spec.name + ".", "CRC " + said(now), said(p.crc32));
  }
}

void Weights::unmap() {
  forget(base_);
  if (base_) munmap(base_, size_);
}

}  // namespace funcrec::serving
