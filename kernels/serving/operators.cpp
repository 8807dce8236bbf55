// The operators of a prediction, torch.ops.funcrec_cpp.*, for a process without Python: with the schemas of
// kernels/library.py, and the functions of kernels/cpp on the same compiled kernels. They check what Python's functions
// check, so no number leads to memory outside the tensors.
#include "describe.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>

namespace funcrec::operators {
namespace {

using Tensors = std::vector<Tensor>;
using Numbers = std::vector<int64_t>;

// -- pooled lookup ----------------------------------------------------------------------------------------------------

constexpr size_t PER_FEATURE = 7;  // forms.Feature: table, rows, first_bag, max_length, mean, weighted, column

int64_t members_of(const Tensors& tables, const Tensors& rows, const Tensor& offsets, const std::optional<Tensor>& weights) {
  for (const Tensor& x : tables) if (x.dim() > 2) return x.size(0);
  for (const Tensor& x : rows) if (x.dim() > 1) return x.size(0);
  if (offsets.dim() > 1) return offsets.size(0);
  return weights && weights->dim() > 1 ? weights->size(0) : -1;
}

std::string text_of(const int64_t* feature) {
  std::string out = "Feature(";
  for (size_t i = 0; i < PER_FEATURE; i++) out += (i ? ", " : "") + std::to_string(feature[i]);
  return out + ')';
}

// Returns the number of columns, which the features must cover without gaps; no feature may lie in two of the `blocks`.
int64_t width_of(const Numbers& features, const Numbers& dims, int64_t buffers, int64_t blocks) {
  struct Span { int64_t begin, end; size_t feature; };
  std::vector<Span> spans;
  int64_t width = 0;
  for (size_t i = 0; i < features.size(); i += PER_FEATURE) {
    const int64_t *f = &features[i], tables = int64_t(dims.size());
    const bool there = f[0] >= 0 && f[0] < tables && f[1] >= 0 && f[1] < buffers && std::min({f[2], f[3], f[6]}) >= 0 && f[2] < INT64_MAX / 2 && f[6] < INT32_MAX;
    if (!there) fail("pooled_lookup", "a feature does not fit.", text_of(f), std::to_string(tables) + " tables, " + std::to_string(buffers) + " buffers of rows");
    spans.push_back({f[6], f[6] + dims[f[0]], i});
    width = std::max(width, spans.back().end);
  }
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return std::tie(a.begin, a.end) < std::tie(b.begin, b.end); });
  const int64_t part = width / std::max<int64_t>(blocks, 1);
  int64_t at = 0;
  for (const Span& s : spans) {
    if (s.begin != at || blocks < 1 || width % blocks || (s.begin < s.end && s.begin / part != (s.end - 1) / part))
      fail("pooled_lookup", "a feature does not fit.", text_of(&features[s.feature]), "columns without gaps, in " + std::to_string(blocks) + " blocks of " + std::to_string(width));
    at = s.end;
  }
  return width;
}

// Returns weights in f32 (f64 for f64), after a check that every feature with weights has enough of them.
std::optional<Tensor> multipliers(const std::optional<Tensor>& weights, const Tensors& rows, const Numbers& features) {
  int64_t need = 0;
  for (size_t i = 0; i < features.size(); i += PER_FEATURE)
    if (features[i + 5]) need = std::max(need, rows[features[i + 1]].size(rows[features[i + 1]].dim() - 1));
  const int64_t got = weights ? weights->size(weights->dim() - 1) : 0;
  if (need > got) fail("pooled_lookup", "`weights` is missing or short.", std::to_string(got), "a number for each of " + std::to_string(need) + " ids");
  if (!weights) return weights;
  const ScalarType dtype = weights->scalar_type();
  return packed(dtype == ScalarType::Float || dtype == ScalarType::Double ? *weights : torch::stable::to(*weights, ScalarType::Float));
}

// Returns the features for an output of `blocks` parts [bags, width / blocks], one after the other (forms.in_blocks).
Numbers in_blocks(Numbers features, int64_t num_bags, int64_t width, int64_t blocks) {
  const int64_t part = width / blocks;
  if (blocks > 1 && part > 0)
    for (size_t i = PER_FEATURE - 1; i < features.size(); i += PER_FEATURE) features[i] = features[i] / part * num_bags * part + features[i] % part;
  return features;
}

