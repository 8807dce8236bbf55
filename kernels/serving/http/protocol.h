// Bodies of POST /predict and of its answers, as JSON and as bytes: README.md has both, byte by byte.
#pragma once
#include <string>
#include <string_view>

#include "model.h"

namespace funcrec::serving {

// What a body says; Bad, with what is wrong with it, if it does not fit the manifest. Nothing is read beyond the body.
// Busy if there is no room for it.
Bags from_json(std::string_view body, const Manifest&, Memory* = nullptr);
Bags from_bytes(std::string_view body, const Manifest&, Memory* = nullptr);

std::string to_json(const Part&, const Manifest&);
std::string to_bytes(const Part&, const Manifest&);

// What a client has to know of a package, and which weights it has.
std::string to_json(const Manifest&, const std::string& version);

// The one string that an object {key: string} holds; Bad if the body is another.
std::string one_string(std::string_view body, const std::string& key);

std::string json_string(std::string_view text);  // as a JSON string; in a text that is not UTF-8 every byte beyond ASCII becomes `?`
std::string to_json(const Problem&);        // {"error": {"problem", "got", "need"}}

}  // namespace funcrec::serving
