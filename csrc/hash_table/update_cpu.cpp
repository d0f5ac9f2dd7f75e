// The backward on the CPU: positions are partitioned by slot, each partition is sorted and its runs
// of equal slots are reduced and applied by one thread. Sums run in the order of the batch, so the
// result does not depend on the number of threads.
#include <algorithm>
#include <vector>

#include "common/parallel.h"
#include "hash_table/apply_row_cpu.h"
#include "hash_table/kernels.h"

namespace torchrec_hkv::hash_table::cpu {
namespace {

struct Occurrence {
  int64_t slot;
  uint32_t position;
  uint32_t bag;
};

// Positions in a partition, about: small enough to sort in the second-level cache.
constexpr int64_t kPartitionSize = 4096;
constexpr int kMaxPartitionBits = 12;

struct Partitions {
  std::vector<Occurrence> entries;  // partition by partition
  std::vector<int64_t> starts;      // [partitions + 1]
};

// Multiplicative hashing spreads neighbouring slots over the partitions.
inline uint32_t partition_of(int64_t slot, int bits) {
  return bits == 0 ? 0
                   : static_cast<uint32_t>((static_cast<uint64_t>(slot) * 0x9e3779b97f4a7c15ull) >>
                                           (64 - bits));
}

// A stable counting sort of all positions that have a slot.
Partitions partition_by_slot(const Batch& batch, const int64_t* slots, int threads) {
  int bits = 0;
  while (bits < kMaxPartitionBits && (batch.num_ids >> bits) > kPartitionSize) ++bits;
  const int64_t partitions = int64_t{1} << bits;
  const int64_t bags = batch.num_features * batch.batch_size;
  const int64_t blocks = std::max<int64_t>(1, std::min<int64_t>(threads, bags / 64));
  const auto block_bounds = [&](int64_t block) { return bags * block / blocks; };
  // counts[block][partition], then the place of the block's first entry there.
  std::vector<int64_t> counts(blocks * partitions, 0);
  parallel_for(blocks, 1, threads, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      int64_t* mine = counts.data() + block * partitions;
      const int64_t last = batch.offsets[block_bounds(block + 1)];
      for (int64_t at = batch.offsets[block_bounds(block)]; at < last; ++at) {
        if (slots[at] != kNoSlot) ++mine[partition_of(slots[at], bits)];
      }
    }
  });
  Partitions result;
  result.starts.resize(partitions + 1);
  int64_t total = 0;
  for (int64_t p = 0; p < partitions; ++p) {
    result.starts[p] = total;
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t here = counts[block * partitions + p];
      counts[block * partitions + p] = total;
      total += here;
    }
  }
  result.starts[partitions] = total;
  result.entries.resize(total);
  parallel_for(blocks, 1, threads, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      int64_t* mine = counts.data() + block * partitions;
      for (int64_t bag = block_bounds(block); bag < block_bounds(block + 1); ++bag) {
        for (int64_t at = batch.offsets[bag]; at < batch.offsets[bag + 1]; ++at) {
          if (slots[at] == kNoSlot) continue;
          result.entries[mine[partition_of(slots[at], bits)]++] =
              Occurrence{slots[at], static_cast<uint32_t>(at), static_cast<uint32_t>(bag)};
        }
      }
    }
  });
  return result;
}

}  // namespace

void update_rows(const TableView* tables, const Batch& batch, const int64_t* slots, Pooling pooling,
                 Output<const float> grad, const OptimizerConfig& optimizer,
                 const float* learning_rate, int32_t num_tables, int threads) {
  for (int32_t t = 0; t < num_tables; ++t) ++*tables[t].optimizer_step;
  Partitions parts = partition_by_slot(batch, slots, threads);
  int32_t widest = 0;
  for (int32_t f = 0; f < batch.num_features; ++f) {
    widest = std::max(widest, tables[batch.feature_tables[f]].dim());
  }
  parallel_for(
      static_cast<int64_t>(parts.starts.size()) - 1, 1, threads, [&](int64_t begin, int64_t end) {
        std::vector<float> sum(widest);
        RowUpdater updater(optimizer, *learning_rate, widest);
        for (int64_t p = begin; p < end; ++p) {
          Occurrence* first = parts.entries.data() + parts.starts[p];
          Occurrence* const last = parts.entries.data() + parts.starts[p + 1];
          std::sort(first, last, [](const Occurrence& a, const Occurrence& b) {
            return a.slot != b.slot ? a.slot < b.slot : a.position < b.position;
          });
          while (first != last) {
            const int64_t slot = first->slot;
            const TableView& table = tables[batch.feature_tables[first->bag / batch.batch_size]];
            std::fill_n(sum.data(), table.dim(), 0.0f);
            for (; first != last && first->slot == slot; ++first) {
              const int64_t feature = first->bag / batch.batch_size;
              const int64_t sample = first->bag - feature * batch.batch_size;
              const float* from = grad.data + sample * grad.stride + batch.feature_columns[feature];
              float scale = pooling.weights ? pooling.weights[first->position] : 1.0f;
              if (pooling.mean) {
                scale *= 1.0f / (batch.offsets[first->bag + 1] - batch.offsets[first->bag]);
              }
              for (int32_t c = 0; c < table.dim(); ++c) sum[c] += scale * from[c];
            }
            updater.update(table, slot - table.first_slot, sum.data());
          }
        }
      });
}

}  // namespace torchrec_hkv::hash_table::cpu
