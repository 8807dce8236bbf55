#include "protocol.h"

#include <algorithm>
#include <bit>
#include <boost/json.hpp>
#include <boost/json/basic_parser_impl.hpp>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

namespace funcrec::serving {
namespace json = boost::json;
static_assert(std::endian::native == std::endian::little, "bodies of bytes are copied as they are");

namespace {

const char* kind_of(const json::value& v) {
  switch (v.kind()) {
    case json::kind::null: return "null";
    case json::kind::bool_: return "a bool";
    case json::kind::int64: case json::kind::uint64: return "an integer";
    case json::kind::double_: return "a number that is not an integer";
    case json::kind::string: return "a string";
    case json::kind::array: return "a list";
    default: return "an object";
  }
}

const json::array& list_of(const json::value& v, const std::string& where) {
  if (!v.is_array()) throw Bad("`" + where + "` is not a list", kind_of(v), "a list");
  return v.get_array();
}

int64_t id_of(const json::value& v, const std::string& where) {
  if (!v.is_int64()) throw Bad("an id of `" + where + "` is not an integer of 64 bits", kind_of(v), "an integer");
  return v.get_int64();
}

float number_of(const json::value& v, const std::string& where) {
  double x = v.is_int64() ? double(v.get_int64()) : v.is_uint64() ? double(v.get_uint64()) : v.is_double() ? v.get_double() : NAN;
  if (!(std::abs(x) <= std::numeric_limits<float>::max()))
    throw Bad("a number of `" + where + "` is not one of 32 bits", std::isnan(x) ? kind_of(v) : "a larger number", "a number");
  return float(x);
}

const json::object& object_of(const json::value& v, const std::string& where) {
  if (!v.is_object()) throw Bad("`" + where + "` is not an object", kind_of(v), "an object");
  return v.get_object();
}

// Makes a value of what the parser sees, as Boost's own does, but knows all keys: of two that are the same its objects keep one.
struct Maker {
  static constexpr size_t max_object_size = size_t(-1), max_array_size = size_t(-1), max_key_size = size_t(-1), max_string_size = size_t(-1);
  using Error = json::error_code;
  using Text = json::string_view;

  json::value_stack made;
  std::string key;
  std::vector<std::vector<std::string>> open;  // the keys of each object that has begun

