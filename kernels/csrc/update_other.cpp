// The updates of rows of any length.
#include "update_rows.h"

namespace funcrec {

// The rule is called for each row: its code serves windows and 16-bit tables.
template <class A> __attribute__((noinline)) static void update_with(const Trained& t, const Group& group, int64_t block, const Called<A>& rule) {
  with_table_type(t.table.dtype, [&](auto tag) {
    using E = typename decltype(tag)::type;
    if constexpr (std::is_same_v<Acc<E>, A>) update_rows<E, Called<A>, 0>(t, group, rule, block);
  });
}

template <class A> static void update_as(const Trained& t, const Group& group, int64_t block, int64_t number, const Hyper& hyper) {
  with_rule<A>(number, hyper, [&](const auto& rule) {
    using Rule = std::decay_t<decltype(rule)>;
    if (t.is_window()) return update_with<A>(t, group, block, Called<A>(rule, t.table.dim, t.wide, *t.first));
    if (t.table.dtype == F32 || t.table.dtype == F64) return update_rows<A, Rule, 0>(t, group, rule, block);
    if constexpr (std::is_same_v<Rule, Generated<float>>) {
      t.table.dtype == F16 ? update_rows<Half, Rule, 0>(t, group, rule, block) : update_rows<Bf16, Rule, 0>(t, group, rule, block);
    } else {
      update_with<A>(t, group, block, Called<A>(rule, t.table.dim, t.wide, -1));
    }
  });
}

void update_other(const Trained& t, const Group& group, int64_t block, int64_t number, const Hyper& hyper) {
  t.table.dtype == F64 ? update_as<double>(t, group, block, number, hyper) : update_as<float>(t, group, block, number, hyper);
}

}  // namespace funcrec
