// The window of CountedSteps follows the clock. CPU only.
#pragma once

#include <cstdint>

#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cpu {

// Moves the window at the start of a call with step `now`: calls touch entries in steps of the
// window only.
void follow_clock(const TableView& table, uint32_t now, int threads);

}  // namespace torchrec_hkv::hash_table::cpu
