// Bodies of the Open Inference Protocol (version 2 of KServe's and Triton's), as JSON and with tensors as bytes after
// it. Jagged ids are two tensors of one dimension: `ids.F.values` and `ids.F.lengths`; README.md describes all tensors.
#pragma once
#include <optional>
#include <string>
#include <string_view>

#include "model.h"

namespace funcrec::serving {

// What a client asks for besides the bags.
struct Wish {
  struct Tensor {
    size_t output;  // its number in the manifest
    bool is_binary;
  };
  std::optional<std::string> id;
  std::vector<Tensor> outputs;
  std::optional<int64_t> timeout_us;
};

struct Inference {
  Bags bags;
  Wish wish;
};

// Returns the request of a body, whose first `header` bytes are JSON; the tensors that are bytes follow. Throws Bad with
// the reason if it does not fit the manifest, and Busy if there is no room.
Inference from_inference(std::string_view body, size_t header, const Manifest&, Memory* = nullptr);

// An answer: `header` bytes of JSON, and the bytes of tensors after it.
struct Written {
  std::string body;
  size_t header = 0;
  bool is_binary() const { return header < body.size(); }
};
Written to_inference(const Part&, const Manifest&, const std::string& model, const Wish&);

// Returns the metadata of a model: its versions, tensors, and the form of jagged ids.
std::string metadata_of(const Manifest&, const std::string& model, const std::vector<std::string>& versions);

}  // namespace funcrec::serving
