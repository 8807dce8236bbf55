// HTTP/1.1 over Boost.Beast: the paths of routes.h. One thread reads and writes all connections,
// each of which is a coroutine; workers run the model.
#pragma once
#include "model.h"
#include "settings.h"

namespace funcrec::serving {

// Serves until SIGTERM, SIGINT or SIGHUP (unless it is ignored, as by nohup). Then it takes no more connections,
// answers the requests that it has, and returns. `ready` gets the addresses for requests and for updates ("" for none).
// Failed if it cannot listen.
void serve(const std::vector<Named>&, const Settings&, const std::function<void(const std::string& url, const std::string& admin)>& ready);

}  // namespace funcrec::serving
