// The `main` of a server, for any model.
#pragma once
#include <csignal>
#include <cstdio>
#include <functional>

#include "models.h"
#include "server.h"

namespace funcrec::serving {

inline std::vector<Named> opened(const Settings& settings, const std::function<Model(const Settings&, const std::string& path)>& open) {
  std::vector<Named> out;
  for (const ModelPlace& place : places_of(settings.packages)) {
    out.push_back({place.name, open(settings, place.path)});
    const Named& own = out.back();
    const int64_t most = own.model.manifest.max_batch;
    if (settings.max_batch > most) throw Bad("funcrec-serve: `max_batch` is more than the package takes", std::to_string(settings.max_batch), "at most " + std::to_string(most));
    for (size_t i = 0; i + 1 < out.size(); i++)
      if (out[i].name == own.name && out[i].model.version() == own.model.version())
        throw Bad("funcrec-serve: two packages have one name and one version", own.name + ", version " + own.model.version(), "another NAME=PATH, or another version");
  }
  return out;
}

inline int command(int count, char** words, const std::function<Model(const Settings&, const std::string& path)>& open) {
  try {
    std::signal(SIGPIPE, SIG_IGN);  // stderr may have no reader
    const Settings settings = settings_of({words + 1, words + count});
    if (settings.help) return std::fputs(usage().c_str(), stdout) < 0;
    if (settings.packages.empty()) throw Bad("funcrec-serve: no package", "no PATH", "the folder that funcrec.export wrote");
    const std::vector<Named> models = opened(settings, open);
    serve(models, settings, [&](const std::string& url, const std::string& admin) {
      std::string all;
      for (const Named& m : models) all += (all.empty() ? "" : ", ") + (models.size() > 1 ? m.name + " " : "") + "version " + m.model.version();
      std::printf("funcrec-serve: %s serves %s\n", url.c_str(), all.c_str());
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
