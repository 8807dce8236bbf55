#include "tensors.h"

#include <algorithm>
#include <boost/json.hpp>
#include <cstdio>
#include <cstring>
#include <optional>
#include <string_view>

#include "digest.h"

namespace funcrec::serving {
namespace {

constexpr int64_t HEAD = 8, DIGITS = 8, MOST = int64_t(1) << 48;  // bytes of the length; digits of a CRC; no size is larger
constexpr std::string_view PADDING = "__padding__", TEXTS = "__metadata__";
constexpr std::pair<std::string_view, DType> DTYPES[] = {
    {"U8", DType::u8}, {"I8", DType::i8}, {"I16", DType::i16}, {"I32", DType::i32}, {"I64", DType::i64}, {"F16", DType::f16},
    {"BF16", DType::bf16}, {"F32", DType::f32}, {"F64", DType::f64}, {"BOOL", DType::boolean}};

std::string digits(uint32_t crc) {
  char out[DIGITS + 1];
  std::snprintf(out, sizeof out, "%08x", crc);
  return out;
}

bool is_padding(const Placed& p) { return p.spec.name.starts_with(PADDING); }

const boost::json::value* entry(const boost::json::object& from, const char* key) { return from.if_contains(key); }

std::optional<std::vector<int64_t>> sizes(const boost::json::value* x) {
  if (!x || !x->is_array()) return {};
  std::vector<int64_t> out;
  for (const auto& n : x->as_array()) {
    if (!n.is_int64() || n.as_int64() < 0 || n.as_int64() > MOST) return {};
    out.push_back(n.as_int64());
  }
  return out;
}

// Whether a tensor of this shape has so many bytes.
bool has_bytes(const Spec& spec, int64_t bytes) {
  if (std::find(spec.shape.begin(), spec.shape.end(), 0) != spec.shape.end()) return bytes == 0;
  int64_t n = size_of(spec.dtype);
  for (int64_t size : spec.shape) {
    if (n > MOST / size) return false;
    n *= size;
  }
  return n == bytes;
}

std::optional<Placed> placed(const std::string& name, const boost::json::value& x) {
  if (!x.is_object() || x.as_object().size() != 3) return {};
  const boost::json::value* dtype = entry(x.as_object(), "dtype");
  const auto shape = sizes(entry(x.as_object(), "shape")), at = sizes(entry(x.as_object(), "data_offsets"));
  if (!dtype || !dtype->is_string() || !shape || !at || at->size() != 2) return {};
  const std::string_view text = dtype->as_string();
  const auto known = std::find_if(std::begin(DTYPES), std::end(DTYPES), [&](const auto& own) { return own.first == text; });
  if (known == std::end(DTYPES)) return {};
  Placed out{{name, known->second, *shape}, (*at)[0], (*at)[1] - (*at)[0], 0};
  if (!has_bytes(out.spec, out.nbytes)) return {};
  return out;
}

}  // namespace

Header read_header(const std::string& path, const std::string& kind, int64_t size, int64_t align, const std::function<std::string(int64_t, int64_t)>& read) {
  const auto bad = [&](const char* what, const std::string& got, const std::string& need) { throw Bad("`" + path + "` " + what + ".", got, need); };
  const std::string head = read(0, HEAD);
  uint64_t length = 0;
  if (head.size() == HEAD) std::memcpy(&length, head.data(), HEAD);
  if (head.size() < HEAD || length > uint64_t(size - HEAD)) bad("is cut off", std::to_string(size) + " bytes", "a header and the tensors that it names");
  const std::string text = read(HEAD, int64_t(length)), start = "{\"" + std::string(TEXTS) + "\":{\"format\":\"" + kind + "\",\"crc32\":\"";
  if (!text.starts_with(start)) bad("is of another format", "another beginning", kind);
  const size_t after = std::min(text.size(), start.size() + DIGITS);
  const std::string now = digits(crc32(head + start + std::string(DIGITS, '0') + text.substr(after)));
  if (text.substr(start.size(), DIGITS) != now) bad("was changed", "CRC " + now, "the CRC in its header");

  boost::system::error_code error;
  const auto value = boost::json::parse(text, error);
  if (error) bad("is damaged", "a header that is not JSON", "the file as it was written");
  Header out;
  bool are_texts = true;
  for (const auto& [key, x] : value.as_object()) {
    if (key != TEXTS) {
      auto own = placed(std::string(key), x);
      if (!own) bad("is damaged", "a tensor that cannot be, " + std::string(key), "a dtype, a shape and a place of its size");
      out.tensors.push_back(std::move(*own));
    } else if ((are_texts = x.is_object())) {
      for (const auto& [name, own] : x.as_object())
        if (own.is_string()) out.texts[std::string(name)] = std::string(own.as_string());
        else are_texts = false;
    }
  }
  std::stable_sort(out.tensors.begin(), out.tensors.end(), [](const Placed& a, const Placed& b) { return std::pair(a.offset, a.nbytes) < std::pair(b.offset, b.nbytes); });
  int64_t end = 0;
  for (const Placed& p : out.tensors) {
    if (p.offset != end) bad("is damaged", p.spec.name + " from " + std::to_string(p.offset) + " on", "from " + std::to_string(end) + " on");
    end += p.nbytes;
  }
  const int64_t first = HEAD + int64_t(length);
  if (first + end != size) bad(first + end > size ? "is cut off" : "goes on past its end", std::to_string(size) + " bytes", std::to_string(first + end) + " bytes");
  for (Placed& p : out.tensors) {
    p.offset += first;
    if (p.nbytes && !is_padding(p) && p.offset % align) bad("is damaged", p.spec.name + " at byte " + std::to_string(p.offset), "a multiple of " + std::to_string(align));
    if (is_padding(p) && read(p.offset, p.nbytes).find_first_not_of('\0') != std::string::npos) bad("was changed", "bytes between its tensors", "zeros");
  }
  std::erase_if(out.tensors, is_padding);
  const std::string crcs = out.texts["crc32s"];
  if (!are_texts || crcs.size() != DIGITS * out.tensors.size() || crcs.find_first_not_of("0123456789abcdef") != std::string::npos)
    bad("is damaged", "other texts", "texts, and a CRC for each tensor");
  for (size_t i = 0; i < out.tensors.size(); i++) out.tensors[i].crc32 = uint32_t(std::stoul(crcs.substr(DIGITS * i, DIGITS), nullptr, 16));
  return out;
}

void check_crc(const std::string& path, const Placed& p, const char* data) {
  const uint32_t now = crc32({data, size_t(p.nbytes)});
  if (now != p.crc32) throw Bad("`" + path + "` was changed, in " + p.spec.name + ".", "CRC " + digits(now), digits(p.crc32));
}

}  // namespace funcrec::serving
