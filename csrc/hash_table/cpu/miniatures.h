// Miniatures on the CPU.
#pragma once

#include "hash_table/clock.h"
#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cpu {

// Has the miniatures of the tables see a call's ids.
void simulate(const TableView* tables, const Batch& batch, const Visit& visit, int threads);

}  // namespace torchrec_hkv::hash_table::cpu
