// Delta files (funcrec/serve/freshness/_delta_file.py): rows, and whole tensors, that take the weights from one version to the next.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <mutex>
#include <set>

#include "digest.h"
#include "weights.h"

namespace funcrec::serving {
namespace {

constexpr std::string_view MAGIC = "FRDELTA1";
constexpr size_t START = 24;  // the magic, u64 length of the header, u32 its CRC, u32 0
constexpr size_t HEADER_ENTRIES = 7, TENSOR_ENTRIES = 4;  // each is read below
constexpr int64_t FORMAT = 1, MOST = std::numeric_limits<int64_t>::max();

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

template <class T> T number_at(std::string_view bytes, size_t at) {
  T x;
  std::memcpy(&x, bytes.data() + at, sizeof x);
  return x;
}

Change change_of(const Entry& e, const std::vector<Placed>& tensors, std::string_view body) {
  e.only(TENSOR_ENTRIES);
  const std::string name = e["name"].text();
  const auto at = std::find_if(tensors.begin(), tensors.end(), [&](const Placed& p) { return p.spec.name == name; });
  if (at == tensors.end()) e["name"].fail(name, "a parameter of the package");
  const std::vector<int64_t>& shape = at->spec.shape;
  const bool is_whole = e["rows"].is_null();
  const int64_t height = shape.empty() ? 1 : shape[0], row_bytes = height ? at->nbytes / height : 0;
  if (!is_whole && shape.empty()) e["rows"].fail("rows of a number", "null");
  const int64_t count = is_whole ? height : e["rows"].number(0, height), need = is_whole ? at->nbytes : count * (8 + row_bytes);
  const int64_t offset = e["offset"].number(0, int64_t(body.size()));
  if (e["nbytes"].number(0, MOST) != need || need > int64_t(body.size()) - offset)
    e["nbytes"].fail(std::to_string(e["nbytes"].number(0, MOST)) + " at " + std::to_string(offset), std::to_string(need) + " within " + std::to_string(body.size()));
  const char* data = body.data() + offset;
  Change change{&*at, is_whole, count, row_bytes, data, is_whole ? data : data + 8 * count};
  for (int64_t i = 0; !is_whole && i < count; i++) {
    const int64_t r = change.row(i);
    if (r < 0 || r >= height || (i && r <= change.row(i - 1)))
      e["rows"].fail("row " + std::to_string(r), "rows of " + text_of(at->spec) + ", ascending, each once");
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
  const std::string_view bytes = content;
  const auto damaged = [&](const std::string& got, const std::string& need) { throw Bad("`" + path + "` is not a delta.", got, need); };
  if (bytes.size() < START || bytes.substr(0, 8) != MAGIC) damaged(std::to_string(bytes.size()) + " bytes that begin with others", std::string(MAGIC));
  const uint64_t length = number_at<uint64_t>(bytes, 8);
  const std::string_view header = bytes.substr(START, std::min<uint64_t>(length, bytes.size()));
  if (header.size() != length || crc32(header) != number_at<uint32_t>(bytes, 16) || number_at<uint32_t>(bytes, 20) != 0)
    damaged("a header that was changed or cut off", std::to_string(length) + " bytes of its CRC");
  const std::string_view body = bytes.substr(START + length);
  const auto value = parse(path, std::string(header));
  const Entry top(path, value);
  top.only(HEADER_ENTRIES);
  if (const int64_t format = top["format"].number(0, MOST); format != FORMAT) damaged("format " + std::to_string(format), "format " + std::to_string(FORMAT));
  if (top["size"].number(0, MOST) != int64_t(body.size()) || top["crc32"].number(0, UINT32_MAX) != crc32(body))
    damaged(std::to_string(body.size()) + " bytes, another CRC", std::to_string(top["size"].number(0, MOST)) + " bytes");
  if (top["manifest"].text() != manifest.digest) throw Bad("`" + path + "` is of another package.", top["manifest"].text(), manifest.digest);
  const std::string from = top["from"].text(), to = top["to"].text();
  if (from != version) throw Bad("`" + path + "` is not the next delta.", "from " + from + " to " + to, "from " + version + ", the version that runs");

  std::vector<Change> changes;
  std::set<const Placed*> named;
  for (const Entry& e : top["tensors"].items()) {
    changes.push_back(change_of(e, tensors(), body));
    if (!named.insert(changes.back().tensor).second) e["name"].fail(changes.back().tensor->spec.name + " twice", "once");
  }
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
