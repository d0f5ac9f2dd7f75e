// Records that two replicas exchange, and their merging, on the CPU.
#include <algorithm>
#include <cstring>
#include <vector>

#include "common/elements_cpu.h"
#include "common/initial_rows_cpu.h"
#include "common/parallel.h"
#include "hash_table/cpu/bucket.h"
#include "hash_table/slot_values.h"
#include "hash_table/sync_kernels.h"

namespace torchrec_hkv::hash_table::cpu {
namespace {

constexpr int64_t kAhead = 48;  // entries
constexpr int64_t kGrain = 512;

using Metadata = ReplicaRecords::Metadata;

Metadata metadata_of(const ReplicaRecords& records, const float* record) {
  Metadata metadata;
  std::memcpy(&metadata, record + records.columns, sizeof(metadata));
  return metadata;
}

void set_metadata(const ReplicaRecords& records, float* record, const Metadata& metadata) {
  std::memcpy(record + records.columns, &metadata, sizeof(metadata));
}

// Addresses of an entry's row and state; state_bytes is 0 if states are not wanted.
struct RecordAddresses {
  const TableView& table;
  const SlotVectors rows, states;
  const int64_t row_bytes, state_bytes;

  RecordAddresses(const TableView& table, bool with_states)
      : table(table),
        rows(table.rows),
        states(table.states),
        row_bytes(table.rows.bytes()),
        state_bytes(with_states ? table.states.bytes() : 0) {}

  template <bool kRows = true>
  void prefetch(int64_t slot) const {
    if (slot == kNoSlot) return;
    if (kRows) prefetch_to_l2(rows.at(slot), row_bytes);
    if (state_bytes > 0) prefetch_to_l2(states.at(slot), state_bytes);
    for_touched(table, slot, [](const void* place) { prefetch_to_l2(place, 1); });
  }
};

// Copies floats inline: for few, a call of memcpy takes as long as the copy.
void copy_floats(const void* source, int64_t n, float* to) {
  const auto* const from = static_cast<const float*>(source);
  int64_t c = 0;
#ifdef __AVX2__
  for (; c + 8 <= n; c += 8) _mm256_storeu_ps(to + c, _mm256_loadu_ps(from + c));
#endif
  for (; c < n; ++c) to[c] = from[c];
}

// The sum of two records' columns, or of these and a third's, times a factor. `to` may be `a`.
void mean_of(const float* a, const float* b, int64_t n, float factor, float* to) {
  for (int64_t c = 0; c < n; ++c) to[c] = (a[c] + b[c]) * factor;
}

void mean_of(const float* a, const float* b, const float* third, int64_t n, float factor,
             float* to) {
  for (int64_t c = 0; c < n; ++c) to[c] = (a[c] + b[c] + third[c]) * factor;
}

// Whether rows fill whole cache lines, so that non-temporal stores can write them. These do not
// read the row from memory first.
bool writes_lines([[maybe_unused]] const TableView& table) {
#ifdef __AVX2__
  return table.rows.type == RowType::kFloat32 && table.rows.bytes() % kCacheLine == 0 &&
         reinterpret_cast<uintptr_t>(table.rows.backing.get()) % kCacheLine == 0;
#else
  return false;
#endif
}

// The first mean_of, for a table for which writes_lines is true.
void stream_mean_of(const float* a, const float* b, int64_t n, float factor, float* to) {
#ifdef __AVX2__
  const __m256 times = _mm256_set1_ps(factor);
  for (int64_t c = 0; c < n; c += 8) {
    const __m256 sum = _mm256_add_ps(_mm256_loadu_ps(a + c), _mm256_loadu_ps(b + c));
    _mm256_stream_ps(to + c, _mm256_mul_ps(sum, times));
  }
#else
  mean_of(a, b, n, factor, to);
#endif
}

// Orders non-temporal stores before the thread's later stores.
void end_streams() {
#ifdef __AVX2__
  _mm_sfence();
#endif
}

}  // namespace

void pack_records(const TableView& table, const int64_t* slots, const bool* is_new, int64_t n,
                  const ReplicaRecords& out, uint64_t* scores, int threads) {
  const RecordAddresses addresses(table, out.states);
  const int32_t dim = table.dim();
  const RowType type = table.rows.type;
  parallel_for(n, kGrain, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < std::min(end, begin + kAhead); ++i) addresses.prefetch(slots[i]);
    for (int64_t i = begin; i < end; ++i) {
      if (i + kAhead < end) addresses.prefetch(slots[i + kAhead]);
      const int64_t slot = slots[i];
      float* const record = out.at(i);
      if (slot == kNoSlot) {
        std::memset(record, 0, out.stride() * sizeof(float));
        if (scores != nullptr) scores[i] = 0;
        continue;
      }
      if (type == RowType::kFloat32) {
        copy_floats(addresses.rows.at(slot), dim, record);
      } else {
        widen_row(type, addresses.rows.at(slot), 0, dim, record);
      }
      if (addresses.state_bytes > 0) {
        copy_floats(addresses.states.at(slot), out.columns - dim, record + dim);
      }
      const uint32_t was = is_new[i] ? 0 : ReplicaRecords::kWasPresent;
      set_metadata(out, record, {step_of(table, slot), ReplicaRecords::kIsPresent | was});
      if (scores != nullptr) scores[i] = score_of(table, slot);
    }
  });
}

