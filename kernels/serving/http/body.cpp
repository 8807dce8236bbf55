// JSON bodies, read event by event into the memory of a batch, without a JSON value in between.
#include <algorithm>
#include <cmath>

#include "events.h"
#include "protocol.h"

namespace funcrec::serving {
namespace {

std::string number(int64_t n) { return std::to_string(n); }

// Lists of bags, in the order in which they came; column c, if it came, has bags [begin, end).
template <class T> struct Lists {
  struct Column {
    int64_t begin = -1, end = -1;
  };
  Many<T> values;
  Many<int64_t> ends;  // of each bag in `values`
  std::vector<Column> columns{};

  explicit Lists(Memory* memory) : values(memory), ends(memory) {}

  int64_t bags() const { return int64_t(ends.size()); }
  int64_t start(int64_t bag) const { return bag ? ends[size_t(bag) - 1] : 0; }
};

// The body of /predict: {"ids": {feature: [[id, ..], ..]}, "weights": {feature: [[w, ..], ..]}, "dense": [[x, ..], ..]}.
struct Body {
  enum Group { IDS, WEIGHTS, DENSE };
  static constexpr const char* NAMES[] = {"ids", "weights", "dense"};

  const Manifest& manifest;
  Lists<int64_t> ids;
  Lists<float> numbers[2];  // weights, dense
  bool has[3]{};
  Group group = IDS;
  size_t feature = 0;
  int depth = 0;  // 1: in the body, 2: in an object of features, 3: in a list of bags, 4: in a bag

  Body(const Manifest& m, Memory* memory) : manifest(m), ids(memory), numbers{Lists<float>(memory), Lists<float>(memory)} {
    ids.columns.resize(m.features.size());
    numbers[0].columns.resize(m.features.size()), numbers[1].columns.resize(1);
  }

  // Any package accepts rows without columns.
  bool takes(Group g) const { return g == IDS ? manifest.has_ids : g == WEIGHTS ? manifest.has_weights : true; }
  bool needs(Group g) const { return g == DENSE ? manifest.dense_columns > 0 : takes(g); }

  std::string where() const { return group == DENSE ? "dense" : std::string(NAMES[group]) + "." + manifest.features[feature].name; }

  // Calls f with the lists that are being read.
  template <class F> void lists(F&& f) { group == IDS ? f(ids) : f(numbers[group - 1]); }

  [[noreturn]] void other(const char* kind) const {
    if (depth == 0) throw Bad("`body` is not an object", kind, "an object");
    if (depth == 1 && group != DENSE) throw Bad(std::string("`") + NAMES[group] + "` is not an object", kind, "an object");
    if (depth < 4) throw Bad("`" + where() + "` is not a list", kind, "a list");
    if (group == IDS) throw Bad("an id of `" + where() + "` is not an integer of 64 bits", kind, "an integer from -2^63 to 2^63 - 1, without point or exponent");
    throw Bad("a number of `" + where() + "` is not one of 32 bits", kind, "a finite number of 32 bits");
  }

  void begin_object() {
    if (depth > 1 || (depth == 1 && group == DENSE)) other("an object");
    depth++;
  }
  void end_object() { depth--; }

  void key(const std::string& name) {
    if (depth == 1) {
      const auto at = std::find(std::begin(NAMES), std::end(NAMES), name);
      if (at == std::end(NAMES)) throw Bad("the body has an unknown key", name, "ids, weights, dense");
      group = Group(at - std::begin(NAMES));
      if (has[group]) throw Bad("an object has a key twice", name, "each key once");
      if (!takes(group)) throw Bad("the package reads no `" + name + "`", name, "a body without it");
      has[group] = true;
      return;
    }
    const auto& all = manifest.features;
    const auto is = [&](const Feature& f) { return f.name == name && (f.weighted || group == IDS); };
    if (feature + 1 < all.size() && is(all[feature + 1])) feature++;  // most clients send the order of the manifest
    else feature = size_t(std::find_if(all.begin(), all.end(), is) - all.begin());
    if (feature == all.size()) {
      std::string names;
      for (const Feature& f : all)
        if (f.weighted || group == IDS) names += (names.empty() ? "" : ", ") + f.name;
      throw Bad(std::string("`") + NAMES[group] + "` has a feature that the package has not" + (group == IDS ? "" : " with weights"), name, names);
    }
    lists([&](auto& l) {
      if (l.columns[feature].begin >= 0) throw Bad("an object has a key twice", name, "each key once");
    });
  }

  void begin_list() {
    if (depth == 0 || depth == 4 || (depth == 1 && group != DENSE)) other("a list");
    if (depth < 3) lists([&](auto& l) { l.columns[group == DENSE ? 0 : feature].begin = l.bags(); });
    depth = std::max(depth + 1, 3);
  }

  void end_list() {
    lists([&](auto& l) {
      auto& column = l.columns[group == DENSE ? 0 : feature];
      if (depth == 3) {
        column.end = l.bags();
      } else {
        l.ends.push_back(int64_t(l.values.size()));
        if (l.bags() - column.begin > manifest.max_batch) throw Bad("`" + where() + "` has too many bags", "more", "at most " + number(manifest.max_batch));
      }
    });
    depth = depth == 4 ? 3 : group == DENSE ? 1 : 2;
  }

  // Throws Bad unless there may be one more id or weight.
  void room(size_t count) const {
    if (int64_t(count) >= manifest.max_ids) throw Bad("there are too many ids", "more", "at most " + number(manifest.max_ids));
  }

