// Memory of one thread that is kept from call to call.
#pragma once
#include <cstdint>
#include <memory>
#include <new>

namespace funcrec {

// It grows, is not initialised, and begins at a cache line: a vector across two lines is slow.
template <class T> class Scratch {
 public:
  T* get(int64_t n) {
    if (n > size_) {
      data_.reset();
      size_ = 0;
      data_.reset(static_cast<T*>(::operator new(n * sizeof(T), LINE)));
      size_ = n;
    }
    return data_.get();
  }

 private:
  static constexpr std::align_val_t LINE{64};
  struct Free { void operator()(T* p) const { ::operator delete(p, LINE); } };
  std::unique_ptr<T, Free> data_;
  int64_t size_ = 0;
};

}  // namespace funcrec
