// funcrec-answers FOLDER [threads [runners [checksums]]]: a package without a server. Commands come from the standard input, little-endian:
//
//   'r' i64 bags, then dense f32, values i64, offsets i64, weights f32, each as i64 n and n elements      run
//   's' i64 n and a folder's name         swap            'a' i64 n and a file's name         apply
//   'o' i64 n and a folder's name         open another package, and close it
//
// An answer: i64 0, then of a run i64 ids out of range, the version, i64 outputs, and of each i64 dtype, its shape and its bytes;
// or i64 1 (Bad) or 2 (Failed) and the message. Text, a shape and bytes are i64 n and n elements.
#include <cstdio>
#include <cstdlib>

#include "package.h"

using namespace funcrec::serving;

namespace {

template <class T> std::vector<T> read(size_t n) {
  std::vector<T> out(n);
  if (std::fread(out.data(), sizeof(T), n, stdin) != n) std::exit(0);
  return out;
}

template <class T> std::vector<T> read_list() { return read<T>(size_t(read<int64_t>(1)[0])); }

void write(int64_t n) { std::fwrite(&n, sizeof n, 1, stdout); }

template <class T> void write_list(const T* data, size_t n) {
  write(int64_t(n));
  std::fwrite(data, sizeof(T), n, stdout);
}

void answer(Package& package) {
  const auto bags = read<int64_t>(1)[0];
  const auto dense = read_list<float>();
  const auto values = read_list<int64_t>(), offsets = read_list<int64_t>();
  const auto weights = read_list<float>();
  const Answer a = package.run({bags, dense, values, offsets, weights});
  write(0), write(a.ids_out_of_range), write_list(a.version.data(), a.version.size()), write(int64_t(a.outputs.size()));
  for (const Output& o : a.outputs) {
    write(int64_t(o.dtype)), write_list(o.shape.data(), o.shape.size());
    write_list(static_cast<const char*>(o.data), size_t(o.row_bytes() * o.shape[0]));
  }
}

}  // namespace

int main(int count, char** words) {
  std::shared_ptr<Package> package;
  const auto attempt = [](int64_t status, const char* said) { write(status), write_list(said, std::char_traits<char>::length(said)), std::fflush(stdout); };
  const auto guarded = [&](auto&& f) {
    try {
      f();
      std::fflush(stdout);
    } catch (const Bad& e) {
      attempt(1, e.what());
    } catch (const std::exception& e) {
      attempt(2, e.what());
    }
  };
  Options options;
  options.keep = false;  // tests read the mapped weights, which are then those of now alone
  guarded([&] {
    if (count > 2) options.threads = std::atoi(words[2]);
    if (count > 3) options.runners = std::atoi(words[3]);
    if (count > 4) options.checksums = std::atoi(words[4]);
    package = Package::open(count > 1 ? words[1] : "", options);
    write(0);
  });
  for (int command; package && (command = std::getchar()) != EOF;)
    guarded([&] {
      if (command == 'r') return answer(*package);
      const auto letters = read_list<char>();
      const std::string name(letters.begin(), letters.end());
      if (command == 'o') Package::open(name, options);
      else command == 's' ? package->swap(name) : package->apply(name);
      write(0);
    });
}