  void string(const std::string&) { other("a string"); }
  void integer(int64_t x) {
    if (depth != 4 || group != IDS) return real(double(x), "an integer");
    room(ids.values.size());
    ids.values.push_back(x);
  }
  void real(double x, const char* kind = "a number that is no integer of 64 bits") {
    if (depth != 4 || group == IDS) other(kind);
    if (!(std::abs(x) < 0x1.ffffffp127)) other("a larger number");  // larger numbers round to infinity
    if (group == WEIGHTS) room(numbers[0].values.size());
    numbers[group - 1].values.push_back(float(x));
  }
};

// The weights of feature f's ids.
void add_weights(const Body& body, size_t f, Many<float>& out) {
  const Feature& feature = body.manifest.features[f];
  const auto [begin, end] = body.ids.columns[f];
  const int64_t first = body.ids.start(begin), last = body.ids.start(end);
  if (!feature.weighted) return out.resize(out.size() + size_t(last - first), 1.0f);  // never read
  const Lists<float>& all = body.numbers[0];
  const auto own = all.columns[f];
  const std::string where = "weights." + feature.name;
  if (own.begin < 0) throw Bad("`weights` lacks a feature whose ids have weights", "no " + feature.name, "a list of bags");
  if (own.end - own.begin != end - begin) throw Bad("`" + where + "` does not match its ids", number(own.end - own.begin) + " bags", number(end - begin));
  const int64_t shift = all.start(own.begin) - first;
  for (int64_t b = 0; b < end - begin; b++)
    if (const int64_t wrong = all.ends[size_t(own.begin + b)] - shift - body.ids.ends[size_t(begin + b)])
      throw Bad("`" + where + "` does not match its ids in bag " + number(b), number(std::abs(wrong)) + (wrong > 0 ? " more" : " fewer"), "one for each id");
  out.insert(out.end(), all.values.begin() + all.start(own.begin), all.values.begin() + all.start(own.end));
}

// The number of bags of a request: the first list sets it, and all others must have as many.
void count(int64_t& bags, int64_t n, const std::string& where) {
  if (bags >= 0 && bags != n) throw Bad("`" + where + "` has another number of bags", number(n), number(bags));
  bags = n;
}

// Puts all features into the order of the manifest.
void add_ids(Body& body, int64_t& bags, Bags& out) {
  const auto& features = body.manifest.features;
  bool in_order = true;
  for (size_t f = 0; f < features.size(); f++) {
    const auto [begin, end] = body.ids.columns[f];
    if (begin < 0) throw Bad("`ids` lacks a feature", "no " + features[f].name, "a list of bags for each feature");
    count(bags, end - begin, "ids." + features[f].name);
    in_order &= begin == int64_t(f) * bags;
    if (body.manifest.has_weights) add_weights(body, f, out.weights);
  }
  out.offsets.reserve(body.ids.ends.size() + 1);
  out.offsets.push_back(0);
  if (in_order) {
    out.offsets.insert(out.offsets.end(), body.ids.ends.begin(), body.ids.ends.end());
    out.values = std::move(body.ids.values);
    return;
  }
  for (const auto [begin, end] : body.ids.columns) {
    const int64_t first = body.ids.start(begin), shift = int64_t(out.values.size()) - first;
    for (int64_t b = begin; b < end; b++) out.offsets.push_back(body.ids.ends[size_t(b)] + shift);
    out.values.insert(out.values.end(), body.ids.values.begin() + first, body.ids.values.begin() + body.ids.start(end));
  }
}

// {key: a string}
struct OneString {
  const std::string& name;
  std::string found{};
  int seen = 0;  // whether there is more than the object

  void must(bool it_is) const {
    if (!it_is) throw Bad("the body is not of this request", "other keys or values", "{\"" + name + "\": a string}");
  }
  void begin_object() { must(seen++ == 0); }
  void key(const std::string& text) { must(seen++ == 1 && text == name); }
  void string(const std::string& text) { must(seen++ == 2), found = text; }
  void end_object() { must(seen == 3); }
  void begin_list() { must(false); }
  void end_list() {}
  void integer(int64_t) { must(false); }
  void real(double, const char* = "") { must(false); }
  void other(const char*) { must(false); }
};

}  // namespace

Bags from_json(std::string_view text, const Manifest& manifest, Memory* memory) {
  Body body = read<Body>(text, manifest, memory);
  for (const auto group : {Body::IDS, Body::DENSE})
    if (const std::string name = Body::NAMES[group]; body.needs(group) && !body.has[group]) throw Bad("`" + name + "` and the package differ", "no " + name, name);
  Bags out(memory);
  int64_t bags = -1;
  if (body.has[Body::IDS]) add_ids(body, bags, out);
  if (body.has[Body::DENSE]) {
    Lists<float>& rows = body.numbers[1];
    count(bags, rows.bags(), "dense");
    for (int64_t b = 0; b < rows.bags(); b++)
      if (const int64_t n = rows.start(b + 1) - rows.start(b); n != manifest.dense_columns) throw Bad("a row of `dense` has another length", number(n), number(manifest.dense_columns));
    out.dense = std::move(rows.values);
  }
  out.bags = std::max<int64_t>(bags, 0);
  return out;
}

std::string one_string(std::string_view body, const std::string& key) { return read<OneString>(body, key).found; }

}  // namespace funcrec::serving
