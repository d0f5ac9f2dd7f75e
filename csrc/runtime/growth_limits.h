// Numbers of entries at which tables grow.
#pragma once

#include <cstdint>

namespace torchrec_hkv::runtime {

// Whether a table with this many entries should grow, if it can. Nothing is evicted before a table
// is 95 % full.
inline bool too_few(int64_t slots, int64_t entries) { return entries > slots - slots / 8; }

// On a CPU a table doubles in steps: each call that inserts splits some of its buckets. Doubling
// begins at the same number of entries, and ends before the entries take 15/16 of the old number of
// slots.
inline int64_t split_begin(int64_t slots) { return slots - slots / 8; }
inline int64_t split_end(int64_t slots) { return slots - slots / 16; }

}  // namespace torchrec_hkv::runtime
