#include "listen.h"

#include <sys/stat.h>
#include <unistd.h>

#include <boost/beast/core/string.hpp>
#include <cstring>

#include "../package.h"

namespace funcrec::serving {
namespace {

namespace beast = boost::beast;
using boost::system::error_code;
using tcp = net::ip::tcp;
using Local = net::local::stream_protocol;

[[noreturn]] void no_place(const std::string& text) {
  throw Bad("funcrec-serve: there is no such place to listen at", text, "a port, an address and a port as 10.0.0.1:8081, or the path of a unix socket, which has a /");
}

tcp::endpoint tcp_of(const Stream::endpoint& end) {
  tcp::endpoint out;
  if (end.size() > out.capacity()) return out;
  std::memcpy(out.data(), end.data(), end.size());
  return out;
}

bool is_local(const Stream::endpoint& end) { return end.protocol().family() == AF_UNIX; }

// Whether a socket has no listener any more.
bool is_left(const std::string& path) {
  struct stat about {};
  if (lstat(path.c_str(), &about) != 0 || !S_ISSOCK(about.st_mode)) return false;
  net::io_context io;
  Local::socket socket(io);
  error_code error;
  socket.connect(Local::endpoint(path), error);
  return error == net::error::connection_refused;
}

}  // namespace

std::string number_of(const std::string& host) {
  if (beast::iequals(host, "localhost")) return "127.0.0.1";
  const bool bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
  const std::string number = bracketed ? host.substr(1, host.size() - 2) : host;
  error_code error;
  const net::ip::address address = net::ip::make_address(number, error);
  return error || (bracketed && !address.is_v6()) ? "" : number;
}

Place place_of(const std::string& text) {
  if (text.find('/') != std::string::npos) {
    if (text.size() >= sizeof(sockaddr_un{}.sun_path) || text.back() == '/') no_place(text);
    return {"", 0, text};
  }
  const size_t colon = text.rfind(':');
  const std::string host = colon == std::string::npos ? "127.0.0.1" : text.substr(0, colon);
  const std::string number = host.find(':') != std::string::npos && host.front() != '[' ? "" : number_of(host);  // ::1:8081 has two readings
  const std::string port = text.substr(colon == std::string::npos ? 0 : colon + 1);
  if (number.empty() || port.empty() || port.size() > 5 || port.find_first_not_of("0123456789") != std::string::npos || std::stol(port) > 65535) no_place(text);
  return {number, static_cast<unsigned short>(std::stol(port)), ""};
}

bool is_loopback(const Place& place) {
  error_code error;
  return !place.path.empty() || net::ip::make_address(place.host, error).is_loopback();
}

Acceptor listen_at(net::io_context& io, const Place& place) {
  error_code error;
  Acceptor acceptor(io);
  const bool local = !place.path.empty();
  if (local && is_left(place.path)) ::unlink(place.path.c_str());
  const Stream::endpoint end = local ? Stream::endpoint(Local::endpoint(place.path)) : Stream::endpoint(tcp::endpoint(net::ip::make_address(place.host, error), place.port));
  if (!error) acceptor.open(end.protocol(), error);
  if (!error && !local) acceptor.set_option(Acceptor::reuse_address(true), error);
  if (!error && local && fchmod(acceptor.native_handle(), 0600) != 0) error = error_code(errno, boost::system::system_category());  // the file that bind makes gets this mode
  if (!error) acceptor.bind(end, error);
  if (!error) acceptor.listen(1024, error);
  if (error) throw Failed("cannot listen on " + (local ? place.path : place.host + ":" + std::to_string(place.port)) + ": " + error.message());
  return acceptor;
}

std::string url_of(const Acceptor& acceptor, const Place& place) {
  if (!place.path.empty()) return "unix:" + place.path;
  const bool six = place.host.find(':') != std::string::npos;
  return "http://" + (six ? "[" + place.host + "]" : place.host) + ":" + std::to_string(tcp_of(acceptor.local_endpoint()).port());
}

std::string address_of(const Stream::endpoint& peer) { return is_local(peer) ? "" : tcp_of(peer).address().to_string(); }

}  // namespace funcrec::serving
