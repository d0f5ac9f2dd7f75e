// The backward on the CPU. Positions are grouped by slot. Gradients of a row that stands at several
// positions are summed in the order of the batch, by one thread, so the result does not depend on
// the number of threads; those of many positions in pieces (GradientSums). Rows that stand at one
// position are updated in the order of the batch, where those of a bag share its gradient.
#include <algorithm>
#include <vector>

#include "common/elements_cpu.h"
#include "common/parallel.h"
#include "hash_table/cpu/apply_row.h"
#include "hash_table/cpu/bucket.h"
#include "hash_table/cpu/group.h"
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
  Gradients(const Batch& batch, Pooling pooling, Output<const char> grad)
      : batch_(batch), pooling_(pooling), grad_(grad), divide_(batch.batch_size) {}

  const char* from(const Occurrence& it) const { return from(feature(it), it.bag); }
  const char* from(int32_t feature, int64_t bag) const {
    return grad_.at(batch_.output_of(feature, bag - batch_.first_bag(feature), grad_.stride));
  }
  float scale(const Occurrence& it) const { return scale(it.position, it.bag); }
  float scale(int64_t position, int64_t bag) const {
    const float weight = pooling_.weights ? pooling_.weights[position] : 1.0f;
    if (!pooling_.mean) return weight;
    return weight * (1.0f / (batch_.offsets[bag + 1] - batch_.offsets[bag]));
  }

 private:
  int32_t feature(const Occurrence& it) const {
    return batch_.ragged != nullptr ? batch_.feature_of_bag(it.bag)
                                    : static_cast<int32_t>(divide_(it.bag));
  }

  const Batch& batch_;
  Pooling pooling_;
  Output<const char> grad_;
  Division divide_;  // by the batch size
};

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

// One occurrence's gradient: itself where nothing multiplies it, else in `scaled`.
template <RowType kType>
const float* scaled_gradient(const char* from, float scale, int32_t dim, float* scaled) {
  if (kType == RowType::kFloat32 && scale == 1.0f) return reinterpret_cast<const float*>(from);
  for_columns<kType>(from, dim, [&](const float* columns, int32_t n, int32_t first_column) {
    scale_columns(columns, scale, n, scaled + first_column);
  });
  return scaled;
}

// scale times an occurrence's gradient, put into `sum` or added to it.
template <RowType kType>
void add_gradient(const char* from, float scale, int32_t dim, bool is_first, float* sum) {
  for_columns<kType>(from, dim, [&](const float* columns, int32_t n, int32_t first_column) {
    if (is_first) {
      scale_columns(columns, scale, n, sum + first_column);
    } else {
      add_columns(columns, scale, n, sum + first_column);
    }
  });
}

// Sums of gradients of a partition's rows that stand at several positions; a thread reuses them,
// with their memory. Rounding errors of a sum in float grow with the number of its terms, and where
// these are alike they don't cancel: a tenth, added a million times, is 1 % off. So a row's
// gradients are added up in pieces of some positions, and pieces in double.
class GradientSums {
 public:
  void clear(int32_t dim) {
    dim_ = dim;
    rows_ = 0;
    totals_of_.clear();
    totals_.clear();
  }
  // The number of a further row, that of so many positions.
  uint32_t add_row(uint32_t positions) {
    const bool in_pieces = positions > kPiece;
    totals_of_.push_back(in_pieces ? static_cast<int64_t>(totals_.size()) : kNoTotals);
    if (in_pieces) totals_.resize(totals_.size() + dim_);
    sums_.resize(std::max<size_t>(sums_.size(), (rows_ + 1) * dim_));
    return static_cast<uint32_t>(rows_++);
  }
  float* of(uint32_t row) { return sums_.data() + int64_t{row} * dim_; }
  // The next of a row's gradients, put into a sum or added to it by add(replaces, sum). left: how
  // many of its positions are still to come, this one among them.
  template <typename Add>
  void add(uint32_t row, uint32_t left, bool is_first, const Add& add) {
    float* const sum = of(row);
    add(is_first || is_border(row, left), sum);
    if (!is_border(row, left - 1)) return;
    double* const totals = totals_.data() + totals_of_[row];
    for (int32_t c = 0; c < dim_; ++c) totals[c] += sum[c];
    if (left > 1) return;
    for (int32_t c = 0; c < dim_; ++c) sum[c] = static_cast<float>(totals[c]);
  }

