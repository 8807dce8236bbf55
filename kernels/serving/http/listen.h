// Where the server listens: an address and a port, or the path of a unix socket.
#pragma once
#include <boost/asio.hpp>
#include <string>

namespace funcrec::serving {
namespace net = boost::asio;
using Stream = net::generic::stream_protocol;
using Acceptor = net::basic_socket_acceptor<Stream>;

struct Place {
  std::string host;  // the number of an address
  unsigned short port = 0;
  std::string path;  // of a unix socket, in place of both
};

// The number of an address that words name: of `localhost` 127.0.0.1, of `[::1]` ::1; "" of what is none.
std::string number_of(const std::string& host);

// Of a setting: PORT (of the loopback address), ADDRESS:PORT, or a path that has a `/`. Bad for what is none.
Place place_of(const std::string& text);
bool is_loopback(const Place&);  // whether only this machine reaches it

// Failed if it cannot. The socket at a path is its owner's alone (mode 0600); one that a killed server left is replaced.
Acceptor listen_at(net::io_context&, const Place&);

std::string url_of(const Acceptor&, const Place&);      // http://127.0.0.1:8080, unix:/run/admin
std::string address_of(const Stream::endpoint& peer);   // its number without the port; "" of a unix socket

}  // namespace funcrec::serving
