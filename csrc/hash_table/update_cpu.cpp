// The backward on the CPU: positions are grouped by slot, each group is summed and applied by one
// thread. Sums run in the order of the batch, so the result does not depend on the number of
// threads.
#include <algorithm>
#include <vector>

#include "common/elements_cpu.h"
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
  Gradients(const TableView* tables, const Batch& batch, Pooling pooling, Output<const char> grad)
      : tables_(tables), batch_(batch), pooling_(pooling), grad_(grad), divide_(batch.batch_size) {}

  const TableView& table(const Occurrence& it) const {
    return tables_[batch_.feature_tables[feature(it)]];
  }
  const char* from(const Occurrence& it) const {
    const int32_t its = feature(it);
    return grad_.at(batch_.output_of(its, it.bag - batch_.first_bag(its), grad_.stride));
  }
  float scale(const Occurrence& it) const {
    const float weight = pooling_.weights ? pooling_.weights[it.position] : 1.0f;
    if (!pooling_.mean) return weight;
    return weight * (1.0f / (batch_.offsets[it.bag + 1] - batch_.offsets[it.bag]));
  }

 private:
  int32_t feature(const Occurrence& it) const {
    return batch_.ragged != nullptr ? batch_.feature_of_bag(it.bag)
                                    : static_cast<int32_t>(divide_(it.bag));
  }

  const TableView* tables_;
  const Batch& batch_;
  Pooling pooling_;
  Output<const char> grad_;
  Division divide_;  // by the batch size
};

// A group's row, state and first gradient.
template <RowType kType>
void prefetch_group(const Gradients& gradients, const SlotGroups& groups,
                    const SlotGroups::Group& group) {
  const Occurrence& first = groups.occurrence(group.first);
  const TableView& table = gradients.table(first);
  const int64_t slot = group.slot - table.first_slot;
  prefetch_bytes(table.row(slot), row_bytes(table));
  prefetch_bytes(table.state(slot), table.states.width * sizeof(float));
  prefetch_bytes(gradients.from(first), table.dim() * element_size(kType));
}

// to = by * from, or to += by * from.
void scale_columns(const float* __restrict__ from, float by, int32_t n, float* __restrict__ to) {
  for (int32_t c = 0; c < n; ++c) to[c] = by * from[c];
}
void add_columns(const float* __restrict__ from, float by, int32_t n, float* __restrict__ to) {
  for (int32_t c = 0; c < n; ++c) to[c] += by * from[c];
}

// Calls visit(floats, n, first column) for the columns of a gradient, those of 16 bits widened.
template <RowType kType, typename Visit>
void for_columns(const char* from, int32_t n, const Visit& visit) {
  if constexpr (kType == RowType::kFloat32) {
    visit(reinterpret_cast<const float*>(from), n, 0);
  } else {
    constexpr int32_t kMost = 64;
    float widened[kMost];
    for (int32_t c = 0; c < n; c += kMost) {
      const int32_t count = std::min(kMost, n - c);
      widen_elements(kType, from + c * element_size(kType), count, widened);
      visit(widened, count, c);
    }
  }
}

// The group's gradient: added up in `sum`, or, where it is one that nothing multiplies, itself.
template <RowType kType>
const float* group_gradient(const Gradients& gradients, const SlotGroups& groups,
                            const SlotGroups::Group& group, int32_t dim, float* sum) {
  const Occurrence& first = groups.occurrence(group.first);
  const char* const from = gradients.from(first);
  const float scale = gradients.scale(first);
  uint32_t next = groups.next(group.first);
  if (kType == RowType::kFloat32 && next == SlotGroups::kEnd && scale == 1.0f) {
    return reinterpret_cast<const float*>(from);
  }
  for_columns<kType>(from, dim, [&](const float* columns, int32_t n, int32_t first_column) {
    scale_columns(columns, scale, n, sum + first_column);
  });
  for (; next != SlotGroups::kEnd; next = groups.next(next)) {
    if (const uint32_t then = groups.next(next); then != SlotGroups::kEnd) {
      prefetch_bytes(gradients.from(groups.occurrence(then)), dim * element_size(kType));
    }
    const Occurrence& it = groups.occurrence(next);
    const float by = gradients.scale(it);
    for_columns<kType>(gradients.from(it), dim, [&](const float* columns, int32_t n, int32_t c) {
      add_columns(columns, by, n, sum + c);
    });
  }
  return sum;
}

template <RowType kType>
void update_all(const TableView* tables, const Batch& batch, const Partitions& partitions,
                const Gradients& gradients, const OptimizerConfig& optimizer, float learning_rate,
                int threads) {
  int32_t widest = 0;
  for (int32_t f = 0; f < batch.num_features; ++f) {
    widest = std::max(widest, tables[batch.feature_tables[f]].dim());
  }
  parallel_for(partitions.size(), 1, threads, [&](int64_t begin, int64_t end) {
    constexpr size_t kAhead = 4;
    std::vector<float> sum(widest);
    RowUpdater updater(optimizer, learning_rate, widest);
    SlotGroups groups;
    for (int64_t p = begin; p < end; ++p) {
      groups.assign(partitions, p);
      const std::vector<SlotGroups::Group>& all = groups.groups();
      for (size_t g = 0; g < all.size(); ++g) {
        if (g + kAhead < all.size()) prefetch_group<kType>(gradients, groups, all[g + kAhead]);
        const TableView& table = gradients.table(groups.occurrence(all[g].first));
        const float* const grad =
            group_gradient<kType>(gradients, groups, all[g], table.dim(), sum.data());
        updater.update(table, all[g].slot - table.first_slot, grad);
      }
    }
  });
}

}  // namespace

void update_rows(const TableView* tables, const Batch& batch, const int64_t* slots, Pooling pooling,
                 Output<const char> grad, const OptimizerConfig& optimizer,
                 const float* learning_rate, int32_t num_tables, int threads) {
  for (int32_t t = 0; t < num_tables; ++t) ++*tables[t].optimizer_step;
  const Partitions partitions(batch, slots, threads);
  const Gradients gradients(tables, batch, pooling, grad);
  const auto update = grad.type == RowType::kFloat32   ? update_all<RowType::kFloat32>
                      : grad.type == RowType::kFloat16 ? update_all<RowType::kFloat16>
                                                       : update_all<RowType::kBFloat16>;
  update(tables, batch, partitions, gradients, optimizer, *learning_rate, threads);
}

}  // namespace torchrec_hkv::hash_table::cpu