 private:
  // Between two pieces, or behind the last one.
  bool is_border(uint32_t row, uint32_t left) const {
    return left % kPiece == 0 && totals_of_[row] != kNoTotals;
  }

  static constexpr uint32_t kPiece = 64;
  static constexpr int64_t kNoTotals = -1;

  int32_t dim_ = 0;
  int64_t rows_ = 0;
  std::vector<float> sums_;
  std::vector<int64_t> totals_of_;  // by row: where its totals begin
  std::vector<double> totals_;
};

// Rows that are on their way from memory, and gradients.
constexpr int64_t kRowsAhead = 12;
constexpr int64_t kGradientsAhead = 8;

// Rows of one table that are updated one after the other.
class RowsAhead {
 public:
  RowsAhead(const TableView& table, const std::vector<int64_t>& slots)
      : rows_(table.rows),
        states_(table.states),
        slots_(slots.data()),
        n_(static_cast<int64_t>(slots.size())) {
    for (int64_t i = 0; i < kRowsAhead; ++i) prefetch(i);
  }

  // To be called before the i-th is updated.
  void before(int64_t i) const { prefetch(i + kRowsAhead); }

 private:
  void prefetch(int64_t i) const {
    if (i >= n_) return;
    rows_.prefetch(slots_[i]);
    states_.prefetch(slots_[i]);
  }

  const HomeVectors rows_, states_;
  const int64_t* const slots_;
  const int64_t n_;
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
      std::vector<int64_t> slots;  // in the table, of rows that stand at several positions
      GradientSums sums;           // theirs
      RowUpdater updater(optimizer_, learning_rate_, widest_);
      for (int64_t p = begin; p < end; ++p) {
        const TableView& table = tables_[partitions[p].table];
        groups.assign(partitions[p]);
        sum(partitions[p], table, groups, slots, sums);
        const RowsAhead rows(table, slots);
        for (size_t i = 0; i < slots.size(); ++i) {
          rows.before(i);
          updater.update(table, slots[i], sums.of(i));
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
        const RowsAhead rows(table, slots);
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
  // Adds up gradients of slots that occur several times, and marks the other positions.
  void sum(const Partition& partition, const TableView& table, SlotGroups& groups,
           std::vector<int64_t>& slots, GradientSums& sums) {
    const int32_t dim = table.dim();
    const int64_t n = partition.end - partition.begin;
    const int64_t lines = lines_of(dim * element_size(kType));
    slots.clear();
    sums.clear(dim);
    for (int64_t i = 0; i < n; ++i) {
      const Occurrence& it = partition.begin[i];
      SlotGroups::Group& group = groups.of(i);
      const bool is_first = group.number == SlotGroups::kNone;
      if (is_first && group.left == 1) {
        alone_[it.position] = 1;
        continue;
      }
      if (i + kGradientsAhead < n) {
        prefetch_lines(gradients_.from(partition.begin[i + kGradientsAhead]), lines);
      }
      if (is_first) {
        group.number = sums.add_row(group.left);
        slots.push_back(group.slot - table.first_slot);
      }
      sums.add(group.number, group.left--, is_first, [&](bool replaces, float* sum) {
        add_gradient<kType>(gradients_.from(it), gradients_.scale(it), dim, replaces, sum);
      });
    }
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
  update.repeated(Partitions(tables, num_tables, batch, slots, threads), threads);
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
