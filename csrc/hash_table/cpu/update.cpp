// The backward on the CPU. Positions are grouped by slot. One thread sums the gradients of a row
// with several positions in the order of the batch (in pieces if they are many, see gradients.h),
// so the result does not depend on the number of threads. Rows with very many positions are summed
// by all threads after the others (long_rows.h). Rows with one position are updated in the
// order of the batch, because the rows of a bag share its gradient.
#include <algorithm>
#include <atomic>
#include <iterator>
#include <mutex>
#include <utility>
#include <vector>

#include "common/elements_cpu.h"
#include "common/parallel.h"
#include "hash_table/cpu/apply_row.h"
#include "hash_table/cpu/bucket.h"
#include "hash_table/cpu/gradients.h"
#include "hash_table/cpu/long_rows.h"
#include "hash_table/cpu/slot_groups.h"
#include "hash_table/kernels.h"

namespace torchrec_hkv::hash_table::cpu {
namespace {

// The gradient of one occurrence; with a scale, computed in `scaled`.
template <RowType kType>
const float* scaled_gradient(const char* from, float scale, int32_t dim, float* scaled) {
  if (kType == RowType::kFloat32 && scale == 1.0f) return reinterpret_cast<const float*>(from);
  for_vectors(dim, [&]<typename Vector, int kVectors>(int32_t c) {
    for (int v = 0; v < kVectors; ++v) {
      const int32_t at = c + v * kColumnsOf<Vector>;
      Vector columns;
      load_columns<kType>(from + at * element_size(kType), columns);
      columns *= scale;
      store_columns<RowType::kFloat32>(columns, reinterpret_cast<char*>(scaled + at));
    }
  });
  return scaled;
}

// Number of rows that are prefetched ahead.
constexpr int64_t kRowsAhead = 12;
// Number of gradients that are prefetched ahead, because those of a large batch do not fit the
// cache.
constexpr int64_t kGradientsAhead = 12;

// Prefetches the rows of one table that are updated one after the other. slot(i): of the i-th of n.
template <typename Slot>
class RowPrefetcher {
 public:
  RowPrefetcher(const TableView& table, const OptimizerConfig& optimizer, int64_t n,
                const Slot& slot)
      : rows_(table.rows),
        states_(table.states),
        ids_(rounds_by_chance(optimizer, table.rows.type) ? table.ids : nullptr),
        n_(n),
        slot_(slot) {
    for (int64_t i = 0; i < kRowsAhead; ++i) prefetch(i);
  }

  // Call it before the update of the i-th row.
  void before(int64_t i) const { prefetch(i + kRowsAhead); }

 private:
  void prefetch(int64_t i) const {
    if (i >= n_) return;
    const int64_t slot = slot_(i);
    rows_.prefetch_to_write(slot);
    states_.prefetch_to_write(slot);
    if (ids_ != nullptr) prefetch_bytes(ids_ + slot, sizeof(int64_t));
  }

  const SlotVectors rows_, states_;
  const int64_t* const ids_;  // if rows are rounded stochastically, which depends on the id
  const int64_t n_;
  const Slot slot_;
};

// The update of a batch.
template <RowType kType>
class BatchUpdate {
 public:
  BatchUpdate(const TableView* tables, int32_t num_tables, const Batch& batch, const int64_t* slots,
              const Gradients& gradients, const OptimizerConfig& optimizer, float learning_rate,
              int threads)
      : tables_(tables),
        batch_(batch),
        slots_(slots),
        gradients_(gradients),
        optimizer_(optimizer),
        learning_rate_(learning_rate),
        threads_(threads),
        partitions_(tables, num_tables, batch, slots, threads),
        is_unique_(partitions_.partitioned() > 0 ? batch.num_ids : 0) {
    for (int32_t f = 0; f < batch.num_features; ++f) {
      widest_ = std::max(widest_, tables[batch.feature_tables[f]].dim());
    }
  }

  void run() {
    // The largest partitions come first, so that the last ones balance the threads.
    std::atomic<int64_t> next = 0;
    const int64_t workers = std::min<int64_t>(threads_, partitions_.size());
    std::vector<LongRow> long_rows;
    std::mutex lock;  // of long_rows
    parallel_for(workers, 1, threads_, [&](int64_t, int64_t) {
      Worker worker(*this);
      for (int64_t p; (p = next.fetch_add(1, std::memory_order_relaxed)) < partitions_.size();) {
        update_partition(partitions_[p], worker);
      }
      const std::scoped_lock held(lock);
      std::move(worker.long_rows.begin(), worker.long_rows.end(), std::back_inserter(long_rows));
    });
    update_long(long_rows);
    if (partitions_.partitioned() > 0) update_partitioned();
  }

