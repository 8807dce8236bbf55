// The updates of f32 tables.
#include "update_rows.h"

template void funcrec::update_class<float>(const Trained&, const Group&, int64_t, int64_t, const Hyper&);
