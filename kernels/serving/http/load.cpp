// funcrec-load PORT FILE CONNECTIONS SECONDS [RECONNECT]: sends requests to a server for some seconds, and compares
// every answer. Each connection sends its next request when it has its answer. RECONNECT: the number of answers after
// which a connection is closed and opened again.
//
// FILE is requests in turn, little-endian:  u32 status; u32 n and the n bytes of a whole HTTP message; u32 V; and for each of V
// versions u32 n and its name, u32 n and the n f32 of all outputs. An answer must have `status` and, if that is 200,
// one of these versions, and agree with its numbers to within 1e-6. V = 0: any body.
//
// Prints one JSON object: the number of answers, of wrong ones and what was wrong with the first, answers by version,
// quantiles of the seconds from the first byte sent to the last byte read, this program's processor seconds, and the
// seconds in all.
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <boost/json.hpp>
#include <chrono>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

namespace json = boost::json;
using Clock = std::chrono::steady_clock;

namespace {

constexpr float WITHIN = 1e-6f;

struct Asked {
  uint32_t status = 0;
  std::string message;
  std::map<std::string, std::vector<float>> right;  // by version
};

struct Reader {
  std::string_view rest;
  std::string_view text(size_t n) {
    if (n > rest.size()) throw std::runtime_error("bytes that end too early");
    const std::string_view out = rest.substr(0, n);
    rest.remove_prefix(n);
    return out;
  }
  template <class T> T one() {
    T x;
    std::memcpy(&x, text(sizeof x).data(), sizeof x);
    return x;
  }
  void align(const char* begin) { text(size_t(-(rest.data() - begin) & 7)); }
};

std::vector<Asked> read(const char* path) {
  std::ifstream file(path, std::ios::binary);
  const std::string all{std::istreambuf_iterator<char>(file), {}};
  std::vector<Asked> out;
  for (Reader in{all}; !in.rest.empty();) {
    Asked& a = out.emplace_back();
    a.status = in.one<uint32_t>();
    a.message = in.text(in.one<uint32_t>());
    for (uint32_t v = in.one<uint32_t>(); v > 0; v--) {
      std::vector<float>& x = a.right[std::string(in.text(in.one<uint32_t>()))];
      x.resize(in.one<uint32_t>());
      for (float& f : x) f = in.one<float>();
    }
  }
  if (out.empty()) throw std::runtime_error(std::string("no requests in ") + path);
  return out;
}

void flatten(const json::value& v, std::vector<float>& out) {
  if (!v.is_array()) return out.push_back(v.is_null() ? NAN : float(v.to_number<double>()));
  for (const json::value& each : v.get_array()) flatten(each, out);
}

// Returns the version and all numbers of an answer in bytes or JSON; outputs in bytes are f32.
std::pair<std::string, std::vector<float>> numbers(std::string_view body) {
  std::vector<float> out;
  if (body.substr(0, 4) != "FRA1") {
    json::monotonic_resource memory;
    const json::value v = json::parse(body, &memory);
    for (const auto& [_, x] : v.at("outputs").as_object()) flatten(x, out);
    return {std::string(v.at("version").as_string()), out};
  }
  Reader in{body.substr(4)};
  const uint32_t outputs = in.one<uint32_t>();
  const uint64_t bags = in.one<uint64_t>();
  in.one<uint64_t>();
  const std::string version(in.text(in.one<uint64_t>()));
  for (uint32_t i = 0; i < outputs; i++) {
    in.align(body.data());
    if (in.one<uint32_t>() != 7) throw std::runtime_error("an output that is not f32");
    const uint32_t rank = in.one<uint32_t>();
    in.text(in.one<uint64_t>());
    in.align(body.data());
    uint64_t n = bags;
    for (uint32_t k = 0; k < rank; k++) n *= in.one<uint64_t>();
    for (; n > 0; n--) out.push_back(in.one<float>());
  }
  return {version, out};
}

struct Load {
  sockaddr_in to{};
  std::vector<Asked> asked;
  size_t next = 0, reconnect = 0, wrong = 0;
  std::string first_wrong;
  std::map<std::string, size_t> versions;
  std::vector<float> seconds;
  int poll = epoll_create1(0);

  struct Connection {
    int socket = -1;
    const Asked* of = nullptr;
    size_t sent = 0, answers = 0;
    std::string got;
    Clock::time_point began;
  };

  void fail(std::string why) {
    for (char& c : why)
      if (c < ' ') c = '?';  // a message in bytes, not JSON
    if (!wrong++) first_wrong = std::move(why);
  }

