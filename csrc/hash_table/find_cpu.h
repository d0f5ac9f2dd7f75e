// The first half of find_or_insert on the CPU.
#pragma once

#include <cstdint>

#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cpu {

// As find, and touches and counts what it finds.
void find_and_touch(const TableView* tables, const Batch& batch, uint32_t step, int64_t* slots,
                    int threads);

}  // namespace torchrec_hkv::hash_table::cpu
