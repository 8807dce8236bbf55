#include "inference.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "events.h"
#include "protocol.h"

namespace funcrec::serving {
namespace {

constexpr const char* DATATYPES[] = {"UINT8", "INT8", "INT16", "INT32", "INT64", "FP16", "BF16", "FP32", "FP64", "BOOL"};  // by DType
constexpr size_t MOST_DIMS = 8, MOST_ID = 1000;
constexpr int64_t MOST = int64_t(1) << 48;  // no size or time is larger

std::string number(int64_t n) { return std::to_string(n); }
std::string datatype(DType t) { return DATATYPES[int(t)]; }

// A tensor that a request has.
struct Input {
  enum Holds { VALUES, LENGTHS, WEIGHTS, DENSE } holds;
  std::string name;
  DType dtype;
  size_t feature = 0;
};

std::vector<Input> inputs_of(const Manifest& m) {
  std::vector<Input> out;
  for (size_t f = 0; f < m.features.size(); f++) {
    const Feature& feature = m.features[f];
    out.push_back({Input::VALUES, "ids." + feature.name + ".values", DType::i64, f});
    out.push_back({Input::LENGTHS, "ids." + feature.name + ".lengths", DType::i32, f});
    if (feature.weighted) out.push_back({Input::WEIGHTS, "weights." + feature.name, DType::f32, f});
  }
  if (m.dense_columns || m.features.empty()) out.push_back({Input::DENSE, "dense", DType::f32});
  return out;
}

// A tensor as it came: its numbers in the order of the text. Integers stay integers until one of them is not.
struct Tensor {
  std::optional<std::string> name, datatype;
  std::vector<int64_t> shape;
  Many<int64_t> numbers;  // int64, or the bits of a double if `is_real`
  Many<int64_t> rows;     // the numbers of each row, if the data are lists in a list
  bool is_real = false, has_shape = false, has_data = false, is_flat = false;
  int64_t bytes = -1;  // of its binary data

  explicit Tensor(Memory* memory) : numbers(memory), rows(memory) {}

  double real(size_t i) const { return is_real ? std::bit_cast<double>(numbers[i]) : double(numbers[i]); }
  void add(int64_t x) { numbers.push_back(is_real ? std::bit_cast<int64_t>(double(x)) : x); }
  void add(double x) {
    if (!is_real)
      for (int64_t& n : numbers) n = std::bit_cast<int64_t>(double(n));
    is_real = true;
    numbers.push_back(std::bit_cast<int64_t>(x));
  }
};

struct Asked {
  std::optional<std::string> name;
  std::optional<bool> is_binary;
};

// Reads {"id", "parameters", "inputs": [{"name", "datatype", "shape", "data", "parameters"}], "outputs": [{"name", "parameters"}]}.
struct Reader {
  enum Place { OUTSIDE, BODY, PARAMETERS, INPUTS, INPUT, SHAPE, DATA, ROW, OUTPUTS, OUTPUT };

  size_t most_inputs, most_outputs;
  Memory* memory;
  std::vector<Tensor> inputs{};
  std::vector<Asked> outputs{};
  std::optional<std::string> id{};
  std::optional<bool> is_binary{};
  std::optional<int64_t> timeout_us{};
  bool has_inputs = false, has_outputs = false;
  std::vector<Place> places{OUTSIDE};
  std::string last{};                            // key
  std::vector<std::vector<std::string>> keys{};  // of each open object, to find those that occur twice

  Reader(size_t inputs, size_t outputs, Memory* m) : most_inputs(inputs), most_outputs(outputs), memory(m) {}

  Place place() const { return places.back(); }
  Place around() const { return places[places.size() - 2]; }
  std::string in_list(bool is_input) const { return is_input ? "inputs[" + number(int64_t(inputs.size()) - 1) + "]" : "outputs[" + number(int64_t(outputs.size()) - 1) + "]"; }
  std::string where() const {
    switch (place()) {
      case OUTSIDE: return "body";
      case BODY: return last;
      case PARAMETERS: return (around() == BODY ? "" : in_list(around() == INPUT) + ".") + "parameters." + last;
      case INPUTS: return "inputs";
      case OUTPUTS: return "outputs";
      case INPUT: return in_list(true) + "." + last;
      case SHAPE: return in_list(true) + ".shape";
      case DATA: case ROW: return in_list(true) + ".data";
      case OUTPUT: return in_list(false) + "." + last;
    }
    return "body";
  }
  [[noreturn]] void wrong(const std::string& got, const std::string& need) const { throw Bad("`" + where() + "` has another form", got, need); }
  std::string needed() const {
    switch (place()) {
      case OUTSIDE: return "an object";
      case BODY: return last == "id" ? "a string" : last == "parameters" ? "an object" : "a list of objects";
      case PARAMETERS: return last == "timeout" || last == "binary_data_size" ? "an integer from 0 to 2^48" : "true or false";
      case INPUTS: case OUTPUTS: return "a list of objects";
      case INPUT: return last == "parameters" ? "an object" : last == "shape" || last == "data" ? "a list of numbers" : "a string";
      case SHAPE: return "integers of at least 0, " + number(MOST_DIMS) + " or fewer";
      case DATA: case ROW: return "numbers, in one list or in a list of rows";
      case OUTPUT: return last == "parameters" ? "an object" : "a string";
    }
    return "";
  }
  [[noreturn]] void other(const char* kind) const { wrong(kind, needed()); }

