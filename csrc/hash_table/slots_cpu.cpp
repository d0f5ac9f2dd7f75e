// Operations on slots that a find gave.
#include <algorithm>
#include <cstring>

#include "common/initial_rows_cpu.h"
#include "common/parallel.h"
#include "hash_table/bucket_cpu.h"
#include "hash_table/kernels.h"

namespace torchrec_hkv::hash_table::cpu {

void gather(const TableView& table, const RowStore& store, const int64_t* ids, const int64_t* slots,
            int64_t n, char* rows, bool* found, int threads) {
  const int64_t bytes = static_cast<int64_t>(store.width) * element_size(store.type);
  parallel_for(n, 1024, threads, [&](int64_t begin, int64_t end) {
    constexpr int64_t kAhead = 8;
    for (int64_t i = begin; i < end; ++i) {
      if (i + kAhead < end && slots[i + kAhead] != kNoSlot) {
        prefetch_bytes(store.at(slots[i + kAhead], kNoFrame), bytes);
      }
      char* to = rows + i * bytes;
      if (found != nullptr) found[i] = slots[i] != kNoSlot;
      if (slots[i] != kNoSlot) {
        std::memcpy(to, store.at(slots[i], kNoFrame), bytes);
      } else if (ids == nullptr) {
        std::memset(to, 0, bytes);
      } else {
        store_initial_row(table.initial_rows, ids[i], static_cast<uint32_t>(table.column_offset),
                          store.width, store.type, to);
      }
    }
  });
}

void write_rows(const TableView& table, const int64_t* slots, const char* rows, int64_t n, bool add,
                int threads) {
  const RowStore& store = table.rows;
  const int64_t bytes = static_cast<int64_t>(store.width) * element_size(store.type);
  // Every thread goes through all slots and writes its share of them, in order.
  const int64_t shares = std::max(1, threads);
  parallel_for(shares, 1, threads, [&](int64_t begin, int64_t end) {
    for (int64_t share = begin; share < end; ++share) {
      for (int64_t i = 0; i < n; ++i) {
        const int64_t slot = slots[i];
        if (slot == kNoSlot || slot % shares != share) continue;
        char* row = store.at(slot, kNoFrame);
        const char* from = rows + i * bytes;
        if (!add) {
          std::memcpy(row, from, bytes);
          continue;
        }
        for (int32_t c = 0; c < store.width; ++c) {
          store_element(store.type, row, c,
                        load_element(store.type, row, c) + load_element(store.type, from, c));
        }
      }
    }
  });
}

void touch_slots(const TableView& table, const int64_t* slots, int64_t n, const Visit& visit,
                 int threads) {
  parallel_for(n, 1024, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (slots[i] != kNoSlot) touch(table, slots[i], visit, visit.given(i));
    }
  });
}

void keep_last_scores(const TableView& table, const int64_t* slots, const uint64_t* scores,
                      int64_t n, int threads) {
  // Every thread goes through all slots and writes its share of them, in order.
  const int64_t shares = std::max(1, threads);
  parallel_for(shares, 1, threads, [&](int64_t begin, int64_t end) {
    for (int64_t share = begin; share < end; ++share) {
      for (int64_t i = 0; i < n; ++i) {
        if (slots[i] < 0 || slots[i] == kPassedOver || slots[i] % shares != share) continue;
        table.scores[slots[i]] = scores[i];
      }
    }
  });
}

void erase_slots(const TableView& table, const int64_t* slots, int64_t n, int threads) {
  parallel_for(n, 1024, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (slots[i] == kNoSlot) continue;
      const int64_t bucket = slots[i] / table.bucket_slots;
      std::atomic_ref<uint16_t>(
          table.digests[bucket * kBucketDigests + slots[i] % table.bucket_slots])
          .store(kEmptyDigest, std::memory_order_relaxed);
      std::atomic_ref<uint32_t>(table.last_steps[slots[i]])
          .store(kFreeStep, std::memory_order_relaxed);
    }
  });
}

}  // namespace torchrec_hkv::hash_table::cpu
