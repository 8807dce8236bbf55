// What the server needs of a model: functions, so that it is tested with one that needs no package and no torch.
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
  std::function<int64_t(const Request&)> check;  // ids that are not in their tables; Bad if the request does not fit
  std::function<Answer(const Request&)> run;     // of one version; called by several workers at once
  std::function<std::string()> version;
  std::function<void(const std::string&)> swap, apply;  // a folder of weights, a file of changed rows, by their names below `updates`; one at a time
};

// A request with memory of its own.
struct Bags {
  int64_t bags = 0;
  Many<float> dense;
  Many<int64_t> values, offsets;
  Many<float> weights;
  explicit Bags(Memory* memory = nullptr) : dense(memory), values(memory), offsets(memory), weights(memory) {}
  Request view() const { return {bags, dense, values, offsets, weights}; }
};

// Why there is no answer, as a client is told.
struct Problem {
  unsigned code = 500;
  std::string problem, got, need;
};

// The part of a batch's answer that is of one request: rows [first, first + bags) of each output.
struct Part {
  std::shared_ptr<const Answer> answer;
  int64_t first = 0, bags = 0, ids_out_of_range = 0;
};

}  // namespace funcrec::serving