  void begin_object() {
    const bool is_own = last == "parameters" && (place() == BODY || place() == INPUT || place() == OUTPUT);
    if (place() == OUTSIDE) places.push_back(BODY);
    else if (is_own) places.push_back(PARAMETERS);
    else if (place() == INPUTS) {
      if (inputs.size() >= most_inputs) throw Bad("there are too many inputs", "more than " + number(int64_t(most_inputs)), "each input of the model once");
      inputs.emplace_back(memory), places.push_back(INPUT);
    } else if (place() == OUTPUTS) {
      if (outputs.size() >= most_outputs) throw Bad("there are too many outputs", "more than " + number(int64_t(most_outputs)), "each output of the model at most once");
      outputs.emplace_back(), places.push_back(OUTPUT);
    } else other("an object");
    keys.emplace_back();
  }
  void end_object() { places.pop_back(), keys.pop_back(); }

  void key(const std::string& text) {
    last = text;
    std::vector<std::string> known;
    switch (place()) {
      case BODY: known = {"id", "parameters", "inputs", "outputs"}; break;
      case INPUT: known = {"name", "datatype", "shape", "data", "parameters"}; break;
      case OUTPUT: known = {"name", "parameters"}; break;
      default: known = around() == BODY ? std::vector<std::string>{"binary_data_output", "timeout"} : std::vector<std::string>{around() == INPUT ? "binary_data_size" : "binary_data"};
    }
    std::string all;
    for (const std::string& k : known) all += (all.empty() ? "" : ", ") + k;
    if (std::find(known.begin(), known.end(), text) == known.end()) throw Bad("`" + where().substr(0, 200) + "` is not a key that this server knows", text, all);
    if (std::find(keys.back().begin(), keys.back().end(), text) != keys.back().end()) throw Bad("`" + where() + "` is there twice", "two or more", "one");
    keys.back().push_back(text);
  }

  void begin_list() {
    if (place() == BODY && last == "inputs") has_inputs = true, places.push_back(INPUTS);
    else if (place() == BODY && last == "outputs") has_outputs = true, places.push_back(OUTPUTS);
    else if (place() == INPUT && last == "shape") inputs.back().has_shape = true, places.push_back(SHAPE);
    else if (place() == INPUT && last == "data") inputs.back().has_data = true, places.push_back(DATA);
    else if (place() == DATA && !inputs.back().is_flat) inputs.back().rows.push_back(0), places.push_back(ROW);
    else other("a list");
  }
  void end_list() { places.pop_back(); }

  void string(const std::string& text) {
    if (place() == BODY && last == "id" && text.size() > MOST_ID) wrong(number(int64_t(text.size())) + " bytes", "at most " + number(MOST_ID));
    if (place() == BODY && last == "id") id = text;
    else if (place() == INPUT && last == "name") inputs.back().name = text;
    else if (place() == INPUT && last == "datatype") inputs.back().datatype = text;
    else if (place() == OUTPUT && last == "name") outputs.back().name = text;
    else other("a string");
  }

