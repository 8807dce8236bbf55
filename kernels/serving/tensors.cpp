#include "tensors.h"

#include <algorithm>
#include <boost/json.hpp>
#include <cstdio>
#include <cstring>
#include <string_view>

#include "digest.h"
#include "manifest.h"

namespace funcrec::serving {
namespace {

constexpr int64_t HEAD = 8, DIGITS = 8;  // bytes of the length; digits of a CRC
constexpr std::string_view PADDING = "__padding__", TEXTS = "__metadata__";

std::string digits(uint32_t crc) {
  char out[DIGITS + 1];
  std::snprintf(out, sizeof out, "%08x", crc);
  return out;
}

bool is_padding(const Placed& p) { return p.spec.name.starts_with(PADDING); }

Placed placed(const std::string& name, const Entry& e) {
  const auto shape = e["shape"].items(), at = e["data_offsets"].items();
  if (e.size() != 3 || at.size() != 2) e.fail("other entries", "dtype, shape and data_offsets");
  Placed out;  // not one initializer: g++ 12 destroys `spec` twice if a later number throws
  out.spec.name = name, out.spec.dtype = dtype_of(e["dtype"], true);
  for (const Entry& n : shape) out.spec.shape.push_back(n.number(0, MOST));
  out.offset = at[0].number(0, MOST), out.nbytes = at[1].number(0, MOST) - out.offset;
  if (out.nbytes != bytes_of(out.spec)) e.fail("other bytes", "those of its shape");
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
  const auto other_texts = [&] { bad("is damaged", "other texts", "texts, and a CRC for each tensor"); };
  Header out;
  for (const auto& [key, x] : value.as_object()) {
    const std::string name = key;
    if (name != TEXTS) try {
      out.tensors.push_back(placed(name, Entry(path, x)));
    } catch (const Bad&) {
      bad("is damaged", "a tensor that cannot be, " + name, "a dtype, a shape and a place of its size");
    } else if (!x.is_object()) other_texts();
    else for (const auto& [text_name, own] : x.as_object()) {
      if (!own.is_string()) other_texts();
      out.texts[text_name] = own.as_string();
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
  const std::string crcs = out.texts.contains("crc32s") ? out.texts.at("crc32s") : "none";
  if (crcs.size() != DIGITS * out.tensors.size() || crcs.find_first_not_of("0123456789abcdef") != std::string::npos) other_texts();
  for (size_t i = 0; i < out.tensors.size(); i++) out.tensors[i].crc32 = uint32_t(std::stoul(crcs.substr(DIGITS * i, DIGITS), nullptr, 16));
  return out;
}

void check_crc(const std::string& path, const Placed& p, const char* data) {
  const uint32_t now = crc32({data, size_t(p.nbytes)});
  if (now != p.crc32) throw Bad("`" + path + "` was changed, in " + p.spec.name + ".", "CRC " + digits(now), digits(p.crc32));
}

}  // namespace funcrec::serving
