// The memory of all bodies and of parsed requests: it is counted at each allocation, and refused above a limit.
#pragma once
#include <atomic>
#include <memory>
#include <string>
#include <vector>

namespace funcrec::serving {

// Thrown if there is no room now; there may be room later.
struct Busy : std::exception {
  const char* what() const noexcept override { return "the memory for bodies is in use"; }
};

class Memory {
 public:
  explicit Memory(int64_t most) : most_(most) {}
  void take(size_t bytes) {
    if (bytes > size_t(most_) || used_.fetch_add(int64_t(bytes)) + int64_t(bytes) > most_) {
      if (bytes <= size_t(most_)) give(bytes);
      throw Busy();
    }
  }
  void give(size_t bytes) { used_ -= int64_t(bytes); }
  int64_t used() const { return used_; }
  int64_t most() const { return most_; }

 private:
  const int64_t most_;
  std::atomic<int64_t> used_ = 0;
};

// An allocator that counts its bytes, if it has a Memory.
template <class T> struct Counted {
  using value_type = T;
  using propagate_on_container_move_assignment = std::true_type;
  using propagate_on_container_swap = std::true_type;
  Memory* memory = nullptr;

  Counted(Memory* m = nullptr) : memory(m) {}
  template <class U> Counted(const Counted<U>& other) : memory(other.memory) {}
  T* allocate(size_t n) {
    if (memory) memory->take(n * sizeof(T));
    try {
      return std::allocator<T>().allocate(n);
    } catch (...) {
      if (memory) memory->give(n * sizeof(T));
      throw;
    }
  }
  void deallocate(T* p, size_t n) {
    std::allocator<T>().deallocate(p, n);
    if (memory) memory->give(n * sizeof(T));
  }
  friend bool operator==(const Counted& a, const Counted& b) { return a.memory == b.memory; }
};

template <class T> using Many = std::vector<T, Counted<T>>;
using Text = std::basic_string<char, std::char_traits<char>, Counted<char>>;

}  // namespace funcrec::serving