  template <class T> void datum(T x) {
    Tensor& t = inputs.back();
    if (place() == ROW) t.rows.back()++;
    else if (t.rows.empty()) t.is_flat = true;
    else other("a number among rows");
    t.add(x);
  }
  void integer(int64_t x) {
    if (place() == DATA || place() == ROW) return datum(x);
    if ((x < 0 || x > MOST) && (place() == SHAPE || place() == PARAMETERS)) other(number(x).c_str());
    if (place() == SHAPE && inputs.back().shape.size() < MOST_DIMS) inputs.back().shape.push_back(x);
    else if (place() == PARAMETERS && last == "timeout") timeout_us = x;
    else if (place() == PARAMETERS && last == "binary_data_size") inputs.back().bytes = x;
    else other("an integer");
  }
  void real(double x, const char* text = "") {
    if (place() == DATA || place() == ROW) return datum(x);
    other(*text ? text : "a number with a point or an exponent");
  }
  void truth(bool x) {
    if (place() == PARAMETERS && last == "binary_data_output") is_binary = x;
    else if (place() == PARAMETERS && last == "binary_data") outputs.back().is_binary = x;
    else other("a bool");
  }
};

// The tensors of a request by their inputs, each with the bytes that it has, and the bags that are made of them.
struct Builder {
  const Manifest& manifest;
  const std::vector<Input> inputs = inputs_of(manifest);
  std::vector<const Tensor*> of = std::vector<const Tensor*>(inputs.size());
  std::vector<std::string_view> bytes = std::vector<std::string_view>(inputs.size());

  // Finds the input of each tensor; the bytes follow in the order of the tensors that have some.
  void match(const std::vector<Tensor>& tensors, std::string_view rest) {
    for (const Tensor& t : tensors) {
      if (!t.name) throw Bad("an input has no name", "an input without `name`", "a name of the model's metadata");
      const size_t i = size_t(std::find_if(inputs.begin(), inputs.end(), [&](const Input& x) { return x.name == *t.name; }) - inputs.begin());
      if (i == inputs.size()) throw Bad("the model has no such input", *t.name, names());
      const std::string& name = inputs[i].name;
      if (of[i]) throw Bad("`" + name + "` is there twice", "two or more", "one");
      if (!t.datatype || *t.datatype != datatype(inputs[i].dtype)) throw Bad("`" + name + "` is of another datatype", t.datatype ? *t.datatype : "none", datatype(inputs[i].dtype));
      if (!t.has_shape) throw Bad("`" + name + "` has no shape", "no `shape`", "a list of integers");
      if (t.has_data == (t.bytes >= 0)) throw Bad("`" + name + "` has not one form of its data", t.has_data ? "`data` and `binary_data_size`" : "neither `data` nor `binary_data_size`", "one of them");
      if (t.bytes > int64_t(rest.size())) throw Bad("the body ends before the bytes of `" + name + "`", number(int64_t(rest.size())), number(t.bytes));
      if (t.bytes > 0) bytes[i] = rest.substr(0, size_t(t.bytes)), rest.remove_prefix(size_t(t.bytes));
      of[i] = &t;
    }
    if (!rest.empty()) throw Bad("the body is longer than its tensors", number(int64_t(rest.size())) + " more bytes", "the bytes of the inputs that have `binary_data_size`");
    for (size_t i = 0; i < inputs.size(); i++)
      if (!of[i]) throw Bad("the request lacks an input", "no " + inputs[i].name, names());
  }

  std::string names() const {
    std::string all;
    for (const Input& x : inputs) all += (all.empty() ? "" : ", ") + x.name;
    return all;
  }

  // Returns the number of elements of a tensor whose shape is [n], or [n, columns].
  int64_t size(size_t i, int64_t columns = -1) const {
    const Tensor& t = *of[i];
    const int64_t most = columns < 0 ? manifest.max_ids : manifest.max_batch;
    std::string shape = "[";
    for (const int64_t n : t.shape) shape += (shape.size() > 1 ? ", " : "") + number(n);
    const auto other = [&](const std::string& got, const std::string& need) { throw Bad("`" + inputs[i].name + "` is of another shape", got, need); };
    if (t.shape.size() != (columns < 0 ? 1u : 2u) || (columns >= 0 && t.shape[1] != columns)) other(shape + "]", columns < 0 ? "[n]" : "[B, " + number(columns) + "]");
    if (t.shape[0] > std::max(most, manifest.max_batch)) other(shape + "]", "at most " + number(std::max(most, manifest.max_batch)));
    const int64_t n = t.shape[0] * std::max<int64_t>(columns, columns < 0 ? 1 : 0);
    const int64_t has = t.has_data ? int64_t(t.numbers.size()) : t.bytes, needs = t.has_data ? n : n * int64_t(bytes_of(inputs[i].dtype));
    if (has != needs) other(shape + "] with " + number(has) + (t.has_data ? " numbers" : " bytes"), number(needs));
    const bool as_rows = !t.rows.empty();
    if (as_rows && (columns < 0 || int64_t(t.rows.size()) != t.shape[0])) other("lists in a list", columns < 0 ? "one list of numbers" : number(t.shape[0]) + " rows, or one list");
    if (as_rows && !std::all_of(t.rows.begin(), t.rows.end(), [&](int64_t k) { return k == columns; })) other("rows of other lengths", number(columns) + " numbers in each");
    return n;
  }

