// The functions of a model that the server needs. So tests can use a model without a package and without torch.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "../package.h"
#include "memory.h"

namespace funcrec::serving {

struct Model {
  Manifest manifest;
  std::function<int64_t(const Request&)> check;  // returns the number of ids outside their tables; Bad if the request does not fit
  std::function<Answer(const Request&)> run;     // uses one version; several workers call it at once
  std::function<std::string()> version;
  std::function<std::string()> kept;             // the version that `back` goes to; "" for none
  std::function<void(const std::string&)> back;  // exchanges the weights for the kept ones, which must have this version; nothing if they serve already
  std::function<void(const std::string&)> swap, apply;  // take a folder of weights, or a file of changed rows, by its name below `updates`; one call at a time
};

// A model of a process. Several models may have one name and different versions.
struct Named {
  std::string name;
  Model model;
};

// A request that owns its memory.
struct Bags {
  int64_t bags = 0;
  Many<float> dense;
  Many<int64_t> values, offsets;
  Many<float> weights;
  explicit Bags(Memory* memory = nullptr) : dense(memory), values(memory), offsets(memory), weights(memory) {}
  Request view() const { return {bags, dense, values, offsets, weights}; }
};

// The reason why there is no answer, for the client.
struct Problem {
  unsigned code = 500;
  std::string problem, got, need;
};

// Returns one request's part of a batch's answer: rows [first, first + bags) of each output.
struct Part {
  std::shared_ptr<const Answer> answer;
  int64_t first = 0, bags = 0, ids_out_of_range = 0;
};

}  // namespace funcrec::serving
