// The paths of requests, and the decisions that need only a header.
#pragma once
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <algorithm>
#include <charconv>
#include <optional>

#include "counted_body.h"
#include "hosts.h"
#include "protocol.h"

namespace funcrec::serving {
namespace beast = boost::beast;
namespace http = beast::http;
using Ask = http::request<CountedBody>;
using Reply = http::response<http::string_body>;

inline constexpr char JSON[] = "application/json", BYTES[] = "application/octet-stream", HEADER_LENGTH[] = "Inference-Header-Content-Length";

inline Reply reply_of(const Ask& ask, unsigned code, std::string body, const char* type = JSON) {
  Reply reply{http::status(code), ask.version() < 10 ? 11 : ask.version()};
  reply.set(http::field::content_type, type);
  reply.keep_alive(ask.keep_alive());
  reply.body() = std::move(body);
  return reply;
}

// Returns the host of a target in a proxy's form, http://host/path, or nothing.
inline std::string_view host_of(std::string_view target) {
  return beast::iequals(target.substr(0, 7), "http://") ? target.substr(7, target.find_first_of("/?", 7) - 7) : std::string_view();
}

inline std::string_view path_of(const Ask& ask) {
  std::string_view target = ask.target();
  if (beast::iequals(target.substr(0, 7), "http://")) target.remove_prefix(7 + host_of(target).size());
  return target.substr(0, target.find('?'));
}

inline Reply problem(const Ask& ask, const Problem& p) {
  const bool is_protocol = path_of(ask).starts_with("/v2");
  Reply reply = reply_of(ask, p.code, is_protocol ? to_inference_json(p) : to_json(p));
  if (p.code == 429 || p.code == 503) reply.set(http::field::retry_after, "1");
  return reply;
}

inline Reply problem(const Ask& ask, unsigned code, std::string what, std::string got, std::string need) {
  return problem(ask, Problem{code, std::move(what), std::move(got), std::move(need)});
}

inline std::string media_type(const Ask& ask) {
  const std::string_view all = ask[http::field::content_type];
  std::string type(all.substr(0, all.find(';')));
  while (!type.empty() && (type.back() == ' ' || type.back() == '\t')) type.pop_back();
  for (char& c : type) c = char(std::tolower(static_cast<unsigned char>(c)));
  return type;
}

// Returns the first charset of the media type that is neither UTF-8 nor a part of it, or nothing.
inline std::string other_charset(const Ask& ask) {
  std::string_view rest = ask[http::field::content_type];
  for (size_t at = rest.find(';'); at != std::string_view::npos; at = rest.find(';')) {
    rest.remove_prefix(at + 1);
    std::string_view own = rest.substr(0, rest.find(';'));
    const auto trim = [&own](std::string_view what) {
      while (!own.empty() && what.find(own.front()) != what.npos) own.remove_prefix(1);
      while (!own.empty() && what.find(own.back()) != what.npos) own.remove_suffix(1);
    };
    trim(" \t");
    if (!beast::iequals(own.substr(0, 8), "charset=")) continue;
    own.remove_prefix(8);
    trim("\"");
    if (!beast::iequals(own, "utf-8") && !beast::iequals(own, "utf8") && !beast::iequals(own, "us-ascii")) return std::string(own);
  }
  return {};
}

struct Route {
  std::string_view path, methods;
  bool of_model = false;  // answered below /models/M and /models/M/versions/V too
  bool updates = false;   // accepted at the operator's address only
  bool has(http::verb verb) const { return verb == http::verb::post ? methods == "POST" : methods != "POST" && (verb == http::verb::get || verb == http::verb::head); }
};
inline constexpr char METADATA[] = "/v2/models/M", READY[] = "/v2/models/M/ready", INFER[] = "/v2/models/M/infer";
inline const Route ROUTES[] = {{"/predict", "POST", true}, {"/reload", "POST", true, true}, {"/delta", "POST", true, true}, {"/rollback", "POST", true, true},
                        {"/manifest", "GET, HEAD", true}, {"/healthz", "GET, HEAD", true}, {"/livez", "GET, HEAD", true}, {"/readyz", "GET, HEAD", true},
                        {"/models", "GET, HEAD"}, {"/metrics", "GET, HEAD"}, {"/openapi.json", "GET, HEAD"}, {"/v2", "GET, HEAD"},
                        {"/v2/health/live", "GET, HEAD"}, {"/v2/health/ready", "GET, HEAD"}, {METADATA, "GET, HEAD"}, {READY, "GET, HEAD"}, {INFER, "POST"}};

// Returns a segment of a path without its escapes (%41); nothing for one that is empty, or whose escapes are broken.
inline std::optional<std::string> segment(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); i++) {
    unsigned char c = static_cast<unsigned char>(text[i]);
    if (c == '%') {
      const char* begin = text.data() + i + 1;
      if (i + 2 >= text.size() || std::from_chars(begin, begin + 2, c, 16).ptr != begin + 2) return {};
      i += 2;
    }
    out += char(c);
  }
  return out.empty() ? std::nullopt : std::optional(out);
}

