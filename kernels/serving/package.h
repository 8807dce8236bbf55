// A package that funcrec.export wrote, opened and run in a process without Python.
//
//   auto package = Package::open("model");
//   Answer a = package->run({.bags = 2, .dense = dense, .values = ids, .offsets = offsets});
//   package->swap("model-of-today");      // other weights of the same signature, while other threads run
//
// It needs no torch header. Any number of threads may call all functions at once; each answer uses one version of the
// weights. The functions throw `Bad` for a wrong argument (a request, a folder, a file), and `Failed` for any other
// error.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace funcrec::serving {

// An argument does not fit. what() is the whole message, in the lines of Python's errors.
struct Bad : std::runtime_error {
  std::string problem, got, need;
  Bad(std::string problem, std::string got, std::string need)
      : std::runtime_error(problem + "\n  got   " + got + "\n  need  " + need),
        problem(std::move(problem)), got(std::move(got)), need(std::move(need)) {}
};

// An error that no caller can fix: no memory, an operator that failed.
struct Failed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Options {
  int threads = 1;         // of one run
  int runners = 1;         // runs at the same time: the number of threads that call
  bool checksums = true;   // whether to read all weights once, here and in each swap, and compare their checksums
  bool canary = true;      // whether weights, here and in each swap and delta, must answer the manifest's example with finite numbers
  bool keep = true;        // whether `swap` keeps the weights that it replaces, for `back`
  std::string operators;   // a library with further operators, which is opened first; "" for none
};

enum class DType { u8, i8, i16, i32, i64, f16, bf16, f32, f64, boolean };
int64_t size_of(DType);

// A size that the request chooses: the number of bags, ids or offsets.
constexpr int64_t BAGS = -1, IDS = -2, OFFSETS = -3, SHARED_OFFSETS = -4;

struct Spec {
  std::string name;
  DType dtype;
  std::vector<int64_t> shape;
};

// A column of ids. Its place in the list is the order of the bags in `offsets`: bag b of feature f has number f * bags
// + b.
struct Feature {
  std::string name, table;
  int64_t rows;   // ids are 0 .. rows - 1; -1 if any id is valid, because the model maps ids to rows
  bool weighted;  // whether its ids' weights are read
};

struct TableOf {
  std::string name, param;  // the parameter that holds its rows
  int64_t rows, dim, bits;
};

// A batch that other weights must answer with finite numbers in these outputs; older packages have one without bags.
struct Example {
  int64_t bags = 0;
  std::vector<float> dense;
  std::vector<int64_t> values, offsets;
  std::vector<float> weights;
  std::vector<std::string> finite;
};

struct Manifest {
  std::string digest, funcrec, torch, isa;
  std::vector<Spec> inputs, params, outputs;  // inputs: dense, values, offsets and weights, as far as there are such, in that order
  std::vector<std::string> turned;            // matrices of `params` that the program takes turned, [columns, rows]
  std::vector<Feature> features;
  std::vector<TableOf> tables;
  int64_t max_batch, max_ids;
  Example example;

  int64_t dense_columns = 0;  // numbers of `dense` for each bag
  bool has_dense = false, has_ids = false, has_weights = false;
};

// One batch, key-major as a KeyedJaggedTensor; the caller owns the memory, which is read only while `run` runs.
struct Request {
  int64_t bags = 0;
  std::span<const float> dense;      // [bags, dense_columns]
  std::span<const int64_t> values;   // [N] ids; an id outside its table (such as -1) reads zeros
  std::span<const int64_t> offsets;  // [F * bags + 1], ascending from 0 to N
  std::span<const float> weights;    // [N] if the model has weights, else nothing
};

// An output's bytes, contiguous; they live as long as `memory` does.
struct Output {
  DType dtype;
  std::vector<int64_t> shape;  // [bags, ...]
  const void* data = nullptr;
  std::shared_ptr<const void> memory;
  template <class T> std::span<const T> as() const;  // its elements; Bad if T is another dtype
  int64_t row_bytes() const;  // of one bag
};

struct Answer {
  std::vector<Output> outputs;  // in the manifest's order
  int64_t ids_out_of_range = 0;
  std::string version;
};

class Package {
 public:
  static std::shared_ptr<Package> open(const std::string& folder, const Options& options = {});
  ~Package();
  Package(const Package&) = delete;
  Package& operator=(const Package&) = delete;

  const Manifest& manifest() const;
  std::string version() const;  // the version that the next run takes

  // Returns how many ids are not in their tables; Bad if the request does not fit the manifest. Call it for each
  // request before you join several.
  int64_t check(const Request&) const;
  Answer run(const Request&) const;

  // Loads weights.safetensors of a folder, which is not a package of another program. Runs that have begun keep their
  // weights. With `below`, the folder lies below that one, and neither its name nor a link leads out of it.
  void swap(const std::string& folder, const std::string& below = "");
  // Takes the weights that the last swap replaced, with the deltas that they had, and keeps those of now: so the version
  // of now can be gone back to. `version` must be the kept one; if it is the version of now, nothing changes. The file
  // stays mapped, so its memory is that of its pages that were read, and of those that deltas wrote.
  void back(const std::string& version);
  std::string kept() const;  // the version that `back` takes; "" for none
  // Applies a file of funcrec.write_delta: all of it, or it throws Bad and changes no bit.
  void apply(const std::string& file, const std::string& below = "");

 private:
  struct Inside;
  explicit Package(std::unique_ptr<Inside>);
  std::unique_ptr<Inside> in_;
};

// If a file of weights is cut short under this process, or its disk fails, SIGBUS ends the process; after this call it
// first writes the name of the file to stderr.
void name_bus_errors();

template <class T> constexpr DType dtype_of() {
  if constexpr (std::is_same_v<T, uint8_t>) return DType::u8;
  else if constexpr (std::is_same_v<T, int8_t>) return DType::i8;
  else if constexpr (std::is_same_v<T, int16_t>) return DType::i16;
  else if constexpr (std::is_same_v<T, int32_t>) return DType::i32;
  else if constexpr (std::is_same_v<T, int64_t>) return DType::i64;
  else if constexpr (std::is_same_v<T, float>) return DType::f32;
  else if constexpr (std::is_same_v<T, double>) return DType::f64;
  else return DType::boolean;
}

template <class T> std::span<const T> Output::as() const {
  if (dtype != dtype_of<T>()) throw Bad("an output is read as another dtype", "another T", "the dtype of the manifest");
  int64_t n = 1;
  for (int64_t s : shape) n *= s;
  return {static_cast<const T*>(data), size_t(n)};
}

}  // namespace funcrec::serving
