// A place to listen at: an address and a port, or the path of a unix socket.
#pragma once
#include <boost/asio.hpp>
#include <string>

namespace funcrec::serving {
namespace net = boost::asio;
using Stream = net::generic::stream_protocol;
using Acceptor = net::basic_socket_acceptor<Stream>;

struct Place {
  std::string host;  // a numeric address
  unsigned short port = 0;
  std::string path;  // of a unix socket, in place of both
};

// Returns the numeric address of a text: 127.0.0.1 for `localhost`, ::1 for `[::1]`, "" for a text that is not an
// address.
std::string number_of(const std::string& host);

// Returns the place of a setting: PORT (at the loopback address), ADDRESS:PORT, or a path with a `/`. Bad for other
// texts.
Place place_of(const std::string& text);
bool is_loopback(const Place&);  // whether only this machine can reach it

// Listens at the place, or throws Failed. Only its owner can use a socket at a path (mode 0600); a socket that a killed
// server left is replaced.
Acceptor listen_at(net::io_context&, const Place&);

std::string url_of(const Acceptor&, const Place&);      // http://127.0.0.1:8080, unix:/run/admin
std::string address_of(const Stream::endpoint& peer);   // the address without the port; "" for a unix socket

}  // namespace funcrec::serving
