// Operations on slots that a find returned.
#include <algorithm>
#include <cstring>
#include <vector>

#include "common/initial_rows_cpu.h"
#include "common/parallel.h"
#include "hash_table/cpu/bucket.h"
#include "hash_table/cpu/row_matrix.h"
#include "hash_table/kernels.h"

namespace torchrec_hkv::hash_table::cpu {
namespace {

// Calls visit_range(table, from, to) for the parts of positions [begin, end) that are of one
// feature.
template <typename Function>
void for_each_feature(const TableView* tables, const Batch& batch, int64_t begin, int64_t end,
                      const Function& visit_range) {
  for (int32_t feature = batch.feature_of(begin); begin < end; ++feature) {
    const int64_t stop = std::min(end, batch.feature_start(feature + 1));
    if (stop <= begin) continue;
    visit_range(tables[batch.feature_tables[feature]], begin, stop);
    begin = stop;
  }
}

// Adds floats to a row of 8 bits, which is rounded to the nearest.
void add_to_int8(char* row, const float* from, int32_t dim) {
  float sums[kMaxColumns];
  widen_int8(row, 0, dim, sums);
  for (int32_t c = 0; c < dim; ++c) sums[c] += from[c];
  narrow_int8(sums, dim, row);
}

}  // namespace

void gather(const TableView& /*table*/, const RowStore& store, const int64_t* slots, int64_t n,
            char* vectors, int threads) {
  const int64_t bytes = store.bytes();
  parallel_for(n, 1024, threads, [&](int64_t begin, int64_t end) {
    constexpr int64_t kAhead = 8;
    for (int64_t i = begin; i < end; ++i) {
      if (i + kAhead < end && slots[i + kAhead] != kNoSlot) {
        prefetch_bytes(store.at(slots[i + kAhead], kNoFrame), bytes);
      }
      char* to = vectors + i * bytes;
      if (slots[i] != kNoSlot) {
        std::memcpy(to, store.at(slots[i], kNoFrame), bytes);
      } else {
        std::memset(to, 0, bytes);
      }
    }
  });
}

void gather_rows(const TableView* tables, const Batch& batch, const int64_t* slots,
                 const RowMatrix& rows, bool* found, int threads) {
  parallel_for(batch.num_ids, 1024, threads, [&](int64_t begin, int64_t end) {
    constexpr int64_t kAhead = 8;
    std::vector<char> initial;
    for_each_feature(
        tables, batch, begin, end, [&](const TableView& table, int64_t from, int64_t to) {
          const auto row_at = [&](int64_t slot) { return table.row(slot - table.first_slot); };
          const int32_t dim = table.dim();
          const RowType type = table.rows.type;
          for (int64_t i = from; i < to; ++i) {
            if (i + kAhead < to && slots[i + kAhead] != kNoSlot) {
              prefetch_bytes(row_at(slots[i + kAhead]), row_bytes(table));
            }
            if (found != nullptr) found[i] = slots[i] != kNoSlot;
            if (slots[i] != kNoSlot) {
              copy_to_matrix(rows, i, type, row_at(slots[i]), dim);
              continue;
            }
            initial.resize(row_bytes(table));
            store_initial_row(table.initial_rows, batch.ids[i],
                              static_cast<uint32_t>(table.column_offset), dim, type,
                              initial.data());
            copy_to_matrix(rows, i, type, initial.data(), dim);
          }
        });
  });
}

void write_rows(const TableView* tables, int32_t num_tables, const int64_t* slots, int64_t n,
                const RowMatrix& rows, bool add, int threads) {
  // Every thread reads all slots and writes its share of the rows, in order.
  const int64_t num_workers = std::max(1, threads);
  parallel_for(num_workers, 1, threads, [&](int64_t begin, int64_t end) {
    std::vector<char> given;
    for (int64_t worker = begin; worker < end; ++worker) {
      for (int64_t i = 0; i < n; ++i) {
        if (slots[i] == kNoSlot || slots[i] % num_workers != worker) continue;
        const TableView& table = tables[table_of_slot(tables, num_tables, slots[i])];
        const RowType type = table.rows.type;
        char* row = table.row(slots[i] - table.first_slot);
        if (!add) {
          copy_elements(type, row, rows.type, rows.at(i), table.dim());
          continue;
        }
        const char* from = rows.at(i);
        if (type == RowType::kInt8) {
          add_to_int8(row, reinterpret_cast<const float*>(from), table.dim());
          continue;
        }
        if (rows.type != type) {  // rounds given rows to the table's type, as an assignment does
          given.resize(row_bytes(table));
          copy_elements(type, given.data(), rows.type, from, table.dim());
          from = given.data();
        }
        for (int32_t c = 0; c < table.dim(); ++c) {
          store_element(type, row, c, load_element(type, row, c) + load_element(type, from, c));
        }
      }
    }
  });
}

void touch_slots(const TableView* tables, const Batch& batch, const int64_t* slots,
                 const CallContext& context, int threads) {
  parallel_for(batch.num_ids, 1024, threads, [&](int64_t begin, int64_t end) {
    for_each_feature(tables, batch, begin, end,
                     [&](const TableView& table, int64_t from, int64_t to) {
                       for (int64_t i = from; i < to; ++i) {
                         if (slots[i] == kNoSlot) continue;
                         touch(table, slots[i] - table.first_slot, context, context.given(i));
                       }
                     });
  });
}

void erase_slots(const TableView* tables, int32_t num_tables, const int64_t* slots, int64_t n,
                 int threads) {
  parallel_for(n, 1024, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (slots[i] == kNoSlot) continue;
      const TableView& table = tables[table_of_slot(tables, num_tables, slots[i])];
      const int64_t slot = slots[i] - table.first_slot;
      const int64_t bucket = slot / table.bucket_slots;
      std::atomic_ref<uint16_t>(table.digests[bucket * kBucketDigests + slot % table.bucket_slots])
          .store(kEmptyDigest, std::memory_order_relaxed);
    }
  });
}

