#include "package.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/isfinite.h>
#include <c10/core/InferenceMode.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/version.h>

#include <algorithm>
#include <iostream>
#include <map>
#include <mutex>
#include <optional>
#include <shared_mutex>

#include "manifest.h"
#include "weights.h"

namespace funcrec::serving {
namespace {

using Loader = torch::inductor::AOTIModelPackageLoader;

at::ScalarType scalar_type(DType dtype) {
  switch (dtype) {
    case DType::u8: return at::kByte;
    case DType::i8: return at::kChar;
    case DType::i16: return at::kShort;
    case DType::i32: return at::kInt;
    case DType::i64: return at::kLong;
    case DType::f16: return at::kHalf;
    case DType::bf16: return at::kBFloat16;
    case DType::f32: return at::kFloat;
    case DType::f64: return at::kDouble;
    case DType::boolean: break;
  }
  return at::kBool;
}

at::Tensor view(const void* data, at::IntArrayRef shape, at::ScalarType dtype) {
  return at::from_blob(const_cast<void*>(data), shape, at::TensorOptions().dtype(dtype));
}

// A program writes an error to std::cerr, with paths of the machine that compiled it, and then throws an error with the
// reason. A thread hides the first while it runs a program.
class Hush {
 public:
  Hush() {
    static Stream one;
    hushed++;
  }
  ~Hush() { hushed--; }
  Hush(const Hush&) = delete;
  Hush& operator=(const Hush&) = delete;

 private:
  struct Stream : std::streambuf {
    std::streambuf* const before = std::cerr.rdbuf();
    Stream() { std::cerr.rdbuf(this); }
    ~Stream() override { std::cerr.rdbuf(before); }
    int overflow(int c) override { return hushed || c == EOF ? 0 : before->sputc(char(c)); }
    std::streamsize xsputn(const char* text, std::streamsize n) override { return hushed ? n : before->sputn(text, n); }
    int sync() override { return before->pubsync(); }
  };
  static inline thread_local int hushed = 0;
};

// Returns torch's message of an error without its stack, whose addresses no client should see.
std::string reason(const std::string& what) { return what.substr(0, what.find("\nException raised from ")); }

template <class F> auto of_torch(const char* what, F&& f) {
  try {
    return f();
  } catch (const c10::Error& e) {
    throw Failed(std::string(what) + ": " + reason(e.what_without_backtrace()));
  } catch (const Bad&) {
    throw;
  } catch (const Failed&) {
    throw;
  } catch (const std::exception& e) {
    throw Failed(std::string(what) + ": " + reason(e.what()));
  }
}

// Weights, and the tensors that a program takes, in its order. Those that it takes turned are copies.
struct Parameters {
  Weights weights;
  std::vector<at::Tensor> tensors;
  std::map<std::string, at::Tensor> turned;  // by name: the views of the file whose copies are turned, and
  std::map<std::string, at::Tensor> copies;  // the copies