  // Appends the elements of a tensor.
  template <class T> void add(size_t i, int64_t n, Many<T>& out) const {
    const Tensor& t = *of[i];
    const size_t first = out.size();
    out.resize(first + size_t(n));
    if (!t.has_data) {
      if (n) std::memcpy(out.data() + first, bytes[i].data(), size_t(n) * sizeof(T));
      return;
    }
    const auto other = [&](const std::string& got, const char* need) { throw Bad("a number of `" + inputs[i].name + "` is not one of " + datatype(inputs[i].dtype), got, need); };
    for (size_t k = 0; k < size_t(n); k++) {
      if constexpr (std::is_floating_point_v<T>) {
        if (!(std::abs(t.real(k)) < 0x1.ffffffp127)) other("a larger number", "a finite number of 32 bits");
        out[first + k] = float(t.real(k));
      } else {
        if (t.is_real) other("a number with a point or an exponent, or of more bits", "integers");
        if (t.numbers[k] < std::numeric_limits<T>::min() || t.numbers[k] > std::numeric_limits<T>::max()) other(number(t.numbers[k]), "a number of 32 bits");
        out[first + k] = T(t.numbers[k]);
      }
    }
  }

  // Appends the offsets of a feature's bags after `first` ids; returns the number of bags. The lengths must sum to `ids`.
  int64_t add_offsets(size_t i, int64_t first, int64_t ids, Bags& out) const {
    const int64_t bags = size(i);
    if (bags > manifest.max_batch) throw Bad("there are too many bags", number(bags), "at most " + number(manifest.max_batch));
    Many<int32_t> lengths(out.offsets.get_allocator().memory);
    add(i, bags, lengths);
    int64_t sum = 0;
    for (const int32_t n : lengths) {
      if (n < 0) throw Bad("`" + inputs[i].name + "` has a length below 0", number(n), "0 or more");
      out.offsets.push_back(first + (sum += n));
    }
    if (sum != ids) throw Bad("`" + inputs[i].name + "` does not sum to the number of ids", number(sum), number(ids) + ", the ids of " + inputs[i - 1].name);
    return bags;
  }

