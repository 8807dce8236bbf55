// The body of a request, for Beast's parser. Only the files that speak HTTP include Beast, which takes seconds each.
#pragma once
#include <boost/beast/core/buffers_range.hpp>
#include <boost/beast/http/error.hpp>
#include <boost/beast/http/message.hpp>
#include <boost/optional.hpp>

#include "memory.h"

namespace funcrec::serving {

// Counts the memory of a body. Without room the error is `no_buffer_space`; if the header states the length, nothing is
// read then.
struct CountedBody {
  using value_type = Text;
  static uint64_t size(const value_type& body) { return body.size(); }

  class reader {
   public:
    using Error = boost::system::error_code;
    template <bool R, class F> reader(boost::beast::http::header<R, F>&, value_type& body) : body_(body) {}
    void init(const boost::optional<uint64_t>& length, Error& error) { error = reserve(length ? size_t(*length) : 0); }
    template <class Buffers> size_t put(const Buffers& buffers, Error& error) {
      const size_t more = boost::beast::buffer_bytes(buffers), need = body_.size() + more;
      error = need > body_.capacity() ? reserve(std::max(need, 2 * body_.capacity())) : Error();
      if (error) return 0;
      for (const auto part : boost::beast::buffers_range_ref(buffers)) body_.append(static_cast<const char*>(part.data()), part.size());
      return more;
    }
    void finish(Error& error) { error = {}; }

   private:
    Error reserve(size_t bytes) try {
      body_.reserve(bytes);
      return {};
    } catch (const std::exception&) {  // Busy, or the process has no memory
      const Memory* memory = body_.get_allocator().memory;
      if (memory && bytes > size_t(memory->most())) return boost::beast::http::error::body_limit;
      return make_error_code(boost::system::errc::no_buffer_space);
    }
    value_type& body_;
  };
};

}  // namespace funcrec::serving