// The tables of a lookup: the columns of each, whether one is f64, and how it is added to a call.
struct Told {
  const char* name;
  Entry entry;
  Numbers dims;
  bool wide;
  std::function<void(Call&, size_t table, int64_t member)> add;
};

Tensor lookup(const Told& told, const Tensors& tables, Tensors rows, Tensor offsets, std::optional<Tensor> weights, Numbers features, int64_t num_bags, int64_t blocks) {
  if (features.size() % PER_FEATURE) fail(told.name, "`features` are seven numbers each.", std::to_string(features.size()), "a multiple of 7");
  if (num_bags < 0 || num_bags > INT32_MAX) fail(told.name, "`num_bags` is out of range.", std::to_string(num_bags), "0 to 2^31 - 1");
  for (Tensor& x : rows) x = packed(x);
  offsets = packed(offsets);
  const int64_t found = members_of(tables, rows, offsets, weights), members = found < 0 ? 1 : found;
  const int64_t width = width_of(features, told.dims, int64_t(rows.size()), blocks), columns = width / blocks;
  int64_t need = features.empty() ? 0 : 1;
  for (size_t i = 2; i < features.size(); i += PER_FEATURE) need = std::max(need, features[i] + num_bags + 1);
  const int64_t boundaries = offsets.dim() ? offsets.size(offsets.dim() - 1) : 0;
  if (boundaries < need) fail(told.name, "`offsets` has too few boundaries.", std::to_string(boundaries), std::to_string(need) + ", one more than the last feature's last bag");
  weights = multipliers(weights, rows, features);
  features = in_blocks(std::move(features), num_bags, width, blocks);
  Numbers shape{blocks * num_bags, columns};
  if (found >= 0) shape.insert(shape.begin(), members);
  const Tensor out = empty(shape, told.wide ? ScalarType::Double : ScalarType::Float);
  const int64_t bytes = blocks * num_bags * columns * (told.wide ? 8 : 4);
  for (int64_t m = 0; m < members; m++) {
    Call call(told.name);
    call.add(int64_t(tables.size()));
    for (size_t t = 0; t < tables.size(); t++) told.add(call, t, m);
    call.add(int64_t(rows.size()));
    for (const Tensor& x : rows) call.ints(x, m);
    call.add(int64_t(features.size() / PER_FEATURE)).add(features);
    call.bounds(offsets, m).reals(weights, m).add({num_bags, columns, told.wide ? F64 : F32, reinterpret_cast<int64_t>(address(out)) + m * bytes});
    call.run(told.entry);
  }
  return out;
}

Tensor pooled_lookup(Tensors tables, Tensors rows, Tensor offsets, std::optional<Tensor> weights, Numbers features, int64_t num_bags, int64_t blocks) {
  static const Entry entry = Object::get().entry("pooled_lookup");
  Told told{"pooled_lookup", entry, {}, false, [&](Call& call, size_t t, int64_t member) { call.table(tables[t], member); }};
  for (const Tensor& x : tables) told.dims.push_back(x.dim() > 1 ? x.size(x.dim() - 1) : 0);
  for (size_t i = 0; i < features.size(); i += PER_FEATURE)
    told.wide = told.wide || (size_t(features[i]) < tables.size() && tables[features[i]].scalar_type() == ScalarType::Double);
  return lookup(told, tables, std::move(rows), offsets, std::move(weights), std::move(features), num_bags, blocks);
}

Tensor quantized_lookup(Tensors tables, Tensors rows, Tensor offsets, std::optional<Tensor> weights, Numbers features, int64_t num_bags, Numbers bits, Numbers dims) {
  static const Entry entry = Object::get().entry("quantized_lookup");
  if (bits.size() != tables.size() || dims.size() != tables.size())
    fail("quantized_lookup", "`bits` and `dims` do not match the tables.", std::to_string(bits.size()) + " bits, " + std::to_string(dims.size()) + " dims", "one for each table");
  Told told{"quantized_lookup", entry, dims, false, [&](Call& call, size_t t, int64_t) { call.coded(tables[t], bits[t], dims[t]); }};
  return lookup(told, tables, std::move(rows), offsets, std::move(weights), std::move(features), num_bags, 1);
}

// -- rows and jagged buffers ------------------------------------------------------------------------------------------

