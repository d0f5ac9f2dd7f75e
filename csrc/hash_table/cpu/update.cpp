// The backward on the CPU. Positions are grouped by slot. Gradients of a row that stands at several
// positions are summed in the order of the batch, by one thread, so the result does not depend on
// the number of threads; those of many positions in pieces (gradients.h). Rows that stand at one
// position are updated in the order of the batch, where those of a bag share its gradient.
#include <algorithm>
#include <vector>

#include "common/elements_cpu.h"
#include "common/parallel.h"
#include "hash_table/cpu/apply_row.h"
#include "hash_table/cpu/bucket.h"
#include "hash_table/cpu/gradients.h"
#include "hash_table/cpu/group.h"
#include "hash_table/kernels.h"

namespace torchrec_hkv::hash_table::cpu {
namespace {

// One occurrence's gradient: itself where nothing multiplies it, else in `scaled`.
template <RowType kType>
const float* scaled_gradient(const char* from, float scale, int32_t dim, float* scaled) {
  if (kType == RowType::kFloat32 && scale == 1.0f) return reinterpret_cast<const float*>(from);
  for_vectors(dim, [&]<typename Vector, int kVectors>(int32_t c) {
    for (int v = 0; v < kVectors; ++v) {
      const int32_t at = c + v * kColumnsOf<Vector>;
      const Vector columns = scale * load_columns<kType, Vector>(from + at * element_size(kType));
      store_columns<RowType::kFloat32>(columns, reinterpret_cast<char*>(scaled + at));
    }
  });
  return scaled;
}

// Rows that are on their way from memory.
constexpr int64_t kRowsAhead = 12;

// Rows of one table that are updated one after the other: slot(i) is that of the i-th of n.
template <typename Slot>
class RowsAhead {
 public:
  RowsAhead(const TableView& table, int64_t n, const Slot& slot)
      : rows_(table.rows), states_(table.states), n_(n), slot_(slot) {
    for (int64_t i = 0; i < kRowsAhead; ++i) prefetch(i);
  }

  // To be called before the i-th is updated.
  void before(int64_t i) const { prefetch(i + kRowsAhead); }

 private:
  void prefetch(int64_t i) const {
    if (i >= n_) return;
    const int64_t slot = slot_(i);
    rows_.prefetch(slot);
    states_.prefetch(slot);
  }

  const HomeVectors rows_, states_;
  const int64_t n_;
  const Slot slot_;
};

// A batch's update.
template <RowType kType>
class Update {
 public:
  Update(const TableView* tables, const Batch& batch, const int64_t* slots,
         const Gradients& gradients, const OptimizerConfig& optimizer, float learning_rate)
      : tables_(tables),
        batch_(batch),
        slots_(slots),
        gradients_(gradients),
        optimizer_(optimizer),
        learning_rate_(learning_rate),
        alone_(batch.num_ids) {
    for (int32_t f = 0; f < batch.num_features; ++f) {
      widest_ = std::max(widest_, tables[batch.feature_tables[f]].dim());
    }
  }

  // Updates the rows that stand at several positions, and marks positions whose row stands nowhere
  // else.
  void repeated(const Partitions& partitions, int threads) {
    parallel_for(partitions.size(), 1, threads, [&](int64_t begin, int64_t end) {
      SlotGroups groups;
      std::vector<float> sum(widest_);
      Reused<float> hot_sums;
      RowUpdater updater(optimizer_, learning_rate_, widest_);
      for (int64_t p = begin; p < end; ++p) {
        const TableView& table = tables_[partitions[p].table];
        groups.assign(partitions, partitions[p], gradients_, alone_.data());
        const std::vector<SlotGroups::Repeated>& all = groups.repeated();
        const auto slot = [&](int64_t i) { return all[i].slot - table.first_slot; };
        const auto n = static_cast<int64_t>(all.size());
        const int64_t hot = sum_hot(table.dim(), groups, hot_sums);
        const RowsAhead rows(table, n, slot);
        for (int64_t i = 0; i < n; ++i) {
          rows.before(i);
          const float* of_row = hot_sums.get() + i * table.dim();
          if (i >= hot) {
            sum_gradients<kType>(of(groups, all[i]), 0, table.dim(), sum.data());
            of_row = sum.data();
          }
          updater.update(table, slot(i), of_row);
        }
      }
    });
  }

