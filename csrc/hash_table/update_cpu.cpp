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

// Where an occurrence's gradient is, and what multiplies it.
class Gradients {
 public:
  Gradients(const TableView* tables, const Batch& batch, Pooling pooling, Output<const float> grad)
      : tables_(tables), batch_(batch), pooling_(pooling), grad_(grad) {}

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
  uint32_t feature(const Occurrence& it) const {
    return it.bag / static_cast<uint32_t>(batch_.batch_size);
  }

  const TableView* tables_;
  const Batch& batch_;
  Pooling pooling_;
  Output<const float> grad_;
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

void sum_gradients(const Gradients& gradients, const SlotGroups& groups,
                   const SlotGroups::Group& group, int32_t dim, float* sum) {
  std::fill_n(sum, dim, 0.0f);
  for (uint32_t i = group.first; i != SlotGroups::kEnd; i = groups.next(i)) {
    const uint32_t next = groups.next(i);
    if (next != SlotGroups::kEnd) {
      prefetch_bytes(gradients.from(groups.occurrence(next)), dim * sizeof(float));
    }
    const float* from = gradients.from(groups.occurrence(i));
    const float scale = gradients.scale(groups.occurrence(i));
    for (int32_t c = 0; c < dim; ++c) sum[c] += scale * from[c];
  }
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
        sum_gradients(gradients, groups, all[g], table.dim(), sum.data());
        updater.update(table, all[g].slot - table.first_slot, sum.data());
      }
    }
  });
}

}  // namespace torchrec_hkv::hash_table::cpu