void same(const char* call, const char* what, int64_t got, int64_t need) {
  if (got != need) fail(call, std::string("`") + what + "` does not match.", std::to_string(got), std::to_string(need));
}

Tensor gather_rows(Tensor table, Tensor rows) {
  static const Entry entry = Object::get().entry("gather_block");
  rows = packed(rows);
  Call call("gather_rows");
  call.add(1);
  if (table.dim() != 2) call.fail("a table is of another kind", table, "[rows, dim]");
  const Tensor out = empty({rows.dim() ? rows.size(0) : 0, table.size(1)}, table.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float);
  call.table(table).matrix(out).ints(rows).run(entry);
  return out;
}

Tensor quantized_rows(Tensor table, Tensor rows, int64_t bits, int64_t dim) {
  static const Entry entry = Object::get().entry("quantized_rows");
  rows = packed(rows);
  Call call("quantized_rows");
  call.coded(table, bits, dim);
  const Tensor out = empty({rows.dim() ? rows.size(0) : 0, dim}, ScalarType::Float);
  call.matrix(out).ints(rows).run(entry);
  return out;
}

std::tuple<Tensor, Tensor> top_k(Tensor queries, Tensor items, std::optional<Tensor> rows, std::optional<Tensor> offsets, int64_t k, int64_t bits) {
  static const Entry entry = Object::get().entry("top_k");
  Call call("top_k"), table("top_k");
  if (queries.dim() != 2 || k < 0 || k > INT32_MAX) call.fail("`queries` are no matrix, or k is out of range", queries, "f[B, D], and k of 0 to 2^31 - 1");
  if (bits && bits != 8 && bits != 4 && bits != 2) call.fail("there are no such codes", items, "bits of 8, 4 or 2, or 0 for floats");
  items = packed(items);
  bits ? table.coded(items, bits, queries.size(1)) : table.table(items);  // only to check the table
  if (!bits && items.size(1) != queries.size(1)) call.fail("`items` are of another dim", items, "that of the queries");
  const bool wide = queries.scalar_type() == ScalarType::Double || (!bits && items.scalar_type() == ScalarType::Double);
  const ScalarType dtype = wide ? ScalarType::Double : ScalarType::Float;
  queries = packed(queries.scalar_type() == dtype ? queries : torch::stable::to(queries, dtype));
  call.matrix(queries).pointer(items).add({bits ? -1 : number_of(items.scalar_type()), items.size(0), queries.size(1)});
  call.add({items.size(1) * int64_t(items.element_size()), bits});
  if (rows && offsets) {
    rows = packed(*rows), offsets = packed(*offsets);
    call.ints(*rows).bounds(*offsets);
    same("top_k", "offsets", offsets->size(0), queries.size(0) + 1);
  } else {
    call.add({0, 0, -1, 0, 0, -1});
  }
  const Tensor scores = empty({queries.size(0), k}, dtype), found = empty({queries.size(0), k}, ScalarType::Long);
  call.add(k).pointer(scores).pointer(found).run(entry);
  return {scores, found};
}

// Returns the bytes of one position of x, whose first `dims` dimensions count positions.
int64_t bytes_of(const Tensor& x, int64_t dims = 1) {
  if (x.dim() < dims || !x.is_cpu()) fail("call", "a tensor has too few dimensions.", text(x), std::to_string(dims) + " or more, on the CPU");
  int64_t bytes = int64_t(x.element_size());
  for (int64_t i = dims; i < x.dim(); i++) bytes *= x.size(i);
  return bytes;
}

// Returns the shape of x with `front` in place of its first `dims` dimensions.
Numbers shape_of(Numbers front, const Tensor& x, int64_t dims) {
  for (int64_t n : front) if (n < 0) fail("call", "a size is negative.", std::to_string(n), "0 or more");
  for (int64_t i = dims; i < x.dim(); i++) front.push_back(x.size(i));
  return front;
}

std::tuple<Tensor, Tensor> take_ranges(Tensor values, Tensor starts, Tensor lengths, int64_t capacity) {
  static const Entry entry = Object::get().entry("take_ranges");
  values = packed(values), starts = packed(starts), lengths = packed(lengths);
  Call call("take_ranges");
  const int64_t bytes = bytes_of(values);
  call.pointer(values).add({values.size(0), bytes}).ints(starts).ints(lengths);
  same("take_ranges", "lengths", lengths.size(0), starts.size(0));
  const Tensor out = empty(shape_of({capacity}, values, 1), values.scalar_type()), offsets = empty({lengths.size(0) + 1}, ScalarType::Long);
  call.pointer(out).add(capacity).pointer(offsets).run(entry);
  return {out, offsets};
}

