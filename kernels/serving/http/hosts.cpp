#include "hosts.h"

#include <algorithm>
#include <boost/asio/ip/address.hpp>
#include <sstream>

namespace funcrec::serving {
namespace {

// Returns the host without its port and final dot, in lower case.
std::string plain(std::string_view host) {
  const size_t colon = host.rfind(':');
  if (colon != std::string_view::npos && host.find(']', colon) == std::string_view::npos && host.find_first_not_of("0123456789", colon + 1) == std::string_view::npos)
    host = host.substr(0, colon);
  if (host.size() > 1 && host.back() == '.') host.remove_suffix(1);
  std::string out(host);
  for (char& c : out) c = char(std::tolower(static_cast<unsigned char>(c)));
  return out;
}

bool is_address(const std::string& host) {
  boost::system::error_code error;
  const bool six = host.size() > 2 && host.front() == '[' && host.back() == ']';
  boost::asio::ip::make_address(six ? host.substr(1, host.size() - 2) : host, error);
  return !error && six == (host.find(':') != std::string::npos);
}

}  // namespace

Hosts::Hosts(const std::string& text, bool any) : any_(text.empty() && any) {
  std::istringstream words(text);
  for (std::string word; std::getline(words, word, ',');) {
    word.erase(0, word.find_first_not_of(' '));
    word.erase(word.find_last_not_of(' ') + 1);
    any_ = any_ || word == "*";
    if (!word.empty()) names_.push_back(plain(word));
  }
}

bool Hosts::allow(std::string_view host) const {
  const std::string name = plain(host);
  return any_ || name == "localhost" || is_address(name) || std::find(names_.begin(), names_.end(), name) != names_.end();
}

}  // namespace funcrec::serving
