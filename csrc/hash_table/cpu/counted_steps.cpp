#include "common/parallel.h"
#include "hash_table/kernels.h"

namespace torchrec_hkv::hash_table::cpu {

void read_counted(const TableView& table, const int64_t* slots, int64_t n, uint32_t* steps,
                  int64_t* counts, int threads) {
  const CountedSteps& counted = table.counted;
  parallel_for(n, 4096, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t slot = slots != nullptr ? slots[i] : i;
      if (steps != nullptr) steps[i] = counted.step(slot);
      if (counts != nullptr) counts[i] = static_cast<int64_t>(counted.count(slot));
    }
  });
}

void write_counted(const TableView& table, const uint32_t* steps, const int64_t* counts, int64_t n,
                   int threads) {
  parallel_for(n, 4096, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      table.counted.set(i, steps[i], static_cast<uint64_t>(counts[i]));
    }
  });
}

}  // namespace torchrec_hkv::hash_table::cpu
