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

// The change of one tensor: `rows` of it, with numbers from `values` on, or all of it.
struct Change {
  const Placed* tensor;
  bool is_whole;
  int64_t count, row_bytes;
  const char *rows, *values;

  int64_t row(int64_t i) const {  // numbers in a file need not be aligned
    int64_t r;
    std::memcpy(&r, rows + 8 * i, 8);
    return r;
  }
};

// Each tensor of the file is a whole parameter, or rows of a parameter, or values of as many rows; no parameter is
// both.
std::vector<Change> changes_of(const std::string& path, const std::vector<Placed>& found, const std::vector<Placed>& params, const char* bytes) {
  std::map<std::string, const Placed*> named;
  for (const Placed& p : found) named[p.spec.name] = &p;
  std::vector<Change> out;
  for (const Placed& p : found) {
    const std::string name = p.spec.name.substr(std::min(p.spec.name.find('/'), p.spec.name.size() - 1) + 1);
    const auto param = std::find_if(params.begin(), params.end(), [&](const Placed& own) { return own.spec.name == name; });
    if (param == params.end()) throw Bad("`" + path + "` has other parameters.", p.spec.name, "parameters of the package");
    const auto& [_, dtype, shape] = param->spec;
    const Placed *whole = named[WHOLE + name], *rows = named[ROWS + name], *values = named[VALUES + name];
    const int64_t height = shape.empty() ? 1 : shape[0], row_bytes = height ? param->nbytes / height : 0;
    const int64_t count = rows && rows->spec.shape.size() == 1 ? rows->spec.shape[0] : -1;
    std::vector<int64_t> own_shape = shape;
    if (!whole && !shape.empty()) own_shape[0] = count;
    const auto is_form = [&](const Placed* x) { return x && x->spec.dtype == dtype && x->spec.shape == own_shape; };
    if (whole == &p && !rows && !values && is_form(whole)) {
      out.push_back({&*param, true, height, row_bytes, nullptr, bytes + p.offset});
    } else if (whole || (rows != &p && values != &p) || shape.empty() || count < 0 || rows->spec.dtype != DType::i64 || !is_form(values)) {
      throw Bad("`" + path + "` has other parameters.", text_of(p.spec) + " as " + p.spec.name, text_of(param->spec) + ", whole, or rows i64[n] and their values");
    } else if (rows == &p) {
      out.push_back({&*param, false, count, row_bytes, bytes + p.offset, bytes + values->offset});
      for (int64_t i = 0; i < count; i++)
        if (const int64_t r = out.back().row(i); r < 0 || r >= height || (i && r <= out.back().row(i - 1)))
          throw Bad("`" + path + "` has rows that " + name + " has not.", "row " + std::to_string(r), "ascending, each once, 0 to " + std::to_string(height - 1));
    }
  }
  return out;
}

// Makes the private pages that a write to [data, data + size) needs; the values stay. So a lack of memory, or a file
// that was cut short, shows before the write. (EINVAL: on Linux before 5.14 the write makes the pages.)
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

// Makes memory writable while this object lives.
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

void Weights::apply(const File& file, const Manifest& manifest, const std::function<void()>& accept, const std::function<void(const Placed&)>& written) {
  const std::string &path = file.path, content = read(file);
  const Header header = read_header(path, KIND, int64_t(content.size()), ALIGN, [&](int64_t at, int64_t n) { return content.substr(size_t(at), size_t(n)); });
  for (const char* key : {"manifest", "from", "to"})
    if (!header.texts.contains(key)) throw Bad("`" + path + "` is damaged.", std::string("no text \"") + key + '"', "the file as it was written");
  const std::string &made_for = header.texts.at("manifest"), &from = header.texts.at("from"), &to = header.texts.at("to");
  if (made_for != manifest.digest) throw Bad("`" + path + "` is of another package.", made_for, manifest.digest);
  if (from != version) throw Bad("`" + path + "` is not the next delta.", "from " + from + " to " + to, "from " + version + ", the version that runs");
  for (const Placed& p : header.tensors) check_crc(path, p, content.data() + p.offset);
  const auto changes = changes_of(path, header.tensors, tensors(), content.data());
  // Calls write(to, from, size) for each piece of the weights that changes, by ascending address within a tensor.
  const auto each = [&](auto&& write) {
    for (const Change& c : changes) {
      char* at = address(*c.tensor);
      if (c.is_whole) write(at, c.values, c.tensor->nbytes);
      for (int64_t i = 0; !c.is_whole && i < c.count; i++) write(at + c.row(i) * c.row_bytes, c.values + i * c.row_bytes, c.row_bytes);
    }
  };
  std::string name = to, before;
  const Writable writable(base_, size_);
  Pages pages;  // made during runs, so that runs wait for the copy only
  each([&](char* at, const char*, int64_t n) { pages.add(at, n); });
  pages.make();
  if (accept || written) each([&](char* at, const char*, int64_t n) { if (n) before.append(at, size_t(n)); });
  const auto tell = [&] {
    for (const Change& c : changes) if (written) written(*c.tensor);
  };
  std::lock_guard alone(gate);
  each([](char* at, const char* from, int64_t n) { if (n) std::memcpy(at, from, size_t(n)); });
  try {
    tell();
    if (accept) accept();
  } catch (...) {
    const char* from = before.data();
    each([&](char* at, const char*, int64_t n) { if (n) std::memcpy(at, from, size_t(n)); from += n; });
    tell();
    throw;
  }
  version.swap(name);
}

}  // namespace funcrec::serving