  void open(Connection& c) {
    if (c.socket >= 0) close(c.socket);
    c.socket = socket(AF_INET, SOCK_STREAM, 0);
    const int yes = 1;
    setsockopt(c.socket, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    if (connect(c.socket, reinterpret_cast<sockaddr*>(&to), sizeof to) != 0) throw std::runtime_error("no connection: " + std::string(std::strerror(errno)));
    epoll_event e{EPOLLIN, {.ptr = &c}};
    epoll_ctl(poll, EPOLL_CTL_ADD, c.socket, &e);
    c.answers = 0;
  }

  void ask(Connection& c) {
    c.of = &asked[next++ % asked.size()];
    c.got.clear();
    c.began = Clock::now();
    c.sent = 0;
    send_more(c);
  }

  // Sends the rest later if the socket does not take all bytes at once.
  void send_more(Connection& c) {
    const std::string& m = c.of->message;
    const ssize_t n = send(c.socket, m.data() + c.sent, m.size() - c.sent, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n < 0 && errno != EAGAIN) throw std::runtime_error("a connection ended: " + std::string(std::strerror(errno)));
    const bool was_whole = c.sent == 0 && n == ssize_t(m.size());
    c.sent += size_t(std::max<ssize_t>(n, 0));
    if (was_whole) return;
    epoll_event e{c.sent < m.size() ? EPOLLIN | EPOLLOUT : EPOLLIN, {.ptr = &c}};
    epoll_ctl(poll, EPOLL_CTL_MOD, c.socket, &e);
  }

  // Returns whether a whole answer has come, which is then compared.
  bool has_answer(Connection& c) {
    const size_t top = c.got.find("\r\n\r\n"), field = c.got.find("Content-Length: ");
    if (top == std::string::npos) return false;
    const size_t length = field < top ? std::stoul(c.got.substr(field + 16)) : 0;
    if (c.got.size() < top + 4 + length) return false;
    seconds.push_back(std::chrono::duration<float>(Clock::now() - c.began).count());
    const uint32_t status = uint32_t(std::stoul(c.got.substr(9, 3)));
    const std::string_view body = std::string_view(c.got).substr(top + 4);
    if (status != c.of->status || body.size() != length) fail(c.got.substr(0, 400));
    else if (status == 200 && !c.of->right.empty()) compare(c, body);
    return true;
  }

  void compare(const Connection& c, std::string_view body) try {
    const auto [version, got] = numbers(body);
    versions[version]++;
    const auto want = c.of->right.find(version);
    bool same = want != c.of->right.end() && want->second.size() == got.size();
    for (size_t i = 0; same && i < got.size(); i++) same = std::abs(got[i] - want->second[i]) <= WITHIN;
    if (!same) fail(std::string(body.substr(0, 400)));
  } catch (const std::exception& e) {  // the answer has neither form
    fail(e.what() + std::string(": ") + std::string(body.substr(0, 400)));
  }

  void run(size_t connections, double time) {
    std::vector<Connection> all(connections);
    for (Connection& c : all) open(c);
    for (Connection& c : all) ask(c);
    const auto end = Clock::now() + std::chrono::duration<double>(time);
    std::vector<char> buffer(1 << 18);
    std::vector<epoll_event> events(connections);
    for (size_t open_ones = connections; open_ones > 0;) {
      const int n = epoll_wait(poll, events.data(), int(events.size()), 30'000);
      if (n <= 0) throw std::runtime_error("no answer for 30 s");
      for (int i = 0; i < n; i++) {
        Connection& c = *static_cast<Connection*>(events[size_t(i)].data.ptr);
        if (events[size_t(i)].events & EPOLLOUT) send_more(c);
        if (!(events[size_t(i)].events & ~uint32_t(EPOLLOUT))) continue;
        const ssize_t size = recv(c.socket, buffer.data(), buffer.size(), MSG_DONTWAIT);
        if (size < 0 && errno == EAGAIN) continue;
        if (size <= 0) throw std::runtime_error("a connection ended before its answer");
        c.got.append(buffer.data(), size_t(size));
        if (!has_answer(c)) continue;
        if (Clock::now() >= end) {
          close(c.socket), open_ones--;
          continue;
        }
        const bool ends = c.got.find("Connection: close") < c.got.find("\r\n\r\n");
        if (ends || (reconnect && ++c.answers >= reconnect)) open(c);
        ask(c);
      }
    }
  }
};

double processor_seconds() {
  rusage u;
  getrusage(RUSAGE_SELF, &u);
  return double(u.ru_utime.tv_sec + u.ru_stime.tv_sec) + 1e-6 * double(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

}  // namespace

int main(int count, char** words) try {
  if (count < 5) throw std::runtime_error("PORT FILE CONNECTIONS SECONDS [RECONNECT]");
  Load load;
  load.to.sin_family = AF_INET;
  load.to.sin_port = htons(uint16_t(std::stoi(words[1])));
  load.to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  load.asked = read(words[2]);
  load.reconnect = count > 5 ? std::stoul(words[5]) : 0;
  const double cpu = processor_seconds();
  const auto begin = Clock::now();
  load.run(std::stoul(words[3]), std::stod(words[4]));
  const double wall = std::chrono::duration<double>(Clock::now() - begin).count();
  std::vector<float>& s = load.seconds;
  if (s.empty()) throw std::runtime_error("no answers: no connections");
  std::sort(s.begin(), s.end());
  const auto quantile = [&](double q) { return double(s[std::min(s.size() - 1, size_t(q * double(s.size())))]); };
  json::object versions;
  for (const auto& [name, n] : load.versions) versions[name] = n;
  std::cout << json::serialize(json::value{{"answers", s.size()}, {"wrong", load.wrong}, {"first_wrong", load.first_wrong}, {"versions", versions},
                                           {"p50", quantile(0.5)}, {"p99", quantile(0.99)}, {"max", quantile(1)}, {"cpu_s", processor_seconds() - cpu}, {"seconds", wall}})
            << std::endl;
  return load.wrong > 0;
} catch (const std::exception& e) {
  std::cerr << "funcrec-load: " << e.what() << std::endl;
  return 2;
}
