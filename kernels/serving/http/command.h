// The `main` of a server, for any model.
#pragma once
#include <csignal>
#include <cstdio>
#include <functional>

#include "server.h"

namespace funcrec::serving {

inline int command(int count, char** words, const std::function<Model(const Settings&)>& open) {
  try {
    std::signal(SIGPIPE, SIG_IGN);  // stderr may have no reader
    const Settings settings = settings_of({words + 1, words + count});
    if (settings.help) return std::fputs(usage().c_str(), stdout) < 0;
    if (settings.package.empty()) throw Bad("funcrec-serve: no package", "no PATH", "the folder that funcrec.export wrote");
    const Model model = open(settings);
    const int64_t most = model.manifest.max_batch;
    if (settings.max_batch > most) throw Bad("funcrec-serve: `max_batch` is more than the package takes", std::to_string(settings.max_batch), "at most " + std::to_string(most));
    serve(model, settings, [&](const std::string& url, const std::string& admin) {
      std::printf("funcrec-serve: %s serves version %s\n", url.c_str(), model.version().c_str());
      if (!admin.empty()) std::printf("funcrec-serve: %s takes updates\n", admin.c_str());
      std::fflush(stdout);
    });
    return 0;
  } catch (const Bad& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 2;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "funcrec-serve: %s\n", e.what());
    return 1;
  }
}

}  // namespace funcrec::serving
