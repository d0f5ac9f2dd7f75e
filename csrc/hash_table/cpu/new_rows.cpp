// Initial rows are computed in a buffer in the cache, and then copied to their slots by
// non-temporal stores, many at a time. Stores leave a processor in order, so a store to a row that
// is not in the cache would delay those of the next row. Non-temporal stores also avoid reading
// rows that are overwritten.
#include "hash_table/cpu/new_rows.h"

#include <algorithm>

#include "common/initial_rows_cpu.h"
#include "common/parallel.h"
#include "common/stream.h"
#include "hash_table/cpu/bucket.h"

namespace torchrec_hkv::hash_table::cpu {
namespace {

// If the new rows of a call take fewer bytes than this, they stay in the cache for the forward.
constexpr int64_t kFitsCache = 1 << 20;

// Buffer of a thread's rows before they are copied to their slots.
class StagingBuffer {
 public:
  // Returns memory for the row at `to`. The row is copied to `to` at the latest by flush().
  char* add(char* to, int64_t bytes) {
    if (used_ + bytes > kBytes) flush();
    char* const staged = buffer_ + used_;
    rows_[count_++] = {to, bytes};
    used_ += bytes;
    return staged;
  }

  void flush() {
    const char* from = buffer_;
    for (int64_t i = 0; i < count_; ++i) {
      stream_copy(rows_[i].to, from, rows_[i].bytes);
      from += rows_[i].bytes;
    }
    used_ = count_ = 0;
  }

  static bool fits(const void* to, int64_t bytes) {
    return bytes <= kBytes && whole_lines(to, bytes);
  }

 private:
  struct StagedRow {
    char* to;
    int64_t bytes;
  };

  static constexpr int64_t kBytes = 8192;  // a quarter of an L1 cache
  alignas(kLineBytes) char buffer_[kBytes];
  StagedRow rows_[kBytes / kLineBytes];
  int64_t used_ = 0, count_ = 0;
};

int64_t max_row_bytes(const TableView* tables, const Batch& batch) {
  int64_t most = 0;
  for (int32_t f = 0; f < batch.num_features; ++f) {
    const TableView& table = tables[batch.feature_tables[f]];
    most = std::max(most, row_bytes(table) + table.states.bytes());
  }
  return most;
}

}  // namespace

void initialize_rows(const TableView* tables, const Batch& batch, const MissingIds& missing,
                     const int64_t* slots, bool initialize, int threads) {
  const bool streams = missing.size() * max_row_bytes(tables, batch) > kFitsCache;
  parallel_for(missing.size(), 256, threads, [&](int64_t begin, int64_t end) {
    constexpr int64_t kAhead = 8;
    StagingBuffer stage;
    for (int64_t i = begin; i < end; ++i) {
      const MissingId& it = missing.begin()[i];
      if (const int64_t next_index = i + kAhead; initialize && !streams && next_index < end) {
        const MissingId& next = missing.begin()[next_index];
        const TableView& table = tables[next.table];
        const int64_t slot = slots[next.position] - table.first_slot;
        if (next.placed) prefetch_bytes(table.row(slot), row_bytes(table));
      }
      if (!it.placed) continue;
      const TableView& table = tables[it.table];
      const int64_t slot = slots[it.position] - table.first_slot;
      if (initialize) {
        char* const row = table.row(slot);
        const int64_t bytes = row_bytes(table);
        char* const to = streams && StagingBuffer::fits(row, bytes) ? stage.add(row, bytes) : row;
        store_initial_row(table.initial_rows, batch.ids[it.position],
                          static_cast<uint32_t>(table.column_offset), table.dim(), table.rows.type,
                          to);
      }
      float* const state = table.state(slot);
      if (streams && whole_lines(state, table.states.bytes())) {
        stream_zeros(state, table.states.bytes());
      } else {
        std::fill_n(state, table.states.width, 0.0f);
      }
    }
    stage.flush();
    finish_streams();
  });
}

}  // namespace torchrec_hkv::hash_table::cpu