  // Updates the rows of marked positions.
  void alone(int threads) {
    parallel_for(batch_.num_bags, 64, threads, [&](int64_t begin, int64_t end) {
      std::vector<int64_t> positions, slots;
      std::vector<float> scaled(widest_);
      RowUpdater updater(optimizer_, learning_rate_, widest_);
      while (begin < end) {
        const int32_t feature = batch_.feature_of_bag(begin);
        const int64_t stop = std::min(end, batch_.first_bag(feature + 1));
        const TableView& table = tables_[batch_.feature_tables[feature]];
        marked(table, batch_.offsets[begin], batch_.offsets[stop], positions, slots);
        const RowsAhead rows(table, static_cast<int64_t>(slots.size()),
                             [&](int64_t i) { return slots[i]; });
        int64_t bag = begin;
        for (size_t i = 0; i < slots.size();) {
          while (positions[i] >= batch_.offsets[bag + 1]) ++bag;
          const float scale = gradients_.scale(positions[i], bag);
          const int64_t same = of_one_gradient(positions, i, bag, scale);
          const float* const grad = scaled_gradient<kType>(gradients_.from(feature, bag), scale,
                                                           table.dim(), scaled.data());
          updater.update(table, slots.data() + i, same, grad,
                         [&](int64_t k) { rows.before(i + k); });
          i += same;
        }
        begin = stop;
      }
    });
  }

 private:
  RowGradients of(const SlotGroups& groups, const SlotGroups::Repeated& row) const {
    const float* const scales = gradients_.scaled() ? groups.scales() + row.first : nullptr;
    return RowGradients{gradients_.data(), groups.places() + row.first, scales, row.count};
  }

  // Sums of the rows that stand at many positions, [rows][dim], where rows are wide: some columns
  // of all such rows, then the next ones, so that gradients, which these rows have in common, come
  // from the cache. Returns how many they are; they are the first ones.
  int64_t sum_hot(int32_t dim, SlotGroups& groups, Reused<float>& sums) const {
    constexpr uint32_t kHot = 16;
    constexpr int32_t kTile = 128;
    if (dim <= kTile) return 0;
    const int64_t n = groups.put_first(kHot);
    float* const to = sums.resize(n * dim);
    for (int32_t c = 0; c < dim; c += kTile) {
      for (int64_t i = 0; i < n; ++i) {
        sum_gradients<kType>(of(groups, groups.repeated()[i]), c, std::min(dim - c, kTile),
                             to + i * dim + c);
      }
    }
    return n;
  }

  // Lists the marked ones of positions [first, last) and their slots in the table.
  void marked(const TableView& table, int64_t first, int64_t last, std::vector<int64_t>& positions,
              std::vector<int64_t>& slots) const {
    positions.resize(last - first + 1);
    slots.resize(last - first + 1);
    int64_t n = 0;  // no branch: which ones are marked can't be foreseen
    for (int64_t at = first; at < last; ++at) {
      positions[n] = at;
      slots[n] = slots_[at] - table.first_slot;
      n += alone_[at];
    }
    positions.resize(n);
    slots.resize(n);
  }

  // How many positions from the i-th on are in the bag and multiply its gradient by the same.
  int64_t of_one_gradient(const std::vector<int64_t>& positions, size_t i, int64_t bag,
                          float scale) const {
    const int64_t end = batch_.offsets[bag + 1];
    size_t next = i + 1;
    while (next < positions.size() && positions[next] < end &&
           gradients_.scale(positions[next], bag) == scale) {
      ++next;
    }
    return static_cast<int64_t>(next - i);
  }

  const TableView* tables_;
  const Batch& batch_;
  const int64_t* slots_;
  const Gradients& gradients_;
  const OptimizerConfig& optimizer_;
  const float learning_rate_;
  int32_t widest_ = 0;
  std::vector<uint8_t> alone_;  // by position
};

template <RowType kType>
void update_all(const TableView* tables, int32_t num_tables, const Batch& batch,
                const int64_t* slots, const Gradients& gradients, const OptimizerConfig& optimizer,
                float learning_rate, int threads) {
  Update<kType> update(tables, batch, slots, gradients, optimizer, learning_rate);
  update.repeated(Partitions(num_tables, batch, slots, threads), threads);
  update.alone(threads);
}

}  // namespace

void update_rows(const TableView* tables, const Batch& batch, const int64_t* slots, Pooling pooling,
                 Output<const char> grad, const OptimizerConfig& optimizer,
                 const float* learning_rate, int32_t num_tables, int threads) {
  for (int32_t t = 0; t < num_tables; ++t) ++*tables[t].optimizer_step;
  const Gradients gradients(batch, pooling, grad);
  const auto update = grad.type == RowType::kFloat32   ? update_all<RowType::kFloat32>
                      : grad.type == RowType::kFloat16 ? update_all<RowType::kFloat16>
                                                       : update_all<RowType::kBFloat16>;
  update(tables, num_tables, batch, slots, gradients, optimizer, *learning_rate, threads);
}

}  // namespace torchrec_hkv::hash_table::cpu
