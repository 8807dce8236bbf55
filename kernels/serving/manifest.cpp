#include "manifest.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <map>
#include <sstream>

#include "digest.h"

namespace funcrec::serving {
namespace {

constexpr int64_t FORMAT = 2, TURNED_FORMAT = 3, PAGE = 4096;  // TURNED_FORMAT: the program takes some weights turned
constexpr int64_t ANY_ROW = std::numeric_limits<int64_t>::max();  // the rows of a column that is hashed or not looked up
constexpr size_t DIGITS = 64;
const std::string WEIGHTS = "funcrec weights 2";

struct Named { const char *python, *brief, *stored; DType dtype; int64_t bytes; };
constexpr Named DTYPES[] = {
    {"uint8", "u8", "U8", DType::u8, 1}, {"int8", "i8", "I8", DType::i8, 1}, {"int16", "i16", "I16", DType::i16, 2},
    {"int32", "i32", "I32", DType::i32, 4}, {"int64", "i64", "I64", DType::i64, 8}, {"float16", "f16", "F16", DType::f16, 2},
    {"bfloat16", "bf16", "BF16", DType::bf16, 2}, {"float32", "f32", "F32", DType::f32, 4}, {"float64", "f64", "F64", DType::f64, 8},
    {"bool", "bool", "BOOL", DType::boolean, 1}};

const Named& named(DType dtype) {
  return *std::find_if(std::begin(DTYPES), std::end(DTYPES), [&](const Named& n) { return n.dtype == dtype; });
}

std::vector<int64_t> shape_of(const Entry& e) {
  std::vector<int64_t> out;
  for (const Entry& size : e.items()) {
    if (!size.is_text()) out.push_back(size.number(0, MOST));
    else if (size.text() == "B") out.push_back(BAGS);
    else if (size.text() == "N") out.push_back(IDS);
    else if (size.text() == "F*B+1") out.push_back(OFFSETS);
    else if (size.text() == "F*U+1") out.push_back(SHARED_OFFSETS);
    else size.fail('"' + size.text() + '"', "a number, \"B\", \"N\", \"F*B+1\" or \"F*U+1\"");
  }
  return out;
}

Spec spec_of(const Entry& e) { return {e["name"].text(), dtype_of(e["dtype"]), shape_of(e["shape"])}; }

std::vector<Spec> specs_of(const Entry& e) {
  std::vector<Spec> out;
  for (const Entry& x : e.items()) out.push_back(spec_of(x));
  return out;
}

// Returns the text with zeros for the digits of these keys, from which the digest in the text is computed.
std::string blanked(std::string text, std::initializer_list<const char*> keys) {
  const auto is_digit = [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); };
  for (const std::string key : keys) {
    const std::string before = '"' + key + "\": \"";
    for (size_t at = 0; (at = text.find(before, at)) != std::string::npos;) {
      at += before.size();
      if (at + DIGITS < text.size() && text[at + DIGITS] == '"' && std::all_of(&text[at], &text[at] + DIGITS, is_digit))
        text.replace(at, DIGITS, DIGITS, '0');
    }
  }
  return text;
}

std::string minor(const std::string& version) {
  const size_t dot = version.find('.');
  return dot == std::string::npos ? version : version.substr(0, std::min(version.find_first_of(".+", dot + 1), version.size()));
}

// Returns the instruction sets of this processor, by their names in Linux.
std::vector<std::string> processor_flags() {
  std::ifstream file("/proc/cpuinfo");
  std::vector<std::string> flags;
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("flags", 0) != 0) continue;
    std::istringstream words(line.substr(std::min(line.find(':'), line.size() - 1) + 1));
    for (std::string word; words >> word;) flags.push_back(word);
    break;
  }
  return flags;
}