// whole: the exact fill, if it is a whole number.
Tensor to_padded(Tensor values, Tensor offsets, int64_t max_length, double fill, std::optional<int64_t> whole) {
  static const Entry entry = Object::get().entry("to_padded");
  values = packed(values), offsets = packed(offsets);
  Call call("to_padded");
  const int64_t bytes = bytes_of(values);
  call.pointer(values).add({values.size(0), bytes}).bounds(offsets);
  const Tensor out = empty(shape_of({offsets.size(0) - 1, max_length}, values, 1), values.scalar_type());
  const int64_t number = whole.value_or(0);
  Tensor one = empty(shape_of({}, values, 1), whole ? ScalarType::Long : ScalarType::Double);
  for (int64_t i = 0; i < one.numel(); i++) std::memcpy(address(one) + 8 * i, whole ? static_cast<const void*>(&number) : &fill, 8);
  one = torch::stable::to(one, values.scalar_type());
  call.add(max_length).pointer(one).pointer(out).run(entry);
  return out;
}

Tensor from_padded(Tensor padded, Tensor offsets, int64_t capacity) {
  static const Entry entry = Object::get().entry("from_padded");
  padded = packed(padded), offsets = packed(offsets);
  Call call("from_padded");
  const int64_t bytes = bytes_of(padded, 2);
  call.pointer(padded).add({padded.size(1), bytes}).bounds(offsets);
  same("from_padded", "offsets", offsets.size(0) - 1, padded.size(0));
  const Tensor out = empty(shape_of({capacity}, padded, 2), padded.scalar_type());
  call.pointer(out).add(capacity).run(entry);
  return out;
}

