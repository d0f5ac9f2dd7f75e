// The backward on the CPU: positions are grouped by slot, each group is summed and applied by one
// thread. Sums run in the order of the batch, so the result does not depend on the number of
// threads.
#include <algorithm>
#include <vector>

#include "common/parallel.h"
#include "hash_table/apply_row_cpu.h"
#include "hash_table/bucket_cpu.h"
#include "hash_table/group_cpu.h"
#include "hash_table/kernels.h"

namespace torchrec_hkv::hash_table::cpu {
namespace {

// Division of 32-bit numbers by one that does not change, as a multiplication (Lemire, Kaser, Kurz
// 2019).
class Division {
 public:
  explicit Division(int64_t by)
      : inverse_(by > 1 ? UINT64_MAX / static_cast<uint64_t>(by) + 1 : 0) {}

  uint32_t operator()(uint32_t number) const {
    if (inverse_ == 0) return number;
    return static_cast<uint32_t>(static_cast<unsigned __int128>(inverse_) * number >> 64);
  }

 private:
  uint64_t inverse_;  // 2^64 / the divisor, rounded up; 0 for a divisor of 1
};

// Where an occurrence's gradient is, and what multiplies it.
class Gradients {
 public:
  Gradients(const TableView* tables, const Batch& batch, Pooling pooling, Output<const float> grad)
      : tables_(tables), batch_(batch), pooling_(pooling), grad_(grad), divide_(batch.batch_size) {}

  const TableView& table(const Occurrence& it) const {
    return tables_[batch_.feature_tables[feature(it)]];
  }
  const float* from(const Occurrence& it) const {
    const uint32_t sample = it.bag - feature(it) * static_cast<uint32_t>(batch_.batch_size);
    return grad_.data + sample * grad_.stride + batch_.feature_columns[feature(it)];
  }
  float scale(const Occurrence& it) const {
    const float weight = pooling_.weights ? pooling_.weights[it.position] : 1.0f;
    if (!pooling_.mean) return weight;
    return weight * (1.0f / (batch_.offsets[it.bag + 1] - batch_.offsets[it.bag]));
  }

 private:
  uint32_t feature(const Occurrence& it) const { return divide_(it.bag); }

  const TableView* tables_;
  const Batch& batch_;
  Pooling pooling_;
  Output<const float> grad_;
  Division divide_;  // by the batch size
};

// A group's row, state and first gradient.
void prefetch_group(const Gradients& gradients, const SlotGroups& groups,
                    const SlotGroups::Group& group) {
  const Occurrence& first = groups.occurrence(group.first);
  const TableView& table = gradients.table(first);
  const int64_t slot = group.slot - table.first_slot;
  prefetch_bytes(table.row(slot), row_bytes(table));
  prefetch_bytes(table.state(slot), table.states.width * sizeof(float));
  prefetch_bytes(gradients.from(first), table.dim() * sizeof(float));
}

// to = by * from, or to += by * from.
void scale_columns(const float* __restrict__ from, float by, int32_t n, float* __restrict__ to) {
  for (int32_t c = 0; c < n; ++c) to[c] = by * from[c];
}
void add_columns(const float* __restrict__ from, float by, int32_t n, float* __restrict__ to) {
  for (int32_t c = 0; c < n; ++c) to[c] += by * from[c];
}

// The group's gradient: added up in `sum`, or, where it is one that nothing multiplies, itself.
const float* group_gradient(const Gradients& gradients, const SlotGroups& groups,
                            const SlotGroups::Group& group, int32_t dim, float* sum) {
  const Occurrence& first = groups.occurrence(group.first);
  const float* const from = gradients.from(first);
  const float scale = gradients.scale(first);
  uint32_t next = groups.next(group.first);
  if (next == SlotGroups::kEnd && scale == 1.0f) return from;
  scale_columns(from, scale, dim, sum);
  for (; next != SlotGroups::kEnd; next = groups.next(next)) {
    if (const uint32_t then = groups.next(next); then != SlotGroups::kEnd) {
      prefetch_bytes(gradients.from(groups.occurrence(then)), dim * sizeof(float));
    }
    const Occurrence& it = groups.occurrence(next);
    add_columns(gradients.from(it), gradients.scale(it), dim, sum);
  }
  return sum;
}

}  // namespace

void update_rows(const TableView* tables, const Batch& batch, const int64_t* slots, Pooling pooling,
                 Output<const float> grad, const OptimizerConfig& optimizer,
                 const float* learning_rate, int32_t num_tables, int threads) {
  for (int32_t t = 0; t < num_tables; ++t) ++*tables[t].optimizer_step;
  const Partitions partitions(batch, slots, threads);
  const Gradients gradients(tables, batch, pooling, grad);
  int32_t widest = 0;
  for (int32_t f = 0; f < batch.num_features; ++f) {
    widest = std::max(widest, tables[batch.feature_tables[f]].dim());
  }
  parallel_for(partitions.size(), 1, threads, [&](int64_t begin, int64_t end) {
    constexpr size_t kAhead = 4;
    std::vector<float> sum(widest);
    RowUpdater updater(optimizer, *learning_rate, widest);
    SlotGroups groups;
    for (int64_t p = begin; p < end; ++p) {
      groups.assign(partitions, p);
      const std::vector<SlotGroups::Group>& all = groups.groups();
      for (size_t g = 0; g < all.size(); ++g) {
        if (g + kAhead < all.size()) prefetch_group(gradients, groups, all[g + kAhead]);
        const TableView& table = gradients.table(groups.occurrence(all[g].first));
        const float* const grad =
            group_gradient(gradients, groups, all[g], table.dim(), sum.data());
        updater.update(table, all[g].slot - table.first_slot, grad);
      }
    }
  });
}

}  // namespace torchrec_hkv::hash_table::cpu