 private:
  // Buffers that a thread reuses for its partitions.
  struct Worker {
    explicit Worker(const BatchUpdate& update)
        : buffer(update.widest_),
          totals(update.widest_),
          updater(update.optimizer_, update.learning_rate_, update.widest_) {}

    SlotGroups groups;
    UniqueRows unique;
    std::vector<LongRow> long_rows;  // which are left to update_long
    std::vector<float> buffer;
    PieceTotals totals;
    RowUpdater updater;
  };

  // Updates the rows of one partition. If the table has several partitions, unique rows are only
  // marked; update_partitioned updates them.
  void update_partition(const Partition& partition, Worker& worker) {
    const TableView& table = tables_[partition.table];
    SlotGroups& groups = worker.groups;
    groups.assign(partitions_, partition, gradients_, table.first_slot, worker.unique);
    update_repeated(partition.table, groups, worker);
    if (partition.bits > 0) {
      for (int64_t i = 0; i < worker.unique.n; ++i)
        is_unique_[worker.unique.positions.get()[i]] = 1;
      return;
    }
    int64_t first = 0;
    partitions_.for_features(partition, [&](int32_t feature) {
      const int64_t end = batch_.feature_start(feature + 1);
      int64_t last = first;
      while (last < worker.unique.n && worker.unique.positions.get()[last] < end) ++last;
      update_unique(table, feature, batch_.first_bag(feature), first, last, worker);
      first = last;
    });
  }

  void update_repeated(int32_t number, const SlotGroups& groups, Worker& worker) const {
    const TableView& table = tables_[number];
    const std::vector<SlotGroups::Repeated>& all = groups.repeated();
    const auto slot = [&](int64_t i) { return all[i].slot - table.first_slot; };
    const RowPrefetcher rows(table, optimizer_, static_cast<int64_t>(all.size()), slot);
    const int64_t last = all.empty() ? 0 : int64_t{all.back().first} + all.back().count;
    int64_t prefetched = 0;  // number of prefetched gradients
    for (size_t i = 0; i < all.size(); ++i) {
      rows.before(i);
      // Gradients are numbered in the order of these rows. In a long sum the processor prefetches.
      const int64_t end = int64_t{all[i].first} + all[i].count;
      if (all[i].count > kGradientsAhead) prefetched = std::max(prefetched, end);
      if (is_long(all[i].count, table.dim(), threads_)) {
        worker.long_rows.push_back(long_row(number, slot(i), groups, all[i]));
        continue;
      }
      const int64_t until = std::min(last, end + kGradientsAhead);
      for (; prefetched < until; ++prefetched)
        prefetch_gradient(table, groups.offsets()[prefetched]);
      const float* const scales = gradients_.scaled() ? groups.scales() + all[i].first : nullptr;
      const int64_t* const offsets = groups.offsets() + all[i].first;
      const RowGradients gradients{gradients_.data(), offsets, scales, all[i].count};
      sum_gradients<kType>(gradients, table.dim(), worker.totals, worker.buffer.data());
      worker.updater.update(table, slot(i), worker.buffer.data());
    }
  }

  LongRow long_row(int32_t table, int64_t slot, const SlotGroups& groups,
                   const SlotGroups::Repeated& row) const {
    const int64_t* const offsets = groups.offsets() + row.first;
    LongRow copy{table, slot, {offsets, offsets + row.count}, {}};
    if (gradients_.scaled()) {
      const float* const scales = groups.scales() + row.first;
      copy.scales.assign(scales, scales + row.count);
    }
    return copy;
  }

  void update_long(const std::vector<LongRow>& rows) const {
    if (rows.empty()) return;
    Worker worker(*this);
    for (const LongRow& row : rows) {
      const TableView& table = tables_[row.table];
      const PieceSums<kType> pieces(row, table.dim(), gradients_.data(), threads_);
      pieces.total(worker.totals, worker.buffer.data());
      worker.updater.update(table, row.slot, worker.buffer.data());
    }
  }