std::tuple<Tensor, Tensor> bag_extrema(Tensor values, Tensor offsets, bool greatest, bool placed) {
  static const Entry entry = Object::get().entry("bag_extrema");
  static const std::map<ScalarType, int64_t> kinds{{ScalarType::Float, 0}, {ScalarType::Half, 1}, {ScalarType::BFloat16, 2}, {ScalarType::Double, 3}, {ScalarType::Int, 4},
                                                   {ScalarType::Long, 5}, {ScalarType::Short, 6}, {ScalarType::Char, 7}, {ScalarType::Byte, 8}};
  values = packed(values), offsets = packed(offsets);
  Call call("bag_extrema");
  const auto kind = kinds.find(values.scalar_type());
  if (kind == kinds.end()) call.fail("`values` have no extrema", values, "floats, or integers of at most 64 bits with a sign or u8");
  const int64_t width = bytes_of(values) / int64_t(values.element_size());
  call.pointer(values).add({kind->second, values.size(0), width, width}).bounds(offsets);
  const Numbers shape = shape_of({offsets.size(0) - 1}, values, 1);
  const Tensor out = empty(shape, values.scalar_type()), places = empty(placed ? shape : Numbers{0}, ScalarType::Long);
  call.add(greatest).pointer(out).add(placed).pointer(places).run(entry);
  return {out, places};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> bucketize(Tensor rows, Tensor offsets, std::optional<Tensor> weights, int64_t num_shards, int64_t block) {
  static const Entry entry = Object::get().entry("bucketize");
  if (block < 1 || num_shards < 0 || num_shards > INT32_MAX)
    fail("bucketize", "a number is out of range.", std::to_string(num_shards) + " shards of " + std::to_string(block), "0 to 2^31 - 1, of one row or more");
  rows = packed(rows), offsets = packed(offsets);
  Call call("bucketize");
  call.ints(rows).bounds(offsets);
  if (weights) {
    weights = packed(*weights);
    if (weights->dim() != 1) call.fail("`weights` does not match", *weights, "[ids]");
    same("bucketize", "weights", weights->size(0), rows.size(0));
  }
  const Tensor out = empty({rows.size(0)}, rows.scalar_type()), positions = empty({rows.size(0)}, ScalarType::Long);
  const Tensor lengths = empty({num_shards * (offsets.size(0) - 1)}, ScalarType::Long);
  const Tensor moved = weights ? empty({rows.size(0)}, weights->scalar_type()) : empty({0}, ScalarType::Float);
  call.add({num_shards, block}).pointer(out).add({weights ? reinterpret_cast<int64_t>(address(*weights)) : 0, int64_t(moved.element_size())});
  call.pointer(lengths).pointer(positions).pointer(moved).run(entry);
  return {out, lengths, moved, positions};
}

constexpr int64_t SLOTS = 128;  // kernels/vocabulary.py: rows of a bucket

void add_vocabulary(Call& call, const Tensor& tags, const Tensor& entries, int64_t shared, int64_t salt) {
  const int64_t num_rows = tags.dim() == 1 ? tags.size(0) : 0;
  if (tags.scalar_type() != ScalarType::Byte || num_rows < 1 || num_rows % SLOTS) call.fail("`tags` are not those of a vocabulary", tags, "u8[R], R a multiple of 128");
  if (entries.scalar_type() != ScalarType::Long || entries.dim() != 2 || entries.size(0) != num_rows || entries.size(1) != 2)
    call.fail("`entries` do not fit `tags`", entries, "i64[R, 2]");
  if (shared < 0 || shared > INT32_MAX) fail("find_ids", "`shared` is out of range.", std::to_string(shared), "0 to 2^31 - 1");
  call.pointer(tags).pointer(entries).add({num_rows, shared, salt});
}

Tensor find_ids(Tensor tags, Tensor entries, Tensor ids, Tensor valid, int64_t shared, int64_t salt) {
  static const Entry entry = Object::get().entry("find_ids");
  tags = packed(tags), entries = packed(entries), ids = packed(ids);
  Call call("find_ids");
  if (valid.scalar_type() != ScalarType::Long || valid.numel() != 1) call.fail("`valid` is not a number", valid, "i64[]");
  add_vocabulary(call, tags, entries, shared, salt);
  const Tensor rows = empty({ids.dim() ? ids.size(0) : 0}, ScalarType::Long);
  call.ints(ids).pointer(valid).pointer(rows).run(entry);
  return rows;
}

// how: (shared, salt) of each vocabulary. columns: vocabulary, buffer (0), first_bag, num_bags and max_length of each.
Tensor find_columns(Tensors state, Tensor ids, Tensor offsets, Numbers how, Numbers columns) {
  static const Entry entry = Object::get().entry("find_columns");
  ids = packed(ids), offsets = packed(offsets);
  for (Tensor& x : state) x = packed(x);
  Call call("find_columns");
  same("find_columns", "how", how.size(), state.size());
  if (how.size() % 2 || columns.size() % 5) fail("find_columns", "the numbers do not fit.", std::to_string(how.size()) + " and " + std::to_string(columns.size()), "2 of each vocabulary, 5 of each column");
  call.add(int64_t(state.size() / 2));
  for (size_t i = 0; i < state.size(); i += 2) add_vocabulary(call, state[i], state[i + 1], how[i], how[i + 1]);
  call.add(1).ints(ids).bounds(offsets).add(int64_t(columns.size() / 5)).add(columns);
  const Tensor rows = empty({ids.dim() ? ids.size(0) : 0}, ScalarType::Long);
  call.pointer(rows).run(entry);
  return rows;
}

// -- attention --------------------------------------------------------------------------------------------------------

constexpr double TIME_STEP = 0.301;  // kernels/forms.py: of log |t_i - t_j|, between two buckets of time

// Returns the least |t_i - t_j| of each bucket, after -inf and before NaN, f32[T + 1].
Tensor time_edges(int64_t buckets) {
  const Tensor out = empty({buckets + 1}, ScalarType::Float);
  float* edge = reinterpret_cast<float*>(address(out));
  edge[0] = -INFINITY;
  for (int64_t k = 1; k < buckets; k++) edge[k] = float(std::exp(double(k) * TIME_STEP));
  edge[buckets] = NAN;
  return out;
}

int64_t bits_of(double x) {
  int64_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

std::tuple<Tensor, Tensor> jagged_attention(
    Tensor queries, Tensor keys, Tensor values, Tensor offsets, Tensor key_offsets, std::optional<Tensor> position_bias,
    std::optional<Tensor> time_bias, std::optional<Tensor> query_times, std::optional<Tensor> key_times, std::optional<Tensor> num_targets,
    double scale, double normalizer, bool softmax, bool causal) {
  static const Entry entry = Object::get().entry("jagged_attention");
  Call call("jagged_attention");
  const ScalarType dtype = queries.scalar_type(), wide = dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  if (const int64_t number = number_of(dtype); number < 0 || number > F64) call.fail("`queries` are no floats", queries, "f32, f64, f16 or bf16");
  for (const Tensor* x : {&queries, &keys, &values})
    if (x->dim() != 3 || x->scalar_type() != dtype || !x->is_cpu()) call.fail("queries, keys and values do not fit each other", *x, "[N, H, D] of one dtype, on the CPU");
  const int64_t heads = queries.size(1), dim = queries.size(2);
  if (keys.size(1) != heads || keys.size(2) != dim || values.size(0) != keys.size(0) || values.size(1) != heads)
    call.fail("queries, keys and values do not fit each other", keys, "the heads and dim of the queries, and a value for each key");
  same("jagged_attention", "key_offsets", key_offsets.numel(), offsets.numel());
  queries = packed(queries), keys = packed(keys), values = packed(values), offsets = packed(offsets), key_offsets = packed(key_offsets);
  call.pointer(queries).pointer(keys).pointer(values).add({number_of(dtype), queries.size(0), keys.size(0), heads, dim, values.size(2)});
  call.bounds(offsets).bounds(key_offsets);
  for (std::optional<Tensor>* bias : {&position_bias, &time_bias}) {
    if (!*bias) {
      call.add({0, 0, 0});
      continue;
    }
    if ((*bias)->dim() != 2 || ((*bias)->size(0) != 1 && (*bias)->size(0) != heads) || (*bias)->size(1) < 1) call.fail("a bias does not fit the heads", **bias, "[1 or H, 1 or more]");
    *bias = packed((*bias)->scalar_type() == wide ? **bias : torch::stable::to(**bias, wide));
    call.pointer(**bias).add({(*bias)->size(1), (*bias)->size(0)});
  }
  std::optional<Tensor> edges;
  if (time_bias) {
    if (!query_times || !key_times) call.fail("there is a time_bias, and there are no times", *time_bias, "query_times and key_times");
    edges = time_edges(time_bias->size(1));
    query_times = packed(torch::stable::to(*query_times, ScalarType::Double)), key_times = packed(torch::stable::to(*key_times, ScalarType::Double));
    same("jagged_attention", "query_times", query_times->numel(), queries.size(0));
    same("jagged_attention", "key_times", key_times->numel(), keys.size(0));
    call.pointer(*edges).pointer(*query_times).pointer(*key_times);
  } else {
    call.add({0, 0, 0});
  }
  if (num_targets) {
    num_targets = packed(*num_targets);
    same("jagged_attention", "num_targets", num_targets->numel(), offsets.size(0) - 1);
    call.ints(*num_targets);
  } else {
    call.add({0, 0, -1});
  }
  const Tensor out = empty({queries.size(0), heads, values.size(2)}, dtype), logs = empty({softmax ? queries.size(0) : 0, heads}, wide);
  call.add({bits_of(scale), bits_of(normalizer), int64_t(softmax), int64_t(causal)}).pointer(out).pointer(logs).run(entry);
  return {out, logs};
}

// -- interactions -----------------------------------------------------------------------------------------------------

Tensor dot_interaction(Tensors x) {
  static const Entry entry = Object::get().entry("dot_interaction");
  if (x.empty()) fail("dot_interaction", "there is no part.", "0 parts", "one or more");
  Call call("dot_interaction");
  const ScalarType dtype = x[0].scalar_type();
  int64_t vectors = 0;
  if (const int64_t number = number_of(dtype); number < 0 || number > F64) call.fail("a part is no stack of vectors", x[0], "f32, f64, f16 or bf16");
  for (Tensor& part : x) {
    if (part.dim() != 3 || part.scalar_type() != dtype || !part.is_cpu() || part.size(0) != x[0].size(0) || part.size(2) != x[0].size(2))
      call.fail("the parts do not fit each other", part, "[B, F, D] of one B, D and dtype, on the CPU");
    part = packed(part), vectors += part.size(1);
  }
  call.add({number_of(dtype), x[0].size(0), x[0].size(2), int64_t(x.size())});
  for (const Tensor& part : x) call.pointer(part).add({part.size(1), part.size(1) * part.size(2)});
  const Tensor out = empty({x[0].size(0), vectors * (vectors - 1) / 2}, dtype);
  call.pointer(out).run(entry);
  return out;
}

// The object has products and sums of one order as whole operators.
Object::Operator whole(const char* name) { return Object::get().operation(name, reinterpret_cast<void*>(&aoti_torch_get_dim)); }

void invariant_bmm(StableIValue* stack, uint64_t inputs, uint64_t outputs) {
  static const Object::Operator run = whole("invariant_bmm");
  run(stack, inputs, outputs);
}

void invariant_sum(StableIValue* stack, uint64_t inputs, uint64_t outputs) {
  static const Object::Operator run = whole("invariant_sum");
  run(stack, inputs, outputs);
}

}  // namespace

// The schemas are those of kernels/library.py; a test compares them.
STABLE_TORCH_LIBRARY(funcrec_cpp, m) {
  m.def("pooled_lookup(Tensor[] tables, Tensor[] rows, Tensor offsets, Tensor? weights, SymInt[] features, SymInt num_bags, int blocks=1) -> Tensor");
  m.def("gather_rows(Tensor table, Tensor rows) -> Tensor");
  m.def("quantized_lookup(Tensor[] tables, Tensor[] rows, Tensor offsets, Tensor? weights, SymInt[] features, SymInt num_bags, int[] bits, int[] dims) -> Tensor");
  m.def("quantized_rows(Tensor table, Tensor rows, int bits, int dim) -> Tensor");
  m.def("top_k(Tensor queries, Tensor items, Tensor? rows, Tensor? offsets, int k, int bits=0) -> (Tensor, Tensor)");
  m.def("take_ranges(Tensor values, Tensor starts, Tensor lengths, SymInt capacity) -> (Tensor, Tensor)");
  m.def("bucketize(Tensor rows, Tensor offsets, Tensor? weights, int num_shards, int block) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("to_padded(Tensor values, Tensor offsets, SymInt max_length, float fill, int? whole=None) -> Tensor");
  m.def("jagged_attention(Tensor queries, Tensor keys, Tensor values, Tensor offsets, Tensor key_offsets, Tensor? position_bias, Tensor? time_bias, "
        "Tensor? query_times, Tensor? key_times, Tensor? num_targets, float scale, float normalizer, bool softmax, bool causal) -> (Tensor, Tensor)");
  m.def("bag_extrema(Tensor values, Tensor offsets, bool greatest, bool placed) -> (Tensor, Tensor)");
  m.def("dot_interaction(Tensor[] x) -> Tensor");
  m.def("find_ids(Tensor tags, Tensor entries, Tensor ids, Tensor valid, int shared, int salt) -> Tensor");
  m.def("find_columns(Tensor[] state, Tensor ids, Tensor offsets, int[] how, SymInt[] columns) -> Tensor");
  m.def("from_padded(Tensor padded, Tensor offsets, SymInt capacity) -> Tensor");
  m.def("invariant_bmm(Tensor a, Tensor b) -> Tensor");
  m.def("invariant_sum(Tensor x) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(funcrec_cpp, CPU, m) {
  m.impl("pooled_lookup", TORCH_BOX(&pooled_lookup));
  m.impl("gather_rows", TORCH_BOX(&gather_rows));
  m.impl("quantized_lookup", TORCH_BOX(&quantized_lookup));
  m.impl("quantized_rows", TORCH_BOX(&quantized_rows));
  m.impl("top_k", TORCH_BOX(&top_k));
  m.impl("take_ranges", TORCH_BOX(&take_ranges));
  m.impl("bucketize", TORCH_BOX(&bucketize));
  m.impl("to_padded", TORCH_BOX(&to_padded));
  m.impl("jagged_attention", TORCH_BOX(&jagged_attention));
  m.impl("bag_extrema", TORCH_BOX(&bag_extrema));
  m.impl("dot_interaction", TORCH_BOX(&dot_interaction));
  m.impl("find_ids", TORCH_BOX(&find_ids));
  m.impl("find_columns", TORCH_BOX(&find_columns));
  m.impl("from_padded", TORCH_BOX(&from_padded));
  m.impl("invariant_bmm", &invariant_bmm);
  m.impl("invariant_sum", &invariant_sum);
}

}  // namespace funcrec::operators
