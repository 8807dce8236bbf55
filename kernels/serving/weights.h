// The weights of a package: a file mapped into memory. All processes that map it share its pages; a delta writes to
// private pages of this process.
#pragma once
#include <pthread.h>

#include <functional>
#include <memory>
#include <string>

#include "manifest.h"

namespace funcrec::serving {

// A writer waits for present readers, and later readers wait for the writer, so many readers cannot keep it out.
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

  // A run holds it while it reads the weights; `apply` holds it alone while it writes.
  mutable Gate gate;
  std::string version;  // changed under the gate

  // Applies a delta file for the version of these weights: the file is checked as a whole, and then written while no
  // run reads. `accept` is called before other runs read; if it throws, every bit stays as it was. `written` is called
  // after each write to a tensor, also after those that undo one.
  void apply(const File& file, const Manifest& manifest, const std::function<void()>& accept = nullptr,
             const std::function<void(const Placed&)>& written = nullptr);

 private:
  void unmap();

  Index index_;
  char* base_ = nullptr;
  size_t size_ = 0;
};

}  // namespace funcrec::serving
