#include "protocol.h"

#include <algorithm>
#include <bit>
#include <boost/json.hpp>
#include <charconv>
#include <cmath>
#include <cstring>

namespace funcrec::serving {
namespace json = boost::json;
static_assert(std::endian::native == std::endian::little, "bodies of bytes are copied as they are");

namespace {

constexpr size_t MOST_TOLD = 1000;  // the most bytes of a wrong value that an error shows: a key may be as long as a body

std::string number(int64_t n) { return std::to_string(n); }

std::string told(const std::string& got) {
  size_t n = MOST_TOLD;
  if (got.size() <= n) return got;
  while (n > 0 && uint8_t(got[n]) >> 6 == 2) n--;  // within a character of UTF-8
  return got.substr(0, n) + " .. of " + std::to_string(got.size()) + " bytes";
}

// Reads values one after the other, each of which must be there.
struct Cursor {
  std::string_view rest;
  Memory* memory;
  template <class T> T one() {
    T x;
    std::memcpy(&x, rest.data(), sizeof x);
    rest.remove_prefix(sizeof x);
    return x;
  }
  template <class T> Many<T> many(uint64_t n) {
    Many<T> out(n, Counted<T>(memory));
    if (n) std::memcpy(out.data(), rest.data(), n * sizeof(T));
    rest.remove_prefix(n * sizeof(T));
    return out;
  }
};

float half(uint16_t x) {
  uint32_t exponent = x >> 10 & 31, mantissa = x & 1023;
  float size = exponent == 31 ? (mantissa ? NAN : INFINITY) : exponent ? std::ldexp(float(1024 + mantissa), int(exponent) - 25) : std::ldexp(float(mantissa), -24);
  return x >> 15 ? -size : size;
}

template <class T> void append(std::string& out, T x) {
  if constexpr (std::is_floating_point_v<T>)
    if (!std::isfinite(x)) {
      out += "null";
      return;
    }
  char text[40];
  out.append(text, std::to_chars(text, text + sizeof text, x).ptr);
}

template <class T> T at(const void* data, int64_t i) {
  T x;
  std::memcpy(&x, static_cast<const char*>(data) + i * int64_t(sizeof x), sizeof x);
  return x;
}

// Writes elements [i, i + n) as nested lists, the innermost with `shape.back()` elements.
void append_lists(std::string& out, const Output& output, std::span<const int64_t> shape, int64_t& i) {
  if (shape.empty()) return append_number(out, output.dtype, output.data, i++);
  out += '[';
  for (int64_t k = 0; k < shape[0]; k++) {
    if (k) out += ',';
    append_lists(out, output, shape.subspan(1), i);
  }
  out += ']';
}

template <class T> void put(std::string& out, T x) { out.append(reinterpret_cast<const char*>(&x), sizeof x); }
void pad(std::string& out) { out.resize((out.size() + 7) / 8 * 8); }

}  // namespace

int64_t bytes_of(DType t) {
  switch (t) {
    case DType::u8: case DType::i8: case DType::boolean: return 1;
    case DType::i16: case DType::f16: case DType::bf16: return 2;
    case DType::i32: case DType::f32: return 4;
    default: return 8;
  }
}

int64_t row_size(const Output& output) {
  int64_t n = 1;
  for (size_t i = 1; i < output.shape.size(); i++) n *= output.shape[i];
  return n;
}

void append_number(std::string& out, DType t, const void* data, int64_t i) {
  switch (t) {
    case DType::u8: return append(out, int(at<uint8_t>(data, i)));
    case DType::i8: return append(out, int(at<int8_t>(data, i)));
    case DType::i16: return append(out, at<int16_t>(data, i));
    case DType::i32: return append(out, at<int32_t>(data, i));
    case DType::i64: return append(out, at<int64_t>(data, i));
    case DType::f16: return append(out, half(at<uint16_t>(data, i)));
    case DType::bf16: return append(out, std::bit_cast<float>(uint32_t(at<uint16_t>(data, i)) << 16));
    case DType::f32: return append(out, at<float>(data, i));
    case DType::f64: return append(out, at<double>(data, i));
    case DType::boolean: out += at<uint8_t>(data, i) ? "true" : "false"; return;
  }
}

Bags from_bytes(std::string_view body, const Manifest& manifest, Memory* memory) {
  if (body.size() < 32 || body.substr(0, 4) != "FRQ1") throw Bad("the body is not a request", number(int64_t(body.size())) + " bytes", "FRQ1 and a header of 32 bytes");
  Cursor in{body.substr(4), memory};
  const uint64_t features = in.one<uint32_t>(), columns = in.one<uint32_t>(), weights = in.one<uint32_t>();
  const uint64_t bags = in.one<uint64_t>(), ids = in.one<uint64_t>();
  auto same = [](const char* what, uint64_t got, uint64_t need) {
    if (got != need) throw Bad(std::string(what) + " and the package differ", std::to_string(got), std::to_string(need));
  };
  same("the number of features", features, manifest.features.size());
  same("the number of dense columns", columns, uint64_t(manifest.dense_columns));
  same("whether weights follow", weights, manifest.has_weights);
  if (bags > uint64_t(manifest.max_batch)) throw Bad("there are too many bags", std::to_string(bags), "at most " + number(manifest.max_batch));
  if (ids > uint64_t(manifest.max_ids)) throw Bad("there are too many ids", std::to_string(ids), "at most " + number(manifest.max_ids));
  same("the bytes that the header tells of", body.size(), 32 + 4 * bags * columns + 4 * bags * features + 8 * ids + 4 * ids * weights);
  Bags out(memory);
  out.bags = int64_t(bags);
  out.dense = in.many<float>(bags * columns);
  uint64_t sum = 0;
  out.offsets.reserve(manifest.has_ids ? bags * features + 1 : 0);
  if (manifest.has_ids) out.offsets.push_back(0);
  for (uint32_t length : in.many<uint32_t>(bags * features)) out.offsets.push_back(int64_t(sum += length));
  if (sum != ids) throw Bad("the lengths of bags do not sum to the number of ids", std::to_string(sum), std::to_string(ids));
  out.values = in.many<int64_t>(ids);
  out.weights = in.many<float>(weights ? ids : 0);
  return out;
}

std::string to_json(const Part& part, const Manifest& manifest) {
  std::string out = "{\"version\":" + json_string(part.answer->version) + ",\"outputs\":{";
  for (size_t i = 0; i < part.answer->outputs.size(); i++) {
    const Output& output = part.answer->outputs[i];
    std::vector<int64_t> shape = output.shape;
    shape[0] = part.bags;
    out += (i ? "," : "") + json_string(manifest.outputs[i].name) + ":";
    int64_t first = part.first * row_size(output);
    append_lists(out, output, shape, first);
  }
  return out + "},\"ids_out_of_range\":" + number(part.ids_out_of_range) + "}\n";
}

std::string to_bytes(const Part& part, const Manifest& manifest) {
  const std::string& version = part.answer->version;
  std::string out = "FRA1";
  put(out, uint32_t(part.answer->outputs.size()));
  put(out, uint64_t(part.bags));
  put(out, uint64_t(part.ids_out_of_range));
  put(out, uint64_t(version.size()));
  pad(out += version);
  for (size_t i = 0; i < part.answer->outputs.size(); i++) {
    const Output& output = part.answer->outputs[i];
    const std::string& name = manifest.outputs[i].name;
    put(out, uint32_t(output.dtype));
    put(out, uint32_t(output.shape.size() - 1));
    put(out, uint64_t(name.size()));
    pad(out += name);
    for (size_t k = 1; k < output.shape.size(); k++) put(out, uint64_t(output.shape[k]));
    const int64_t row = row_size(output) * bytes_of(output.dtype);
    if (part.bags > 0 && row > 0) out.append(static_cast<const char*>(output.data) + part.first * row, size_t(part.bags * row));
    pad(out);
  }
  return out;
}

std::string to_json(const Manifest& m, const std::string& version) {
  constexpr const char* DTYPES[] = {"uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "bool"};
  const auto list = [](const auto& all, auto&& one) {
    std::string out = "[";
    for (const auto& x : all) out += (out.size() > 1 ? "," : "") + one(x);
    return out + "]";
  };
  const auto size = [](int64_t n) { return n == BAGS ? "\"B\"" : n == IDS ? "\"N\"" : n == OFFSETS ? "\"F*B+1\"" : number(n); };
  const auto spec = [&](const Spec& s) {
    return "{\"name\":" + json_string(s.name) + ",\"dtype\":" + json_string(DTYPES[int(s.dtype)]) + ",\"shape\":" + list(s.shape, size) + "}";
  };
  const auto feature = [](const Feature& f) {
    return "{\"name\":" + json_string(f.name) + ",\"rows\":" + (f.rows < 0 ? "null" : number(f.rows)) + ",\"weighted\":" + (f.weighted ? "true" : "false") + "}";
  };
  return "{\"version\":" + json_string(version) + ",\"manifest\":" + json_string(m.digest) + ",\"funcrec\":" + json_string(m.funcrec) + ",\"torch\":" +
         json_string(m.torch) + ",\"isa\":" + json_string(m.isa) + ",\"inputs\":" + list(m.inputs, spec) + ",\"outputs\":" + list(m.outputs, spec) +
         ",\"features\":" + list(m.features, feature) + ",\"max_batch\":" + number(m.max_batch) + ",\"max_ids\":" + number(m.max_ids) + "}\n";
}

std::string json_string(std::string_view text) {
  boost::system::error_code error;
  std::string out = json::serialize(json::string(text));
  if (std::all_of(text.begin(), text.end(), [](char c) { return c >= 0; })) return out;
  json::parse(out, error);
  if (error)
    for (char& c : out)
      if (c < 0) c = '?';
  return out;
}

std::string to_inference_json(const Problem& p) { return "{\"error\":" + json_string(p.problem + "\n  got   " + told(p.got) + "\n  need  " + p.need) + "}\n"; }

std::string to_json(const Problem& p) {
  return "{\"error\":{\"problem\":" + json_string(p.problem) + ",\"got\":" + json_string(told(p.got)) + ",\"need\":" + json_string(p.need) + "}}\n";
}

}  // namespace funcrec::serving
