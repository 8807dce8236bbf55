// funcrec-serve: a package behind HTTP.
#include "command.h"

using namespace funcrec::serving;

namespace {

// One bag without ids: what no request could be answered with, an operator that the kernels lack, say, is found before anybody asks.
void try_it(const Package& package) {
  const Manifest& m = package.manifest();
  const std::vector<float> dense(size_t(m.dense_columns));
  const std::vector<int64_t> offsets(m.has_ids ? m.features.size() + 1 : 0);
  package.run({.bags = 1, .dense = dense, .values = {}, .offsets = offsets, .weights = {}});
}

}  // namespace

int main(int count, char** words) {
  return command(count, words, [](const Settings& s) {
    Options options;
    options.threads = int(s.threads);
    options.runners = int(s.workers);
    auto package = Package::open(s.package, options);
    try_it(*package);
    return Model{
        package->manifest(),
        [package](const Request& r) { return package->check(r); },
        [package](const Request& r) { return package->run(r); },
        [package] { return package->version(); },
        [package](const std::string& folder) { package->swap(folder); },
        [package](const std::string& file) { package->apply(file); },
    };
  });
}
