// Delta files (funcrec/serve/freshness/_delta_file.py): rows, and whole tensors, that take the weights from one version to the next.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>

#include "tensors.h"
#include "weights.h"

namespace funcrec::serving {
namespace {

constexpr int64_t ALIGN = 8;
const std::string KIND = "funcrec delta 2", WHOLE = "whole/", ROWS = "rows/", VALUES = "values/";

// What one tensor is given: `rows` of it from `values` on, or all of it.
struct Change {
  const Placed* tensor;
  bool is_whole;
  int64_t count, row_bytes;
  const char *rows, *values;

  int64_t row(int64_t i) const {  // numbers of a file need not lie at their alignment
    int64_t r;
    std::memcpy(&r, rows + 8 * i, 8);
    return r;
  }
};

// What the file has of each parameter, by the beginnings of its tensors' names, in the order of the first ones.
struct Parts {
  std::string name;
  const Placed *whole = nullptr, *rows = nullptr, *values = nullptr;
};

std::vector<Parts> parts_of(const std::string& path, const std::vector<Placed>& found) {
  std::vector<Parts> out;
  std::map<std::string, size_t> places;
  for (const Placed& p : found) {
    const std::string part = p.spec.name.substr(0, p.spec.name.find('/') + 1), name = p.spec.name.substr(part.size());
    const size_t at = places.emplace(name, out.size()).first->second;
    if (at == out.size()) out.push_back({name});
    const Placed** own = part == WHOLE ? &out[at].whole : part == ROWS ? &out[at].rows : part == VALUES ? &out[at].values : nullptr;
    if (!own) throw Bad("`" + path + "` has other parameters.", p.spec.name, WHOLE + ", " + ROWS + " or " + VALUES + " and a parameter");
    *own = &p;
  }
  return out;
}

bool is_form(const Placed* p, DType dtype, const std::vector<int64_t>& shape) { return p && p->spec.dtype == dtype && p->spec.shape == shape; }

Change change_of(const std::string& path, const Parts& parts, const std::vector<Placed>& params, const char* bytes) {
  const auto at = std::find_if(params.begin(), params.end(), [&](const Placed& p) { return p.spec.name == parts.name; });
  if (at == params.end()) throw Bad("`" + path + "` has other parameters.", parts.name, "a parameter of the package");
  const auto& [name, dtype, shape] = at->spec;
  const int64_t height = shape.empty() ? 1 : shape[0], row_bytes = height ? at->nbytes / height : 0;
  if (!parts.rows && !parts.values && is_form(parts.whole, dtype, shape))
    return {&*at, true, height, row_bytes, nullptr, bytes + parts.whole->offset};
  const int64_t count = parts.rows && parts.rows->spec.shape.size() == 1 ? parts.rows->spec.shape[0] : -1;
  std::vector<int64_t> of_values = shape;
  if (!shape.empty()) of_values[0] = count;
  if (parts.whole || shape.empty() || count < 0 || !is_form(parts.rows, DType::i64, {count}) || !is_form(parts.values, dtype, of_values))
    throw Bad("`" + path + "` has other parameters.", name + " in another form", text_of(at->spec) + ", whole, or rows i64[n] and their values");
  const Change change{&*at, false, count, row_bytes, bytes + parts.rows->offset, bytes + parts.values->offset};
  for (int64_t i = 0; i < count; i++) {
    const int64_t r = change.row(i);
    if (r < 0 || r >= height || (i && r <= change.row(i - 1)))
      throw Bad("`" + path + "` has rows that " + name + " has not.", "row " + std::to_string(r), "ascending, each once, 0 to " + std::to_string(height - 1));
  }
  return change;
}

// The pages of this process's own that a write to [data, data + size) is going to need: the values stay, and what has no room, or a file
// that was cut short meanwhile, is found here. (EINVAL: Linux before 5.14, where the write makes them.)
class Pages {
 public:
  void add(const char* data, int64_t size) {
    if (size <= 0) return;
    const uintptr_t begin = uintptr_t(data) / page_ * page_, end = (uintptr_t(data) + uintptr_t(size) + page_ - 1) / page_ * page_;
    if (begin > end_ || begin < begin_) make();
    if (begin_ == end_) begin_ = begin;
    end_ = std::max(end_, end);
  }
  void make() {
    if (begin_ != end_ && madvise(reinterpret_cast<void*>(begin_), end_ - begin_, MADV_POPULATE_WRITE) != 0 && errno != EINVAL)
      throw Failed(std::string("there are no pages to write the delta to: ") + std::strerror(errno));
    begin_ = end_ = 0;
  }

