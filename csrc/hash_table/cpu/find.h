// The first half of find_or_insert on the CPU.
#pragma once

#include <cstdint>

#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cpu {

// As find, and touches and counts what it finds. Returns the number of positions with a missing id.
int64_t find_and_touch(const TableView* tables, const Batch& batch, const CallContext& context,
                       int64_t* slots, bool* found, int threads);

}  // namespace torchrec_hkv::hash_table::cpu