// A path taken apart: its route, null if there is none, and the model and version that it names.
struct Way {
  const Route* route = nullptr;
  std::optional<std::string> model, version;
};

inline Way way_of(std::string_view path) {
  const auto found = [](std::string_view name) {
    const Route* at = std::find_if(std::begin(ROUTES), std::end(ROUTES), [&](const Route& r) { return r.path == name; });
    return at == std::end(ROUTES) ? nullptr : at;
  };
  const bool is_protocol = path.starts_with("/v2/models/");
  if (!is_protocol && !path.starts_with("/models/")) return {found(path), {}, {}};
  Way way;
  std::string_view rest = path.substr(is_protocol ? 11 : 8);
  const auto take = [&rest] {
    const std::string_view own = rest.substr(0, rest.find('/'));
    rest.remove_prefix(own.size());
    return segment(own);
  };
  if (!(way.model = take())) return {};
  if (rest.starts_with("/versions/")) {
    rest.remove_prefix(10);
    if (!(way.version = take())) return {};
  }
  const Route* route = found((is_protocol ? METADATA : "") + std::string(rest));
  if (route && (is_protocol || route->of_model)) way.route = route;
  return way;
}

// A request of HTTP/1.1 must name one host, which is this server.
inline std::optional<Reply> refused_host(const Ask& ask, const Hosts& hosts) {
  const size_t count = ask.count(http::field::host);
  if (count > 1 || (ask[http::field::host].empty() && ask.version() >= 11)) {  // of two hosts, a proxy may have read the other
    Reply reply = problem(ask, 400, "the request does not name one host", std::to_string(count) + " fields Host", "one");
    reply.keep_alive(false);
    return reply;
  }
  for (const std::string_view host : {host_of(ask.target()), std::string_view(ask[http::field::host])})
    if (!host.empty() && !hosts.allow(host)) return problem(ask, 421, "the request is for another host", std::string(host), "an address, localhost, or a name of --allowed-hosts");
  return {};
}

// Returns the answer if the header alone decides it. admin: whether the request came to the operator's address.
inline std::optional<Reply> refusal(const Ask& ask, const Hosts& hosts, bool admin) {
  const auto framing = ask.find(http::field::transfer_encoding);
  if (framing != ask.end() && (ask.version() < 11 || !beast::iequals(framing->value(), "chunked"))) {  // a proxy may see another end of the body
    Reply reply = problem(ask, 501, "the body's end is not known", "Transfer-Encoding: " + std::string(framing->value()), "a Content-Length, or chunks of HTTP/1.1");
    reply.keep_alive(false);
    return reply;
  }
  if (auto refused = refused_host(ask, hosts)) return refused;
  const Way way = way_of(path_of(ask));
  if (!way.route)
    return problem(ask, 404, "there is no such path", std::string(path_of(ask)),
                   "/predict, /reload, /delta, /rollback, /healthz, /livez, /readyz, /manifest, each of them below /models/NAME too, /models, /metrics, /openapi.json, or a path of /v2");
  const Route& route = *way.route;
  if (route.updates && !admin) return problem(ask, 403, "updates are not taken here", std::string(path_of(ask)), "the address of --admin");
  if (!route.has(ask.method())) {
    Reply reply = problem(ask, 405, "the path has no such method", std::string(ask.method_string()), std::string(route.methods));
    reply.set(http::field::allow, route.methods);
    return reply;
  }
  if (route.methods != "POST") return {};
  const std::string_view coding = ask[http::field::content_encoding];
  if (!coding.empty() && !beast::iequals(coding, "identity")) {
    Reply reply = problem(ask, 415, "the body is coded", "Content-Encoding: " + std::string(coding), "a body as it is");
    reply.set(http::field::accept_encoding, "identity");
    return reply;
  }
  const bool is_infer = route.path == INFER, takes_bytes = is_infer || route.path == "/predict";
  const std::string type = media_type(ask), charset = type == JSON ? other_charset(ask) : std::string();
  if (!charset.empty()) return problem(ask, 415, "the body is of another charset", "charset=" + charset, "UTF-8, as JSON has");
  if (type == JSON || (type == BYTES && takes_bytes) || (type.empty() && is_infer)) return {};  // clients of the protocol name no type
  return problem(ask, 415, "the body is of another type", type.empty() ? "no Content-Type" : type, takes_bytes ? std::string(JSON) + " or " + BYTES : JSON);
}

}  // namespace funcrec::serving