  // Updates the unique rows of tables with several partitions, which update_partition has marked.
  // It goes in the order of the batch, because the rows of a bag share its gradient.
  void update_partitioned() {
    parallel_for(batch_.num_bags, 64, threads_, [&](int64_t begin, int64_t end) {
      Worker worker(*this);
      while (begin < end) {
        const int32_t feature = batch_.feature_of_bag(begin);
        const int64_t stop = std::min(end, batch_.first_bag(feature + 1));
        const int32_t table = batch_.feature_tables[feature];
        if (partitions_.partitioned(table)) {
          list_marked(tables_[table], batch_.offsets[begin], batch_.offsets[stop], worker.unique);
          update_unique(tables_[table], feature, begin, 0, worker.unique.n, worker);
        }
        begin = stop;
      }
    });
  }

  // Lists the marked positions of [first, last).
  void list_marked(const TableView& table, int64_t first, int64_t last, UniqueRows& unique) const {
    uint32_t* const positions = unique.positions.resize(last - first + 1);
    int64_t* const slots = unique.slots.resize(last - first + 1);
    int64_t n = 0;  // no branch, because marks are unpredictable
    for (int64_t at = first; at < last; ++at) {
      positions[n] = static_cast<uint32_t>(at);
      slots[n] = slots_[at] - table.first_slot;
      n += is_unique_[at];
    }
    unique.n = n;
  }

  // Updates the listed rows [first, last), all of one feature. bag: where their search begins.
  void update_unique(const TableView& table, int32_t feature, int64_t bag, int64_t first,
                     int64_t last, Worker& worker) const {
    const int64_t* const slots = worker.unique.slots.get() + first;
    const uint32_t* const positions = worker.unique.positions.get() + first;
    const int64_t n = last - first;
    const RowPrefetcher rows(table, optimizer_, n, [&](int64_t i) { return slots[i]; });
    int64_t prefetched = 0,
            prefetched_bag = bag;  // the next row whose gradient is prefetched, and its bag
    for (int64_t i = 0; i < n;) {
      while (positions[i] >= batch_.offsets[bag + 1]) ++bag;
      for (const int64_t until = std::min(n, i + kGradientsAhead); prefetched < until;
           ++prefetched) {
        if (positions[prefetched] < batch_.offsets[prefetched_bag]) continue;  // of the bag before
        while (positions[prefetched] >= batch_.offsets[prefetched_bag + 1]) ++prefetched_bag;
        prefetch_gradient(table, gradients_.offset(feature, prefetched_bag));
        ++prefetched_bag;
      }
      const float scale = gradients_.scale(positions[i], bag);
      const int64_t same = of_one_gradient(positions + i, n - i, bag, scale);
      const float* const grad = scaled_gradient<kType>(gradients_.from(feature, bag), scale,
                                                       table.dim(), worker.buffer.data());
      worker.updater.update(table, slots + i, same, grad, [&](int64_t k) { rows.before(i + k); });
      i += same;
    }
  }

  // Prefetches the first lines of a gradient; the processor prefetches later ones.
  void prefetch_gradient(const TableView& table, int64_t offset) const {
    constexpr int64_t kMaxBytes = 16 * kCacheLine;
    const char* const from = gradients_.data() + offset * element_size(kType);
    prefetch_bytes(from, std::min<int64_t>(kMaxBytes, table.dim() * element_size(kType)));
  }

  // How many of n positions, from the first on, are in the bag and have the same scale.
  int64_t of_one_gradient(const uint32_t* positions, int64_t n, int64_t bag, float scale) const {
    const int64_t end = batch_.offsets[bag + 1];
    int64_t next = 1;
    while (next < n && positions[next] < end && gradients_.scale(positions[next], bag) == scale) {
      ++next;
    }
    return next;
  }

  const TableView* tables_;
  const Batch& batch_;
  const int64_t* slots_;
  const Gradients& gradients_;
  const OptimizerConfig& optimizer_;
  const float learning_rate_;
  const int threads_;
  const Partitions partitions_;
  std::vector<uint8_t> is_unique_;  // by position, of tables with several partitions
  int32_t widest_ = 0;
};

template <RowType kType>
void update_all(const TableView* tables, int32_t num_tables, const Batch& batch,
                const int64_t* slots, const Gradients& gradients, const OptimizerConfig& optimizer,
                float learning_rate, int threads) {
  BatchUpdate<kType>(tables, num_tables, batch, slots, gradients, optimizer, learning_rate, threads)
      .run();
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
