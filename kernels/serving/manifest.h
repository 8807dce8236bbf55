// Readers of a package's manifest.json and of the header of its weights, which check every entry.
#pragma once
#include <boost/json.hpp>
#include <string>
#include <vector>

#include "files.h"
#include "package.h"
#include "tensors.h"

namespace funcrec::serving {

struct Index {
  std::string version;
  std::vector<Placed> tensors;
};

// A value of a JSON text, and its place there. Access throws Bad for a missing value or another kind.
class Entry {
 public:
  Entry(std::string path, const boost::json::value& value) : path_(std::move(path)), value_(&value) {}
  Entry operator[](const char* key) const;
  bool has(const char* key) const;
  size_t size() const;  // of an object
  std::vector<Entry> items() const;
  std::string text() const;
  int64_t number(int64_t least, int64_t most) const;
  double real() const;
  bool truth() const;
  bool is_null() const { return value_->is_null(); }
  bool is_text() const { return value_->is_string(); }
  const std::string& path() const { return path_; }
  [[noreturn]] void fail(const std::string& got, const std::string& need) const;

 private:
  std::string path_;
  const boost::json::value* value_;
};

boost::json::value parse(const std::string& path, const std::string& text);

// Returns the manifest of a package that this process can run. torch: the version of this process.
Manifest read_manifest(const Folder& folder, const std::string& torch);

// Checks that inputs and outputs fit requests and answers.
void check_program(Manifest& manifest);

// Checks that a folder of weights, if it is a package, has this program: its own program is not loaded, and weights of
// another one may mean something else.
void check_same_program(const Folder& folder, const Manifest& manifest);

// Reads the header of weights: the tensors in the order of the manifest, with its dtypes and shapes.
Index read_index(const File& file, const Manifest& manifest);

constexpr int64_t MOST = int64_t(1) << 48;            // no size is larger
DType dtype_of(const Entry& e, bool stored = false);  // stored: by its name in files of tensors
std::string text_of(const Spec& spec);                // f32[B, 13]
int64_t bytes_of(const Spec& spec);                   // only for a Spec whose sizes no request chooses

}  // namespace funcrec::serving
