#include "server.h"

#include <boost/asio.hpp>
#include <boost/beast/core.hpp>
#include <chrono>
#include <filesystem>
#include <csignal>
#include <list>
#include <map>
#include <numeric>
#include <optional>
#include <thread>

#include "batcher.h"
#include "inference.h"
#include "listen.h"
#include "metrics.h"
#include "openapi.h"
#include "routes.h"

namespace funcrec::serving {
using boost::system::error_code;
using Clock = std::chrono::steady_clock;
template <class T = void> using Task = net::awaitable<T>;

namespace {

constexpr auto FOREVER = Clock::time_point::max();
constexpr auto TICK = std::chrono::milliseconds(25);       // the delay with which a deadline may be noticed
constexpr auto YIELDS = std::chrono::seconds(1);           // the time that a connection must be idle before a new one replaces it
constexpr auto LINGER = std::chrono::seconds(2);           // the time in which a client may still send after its last answer
constexpr size_t ADMINS = 64;                              // connections for updates, which other connections do not use up
constexpr size_t LINGER_BYTES = 64 << 20;
constexpr size_t SHORT = 1 << 14;                          // bytes of a body, and numbers of an answer, up to which this thread reads and writes them
constexpr size_t UNREAD = 1 << 16;                         // bytes of a header, of a chunk's header or of trailers, for which the parser has no limit

Clock::duration seconds(double s) { return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(s)); }

// A place where the server listens, and its connections.
struct Listener {
  Place place;
  bool admin;  // whether it accepts updates
  size_t most;
  Hosts hosts;
  Acceptor acceptor;
  size_t open = 0;
  std::map<std::string, size_t> from = {};  // open connections by address; those of a unix socket have none
};

struct Connection {
  Stream::socket socket;
  Listener& from;
  std::string address;
  beast::flat_buffer buffer = beast::flat_buffer(UNREAD);
  Clock::time_point deadline = FOREVER, since = {};  // the deadline of the present operation, and its begin
  bool idle = false, yields = false, late = false;  // yields: it has no request, so a new connection may replace it
};

int64_t numbers_of(const Part& part) {
  int64_t n = 0;
  for (const Output& output : part.answer->outputs) n += std::accumulate(output.shape.begin() + 1, output.shape.end(), part.bags, std::multiplies<>());
  return n;
}

// A model with the queue of its requests.
struct Served {
  const Named& own;
  Batcher batcher;
  template <class... X> Served(const Named& named, X&&... x) : own(named), batcher(named.model, std::forward<X>(x)...) {}
  const Model& model() const { return own.model; }
  const Manifest& manifest() const { return own.model.manifest; }
};

// The status for a client whose message cannot be read; 0 if the client has gone.
unsigned code_of(error_code error, bool late) {
  if (late) return 408;
  if (error == http::error::header_limit || error == http::error::buffer_overflow) return 431;
  if (error == http::error::body_limit) return 413;
  if (error == boost::system::errc::no_buffer_space) return 503;
  if (error == http::error::end_of_stream) return 0;
  return error.category() == http::make_error_code(http::error::bad_version).category() ? 400 : 0;
}

class Server {
 public:
  Server(const std::vector<Named>& models, const Settings& settings) : settings_(settings) {
    const auto deliver = [this](Jobs jobs) {
      net::post(io_, [jobs = std::move(jobs)] {
        for (auto& job : jobs) job->done(std::move(job->outcome));
      });
    };
    for (const Named& m : models) served_.emplace_back(m, metrics_, limits(m.model.manifest), deliver);
  }

  void run(const std::function<void(const std::string&, const std::string&)>& ready) {
    struct sigaction before {};
    if (sigaction(SIGHUP, nullptr, &before) == 0 && before.sa_handler != SIG_IGN) signals_.add(SIGHUP);
    listen({settings_.host, static_cast<unsigned short>(settings_.port), ""}, false, size_t(settings_.connections));
    if (!settings_.admin.empty()) listen(place_of(settings_.admin), true, ADMINS);
    const auto url = [](const Listener& l) { return url_of(l.acceptor, l.place); };
    ready(url(listeners_.front()), listeners_.size() > 1 ? url(listeners_.back()) : "");
    for (Listener& l : listeners_) net::co_spawn(io_, accept(l), net::detached);
    net::co_spawn(io_, watch(), net::detached);
    net::co_spawn(io_, wait_for_signal(), net::detached);
    for (bool over = false; !over;) try {
      io_.run();
      over = true;
    } catch (const std::exception&) {  // of a connection, which has ended: for example, no memory for a body
    }
    updater_.join(), parsers_.join();
  }

