// JSON texts read event by event, without a JSON value in between.
#pragma once
#include <boost/json.hpp>
#include <boost/json/basic_parser_impl.hpp>
#include <string>
#include <string_view>

#include "../package.h"

namespace funcrec::serving {
namespace json = boost::json;

// Passes the parser's events to T: begin and end of objects and lists, whole keys and strings, numbers, and all others.
template <class T> struct Events {
  static constexpr size_t max_object_size = size_t(-1), max_array_size = size_t(-1), max_key_size = size_t(-1), max_string_size = size_t(-1);
  using Error = boost::system::error_code;
  using Text = json::string_view;

  T to;
  std::string text;  // of a key or a string so far

  template <class... X> explicit Events(X&&... x) : to{std::forward<X>(x)...} {}
  bool part(Text s) { return text.append(s.data(), s.size()), true; }
  template <class F> bool whole(Text s, F&& tell) { return part(s), tell(), text.clear(), true; }

  bool on_document_begin(Error&) { return true; }
  bool on_document_end(Error&) { return true; }
  bool on_object_begin(Error&) { return to.begin_object(), true; }
  bool on_object_end(size_t, Error&) { return to.end_object(), true; }
  bool on_array_begin(Error&) { return to.begin_list(), true; }
  bool on_array_end(size_t, Error&) { return to.end_list(), true; }
  bool on_key_part(Text s, size_t, Error&) { return part(s); }
  bool on_key(Text s, size_t, Error&) { return whole(s, [&] { to.key(text); }); }
  bool on_string_part(Text s, size_t, Error&) { return part(s); }
  bool on_string(Text s, size_t, Error&) { return whole(s, [&] { to.string(text); }); }
  bool on_number_part(Text, Error&) { return true; }
  bool on_int64(int64_t x, Text, Error&) { return to.integer(x), true; }
  bool on_uint64(uint64_t x, Text, Error&) { return to.real(double(x), std::to_string(x).c_str()), true; }
  bool on_double(double x, Text, Error&) { return to.real(x), true; }
  bool on_bool(bool x, Error&) {
    if constexpr (requires { to.truth(x); }) to.truth(x);
    else to.other("a bool");
    return true;
  }
  bool on_null(Error&) { return to.other("null"), true; }
  bool on_comment_part(Text, Error&) { return true; }
  bool on_comment(Text, Error&) { return true; }
};

// Returns the T that has seen all events of a text. Bad if the text is not one JSON value.
template <class T, class... X> T read(std::string_view body, X&&... x) {
  json::parse_options options;
  options.max_depth = 8;
  boost::system::error_code error;
  json::basic_parser<Events<T>> parser(options, std::forward<X>(x)...);
  const size_t end = parser.write_some(false, body.data(), body.size(), error);
  if (!error && end != body.size()) error = json::error::extra_data;
  if (error == json::error::exponent_overflow) throw Bad("a number of the body has another exponent", "one beyond 32 bits", "a number of 64 bits");
  if (error) throw Bad("the body is not JSON", error.message() + ", after " + std::to_string(end) + " bytes", "one JSON value, of UTF-8");
  return std::move(parser.handler().to);
}

}  // namespace funcrec::serving