void check_place(const Manifest& m, const Entry& top, const std::string& torch) {
  std::vector<std::string> needs;
  for (const Entry& need : top["needs"].items()) needs.push_back(need.text());
  if (minor(m.torch) != minor(torch)) throw Bad("the package is of another torch.", "torch " + torch, m.torch);
  const auto flags = processor_flags();
  std::string absent;
  for (const std::string& need : needs)
    if (std::find(flags.begin(), flags.end(), need) == flags.end()) absent += (absent.empty() ? " " : ", ") + need;
  if (!absent.empty()) throw Bad("the package needs instructions that this processor lacks.", "a processor without" + absent, "isa " + m.isa);
}

Example example_of(const Entry& e) {
  Example out;
  out.bags = e["bags"].number(0, MOST);
  const auto list = [&](const char* key, auto&& add) {
    if (e.has(key))
      for (const Entry& x : e[key].items()) add(x);
  };
  list("dense", [&](const Entry& x) { out.dense.push_back(float(x.real())); });
  list("values", [&](const Entry& x) { out.values.push_back(x.number(std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max())); });
  list("offsets", [&](const Entry& x) { out.offsets.push_back(x.number(0, MOST)); });
  list("weights", [&](const Entry& x) { out.weights.push_back(float(x.real())); });
  list("finite", [&](const Entry& x) { out.finite.push_back(x.text()); });
  return out;
}

// The inputs are dense, values, offsets and weights, as far as the package has them, in this order and of these kinds.
void check_inputs(Manifest& m) {
  const std::vector<Spec> whole = {{"dense", DType::f32, {BAGS, 0}}, {"values", DType::i64, {IDS}}, {"offsets", DType::i64, {OFFSETS}}, {"weights", DType::f32, {IDS}}};
  std::vector<Spec> expected;
  for (const Spec& w : whole) {
    const auto found = std::find_if(m.inputs.begin(), m.inputs.end(), [&](const Spec& s) { return s.name == w.name; });
    if (found == m.inputs.end()) continue;
    expected.push_back(w);
    if (w.name != "dense") continue;
    if (found->shape.size() == 2 && found->shape[1] >= 0) m.dense_columns = expected.back().shape[1] = found->shape[1];
    m.has_dense = true;
  }
  const auto list = [](const std::vector<Spec>& specs) {
    std::string out;
    for (const Spec& s : specs) out += (out.empty() ? "" : ", ") + s.name + " " + text_of(s);
    return out;
  };
  if (list(m.inputs) != list(expected)) throw Bad("the program has other inputs.", list(m.inputs), list(expected));
  const auto is_there = [&](const char* name) { return std::any_of(expected.begin(), expected.end(), [&](const Spec& s) { return s.name == name; }); };
  m.has_ids = is_there("values"), m.has_weights = is_there("weights");
  if (m.has_ids != is_there("offsets") || (m.has_weights && !m.has_ids) || (m.has_ids != !m.features.empty()))
    throw Bad("the program has other inputs.", list(m.inputs), "values and offsets if there are features, weights only with them");
}

}  // namespace

// -- entries ----------------------------------------------------------------------------------------------------------

void Entry::fail(const std::string& got, const std::string& need) const { throw Bad("`" + path_ + "` is wrong.", got, need); }

Entry Entry::operator[](const char* key) const {
  if (!value_->is_object()) fail("no object", "an object");
  const boost::json::value* found = value_->as_object().if_contains(key);
  if (!found) fail(std::string("no \"") + key + '"', "the file as it was written");
  return {path_ + '.' + key, *found};
}

bool Entry::has(const char* key) const { return value_->is_object() && value_->as_object().contains(key); }

size_t Entry::size() const {
  if (!value_->is_object()) fail("no object", "an object");
  return value_->as_object().size();
}

std::vector<Entry> Entry::items() const {
  if (!value_->is_array()) fail("no list", "a list");
  std::vector<Entry> out;
  const auto& array = value_->as_array();
  for (size_t i = 0; i < array.size(); i++) out.emplace_back(path_ + '[' + std::to_string(i) + ']', array[i]);
  return out;
}