 private:
  void listen(const Place& place, bool admin, size_t most) {
    listeners_.push_back({place, admin, most, Hosts(settings_.allowed_hosts, !is_loopback(place)), listen_at(io_, place)});
  }

  Task<> pause(Clock::duration time) {
    net::steady_timer timer(io_, time);
    error_code error;
    co_await timer.async_wait(net::redirect_error(net::use_awaitable, error));
  }

  Task<> accept(Listener& l) {
    while (!draining_) {
      error_code error, gone;
      Stream::socket socket = co_await l.acceptor.async_accept(net::redirect_error(net::use_awaitable, error));
      if (!error && !has_room(l, address_of(socket.remote_endpoint(gone)))) {
        refuse(socket);
        continue;
      }
      while (!error && !draining_ && l.open >= l.most) {
        const Clock::duration wait = close_an_idle_one(l) ? Clock::duration(0) : TICK;
        co_await pause(wait);
      }
      if (!error) try {
        begin(std::move(socket), l);
      } catch (const std::exception&) {  // no memory for this one
      }
      else if (error != net::error::operation_aborted) {  // for example, no more descriptors
        close_an_idle_one(l);
        co_await pause(TICK);
      }
    }
  }

  // Returns whether an address may have one more connection; an idle connection of the address then gives way.
  bool has_room(Listener& l, const std::string& address) {
    const auto own = l.from.find(address);
    return !settings_.per_address || address.empty() || own == l.from.end() || own->second < size_t(settings_.per_address) || close_an_idle_one(l, &address);
  }

  void refuse(Stream::socket& socket) {
    constexpr std::string_view said = "HTTP/1.1 429 Too Many Requests\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
    error_code error;
    socket.non_blocking(true, error);
    socket.write_some(net::buffer(said), error);
    metrics_.answered(429);
  }

  // Closes the connection that has been idle for longest, to make room for a new one.
  bool close_an_idle_one(const Listener& l, const std::string* address = nullptr) {
    Connection* found = nullptr;
    for (Connection& c : connections_)
      if (c.yields && &c.from == &l && (!address || c.address == *address) && (!found || c.since < found->since)) found = &c;
    if (!found || Clock::now() - found->since < YIELDS) return false;
    error_code error;
    found->socket.cancel(error);
    return true;
  }

  void begin(Stream::socket socket, Listener& l) {
    error_code error;
    if (l.place.path.empty()) socket.set_option(net::ip::tcp::no_delay(true), error);
    const std::string address = address_of(socket.remote_endpoint(error));
    connections_.push_back({.socket = std::move(socket), .from = l, .address = address});
    l.open++, l.from[address]++;
    net::co_spawn(io_, live(std::prev(connections_.end())), net::detached);
  }

  Task<> live(std::list<Connection>::iterator c) {
    struct Entry {  // ends with the coroutine, however it ends
      std::list<Connection>& all;
      std::list<Connection>::iterator at;
      ~Entry() {
        Listener& l = at->from;
        if (l.open--; --l.from[at->address] == 0) l.from.erase(at->address);
        all.erase(at);
      }
    } const entry{connections_, c};
    try {
      if (co_await converse(*c)) co_await linger(*c);
    } catch (const std::exception&) {  // no memory for this connection; the others go on
    }
  }

  // Ends operations whose deadline has passed; returns when the server has drained.
  Task<> watch() {
    while (!draining_ || !connections_.empty()) {
      co_await pause(TICK);
      const auto now = Clock::now();
      for (Connection& c : connections_)
        if (now >= (draining_ && c.idle ? std::min(c.deadline, drained_) : c.deadline)) {
          error_code error;
          c.late = true;
          c.socket.cancel(error);
        }
    }
    served_.clear();
    io_.stop();
  }

