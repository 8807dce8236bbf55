// The paths of requests, and the decisions that need only a header.
#pragma once
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <optional>

#include "hosts.h"
#include "protocol.h"

namespace funcrec::serving {
namespace beast = boost::beast;
namespace http = beast::http;
using Ask = http::request<CountedBody>;
using Reply = http::response<http::string_body>;

inline constexpr char JSON[] = "application/json", BYTES[] = "application/octet-stream";

inline Reply reply_of(const Ask& ask, unsigned code, std::string body, const char* type = JSON) {
  Reply reply{http::status(code), ask.version() < 10 ? 11 : ask.version()};
  reply.set(http::field::content_type, type);
  reply.keep_alive(ask.keep_alive());
  reply.body() = std::move(body);
  return reply;
}

inline Reply problem(const Ask& ask, const Problem& p) {
  Reply reply = reply_of(ask, p.code, to_json(p));
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

// Returns the host of a target in a proxy's form, http://host/path, or nothing.
inline std::string_view host_of(std::string_view target) {
  return beast::iequals(target.substr(0, 7), "http://") ? target.substr(7, target.find_first_of("/?", 7) - 7) : std::string_view();
}

inline std::string_view path_of(const Ask& ask) {
  std::string_view target = ask.target();
  if (beast::iequals(target.substr(0, 7), "http://")) target.remove_prefix(7 + host_of(target).size());
  return target.substr(0, target.find('?'));
}

struct Route {
  std::string_view path, methods;
  bool updates = false;  // accepted at the operator's address only
  bool has(http::verb verb) const { return verb == http::verb::post ? methods == "POST" : methods != "POST" && (verb == http::verb::get || verb == http::verb::head); }
};
inline const Route ROUTES[] = {{"/predict", "POST"}, {"/reload", "POST", true}, {"/delta", "POST", true}, {"/healthz", "GET, HEAD"}, {"/livez", "GET, HEAD"},
                        {"/readyz", "GET, HEAD"}, {"/manifest", "GET, HEAD"}, {"/metrics", "GET, HEAD"}};

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
  for (const Route& route : ROUTES) {
    if (route.path != path_of(ask)) continue;
    if (route.updates && !admin) return problem(ask, 403, "updates are not taken here", std::string(route.path), "the address of --admin");
    if (!route.has(ask.method())) {
      Reply reply = problem(ask, 405, "the path has no such method", std::string(ask.method_string()), std::string(route.methods));
      reply.set(http::field::allow, route.methods);
      return reply;
    }
    const std::string_view coding = ask[http::field::content_encoding];
    if (route.methods == "POST" && !coding.empty() && !beast::iequals(coding, "identity")) {
      Reply reply = problem(ask, 415, "the body is coded", "Content-Encoding: " + std::string(coding), "a body as it is");
      reply.set(http::field::accept_encoding, "identity");
      return reply;
    }
    const std::string type = route.methods == "POST" ? media_type(ask) : JSON;
    const std::string charset = type == JSON && route.methods == "POST" ? other_charset(ask) : std::string();
    if (!charset.empty()) return problem(ask, 415, "the body is of another charset", "charset=" + charset, "UTF-8, as JSON has");
    if (type == JSON || (type == BYTES && route.path == "/predict")) return {};
    return problem(ask, 415, "the body is of another type", type.empty() ? "no Content-Type" : type, route.path == "/predict" ? std::string(JSON) + " or " + BYTES : JSON);
  }
  return problem(ask, 404, "there is no such path", std::string(path_of(ask)), "/predict, /reload, /delta, /healthz, /livez, /readyz, /manifest or /metrics");
}

}  // namespace funcrec::serving
