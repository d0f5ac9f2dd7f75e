#include "common/parallel.h"
#include "hash_table/kernels.h"

namespace torchrec_hkv::hash_table::cpu {

void read_counts(const TableView& table, const int64_t* slots, int64_t n, int64_t* counts,
                 int threads) {
  parallel_for(n, 4096, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      counts[i] = static_cast<int64_t>(table.counts.of(slots != nullptr ? slots[i] : i));
    }
  });
}

void write_counts(const TableView& table, const int64_t* counts, int64_t n, int threads) {
  parallel_for(n, 4096, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) table.counts.set(i, static_cast<uint64_t>(counts[i]));
  });
}

}  // namespace torchrec_hkv::hash_table::cpu
