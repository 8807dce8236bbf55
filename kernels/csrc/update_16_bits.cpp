// The updates of 16-bit tables.
#include "update_rows.h"

template void funcrec::update_class<funcrec::Half>(const Trained&, const Group&, int64_t, int64_t, const Hyper&);
template void funcrec::update_class<funcrec::Bf16>(const Trained&, const Group&, int64_t, int64_t, const Hyper&);
