#include "settings.h"

#include <boost/json.hpp>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <variant>

#include "../package.h"
#include "listen.h"

namespace funcrec::serving {
namespace json = boost::json;
namespace {

struct Setting {
  const char* name;  // in the file; the flag has - for _
  std::variant<std::string Settings::*, int64_t Settings::*, double Settings::*, bool Settings::*> field;
  const char* help;
  double least = 0, most = 0;
};

const Setting ALL[] = {
    {"host", &Settings::host, "the address to listen on; others than the loopback one let other machines in"},
    {"port", &Settings::port, "0: a free one, which is printed", 0, 65535},
    {"workers", &Settings::workers, "batches that run at the same time", 1, 1024},
    {"threads", &Settings::threads, "threads of each", 1, 1024},
    {"max_batch", &Settings::max_batch, "bags of one batch; 0: as many as the package takes", 0, 1 << 24},
    {"max_body", &Settings::max_body, "bytes of a body, else 413", 1, 1LL << 32},
    {"max_header", &Settings::max_header, "bytes of a header, else 431", 256, 1 << 16},
    {"memory", &Settings::memory, "bytes, half of them for all bodies, half for what is parsed of them; else 503", 4096, 1LL << 44},
    {"queue", &Settings::queue, "requests that may wait, else 429", 1, 1 << 20},
    {"connections", &Settings::connections, "open connections; further ones take the place of idle ones, or wait", 1, 1 << 20},
    {"per_address", &Settings::per_address, "of these from one address, else 429; 0: as many as there are, as behind a proxy", 0, 1 << 20},
    {"head_s", &Settings::head_s, "for a request's head to come in; after a second its connection gives way to a new one", 0.05, 3600},
    {"timeout_s", &Settings::timeout_s, "at most for a head, for a body (else 408) and for a client to take an answer", 0.05, 3600},
    {"idle_s", &Settings::idle_s, "that a connection may be open without a request", 0.05, 86400},
    {"drain_s", &Settings::drain_s, "after SIGTERM, that an open connection may begin one more request", 0, 3600},
    {"checksums", &Settings::checksums, "whether all weights are read, at the start and at /reload, and those that were changed refused"},
    {"canary", &Settings::canary, "whether weights, at the start and in updates, have to answer the package's example with finite numbers"},
    {"keep", &Settings::keep, "whether the weights that /reload replaces stay open, so that /rollback goes back to them"},
    {"updates", &Settings::updates, "the folder below which /reload and /delta may read; needs --admin"},
    {"admin", &Settings::admin, "where alone /reload and /delta are taken: a port of 127.0.0.1, ADDRESS:PORT, or a unix socket's path, with a /"},
    {"allowed_hosts", &Settings::allowed_hosts, "names, with commas between, that Host may have besides addresses and localhost; *: any, as where others than the loopback address are listened on"},
};

std::string flag_of(const Setting& s) {
  std::string flag = std::string("--") + s.name;
  for (char& c : flag)
    if (c == '_') c = '-';
  return flag;
}

std::string shown(double x) {
  std::ostringstream out;
  out.precision(15);
  out << x;
  return out.str();
}

[[noreturn]] void wrong(const std::string& name, const std::string& got, const std::string& need) {
  throw Bad("funcrec-serve: `" + name + "` is not a setting that can be", got, need);
}

void set_number(Settings& out, const Setting& s, const std::string& name, double x, bool whole) {
  const std::string need = "a number from " + shown(s.least) + " to " + shown(s.most);
  if (!(x >= s.least && x <= s.most)) wrong(name, shown(x), need);
  if (auto* field = std::get_if<int64_t Settings::*>(&s.field)) {
    if (!whole) wrong(name, shown(x), "a whole number");
    out.**field = int64_t(x);
  } else {
    out.*std::get<double Settings::*>(s.field) = x;
  }
}

void set(Settings& out, const Setting& s, const std::string& name, const json::value& v) {
  if (auto* text = std::get_if<std::string Settings::*>(&s.field)) {
    if (!v.is_string()) wrong(name, json::serialize(v), "a string");
    out.**text = std::string(v.get_string());
  } else if (auto* truth = std::get_if<bool Settings::*>(&s.field)) {
    if (!v.is_bool()) wrong(name, json::serialize(v), "true or false");
    out.**truth = v.get_bool();
  } else if (!v.is_number()) {
    wrong(name, json::serialize(v), "a number");
  } else {
    set_number(out, s, name, v.to_number<double>(), !v.is_double());
  }
}

void set(Settings& out, const Setting& s, const std::string& name, const std::string& text) {
  if (auto* field = std::get_if<std::string Settings::*>(&s.field)) {
    out.**field = text;
    return;
  }
  if (auto* truth = std::get_if<bool Settings::*>(&s.field)) {
    if (text != "true" && text != "false") wrong(name, text, "true or false");
    out.**truth = text == "true";
    return;
  }
  size_t end = 0;
  double x = NAN;
  try {
    x = std::stod(text, &end);
  } catch (const std::exception&) {
  }
  if (text.empty() || end != text.size()) wrong(name, text, "a number");
  set_number(out, s, name, x, text.find_first_not_of("0123456789") == std::string::npos);
}

// Returns the first key that occurs twice in the outer object of a JSON text, or nothing.
std::string twice(const std::string& text) {
  std::set<std::string> seen;
  std::string last;
  int depth = 0;
  for (size_t i = 0; i < text.size(); i++) {
    const char c = text[i];
    depth += (c == '{' || c == '[') - (c == '}' || c == ']');
    if (c == ':' && depth == 1 && !seen.insert(last).second) return last;
    if (c != '"') continue;
    const size_t begin = i++;
    for (; text[i] != '"'; i++) i += text[i] == '\\';
    last = std::string(json::parse(text.substr(begin, i + 1 - begin)).get_string());
  }
  return {};
}

void read_file(Settings& out, const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  boost::system::error_code error;
  const json::value value = file ? json::parse(text.str(), error) : json::value();
  if (error || !value.is_object()) wrong("settings", path, "a file that holds one JSON object");
  if (const std::string key = twice(text.str()); !key.empty()) wrong("settings", path + " with the key " + key + " twice", "each key once");
  for (const auto& [key, v] : value.get_object()) {
    const Setting* found = nullptr;
    for (const Setting& s : ALL)
      if (key == s.name) found = &s;
    if (!found) wrong("settings", path + " with a key " + std::string(key), "the flags' names, with _ for -");
    set(out, *found, path + ": " + found->name, v);
  }
}

}  // namespace

Settings settings_of(const std::vector<std::string>& arguments) {
  Settings out;
  std::vector<std::pair<const Setting*, std::string>> flags;
  for (size_t i = 0; i < arguments.size(); i++) {
    const std::string& a = arguments[i];
    if (a == "--help" || a == "-h") {
      out.help = true;
      return out;
    }
    if (!a.starts_with("-")) {
      out.packages.push_back(a);
      continue;
    }
    const size_t equals = a.find('=');
    const std::string flag = a.substr(0, equals);
    const Setting* found = nullptr;
    for (const Setting& s : ALL)
      if (flag_of(s) == flag) found = &s;
    if (!found && flag != "--settings") wrong("arguments", flag, "the flags that --help lists");
    if (equals == std::string::npos && i + 1 == arguments.size()) wrong(flag, "nothing", "a value");
    const std::string value = equals == std::string::npos ? arguments[++i] : a.substr(equals + 1);
    found ? flags.emplace_back(found, value) : (read_file(out, value), flags.emplace_back());
    if (!found) flags.pop_back();
  }
  for (const auto& [setting, value] : flags) set(out, *setting, flag_of(*setting), value);
  const std::string number = number_of(out.host);
  if (number.empty()) wrong("host", out.host.empty() ? "nothing" : out.host, "localhost or the number of an address, as 127.0.0.1, ::1 or 0.0.0.0");
  out.host = number;
  if (!out.admin.empty()) place_of(out.admin);
  else if (!out.updates.empty()) wrong("updates", "no --admin", "--admin PORT or --admin PATH: whoever may ask for predictions may not change the model");
  std::error_code absent;
  if (!out.updates.empty() && !std::filesystem::is_directory(out.updates, absent)) wrong("updates", out.updates, "a folder that is there");
  return out;
}

std::string usage() {
  const Settings defaults;
  std::ostringstream out;
  out << "funcrec-serve PATH [flags]: answers POST /predict with the package in the folder PATH\n"
      << "funcrec-serve NAME=PATH NAME=PATH.. [flags]: answers for several packages, each below /models/NAME and /v2/models/NAME;\n"
      << "a PATH may also be a folder of packages NAME, or of folders NAME with packages that are its versions\n\n"
      << "  --settings FILE      a JSON object of the flags below, with _ for -; a flag rules over it\n";
  for (const Setting& s : ALL) {
    std::string value = std::visit([&](auto field) {
      if constexpr (std::is_same_v<decltype(field), std::string Settings::*>) return defaults.*field;
      else if constexpr (std::is_same_v<decltype(field), bool Settings::*>) return std::string(defaults.*field ? "true" : "false");
      else return shown(double(defaults.*field));
    }, s.field);
    std::string flag = "  " + flag_of(s) + " " + value;
    flag.resize(std::max<size_t>(flag.size() + 1, 23), ' ');
    out << flag << s.help << "\n";
  }
  return out.str();
}

}  // namespace funcrec::serving