  Bags build(Memory* memory) const {
    Bags out(memory);
    int64_t bags = -1, ids = 0;
    const auto same = [&](int64_t n, const std::string& name) {
      if (bags >= 0 && n != bags) throw Bad("`" + name + "` has another number of bags", number(n), number(bags));
      bags = n;
    };
    if (manifest.has_ids) out.offsets.push_back(0);
    for (size_t i = 0; i < inputs.size(); i++) {
      const Input& x = inputs[i];
      if (x.holds == Input::VALUES) {
        ids = size(i);
        if (int64_t(out.values.size()) + ids > manifest.max_ids) throw Bad("there are too many ids", "more than " + number(manifest.max_ids), "at most " + number(manifest.max_ids));
        const int64_t first = int64_t(out.values.size());
        add(i, ids, out.values);
        same(add_offsets(i + 1, first, ids, out), inputs[i + 1].name);
        if (manifest.has_weights && !manifest.features[x.feature].weighted) out.weights.resize(out.values.size(), 1.0f);  // never read
      } else if (x.holds == Input::WEIGHTS) {
        if (const int64_t n = size(i); n != ids) throw Bad("`" + x.name + "` does not match its ids", number(n), number(ids));
        add(i, ids, out.weights);
      } else if (x.holds == Input::DENSE) {
        const int64_t n = size(i, manifest.dense_columns);
        same(of[i]->shape[0], x.name);
        add(i, n, out.dense);
      }
    }
    out.bags = std::max<int64_t>(bags, 0);
    return out;
  }
};

// Returns the outputs that the client asks for: all of them if it names none.
std::vector<Wish::Tensor> wished(const Reader& r, const Manifest& m) {
  std::vector<Wish::Tensor> out;
  std::string all;
  for (const Spec& s : m.outputs) all += (all.empty() ? "" : ", ") + s.name;
  for (const Asked& a : r.outputs) {
    const auto at = std::find_if(m.outputs.begin(), m.outputs.end(), [&](const Spec& s) { return a.name && s.name == *a.name; });
    if (at == m.outputs.end()) throw Bad("the model has no such output", a.name ? *a.name : "an output without `name`", all);
    const size_t i = size_t(at - m.outputs.begin());
    if (std::any_of(out.begin(), out.end(), [&](const Wish::Tensor& t) { return t.output == i; })) throw Bad("an output is asked for twice", *a.name, "each at most once");
    out.push_back({i, a.is_binary.value_or(r.is_binary.value_or(false))});
  }
  if (r.outputs.empty())
    for (size_t i = 0; i < m.outputs.size(); i++) out.push_back({i, r.is_binary.value_or(false)});
  return out;
}

std::string tensor_text(const std::string& name, DType dtype, const std::vector<int64_t>& shape) {
  std::string out = "{\"name\":" + json_string(name) + ",\"datatype\":\"" + datatype(dtype) + "\",\"shape\":[";
  for (size_t i = 0; i < shape.size(); i++) out += (i ? "," : "") + number(shape[i]);
  return out + "]";
}

}  // namespace

Inference from_inference(std::string_view body, size_t header, const Manifest& manifest, Memory* memory) {
  if (header > body.size()) throw Bad("the JSON is longer than the body", number(int64_t(header)) + " in Inference-Header-Content-Length", "at most " + number(int64_t(body.size())));
  Builder builder{manifest};
  const Reader r = read<Reader>(body.substr(0, header), builder.inputs.size(), manifest.outputs.size(), memory);
  if (!r.has_inputs) throw Bad("the request has no inputs", "no `inputs`", "a list of objects");
  builder.match(r.inputs, body.substr(header));
  Wish wish{r.id, wished(r, manifest), r.timeout_us};
  return {builder.build(memory), std::move(wish)};
}

Written to_inference(const Part& part, const Manifest& manifest, const std::string& model, const Wish& wish) {
  std::string out = "{\"model_name\":" + json_string(model) + ",\"model_version\":" + json_string(part.answer->version), bytes;
  if (wish.id) out += ",\"id\":" + json_string(*wish.id);
  out += ",\"parameters\":{\"ids_out_of_range\":" + number(part.ids_out_of_range) + "},\"outputs\":[";
  for (size_t i = 0; i < wish.outputs.size(); i++) {
    const Output& output = part.answer->outputs[wish.outputs[i].output];
    std::vector<int64_t> shape = output.shape;
    shape[0] = part.bags;
    out += (i ? "," : "") + tensor_text(manifest.outputs[wish.outputs[i].output].name, output.dtype, shape);
    const int64_t row = row_size(output), first = part.first * row, n = part.bags * row, size = bytes_of(output.dtype);
    if (wish.outputs[i].is_binary) {
      out += ",\"parameters\":{\"binary_data_size\":" + number(n * size) + "}}";
      if (n) bytes.append(static_cast<const char*>(output.data) + first * size, size_t(n * size));
      continue;
    }
    out += ",\"data\":[";
    for (int64_t k = 0; k < n; k++) {
      if (k) out += ',';
      append_number(out, output.dtype, output.data, first + k);
    }
    out += "]}";
  }
  out += "]}";
  const size_t header = out.size();
  return {std::move(out += bytes), header};
}

std::string metadata_of(const Manifest& m, const std::string& model, const std::vector<std::string>& versions) {
  constexpr const char* HOLDS[] = {"values", "lengths", "weights", "dense"};
  std::string out = "{\"name\":" + json_string(model) + ",\"versions\":[";
  for (size_t i = 0; i < versions.size(); i++) out += (i ? "," : "") + json_string(versions[i]);
  out += "],\"platform\":\"funcrec\",\"inputs\":[";
  const std::vector<Input> inputs = inputs_of(m);
  for (size_t i = 0; i < inputs.size(); i++) {
    const Input& x = inputs[i];
    const bool is_dense = x.holds == Input::DENSE;
    const std::vector<int64_t> shape = is_dense ? std::vector<int64_t>{-1, m.dense_columns} : std::vector<int64_t>{-1};
    out += (i ? "," : "") + tensor_text(x.name, x.dtype, shape) + ",\"parameters\":{\"holds\":\"" + HOLDS[x.holds] + "\"";
    if (!is_dense) out += ",\"feature\":" + json_string(m.features[x.feature].name);
    out += "}}";
  }
  out += "],\"outputs\":[";
  for (size_t i = 0; i < m.outputs.size(); i++) {
    std::vector<int64_t> shape = m.outputs[i].shape;
    shape[0] = -1;
    out += (i ? "," : "") + tensor_text(m.outputs[i].name, m.outputs[i].dtype, shape) + "}";
  }
  return out + "],\"parameters\":{\"jagged\":\"ids.F.values has the ids of all examples one after the other; ids.F.lengths[b] is how many of them example b has; "
               "weights.F has one weight for each id; all lengths and dense have one entry for each example\",\"max_batch\":" +
         number(m.max_batch) + ",\"max_ids\":" + number(m.max_ids) + "}}\n";
}

}  // namespace funcrec::serving