void merge_records(const TableView& table, const MergedEntries& entries,
                   const ReplicaRecords& own_records, const float* other_records, int threads) {
  const RecordAddresses addresses(table, own_records.states);
  const int32_t dim = table.dim();
  const RowType type = table.rows.type;
  const int64_t* const slots = entries.slots;
  const int64_t highest = entries.highest_column;
  const bool direct = type == RowType::kFloat32 && highest < 0;
  const bool streams = direct && writes_lines(table);
  const auto touch = [&](int64_t slot, uint32_t step, int64_t i) {
    set_step_and_score(table, slot, step, entries.scores != nullptr ? &entries.scores[i] : nullptr);
  };
  const auto prefetch = [&](int64_t slot) {
    if (streams) {
      addresses.prefetch</*kRows=*/false>(slot);
    } else {
      addresses.prefetch(slot);
    }
  };
  parallel_for(entries.n, kGrain, threads, [&](int64_t begin, int64_t end) {
    std::vector<float> initial(own_records.columns);  // a new id's state is 0
    for (int64_t i = begin; i < std::min(end, begin + kAhead); ++i) prefetch(slots[i]);
    for (int64_t i = begin; i < end; ++i) {
      if (i + kAhead < end) prefetch(slots[i + kAhead]);
      float* const a = own_records.at(i);
      const float* const b = other_records + i * own_records.stride();
      const Metadata mine = metadata_of(own_records, a), other = metadata_of(own_records, b);
      const uint32_t both = mine.flags & other.flags, either = mine.flags | other.flags;
      const bool is_new = !entries.known[i] && (either & ReplicaRecords::kWasPresent) == 0;
      const bool of_both = (both & ReplicaRecords::kIsPresent) != 0;
      const float factor = of_both || is_new ? 0.5f : 1.0f;
      const float most = highest >= 0 ? std::max(a[highest], b[highest]) : 0.0f;
      const Metadata metadata = {std::max(mine.last_step, other.last_step), mine.flags};
      const bool here = slots[i] != kNoSlot;
      if (is_new && !of_both) {
        initial_row(table.initial_rows, entries.ids[i], static_cast<uint32_t>(table.column_offset),
                    dim, initial.data());
        mean_of(a, b, initial.data(), own_records.columns, factor, a);
      } else if (here && direct) {
        // Bypasses the record, because nothing reads it.
        float* const row = reinterpret_cast<float*>(addresses.rows.at(slots[i]));
        if (streams) {
          stream_mean_of(a, b, dim, factor, row);
        } else {
          mean_of(a, b, dim, factor, row);
        }
        if (addresses.state_bytes > 0) {
          mean_of(a + dim, b + dim, own_records.columns - dim, factor,
                  reinterpret_cast<float*>(addresses.states.at(slots[i])));
        }
        touch(slots[i], metadata.last_step, i);
        continue;
      } else {
        mean_of(a, b, own_records.columns, factor, a);
      }
      if (highest >= 0) a[highest] = most;
      set_metadata(own_records, a, metadata);
      if (!here) continue;
      if (type == RowType::kFloat32) {
        std::memcpy(addresses.rows.at(slots[i]), a, addresses.row_bytes);
      } else {
        narrow_row(type, a, dim, addresses.rows.at(slots[i]));
      }
      if (addresses.state_bytes > 0) {
        std::memcpy(addresses.states.at(slots[i]), a + dim, addresses.state_bytes);
      }
      touch(slots[i], metadata.last_step, i);
    }
    end_streams();
  });
}

}  // namespace torchrec_hkv::hash_table::cpu
