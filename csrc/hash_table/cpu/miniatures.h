// Runs miniatures (miniatures.h) on the CPU.
#pragma once

#include "hash_table/clock.h"
#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cpu {

// Passes the ids of a call to the miniatures of the tables.
void simulate(const TableView* tables, const Batch& batch, const CallContext& context, int threads);

}  // namespace torchrec_hkv::hash_table::cpu