  Task<> wait_for_signal() {
    co_await signals_.async_wait(net::use_awaitable);
    signals_.clear();  // a second signal ends the process at once
    draining_ = true;
    drained_ = Clock::now() + seconds(settings_.drain_s);
    for (Listener& l : listeners_) {
      error_code error;
      l.acceptor.non_blocking(true, error);
      while (l.open < l.most) {  // connections that the system had accepted before
        Stream::socket socket(io_);
        if (l.acceptor.accept(socket, error)) break;
        begin(std::move(socket), l);
      }
      l.acceptor.close(error);
      if (!l.place.path.empty()) std::filesystem::remove(l.place.path, error);
    }
  }

  void give(Connection& c, double s, bool idle = false) {
    c.since = Clock::now();
    c.deadline = s < 0 ? FOREVER : c.since + seconds(s);
    c.idle = c.yields = idle;
    c.late = false;
  }

  // Serves requests one after the other until the connection ends; returns whether the client may still be sending.
  Task<bool> converse(Connection& c) {
    for (;;) {
      error_code error;
      auto token = net::redirect_error(net::use_awaitable, error);
      if (c.buffer.size() == 0) {
        give(c, settings_.idle_s, true);
        co_await c.socket.async_wait(Stream::socket::wait_read, token);
        if (error && c.socket.available(error) == 0) co_return false;  // requests that have come are answered
      }
      http::request_parser<CountedBody> parser;
      parser.get().body() = Text(Counted<char>(&bodies_));
      parser.header_limit(std::uint32_t(settings_.max_header));
      parser.body_limit(std::uint64_t(settings_.max_body));
      give(c, std::min(settings_.head_s, settings_.timeout_s));
      c.yields = true;
      co_await http::async_read_header(c.socket, c.buffer, parser, token);
      std::optional<Reply> refused;
      if (!error) refused = refusal(parser.get(), c.from.hosts, c.from.admin);
      const bool waits = !error && beast::iequals(parser.get()[http::field::expect], "100-continue");
      if (!error && waits && !refused && !parser.is_done()) {
        const http::response<http::empty_body> go_on{http::status::continue_, 11};
        co_await http::async_write(c.socket, go_on, token);
        if (error) co_return false;
      }
      if (!error && !(refused && (waits || !refused->keep_alive()))) {  // the body is not read if the connection ends after the answer
        give(c, settings_.timeout_s);
        co_await http::async_read(c.socket, c.buffer, parser, token);
      }
      const bool unread = error || !parser.is_done();
      if (error) {
        const unsigned code = code_of(error, c.late);
        if (!code) co_return false;
        refused = problem(parser.get(), code, "the request cannot be read", c.late ? "no more bytes in time" : error.message(), need_of(code));
      }
      if (!refused) refused = co_await answer(c, parser.get());
      Reply& reply = *refused;
      if (unread || draining_) reply.keep_alive(false);
      const bool goes_on = reply.keep_alive();
      co_await send(c, parser.get(), reply, error);
      if (error) co_return false;
      if (!goes_on) co_return true;
    }
  }

  std::string need_of(unsigned code) const {
    if (code == 408) return "a head within " + std::to_string(std::min(settings_.head_s, settings_.timeout_s)) + " s, and a body within " + std::to_string(settings_.timeout_s) + " s";
    if (code == 413) return "a body of at most " + std::to_string(std::min(settings_.max_body, bodies_.most())) + " bytes";
    if (code == 503) return "to be asked again later, or a server with more --memory";
    if (code == 431) return "a header of at most " + std::to_string(settings_.max_header) + " bytes, and " + std::to_string(UNREAD) + " about chunks";
    return "a whole request of HTTP/1.1";
  }

  Task<> send(Connection& c, const Ask& ask, Reply& reply, error_code& error) {
    metrics_.answered(reply.result_int());
    reply.prepare_payload();
    give(c, settings_.timeout_s);
    auto token = net::redirect_error(net::use_awaitable, error);
    http::response_serializer<http::string_body> serializer(reply);
    if (ask.method() == http::verb::head) co_await http::async_write_header(c.socket, serializer, token);
    else co_await http::async_write(c.socket, serializer, token);
  }

  // A socket that is closed while bytes come in may lose the bytes that it sent last, so the server reads on for a
  // while.
  Task<> linger(Connection& c) {
    error_code error;
    c.socket.shutdown(Stream::socket::shutdown_send, error);
    c.buffer = {};
    give(c, std::chrono::duration<double>(LINGER).count());
    std::vector<char> bin(1 << 14);
    for (size_t total = 0; !error && total < LINGER_BYTES;)
      total += co_await c.socket.async_read_some(net::buffer(bin), net::redirect_error(net::use_awaitable, error));
  }

