// Files by descriptor. A folder is opened once: what is read of it is of that folder, whatever its path names later.
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

std::string read(const File&);  // what there is of it, should it have been cut short meanwhile
std::string read(const File&, int64_t at, int64_t count);
std::string own_path(const File&);  // one that leads to this file, in this process, while it is open

class Folder {
 public:
  // The folder at a path; or, with `below`, the one of this name below that folder, which neither the name nor a link leads out of, nor
  // what is read of it. Bad if there is none. Errors then call it by its name alone.
  Folder(const std::string& name, const std::string& below = "");

  File file(const std::string& name) const;  // Bad if it cannot be read, or is none: a pipe, say, that nobody may ever write to
  bool has(const std::string& name) const;
  bool is_same(const Folder& other) const;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  std::shared_ptr<const Descriptor> top_;  // what is opened lies below it; null: anywhere
  Descriptor descriptor_;
};

// A file of its own, with the same two arguments.
File open_file(const std::string& name, const std::string& below = "");

// f(folder); again, where that fails because the folder's name was another's meanwhile, who may have removed what it held.
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
