#include "files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace funcrec::serving {
namespace {

[[noreturn]] void unreadable(const std::string& path, const std::string& got) {
  throw Bad("`" + path + "` cannot be read.", got, "a file that funcrec wrote");
}

[[noreturn]] void outside(const std::string& name) {
  throw Bad("there is no such file or folder", name, "a path below the folder of updates, relative to it");
}

std::string own_path(int number) { return "/proc/self/fd/" + std::to_string(number); }

// Returns the path that an open file has now, even if the name that opened it leads elsewhere.
std::string real_path(const Descriptor& d) {
  char out[4096];
  const ssize_t size = readlink(own_path(d.number()).c_str(), out, sizeof out);
  if (size <= 0 || size == ssize_t(sizeof out)) throw Failed("an open file has no path: is /proc there?");
  return std::string(out, size_t(size));
}

// With `top`, the place of the file is checked first, by a descriptor that reads nothing and does not wait.
Descriptor open_at(int folder, const std::string& name, const Descriptor* top, int flags) {
  flags |= O_RDONLY | O_CLOEXEC | O_NONBLOCK;  // does not wait for a pipe
  if (!top) return Descriptor(openat(folder, name.c_str(), flags));
  if (name.find('\0') != std::string::npos) outside(name);
  const Descriptor found(openat(folder, name.c_str(), O_PATH | O_CLOEXEC));
  if (found.number() < 0) return Descriptor(-1);
  const std::string root = real_path(*top);
  if (real_path(found).rfind(root == "/" ? root : root + "/", 0) != 0) outside(name);
  return Descriptor(open(own_path(found.number()).c_str(), flags));
}

Descriptor open_folder(int at, const std::string& name, const Descriptor* top) {
  Descriptor out = open_at(at, name, top, O_DIRECTORY);
  if (out.number() < 0 && top) outside(name);
  if (out.number() < 0) throw Bad("`" + name + "` cannot be read.", std::strerror(errno), "a folder that funcrec wrote");
  return out;
}

std::shared_ptr<const Descriptor> open_top(const std::string& path) {
  if (path.empty()) return nullptr;
  auto out = std::make_shared<const Descriptor>(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECTORY));
  if (out->number() < 0) throw Failed("the folder of updates is not there");
  return out;
}

File file_of(Descriptor descriptor, const std::string& path) {
  struct stat about {};
  if (descriptor.number() < 0) unreadable(path, std::strerror(errno));
  if (fstat(descriptor.number(), &about) != 0 || !S_ISREG(about.st_mode)) unreadable(path, "a folder, a pipe or a device");
  return {path, std::move(descriptor), about.st_size};
}

}  // namespace

Descriptor::~Descriptor() {
  if (number_ >= 0) ::close(number_);
}

std::string own_path(const File& file) { return own_path(file.descriptor.number()); }

std::string read(const File& file) { return read(file, 0, file.bytes); }

std::string read(const File& file, int64_t at, int64_t count) {
  std::string text(size_t(count), '\0');
  size_t size = 0;
  while (size < text.size()) {
    const ssize_t got = pread(file.descriptor.number(), &text[size], text.size() - size, off_t(at) + off_t(size));
    if (got < 0 && errno != EINTR) unreadable(file.path, std::strerror(errno));
    if (got == 0) break;
    size += size_t(std::max<ssize_t>(got, 0));
  }
  text.resize(size);
  return text;
}

Folder::Folder(const std::string& name, const std::string& below)
    : path_(name), top_(open_top(below)), descriptor_(open_folder(top_ ? top_->number() : AT_FDCWD, name, top_.get())) {}

File Folder::file(const std::string& name) const {
  return file_of(open_at(descriptor_.number(), name, top_.get(), 0), path_ + "/" + name);
}

bool Folder::has(const std::string& name) const { return faccessat(descriptor_.number(), name.c_str(), F_OK, 0) == 0; }

bool Folder::is_same(const Folder& other) const {
  struct stat a {}, b {};
  return fstat(descriptor_.number(), &a) == 0 && fstat(other.descriptor_.number(), &b) == 0 && a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

File open_file(const std::string& name, const std::string& below) {
  const auto top = open_top(below);
  Descriptor found = open_at(top ? top->number() : AT_FDCWD, name, top.get(), 0);
  if (found.number() < 0 && top) outside(name);
  return file_of(std::move(found), name);
}

}  // namespace funcrec::serving