  Task<Reply> answer(Connection& c, Ask& ask) {
    give(c, -1);
    const Way way = way_of(path_of(ask));
    const std::string_view path = way.route->path;
    if (path == "/openapi.json") co_return reply_of(ask, 200, OPENAPI);
    if (path == "/models") co_return reply_of(ask, 200, list_of_models());
    if (path == "/metrics") co_return reply_of(ask, 200, metrics_.text(now()), "text/plain; version=0.0.4");
    Served* m = find(way);
    if (!m) co_return problem(ask, 404, "there is no such model or version", *way.model + (way.version ? ", version " + *way.version : ""), names());
    const bool is_full = way.model ? m->batcher.is_full() : std::any_of(served_.begin(), served_.end(), [](const Served& s) { return s.batcher.is_full(); });
    if (path == "/healthz") co_return health(ask, *m, draining_);
    if (path == "/livez") co_return health(ask, *m, false);
    if (path == "/readyz") co_return health(ask, *m, draining_ || is_full);
    if (path == "/manifest") co_return reply_of(ask, 200, to_json(m->manifest(), m->model().version()));
    if (path == "/v2") co_return reply_of(ask, 200, "{\"name\":\"funcrec-serve\",\"version\":" + json_string(m->manifest().funcrec) + ",\"extensions\":[\"binary_tensor_data\"]}\n");
    if (path == "/v2/health/live") co_return reply_of(ask, 200, "{\"live\":true}\n");
    const bool is_ready = !draining_ && !is_full;
    if (path == "/v2/health/ready") co_return reply_of(ask, is_ready ? 200 : 503, std::string("{\"ready\":") + (is_ready ? "true}\n" : "false}\n"));
    if (path == READY) co_return reply_of(ask, is_ready ? 200 : 503, "{\"name\":" + json_string(m->own.name) + ",\"ready\":" + (is_ready ? "true}\n" : "false}\n"));
    if (path == METADATA) co_return reply_of(ask, 200, metadata_of(m->manifest(), m->own.name, versions_of(m->own.name)));
    co_return co_await answer(ask, *m, path, way.version);
  }

  // Answers a request that has a body.
  Task<Reply> answer(Ask& ask, Served& m, std::string_view path, const std::optional<std::string>& version) {
    std::optional<Reply> failed;
    try {
      if (path == "/predict") co_return co_await predict(ask, m, version);
      if (path == INFER) co_return co_await infer(ask, m, version);
      if (settings_.updates.empty()) co_return problem(ask, 403, "the server takes no updates", "no folder of updates", "to be started with --updates FOLDER");
      co_return co_await update(ask, m, path);
    } catch (const Bad& e) {
      failed = problem(ask, 400, e.problem, e.got, e.need);
    } catch (const Busy& e) {
      failed = problem(ask, 503, e.what(), std::to_string(bodies_.used() + parsed_.used()) + " bytes", need_of(503));
    } catch (const std::exception& e) {
      failed = problem(ask, 500, "the server failed", e.what(), "a server that does not");
    }
    co_return std::move(*failed);
  }

  // Returns the model that a path names: without a version the last one of its name, without a name the first model.
  Served* find(const Way& way) {
    Served* found = nullptr;
    const std::string& name = way.model ? *way.model : served_.front().own.name;
    for (Served& s : served_)
      if (s.own.name == name && (!way.version || s.model().version() == *way.version)) found = &s;
    return found;
  }

  std::vector<std::string> versions_of(const std::string& name) const {
    std::vector<std::string> out;
    for (const Served& s : served_)
      if (s.own.name == name) out.push_back(s.model().version());
    return out;
  }

  std::string names() const {
    std::string out;
    for (const Served& s : served_) out += (out.empty() ? "" : "; ") + s.own.name + ", version " + s.model().version();
    return out;
  }

  std::string list_of_models() const {
    std::string out = "{\"models\":[";
    for (const Served& s : served_) {
      const std::string kept = s.model().kept();
      out += (&s == &served_.front() ? "{\"name\":" : ",{\"name\":") + json_string(s.own.name) + ",\"version\":" + json_string(s.model().version()) +
             ",\"kept\":" + (kept.empty() ? "null" : json_string(kept)) + ",\"manifest\":" + json_string(s.manifest().digest) + "}";
    }
    return out + "]}\n";
  }

