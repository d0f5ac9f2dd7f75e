// Rows and states of ids that were placed, on the CPU.
#pragma once

#include <cstdint>

#include "hash_table/cpu/missing_ids.h"
#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cpu {

// Writes a zero state and, with `initialize`, the initial row of each id that was placed. slots: of
// the batch.
void initialize_rows(const TableView* tables, const Batch& batch, const MissingIds& missing,
                     const int64_t* slots, bool initialize, int threads);

}  // namespace torchrec_hkv::hash_table::cpu
