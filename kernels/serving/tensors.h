// Files of named tensors (funcrec/files/_tensors.py) in the layout of safetensors, with a check of every byte.
#pragma once
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "package.h"

namespace funcrec::serving {

// A tensor in a file: `offset` bytes from its beginning.
struct Placed {
  Spec spec;
  int64_t offset = 0, nbytes = 0;
  uint32_t crc32 = 0;
};

// The tensors of a file in their order, and its texts.
struct Header {
  std::vector<Placed> tensors;
  std::map<std::string, std::string> texts;
};

// Reads the header of a file of `size` bytes, which accounts for every byte; tensors begin at multiples of `align`. Bad
// has Python's message. read(at, n): n bytes of the file, or as many as there are.
Header read_header(const std::string& path, const std::string& kind, int64_t size, int64_t align, const std::function<std::string(int64_t, int64_t)>& read);

// Throws Bad if a tensor has another CRC.
void check_crc(const std::string& path, const Placed& tensor, const char* data);

}  // namespace funcrec::serving