  Parameters(const Folder& folder, const Manifest& manifest, bool checksums) : weights(folder, manifest, checksums) {
    for (const Placed& p : weights.tensors()) {
      at::Tensor x = view(weights.address(p), p.spec.shape, scalar_type(p.spec.dtype));
      if (const auto& names = manifest.turned; std::find(names.begin(), names.end(), p.spec.name) != names.end()) {
        turned.emplace(p.spec.name, x);
        x = copies.emplace(p.spec.name, x.t().clone(at::MemoryFormat::Contiguous)).first->second;
      }
      tensors.push_back(std::move(x));
    }
  }
  // Turns a tensor again, after a write to it. The caller holds the gate of the weights alone.
  void turn(const Placed& p) {
    if (const auto copy = copies.find(p.spec.name); copy != copies.end()) copy->second.copy_(turned.at(p.spec.name).t());
  }
  bool holds(const void* data) const {
    const auto within = [&](const auto& of) { return data >= of.second.data_ptr() && data < static_cast<const char*>(of.second.data_ptr()) + of.second.nbytes(); };
    return weights.holds(data) || std::any_of(copies.begin(), copies.end(), within);
  }
};

std::string version_of(const std::shared_ptr<Parameters>& p) {
  if (!p) return {};
  std::shared_lock reading(p->weights.gate);
  return p->weights.version;
}

// Throws Bad unless the request has `needed` of `n` things.
void count(const char* what, size_t n, int64_t needed) {
  if (n != size_t(needed)) throw Bad(std::string("`") + what + "` has another size.", std::to_string(n), std::to_string(needed));
}

// Returns the number of ids outside [0, rows), by a loop that compiles to vectors.
int64_t outside(std::span<const int64_t> ids, int64_t rows) {
  int64_t n = 0;
  for (int64_t id : ids) n += uint64_t(id) >= uint64_t(rows);
  return n;
}

// The weights that the next run takes. It is not a std::atomic: libstdc++ 12 unlocks its load in relaxed order, so the
// read of the pointer may move behind the next store.
class Current {
 public:
  std::shared_ptr<Parameters> load() const {
    std::lock_guard alone(one_);
    return now_;
  }
  std::shared_ptr<Parameters> kept() const {
    std::lock_guard alone(one_);
    return kept_;
  }
  void replace(std::shared_ptr<Parameters> next, bool keep) {
    std::shared_ptr<Parameters> old;  // freed after the lock, as `next` is
    std::lock_guard alone(one_);
    now_.swap(next), kept_.swap(old);
    if (keep) kept_.swap(next);
  }

 private:
  mutable std::mutex one_;
  std::shared_ptr<Parameters> now_, kept_;
};

}  // namespace

struct Package::Inside {
  Manifest manifest;
  Options options;
  mutable std::optional<Loader> loader;  // any number of threads may run it
  Current now;
  std::mutex one_change;  // swaps and deltas, one at a time

  static std::unique_ptr<Inside> open(const Folder& folder, const Options& options);

  void set_threads() const {  // torch keeps a number for each thread
    thread_local int set = 0;
    if (set != options.threads) at::set_num_threads(set = options.threads);
  }

  // Returns the answer of the program with these weights to a checked request. The caller of `answer_now` holds their
  // gate.
  Answer answer(const Request& request, const Parameters& p) const {
    std::shared_lock reading(p.weights.gate);
    return answer_now(request, p, "the program failed");
  }
  Answer answer_now(const Request& request, const Parameters& p, const char* failure) const;
  std::vector<Output> outputs_of(std::vector<at::Tensor> results, const Request& request, const Parameters& p) const;