  Now now() const {
    Now out{0, connections_.size(), parsing_, bodies_.used() + parsed_.used(), {}};
    for (const Served& s : served_) {
      out.queue += s.batcher.waiting();
      out.versions.push_back({s.own.name, s.model().version(), s.model().kept()});
    }
    return out;
  }

  Reply health(const Ask& ask, const Served& m, bool away) const {
    const std::string body = std::string("{\"status\":\"") + (draining_ ? "draining" : "ok") + "\",\"version\":" + json_string(m.model().version()) +
                             ",\"manifest\":" + json_string(m.manifest().digest) + "}\n";
    return reply_of(ask, away ? 503 : 200, body);
  }

  // Runs f(), which takes long, in another thread, so that other requests are answered meanwhile.
  template <class F> Task<std::invoke_result_t<F>> aside(bool is_long, F f) {
    if (!is_long) co_return f();
    auto work = [&]() -> Task<std::invoke_result_t<F>> { co_return f(); };
    struct Count {
      size_t& n;
      ~Count() { n--; }
    } const count{++parsing_};
    co_return co_await net::co_spawn(parsers_, work, net::use_awaitable);
  }

  Task<Reply> predict(Ask& ask, Served& m, const std::optional<std::string>& version) {
    const bool bytes = media_type(ask) == BYTES;
    const auto parse = [&](const Text& body, Job& job) { job.bags = (bytes ? from_bytes : from_json)(body, m.manifest(), &parsed_); };
    const auto write = [&](const Part& part) { return reply_of(ask, 200, bytes ? to_bytes(part, m.manifest()) : to_json(part, m.manifest()), bytes ? BYTES : JSON); };
    co_return co_await run(ask, m, version, parse, write);
  }

  Task<Reply> infer(Ask& ask, Served& m, const std::optional<std::string>& version) {
    const auto begin = Clock::now();
    const auto header = header_of(ask);
    Wish wish;
    const auto parse = [&](const Text& body, Job& job) {
      Inference found = from_inference(body, header.value_or(body.size()), m.manifest(), &parsed_);
      job.bags = std::move(found.bags);
      wish = std::move(found.wish);
      if (wish.timeout_us.value_or(0)) job.deadline = std::min(job.deadline, begin + std::chrono::microseconds(*wish.timeout_us));
    };
    const auto write = [&](const Part& part) {
      Written out = to_inference(part, m.manifest(), m.own.name, wish);
      const bool is_binary = std::any_of(wish.outputs.begin(), wish.outputs.end(), [](const Wish::Tensor& t) { return t.is_binary; });
      Reply reply = reply_of(ask, 200, std::move(out.body), is_binary ? BYTES : JSON);
      if (is_binary) reply.set(HEADER_LENGTH, std::to_string(out.header));
      return reply;
    };
    co_return co_await run(ask, m, version, parse, write);
  }

  // Parses a body into a job, waits for its outcome, and writes the answer. parse: (body, job). write: part -> reply.
  template <class P, class W> Task<Reply> run(Ask& ask, Served& m, const std::optional<std::string>& version, const P& parse, const W& write) {
    const auto begin = Clock::now();
    const auto limit = time_of(ask);
    const auto read = [&] {
      auto job = std::make_unique<Job>();
      if (limit) job->deadline = begin + *limit;
      const Text body = std::move(ask.body());  // freed before the job waits
      parse(body, *job);
      job->ids_out_of_range = m.model().check(job->bags.view());
      return job;
    };
    const bool is_long = ask.body().size() > SHORT;
    std::unique_ptr<Job> job = co_await aside(is_long, read);
    const Outcome outcome = co_await wait(m.batcher, job);
    metrics_.predicted(std::chrono::duration<double>(Clock::now() - begin).count());
    if (const Problem* p = std::get_if<Problem>(&outcome)) co_return problem(ask, *p);
    const Part& part = std::get<Part>(outcome);
    if (version && part.answer->version != *version) co_return problem(ask, 404, "the version was replaced before the request ran", *version, part.answer->version);
    const bool is_wide = numbers_of(part) > int64_t(SHORT);
    const auto written = [&] { return write(part); };
    co_return co_await aside(is_wide, written);
  }

