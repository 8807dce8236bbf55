// Bodies of POST /predict and of its answers, as JSON and as bytes: README.md describes both, byte by byte.
#pragma once
#include <string>
#include <string_view>

#include "model.h"

namespace funcrec::serving {

// Returns the request of a body. Throws Bad with the reason if it does not fit the manifest, and Busy if there is no
// room. Nothing beyond the body is read.
Bags from_json(std::string_view body, const Manifest&, Memory* = nullptr);
Bags from_bytes(std::string_view body, const Manifest&, Memory* = nullptr);

std::string to_json(const Part&, const Manifest&);
std::string to_bytes(const Part&, const Manifest&);

// Returns the facts about a package that clients need, with the version of its weights.
std::string to_json(const Manifest&, const std::string& version);

// Returns the string of an object {key: string}; Bad for any other body.
std::string one_string(std::string_view body, const std::string& key);

std::string json_string(std::string_view text);  // a JSON string; in a text that is not UTF-8, bytes above ASCII become `?`
std::string to_json(const Problem&);            // {"error": {"problem", "got", "need"}}
std::string to_inference_json(const Problem&);  // {"error": the same in one text}, as the Open Inference Protocol has it

int64_t bytes_of(DType);          // of one number
int64_t row_size(const Output&);  // the numbers of one bag
void append_number(std::string& out, DType, const void* data, int64_t i);  // number i as JSON; null if it is not finite

}  // namespace funcrec::serving