  // Before weights serve, they must answer one bag without ids, and the example with finite numbers. This refuses
  // weights that could answer no request (for example, kernels that lack an operator) and weights of a run that
  // diverged. others: whether the program has run with other weights.
  void try_out(const Parameters& p, bool others) const;
  void try_example(const Parameters& p) const;
};

Package::Package(std::unique_ptr<Inside> in) : in_(std::move(in)) {}
Package::~Package() = default;

std::shared_ptr<Package> Package::open(const std::string& folder, const Options& options) {
  if (options.threads < 1 || options.runners < 1) throw Bad("the options do not fit.", "threads or runners below 1", "1 or more");
  if (!options.operators.empty() && !dlopen(options.operators.c_str(), RTLD_NOW | RTLD_GLOBAL)) {
    const char* error = dlerror();
    throw Bad("the operators cannot be loaded.", error ? error : options.operators, "a shared library that registers them");
  }
  return read_folder(folder, "", [&](const Folder& opened) { return std::shared_ptr<Package>(new Package(Inside::open(opened, options))); });
}

std::unique_ptr<Package::Inside> Package::Inside::open(const Folder& folder, const Options& options) {
  auto in = std::make_unique<Inside>();
  in->options = options;
  in->manifest = read_manifest(folder, TORCH_VERSION);
  const File model = folder.file("model.pt2");
  of_torch("the program cannot be loaded", [&] {
    const Hush hush;
    in->loader.emplace(own_path(model), "model", false, size_t(options.runners));
    const auto metadata = in->loader->get_metadata();
    const auto digest = metadata.find("funcrec_digest");
    if (digest == metadata.end() || digest->second != in->manifest.digest)
      throw Bad("`model.pt2` is not the manifest's program.", "digest " + (digest == metadata.end() ? "None" : digest->second), in->manifest.digest);
  });
  check_program(in->manifest);
  auto p = std::make_shared<Parameters>(folder, in->manifest, options.checksums);
  in->try_out(*p, false);
  in->now.replace(std::move(p), false);
  return in;
}

const Manifest& Package::manifest() const { return in_->manifest; }

std::string Package::version() const { return version_of(in_->now.load()); }
std::string Package::kept() const { return version_of(in_->now.kept()); }

int64_t Package::check(const Request& r) const {
  const Manifest& m = in_->manifest;
  if (r.bags < 0 || r.bags > m.max_batch) throw Bad("the batch is of another size.", std::to_string(r.bags) + " bags", "0 to " + std::to_string(m.max_batch));
  count("dense", r.dense.size(), m.dense_columns * r.bags);
  if (int64_t(r.values.size()) > m.max_ids) throw Bad("there are too many ids.", std::to_string(r.values.size()), std::to_string(m.max_ids) + " or fewer");
  count("weights", r.weights.size(), m.has_weights ? int64_t(r.values.size()) : 0);
  if (!m.has_ids) {
    count("values", r.values.size(), 0), count("offsets", r.offsets.size(), 0);
    return 0;
  }
  count("offsets", r.offsets.size(), int64_t(m.features.size()) * r.bags + 1);
  const int64_t n = int64_t(r.values.size());
  if (r.offsets.front() != 0) throw Bad("`offsets` do not begin at 0.", std::to_string(r.offsets.front()), "0");
  if (r.offsets.back() != n) throw Bad("`offsets` do not end at the number of ids.", std::to_string(r.offsets.back()), std::to_string(n));
  bool descends = false;
  for (size_t i = 1; i < r.offsets.size(); i++) descends |= r.offsets[i] < r.offsets[i - 1];
  if (descends) throw Bad("`offsets` descend.", "a bag that ends before it begins", "ascending numbers");
  int64_t out = 0;
  for (size_t f = 0; f < m.features.size(); f++) {
    if (m.features[f].rows < 0) continue;
    const int64_t begin = r.offsets[f * size_t(r.bags)], end = r.offsets[(f + 1) * size_t(r.bags)];
    out += outside(r.values.subspan(size_t(begin), size_t(end - begin)), m.features[f].rows);
  }
  return out;
}

Answer Package::run(const Request& r) const {
  const int64_t out_of_range = check(r);
  Answer answer = in_->answer(r, *in_->now.load());
  answer.ids_out_of_range = out_of_range;
  return answer;
}

Answer Package::Inside::answer_now(const Request& r, const Parameters& p, const char* failure) const {
  set_threads();
  Answer answer;
  answer.version = p.weights.version;
  if (r.bags == 0) {  // programs need one bag or more
    for (const Spec& spec : manifest.outputs) {
      answer.outputs.push_back({spec.dtype, spec.shape, nullptr, nullptr});
      answer.outputs.back().shape[0] = 0;
    }
    return answer;
  }
  answer.outputs = of_torch(failure, [&] {
    c10::InferenceMode inference;
    const Hush hush;
    std::vector<at::Tensor> inputs;
    inputs.reserve(p.tensors.size() + 4);
    inputs = p.tensors;
    if (manifest.has_dense) inputs.push_back(view(r.dense.data(), {r.bags, manifest.dense_columns}, at::kFloat));
    if (manifest.has_ids) inputs.push_back(view(r.values.data(), {int64_t(r.values.size())}, at::kLong));
    if (manifest.has_ids) inputs.push_back(view(r.offsets.data(), {int64_t(r.offsets.size())}, at::kLong));
    if (manifest.has_weights) inputs.push_back(view(r.weights.data(), {int64_t(r.weights.size())}, at::kFloat));
    return outputs_of(loader->boxed_run(std::move(inputs)), r, p);
  });
  return answer;
}

void Package::Inside::try_out(const Parameters& p, bool others) const {
  const std::vector<float> dense(size_t(manifest.dense_columns));
  const std::vector<int64_t> offsets(manifest.has_ids ? manifest.features.size() + 1 : 0);
  try {
    answer_now({.bags = 1, .dense = dense, .values = {}, .offsets = offsets, .weights = {}}, p, "the package cannot answer one bag without ids");
    if (options.canary && manifest.example.bags) try_example(p);
  } catch (const Failed& e) {
    if (!others) throw;
    throw Bad("the program fails with these weights.", e.what(), "weights that it runs with");
  }
}

void Package::Inside::try_example(const Parameters& p) const {
  const Example& x = manifest.example;
  const Answer answer = answer_now({x.bags, x.dense, x.values, x.offsets, x.weights}, p, "the package cannot answer its example");
  for (size_t i = 0; i < answer.outputs.size(); i++) {
    const std::string& name = manifest.outputs[i].name;
    if (std::find(x.finite.begin(), x.finite.end(), name) == x.finite.end()) continue;
    const at::Tensor& numbers = *std::static_pointer_cast<const at::Tensor>(answer.outputs[i].memory);
    const int64_t wrong = of_torch("the answer cannot be read", [&] { return numbers.numel() - at::isfinite(numbers).sum().item<int64_t>(); });
    if (wrong) throw Bad("the package's example is not answered with finite numbers.", std::to_string(wrong) + " of " + name + " that are none", "weights as those that it was exported with, or --canary false");
  }
}

std::vector<Output> Package::Inside::outputs_of(std::vector<at::Tensor> results, const Request& r, const Parameters& p) const {
  if (results.size() != manifest.outputs.size()) throw Failed("the program has other outputs than its manifest");
  std::vector<Output> out;
  for (size_t i = 0; i < results.size(); i++) {
    const Spec& spec = manifest.outputs[i];
    std::vector<int64_t> shape = spec.shape;
    shape[0] = r.bags;
    at::Tensor x = results[i].contiguous();
    if (x.sizes() != at::IntArrayRef(shape) || x.scalar_type() != scalar_type(spec.dtype))
      throw Failed("the program's output " + spec.name + " is not " + text_of(spec) + ", as its manifest says");
    const void* data = x.data_ptr();
    const auto within = [&](auto span) { return data >= span.data() && data < span.data() + span.size(); };
    if (p.holds(data) || within(r.dense) || within(r.values) || within(r.offsets) || within(r.weights)) x = x.clone();
    data = x.data_ptr();
    out.push_back({spec.dtype, std::move(shape), data, std::make_shared<at::Tensor>(std::move(x))});
  }
  return out;
}

void Package::swap(const std::string& folder, const std::string& below) {
  std::lock_guard alone(in_->one_change);
  read_folder(folder, below, [&](const Folder& opened) {
    check_same_program(opened, in_->manifest);
    auto p = std::make_shared<Parameters>(opened, in_->manifest, in_->options.checksums);
    in_->try_out(*p, true);
    in_->now.replace(std::move(p), in_->options.keep);
  });
}

void Package::back(const std::string& version) {
  std::lock_guard alone(in_->one_change);
  if (version == this->version()) return;
  if (const std::string own = kept(); own.empty() || own != version)
    throw Bad("no weights of this version are kept.", version, own.empty() ? "none are: `swap` keeps those that it replaces" : own);
  in_->now.replace(in_->now.kept(), true);
}

void Package::apply(const std::string& file, const std::string& below) {
  std::lock_guard alone(in_->one_change);
  const auto p = in_->now.load();
  p->weights.apply(open_file(file, below), in_->manifest, [&] { in_->try_out(*p, true); }, [&](const Placed& own) { p->turn(own); });
}

int64_t Output::row_bytes() const {
  int64_t bytes = size_of(dtype);
  for (size_t i = 1; i < shape.size(); i++) bytes *= shape[i];
  return bytes;
}

}  // namespace funcrec::serving