  // Returns the bytes of JSON at the beginning of a body of the protocol, if tensors as bytes follow.
  static std::optional<size_t> header_of(const Ask& ask) {
    const std::string text(ask[HEADER_LENGTH]);
    const size_t count = ask.count(HEADER_LENGTH);
    if (!count) return {};
    if (count > 1 || text.empty() || text.size() > 10 || text.find_first_not_of("0123456789") != std::string::npos)
      throw Bad("`Inference-Header-Content-Length` is not a length", count > 1 ? "two or more" : text, "one whole number of at most ten digits");
    return size_t(std::stoull(text));
  }

  // Returns how long the client waits, from Timeout-Ms.
  static std::optional<Clock::duration> time_of(const Ask& ask) {
    const std::string text(ask["Timeout-Ms"]);
    if (ask.find("Timeout-Ms") == ask.end()) return {};
    if (ask.count("Timeout-Ms") > 1) throw Bad("`Timeout-Ms` is there twice", "two or more", "one");
    if (text.empty() || text.size() > 9 || text.find_first_not_of("0123456789") != std::string::npos)
      throw Bad("`Timeout-Ms` is no time", text, "milliseconds, a whole number of at most nine digits");
    return std::chrono::milliseconds(std::stol(text));
  }

  // Returns the outcome of a job: that of its batch, or that the queue is full.
  Task<Outcome> wait(Batcher& batcher, std::unique_ptr<Job>& job) {
    auto begin = [this, &batcher, &job](auto handler) {
      auto done = std::make_shared<decltype(handler)>(std::move(handler));
      job->done = [done](Outcome outcome) { std::move (*done)(std::move(outcome)); };
      if (batcher.push(job)) return;
      const std::string most = std::to_string(settings_.queue);
      net::post(io_, [done, most] { std::move (*done)(Problem{429, "too many requests wait", most, "to be asked again later"}); });
    };
    return net::async_initiate<const net::use_awaitable_t<>, void(Outcome)>(begin, net::use_awaitable);
  }

  // Runs updates in another thread, one after the other.
  Task<Reply> update(const Ask& ask, Served& m, std::string_view path) {
    const bool reload = path == "/reload", back = path == "/rollback";
    const std::string name = one_string(ask.body(), reload ? "weights" : back ? "version" : "path");
    const auto& change = reload ? m.model().swap : back ? m.model().back : m.model().apply;
    auto work = [&]() -> Task<std::optional<Problem>> {
      try {
        change(name);
        co_return std::nullopt;
      } catch (const Bad& e) {
        co_return Problem{400, e.problem, e.got, e.need};
      } catch (const std::exception& e) {
        co_return Problem{500, "the update failed", e.what(), "weights that the program runs with"};
      }
    };
    const std::optional<Problem> wrong = co_await net::co_spawn(updater_, work, net::use_awaitable);
    metrics_.reloaded(reload ? "weights" : back ? "rollback" : "delta", !wrong);
    if (wrong) co_return problem(ask, *wrong);
    co_return reply_of(ask, 200, "{\"version\":" + json_string(m.model().version()) + "}\n");
  }

  Limits limits(const Manifest& manifest) const {
    const int64_t asked = settings_.max_batch;
    return {int(settings_.workers), size_t(settings_.queue), asked ? asked : manifest.max_batch};
  }

  const Settings& settings_;
  Metrics metrics_;
  Memory bodies_{settings_.memory / 2}, parsed_{settings_.memory / 2};  // separate, so that a body that came in finds room to be parsed
  size_t parsing_ = 0;
  net::io_context io_{1};
  net::thread_pool updater_{1}, parsers_{std::clamp(std::thread::hardware_concurrency() / 2, 1u, 8u)};
  std::list<Listener> listeners_;
  net::signal_set signals_{io_, SIGTERM, SIGINT};
  std::list<Connection> connections_;
  bool draining_ = false;
  Clock::time_point drained_ = FOREVER;
  std::list<Served> served_;  // after what their batchers use
};

}  // namespace

void serve(const std::vector<Named>& models, const Settings& settings, const std::function<void(const std::string&, const std::string&)>& ready) { Server(models, settings).run(ready); }

}  // namespace funcrec::serving
