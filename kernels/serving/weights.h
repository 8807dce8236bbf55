// The weights of a package: a file mapped into memory, whose pages all processes that map it share. What a delta writes, it writes
// to pages of this process's own.
#pragma once
#include <pthread.h>

#include <functional>
#include <memory>
#include <string>

#include "manifest.h"

namespace funcrec::serving {

// One that writes waits for those that read now, and those that come after it wait for it: many readers cannot keep it out.
class Gate {
 public:
  Gate();
  ~Gate() { pthread_rwlock_destroy(&lock_); }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;
  void lock() { pthread_rwlock_wrlock(&lock_); }
  void unlock() { pthread_rwlock_unlock(&lock_); }
  void lock_shared() { pthread_rwlock_rdlock(&lock_); }
  void unlock_shared() { pthread_rwlock_unlock(&lock_); }

 private:
  pthread_rwlock_t lock_;
};

class Weights {
 public:
  Weights(const Folder& folder, const Manifest& manifest, bool checksums);
  ~Weights() { unmap(); }
  Weights(const Weights&) = delete;
  Weights& operator=(const Weights&) = delete;

  const std::vector<Placed>& tensors() const { return index_.tensors; }
  char* address(const Placed& tensor) const { return tensor.nbytes ? base_ + tensor.offset : nullptr; }
  bool holds(const void* p) const { return p >= base_ && p < base_ + size_; }

  // Held while a run reads them, and for itself while `apply` writes.
  mutable Gate gate;
  std::string version;  // changed under the gate

  // All rows of a delta file for the version that these are of: validated whole, then written while nobody reads. What `accept`, which is
  // called before anybody reads, throws leaves every bit as it was.
  void apply(const File& file, const Manifest& manifest, const std::function<void()>& accept = nullptr);

 private:
  void unmap();

  Index index_;
  char* base_ = nullptr;
  size_t size_ = 0;
};

}  // namespace funcrec::serving