std::string Entry::text() const {
  if (!value_->is_string()) fail("no text", "text");
  return std::string(value_->as_string());
}

int64_t Entry::number(int64_t least, int64_t most) const {
  if (!value_->is_int64()) fail("no whole number of 64 bits", "one");
  const int64_t n = value_->as_int64();
  if (n < least || n > most) fail(std::to_string(n), std::to_string(least) + " to " + std::to_string(most));
  return n;
}

double Entry::real() const {
  if (!value_->is_number()) fail("no number", "one");
  return value_->to_number<double>();
}

bool Entry::truth() const {
  if (!value_->is_bool()) fail("no bool", "true or false");
  return value_->as_bool();
}

// -- files ------------------------------------------------------------------------------------------------------------

// Names of matrices of the parameters, each once.
static std::vector<std::string> turned_of(const Entry& names, const std::vector<Spec>& params) {
  std::vector<std::string> out;
  for (const Entry& e : names.items()) out.push_back(e.text());
  for (size_t i = 0; i < out.size(); i++) {
    const auto is_matrix = [&](const Spec& s) { return s.name == out[i] && s.shape.size() == 2; };
    if (std::none_of(params.begin(), params.end(), is_matrix) || std::find(out.begin(), out.begin() + i, out[i]) != out.begin() + i)
      names.items()[i].fail('"' + out[i] + '"', "a matrix of `params`, once");
  }
  return out;
}

boost::json::value parse(const std::string& path, const std::string& text) {
  boost::system::error_code error;
  auto value = boost::json::parse(text, error);
  if (error) throw Bad("`" + path + "` is damaged.", error.message(), "the file as it was written");
  return value;
}

Manifest read_manifest(const Folder& folder, const std::string& torch) {
  const File file = folder.file("manifest.json");
  const std::string &path = file.path, text = read(file);
  const auto value = parse(path, text);
  const Entry top(path, value);
  Manifest m;
  const int64_t format = top["format"].number(std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max());
  m.digest = top["digest"].text(), m.funcrec = top["funcrec"].text(), m.torch = top["torch"].text(), m.isa = top["isa"].text();
  if (format != FORMAT && format != TURNED_FORMAT)
    throw Bad("`" + path + "` is of another format.", "format " + std::to_string(format), "format " + std::to_string(FORMAT) + " or " + std::to_string(TURNED_FORMAT));
  if (const std::string now = sha256(blanked(text, {"digest", "model.pt2", "encoding.frc"})); now != m.digest)
    throw Bad("`" + path + "` was changed.", "digest " + now, m.digest);
  check_place(m, top, torch);
  m.inputs = specs_of(top["inputs"]), m.params = specs_of(top["params"]), m.outputs = specs_of(top["outputs"]);
  if (format == TURNED_FORMAT) m.turned = turned_of(top["turned"], m.params);
  m.max_batch = top["max_batch"].number(1, std::numeric_limits<int32_t>::max());
  m.max_ids = top["max_ids"].number(0, MOST);
  if (top.has("example")) try {
    m.example = example_of(top["example"]);
  } catch (const Bad&) {  // a changed manifest has another digest than the program: the error says this
  }
  for (const Entry& e : top["features"].items()) {
    Feature f{e["name"].text(), e["table"].is_null() ? "" : e["table"].text(), e["rows"].number(0, ANY_ROW), e["weighted"].truth()};
    if (f.rows == ANY_ROW) f.rows = -1;
    m.features.push_back(std::move(f));
  }
  for (const Entry& e : top["tables"].items())
    m.tables.push_back({e["name"].text(), e["param"].is_null() ? "" : e["param"].text(), e["rows"].number(0, MOST), e["dim"].number(0, MOST),
                        e["bits"].is_null() ? 0 : e["bits"].number(1, 64)});
  const Entry files = top["files"];
  const std::string model = files["model.pt2"].text();
  const bool encodes = files.has("encoding.frc");
  if (files.size() != (encodes ? 2 : 1)) files.fail("other files", "model.pt2 and encoding.frc");
  if (encodes) files["encoding.frc"].text();  // only Python reads its content
  const std::string now = folder.has("model.pt2") ? "sha256 " + sha256(read(folder.file("model.pt2"))) : "no file";
  if (now != "sha256 " + model) throw Bad("`" + folder.path() + "/model.pt2` was changed.", now, model);
  return m;
}

