// funcrec-serve: a package behind HTTP.
#include "command.h"

using namespace funcrec::serving;

int main(int count, char** words) {
  return command(count, words, [](const Settings& s) {
    Options options;
    options.threads = int(s.threads);
    options.runners = int(s.workers);
    auto package = Package::open(s.package, options);
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