 private:
  const uintptr_t page_ = uintptr_t(sysconf(_SC_PAGESIZE));
  uintptr_t begin_ = 0, end_ = 0;
};

// Memory that may be written to while this lives.
class Writable {
 public:
  Writable(char* base, size_t size) : base_(base), size_(size) {
    if (size_ && mprotect(base_, size_, PROT_READ | PROT_WRITE) != 0)
      throw Failed(std::string("the weights cannot be made writable: ") + std::strerror(errno));
  }
  ~Writable() {
    if (size_) mprotect(base_, size_, PROT_READ);
  }
  Writable(const Writable&) = delete;
  Writable& operator=(const Writable&) = delete;

 private:
  char* base_;
  size_t size_;
};

}  // namespace

void Weights::apply(const File& file, const Manifest& manifest, const std::function<void()>& accept) {
  const std::string &path = file.path, content = read(file);
  const Header header = read_header(path, KIND, int64_t(content.size()), ALIGN, [&](int64_t at, int64_t n) { return content.substr(size_t(at), size_t(n)); });
  for (const char* key : {"manifest", "from", "to"})
    if (!header.texts.contains(key)) throw Bad("`" + path + "` is damaged.", std::string("no text \"") + key + '"', "the file as it was written");
  const std::string &made_for = header.texts.at("manifest"), &from = header.texts.at("from"), &to = header.texts.at("to");
  if (made_for != manifest.digest) throw Bad("`" + path + "` is of another package.", made_for, manifest.digest);
  if (from != version) throw Bad("`" + path + "` is not the next delta.", "from " + from + " to " + to, "from " + version + ", the version that runs");
  for (const Placed& p : header.tensors) check_crc(path, p, content.data() + p.offset);
  std::vector<Change> changes;
  for (const Parts& p : parts_of(path, header.tensors)) changes.push_back(change_of(path, p, tensors(), content.data()));
  // write(to, from, size) for each piece of the weights that changes, in the order of their addresses within a tensor.
  const auto each = [&](auto&& write) {
    for (const Change& c : changes) {
      char* at = address(*c.tensor);
      if (c.is_whole) write(at, c.values, c.tensor->nbytes);
      for (int64_t i = 0; !c.is_whole && i < c.count; i++) write(at + c.row(i) * c.row_bytes, c.values + i * c.row_bytes, c.row_bytes);
    }
  };
  std::string name = to, before;
  const Writable writable(base_, size_);
  Pages pages;  // made while runs go on, so that they wait for the copy alone
  each([&](char* at, const char*, int64_t n) { pages.add(at, n); });
  pages.make();
  if (accept) each([&](char* at, const char*, int64_t n) { if (n) before.append(at, size_t(n)); });
  std::lock_guard alone(gate);
  each([](char* at, const char* from, int64_t n) { if (n) std::memcpy(at, from, size_t(n)); });
  if (accept) try {
    accept();
  } catch (...) {
    const char* from = before.data();
    each([&](char* at, const char*, int64_t n) { if (n) std::memcpy(at, from, size_t(n)); from += n; });
    throw;
  }
  version.swap(name);
}

}  // namespace funcrec::serving
