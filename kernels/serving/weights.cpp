#include "weights.h"

#include <sys/mman.h>

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

}  // namespace

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
  }
  if (!checksums) return;
  for (const Placed& p : index_.tensors) {
    const uint32_t now = crc32({address(p), size_t(p.nbytes)});
    if (now == p.crc32) continue;
    if (base_) munmap(base_, size_);
    throw Bad("`" + path + "` was changed, in " + p.spec.name + ".", "CRC " + said(now), said(p.crc32));
  }
}

Weights::~Weights() {
  if (base_) munmap(base_, size_);
}

}  // namespace funcrec::serving
