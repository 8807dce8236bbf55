// Files by descriptor. A folder is opened once: all reads use that folder, even if its path names another one later.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include "package.h"

namespace funcrec::serving {

class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  ~Descriptor();
  Descriptor(Descriptor&& other) noexcept : number_(other.number_) { other.number_ = -1; }
  Descriptor& operator=(Descriptor&&) = delete;
  int number() const { return number_; }

 private:
  int number_;
};

// A file that is open for reading; errors call it `path`.
struct File {
  std::string path;
  Descriptor descriptor;
  int64_t bytes;
};

std::string read(const File&);  // the rest is missing if the file was cut short
std::string read(const File&, int64_t at, int64_t count);
std::string own_path(const File&);  // a path to this open file, in this process

class Folder {
 public:
  // Opens the folder at a path; or, with `below`, the folder of this name below that one. Neither the name nor a link
  // leads out of `below`, and neither do the files in the folder. Bad if there is none. Errors then show the name only.
  Folder(const std::string& name, const std::string& below = "");

  File file(const std::string& name) const;  // Bad if it cannot be read or is not a file: a read of a pipe may never end
  bool has(const std::string& name) const;
  bool is_same(const Folder& other) const;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  std::shared_ptr<const Descriptor> top_;  // all files must lie below it; null for no limit
  Descriptor descriptor_;
};

// Opens a file that is in no such folder, with the same two arguments.
File open_file(const std::string& name, const std::string& below = "");

// Returns f(folder). If it fails because the path now names another folder, whose writer removed the old files, it
// tries again.
template <class F> auto read_folder(const std::string& name, const std::string& below, F&& f) {
  for (int tries = 3;; tries--) {
    const Folder folder(name, below);
    try {
      return f(folder);
    } catch (const Bad&) {
      if (tries == 0 || folder.is_same(Folder(name, below))) throw;
    }
  }
}

}  // namespace funcrec::serving