void keep_last_scores(const TableView* tables, int32_t num_tables, const int64_t* slots,
                      const uint64_t* scores, int64_t n, int threads) {
  // Every thread reads all slots and writes its share of the scores, in order.
  const int64_t num_workers = std::max(1, threads);
  parallel_for(num_workers, 1, threads, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker) {
      for (int64_t i = 0; i < n; ++i) {
        if (slots[i] < 0 || slots[i] == kSkipped || slots[i] % num_workers != worker) continue;
        const TableView& table = tables[table_of_slot(tables, num_tables, slots[i])];
        if (table.eviction != Eviction::kCustomized) continue;
        table.scores[slots[i] - table.first_slot] = scores[i];
      }
    }
  });
}

void select_slots(const TableView* tables, int32_t num_tables, const Selection& selection,
                  bool* chosen, int threads) {
  for (int32_t t = 0; t < num_tables; ++t) {
    if (selection.starts[t] < 0) continue;
    const TableView& table = tables[t];
    bool* const out = chosen + selection.starts[t];
    parallel_for(table.num_buckets, 64, threads, [&](int64_t begin, int64_t end) {
      for (int64_t bucket = begin; bucket < end; ++bucket) {
        const uint16_t* digests = digest_line(table, static_cast<uint32_t>(bucket));
        for (int32_t position = 0; position < table.bucket_slots; ++position) {
          const int64_t slot = bucket * table.bucket_slots + position;
          // Reads nothing else of free slots, whose memory may never have been touched.
          const bool taken = digests[position] != kEmptyDigest;
          out[slot] = taken && selection.meets(digests[position], score_of(table, slot),
                                               step_of(table, slot));
        }
      }
    });
  }
}

void export_slots(const TableView* tables, int32_t num_tables, const int64_t* slots, int64_t n,
                  const ExportedEntries& out, int threads) {
  parallel_for(n, 256, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const TableView& table = tables[table_of_slot(tables, num_tables, slots[i])];
      const int64_t slot = slots[i] - table.first_slot;
      out.ids[i] = table.ids[slot];
      out.scores[i] = score_of(table, slot);
      copy_to_matrix(out.rows, i, table.rows.type, table.row(slot), table.dim());
      if (out.states.columns == 0) continue;
      copy_to_matrix(out.states, i, table.states.type,
                     reinterpret_cast<const char*>(table.state(slot)), table.states.width);
    }
  });
}

}  // namespace torchrec_hkv::hash_table::cpu