void check_program(Manifest& m) {
  check_inputs(m);
  for (const Spec& s : m.outputs)
    if (s.shape.empty() || s.shape[0] != BAGS || std::any_of(s.shape.begin() + 1, s.shape.end(), [](int64_t n) { return n < 0; }))
      throw Bad("the program has other outputs.", s.name + " " + text_of(s), "a row for each bag");
}

void check_same_program(const Folder& folder, const Manifest& manifest) {
  if (!folder.has("manifest.json")) return;
  const File file = folder.file("manifest.json");
  const auto value = parse(file.path, read(file));
  if (const std::string digest = Entry(file.path, value)["digest"].text(); digest != manifest.digest)
    throw Bad("`" + folder.path() + "` is a package of another program.", "digest " + digest, manifest.digest);
}

Index read_index(const File& file, const Manifest& manifest) {
  const std::string& path = file.path;
  const Header header = read_header(path, WEIGHTS, file.bytes, PAGE, [&](int64_t at, int64_t n) { return read(file, at, n); });
  if (!header.texts.contains("version")) throw Bad("`" + path + "` is damaged.", "no text \"version\"", "the file as it was written");
  Index index{header.texts.at("version"), {}};
  std::map<std::string, Placed> found;
  for (const Placed& p : header.tensors) found.emplace(p.spec.name, p);
  for (const Spec& want : manifest.params) {
    const auto at = found.find(want.name);
    const std::string got = at == found.end() ? "none" : text_of(at->second.spec), need = text_of(want);
    if (got != need) throw Bad("`" + path + "` is of other parameters than the package.", want.name + ": " + got, want.name + ": " + need);
    index.tensors.push_back(std::move(at->second));
    found.erase(at);
  }
  if (!found.empty()) throw Bad("`" + path + "` is of other parameters than the package.", found.begin()->first, "no such parameter");
  return index;
}

// -- specs ------------------------------------------------------------------------------------------------------------

int64_t size_of(DType dtype) { return named(dtype).bytes; }

DType dtype_of(const Entry& e, bool stored) {
  const std::string name = e.text();
  for (const Named& n : DTYPES) if (name == (stored ? n.stored : n.python)) return n.dtype;
  e.fail('"' + name + '"', "a dtype that packages have");
}

std::string text_of(const Spec& spec) {
  std::string out = named(spec.dtype).brief;
  for (size_t i = 0; i < spec.shape.size(); i++) {
    const int64_t n = spec.shape[i];
    out += (i ? ", " : "[") + (n == BAGS ? "B" : n == IDS ? "N" : n == OFFSETS ? "F*B+1" : n == SHARED_OFFSETS ? "F*U+1" : std::to_string(n));
  }
  return out + (spec.shape.empty() ? "[]" : "]");
}

int64_t bytes_of(const Spec& spec) {
  int64_t bytes = size_of(spec.dtype);
  if (std::find(spec.shape.begin(), spec.shape.end(), 0) != spec.shape.end()) return 0;
  for (int64_t n : spec.shape) {
    if (n < 0) throw Bad("a parameter has no size of its own.", spec.name + " " + text_of(spec), "numbers");
    if (bytes > MOST / n) throw Bad("a tensor is too large.", spec.name + " " + text_of(spec), std::to_string(MOST) + " bytes or less");
    bytes *= n;
  }
  return bytes;
}

}  // namespace funcrec::serving