  explicit Maker(json::storage_ptr memory) { made.reset(std::move(memory)); }
  bool on_document_begin(Error&) { return true; }
  bool on_document_end(Error&) { return true; }
  bool on_object_begin(Error&) { return open.emplace_back(), true; }
  bool on_object_end(size_t n, Error&) {
    std::vector<std::string>& keys = open.back();
    std::sort(keys.begin(), keys.end());
    if (auto twice = std::adjacent_find(keys.begin(), keys.end()); twice != keys.end()) throw Bad("an object has a key twice", *twice, "each key once");
    return open.pop_back(), made.push_object(n), true;
  }
  bool on_array_begin(Error&) { return true; }
  bool on_array_end(size_t n, Error&) { return made.push_array(n), true; }
  bool on_key_part(Text s, size_t, Error&) { return key += s, made.push_chars(s), true; }
  bool on_key(Text s, size_t, Error&) { return open.back().push_back(std::move(key += s)), key.clear(), made.push_key(s), true; }
  bool on_string_part(Text s, size_t, Error&) { return made.push_chars(s), true; }
  bool on_string(Text s, size_t, Error&) { return made.push_string(s), true; }
  bool on_number_part(Text, Error&) { return true; }
  bool on_int64(int64_t x, Text, Error&) { return made.push_int64(x), true; }
  bool on_uint64(uint64_t x, Text, Error&) { return made.push_uint64(x), true; }
  bool on_double(double x, Text, Error&) { return made.push_double(x), true; }
  bool on_bool(bool x, Error&) { return made.push_bool(x), true; }
  bool on_null(Error&) { return made.push_null(), true; }
  bool on_comment_part(Text, Error&) { return true; }
  bool on_comment(Text, Error&) { return true; }
};

json::value parsed(std::string_view body, json::storage_ptr memory) {
  json::parse_options options;
  options.max_depth = 8;
  json::error_code error;
  json::basic_parser<Maker> parser(options, std::move(memory));
  const size_t end = parser.write_some(false, body.data(), body.size(), error);
  if (!error && end != body.size()) error = json::error::extra_data;
  if (error) throw Bad("the body is not JSON", error.message() + ", after " + std::to_string(end) + " bytes", "one JSON value, of UTF-8");
  return parser.handler().made.release();
}

std::string number(int64_t n) { return std::to_string(n); }

// How many bags a request has: once it is known, all else has to have as many.
struct Count {
  std::optional<int64_t> bags;
  const Manifest& manifest;
  void must_be(int64_t n, const std::string& where) {
    if (n > manifest.max_batch) throw Bad("`" + where + "` has too many bags", number(n), "at most " + number(manifest.max_batch));
    if (bags.value_or(n) != n) throw Bad("`" + where + "` has another number of bags", number(n), number(*bags));
    bags = n;
  }
};

// `given` names features of the manifest alone; with `weighted` those of them that have weights.
void no_other_features(const json::object& given, const Manifest& manifest, const char* where, bool weighted) {
  const auto fits = [&](const Feature& f) { return f.weighted || !weighted; };
  size_t found = 0;
  for (const Feature& f : manifest.features) found += fits(f) && given.contains(f.name);
  if (found == given.size()) return;
  for (const auto& [name, _] : given) {
    const auto is = [&](const Feature& f) { return fits(f) && f.name == std::string_view(name); };
    if (std::any_of(manifest.features.begin(), manifest.features.end(), is)) continue;
    std::string names;
    for (const Feature& f : manifest.features)
      if (fits(f)) names += (names.empty() ? "" : ", ") + f.name;
    throw Bad(std::string("`") + where + "` has a feature that the package has not" + (weighted ? " with weights" : ""), name, names);
  }
}

void read_ids(const json::object& all, const json::object* weights, const Manifest& manifest, Count& count, Bags& out) {
  no_other_features(all, manifest, "ids", false);
  if (weights) no_other_features(*weights, manifest, "weights", true);
  out.offsets.push_back(0);
  for (const Feature& feature : manifest.features) {
    const std::string where = "ids." + feature.name;
    const json::value* given = all.if_contains(feature.name);
    if (!given) throw Bad("`ids` lacks a feature", "no " + feature.name, "a list of bags for each feature");
    const json::array& bags = list_of(*given, where);
    count.must_be(int64_t(bags.size()), where);
    for (const json::value& bag : bags) {
      for (const json::value& id : list_of(bag, where)) out.values.push_back(id_of(id, where));
      out.offsets.push_back(int64_t(out.values.size()));
    }
    if (int64_t(out.values.size()) > manifest.max_ids) throw Bad("there are too many ids", "more", "at most " + number(manifest.max_ids));
    if (!manifest.has_weights) continue;
    if (!feature.weighted) {
      out.weights.resize(out.values.size(), 1.0f);  // never read
      continue;
    }
    const std::string there = "weights." + feature.name;
    const json::value* own = weights ? weights->if_contains(feature.name) : nullptr;
    if (!own) throw Bad("`weights` lacks a feature whose ids have weights", "no " + feature.name, "a list of bags");
    const json::array& numbers = list_of(*own, there);
    if (numbers.size() != bags.size()) throw Bad("`" + there + "` does not match its ids", number(int64_t(numbers.size())) + " bags", number(int64_t(bags.size())));
    for (size_t b = 0; b < numbers.size(); b++) {
      const json::array& bag = list_of(numbers[b], there);
      size_t ids = bags[b].get_array().size();
      if (bag.size() != ids) throw Bad("`" + there + "` does not match its ids in bag " + number(int64_t(b)), number(int64_t(bag.size())), number(int64_t(ids)));
      for (const json::value& x : bag) out.weights.push_back(number_of(x, there));
    }
  }
}

// Values one after the other, each of which must be there.
struct Cursor {
  std::string_view rest;
  template <class T> T one() {
    T x;
    std::memcpy(&x, rest.data(), sizeof x);
    rest.remove_prefix(sizeof x);
    return x;
  }
  template <class T> std::vector<T> many(uint64_t n) {
    std::vector<T> out(n);
    if (n) std::memcpy(out.data(), rest.data(), n * sizeof(T));
    rest.remove_prefix(n * sizeof(T));
    return out;
  }
};

int64_t bytes_of(DType t) {
  switch (t) {
    case DType::u8: case DType::i8: case DType::boolean: return 1;
    case DType::i16: case DType::f16: case DType::bf16: return 2;
    case DType::i32: case DType::f32: return 4;
    default: return 8;
  }
}

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

void append(std::string& out, DType t, const void* data, int64_t i) {
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

// Elements [i, i + n) as lists in lists, the innermost `shape.back()` long.
void append_lists(std::string& out, const Output& output, std::span<const int64_t> shape, int64_t& i) {
  if (shape.empty()) return append(out, output.dtype, output.data, i++);
  out += '[';
  for (int64_t k = 0; k < shape[0]; k++) {
    if (k) out += ',';
    append_lists(out, output, shape.subspan(1), i);
  }
  out += ']';
}

int64_t row_size(const Output& output) {
  int64_t n = 1;
  for (size_t i = 1; i < output.shape.size(); i++) n *= output.shape[i];
  return n;
}

template <class T> void put(std::string& out, T x) { out.append(reinterpret_cast<const char*>(&x), sizeof x); }
void pad(std::string& out) { out.resize((out.size() + 7) / 8 * 8); }

}  // namespace

Bags from_json(std::string_view body, const Manifest& manifest) {
  json::monotonic_resource memory;
  const json::value value = parsed(body, &memory);
  const json::object& all = object_of(value, "body");
  for (const auto& [key, _] : all)
    if (key != "ids" && key != "weights" && key != "dense") throw Bad("the body has an unknown key", key, "ids, weights, dense");
  Bags out;
  Count count{{}, manifest};
  const json::value *ids = all.if_contains("ids"), *weights = all.if_contains("weights"), *dense = all.if_contains("dense");
  if (bool(ids) != manifest.has_ids) throw Bad("`ids` and the package differ", ids ? "ids" : "no ids", manifest.has_ids ? "ids" : "none");
  if (weights && !manifest.has_weights) throw Bad("`weights` and the package differ", "weights", "none");
  if (bool(dense) != (manifest.dense_columns > 0))
    throw Bad("`dense` and the package differ", dense ? "dense" : "no dense", number(manifest.dense_columns) + " columns");
  if (ids) read_ids(object_of(*ids, "ids"), weights ? &object_of(*weights, "weights") : nullptr, manifest, count, out);
  if (dense) {
    const json::array& rows = list_of(*dense, "dense");
    count.must_be(int64_t(rows.size()), "dense");
    for (const json::value& row : rows) {
      const json::array& numbers = list_of(row, "dense");
      if (int64_t(numbers.size()) != manifest.dense_columns)
        throw Bad("a row of `dense` has another length", number(int64_t(numbers.size())), number(manifest.dense_columns));
      for (const json::value& x : numbers) out.dense.push_back(number_of(x, "dense"));
    }
  }
  out.bags = count.bags.value_or(0);
  return out;
}

Bags from_bytes(std::string_view body, const Manifest& manifest) {
  if (body.size() < 32 || body.substr(0, 4) != "FRQ1") throw Bad("the body is not a request", number(int64_t(body.size())) + " bytes", "FRQ1 and a header of 32 bytes");
  Cursor in{body.substr(4)};
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
  Bags out;
  out.bags = int64_t(bags);
  out.dense = in.many<float>(bags * columns);
  uint64_t sum = 0;
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

std::string one_string(std::string_view body, const std::string& key) {
  const json::value value = parsed(body, {});
  const json::object& all = object_of(value, "body");
  const json::value* given = all.if_contains(key);
  if (all.size() != 1 || !given || !given->is_string()) throw Bad("the body is not of this request", "other keys or values", "{\"" + key + "\": a string}");
  return std::string(given->get_string());
}

std::string json_string(std::string_view text) {
  json::error_code error;
  std::string out = json::serialize(json::string(text));
  if (std::all_of(text.begin(), text.end(), [](char c) { return c >= 0; })) return out;
  json::parse(out, error);
  if (error)
    for (char& c : out)
      if (c < 0) c = '?';
  return out;
}

std::string to_json(const Problem& p) {
  return "{\"error\":{\"problem\":" + json_string(p.problem) + ",\"got\":" + json_string(p.got) + ",\"need\":" + json_string(p.need) + "}}\n";
}

}  // namespace funcrec::serving
