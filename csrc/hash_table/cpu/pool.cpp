#include <algorithm>
#include <cstring>
#include <vector>

#include "common/elements_cpu.h"
#include "common/initial_rows_cpu.h"
#include "common/parallel.h"
#include "hash_table/cpu/bucket.h"
#include "hash_table/kernels.h"

namespace torchrec_hkv::hash_table::cpu {
namespace {

// Number of ids whose rows are prefetched ahead, across bags. Fewer for wide rows, so that they
// leave room in the L1 cache.
constexpr int64_t kMaxAhead = 16, kMinAhead = 2, kBytesAhead = 8192;

float dot(const float* a, const float* b, int32_t n) {
  constexpr int kLanes = 8;  // partial sums that the compiler can keep in one vector
  float lanes[kLanes] = {};
  int32_t c = 0;
  for (; c + kLanes <= n; c += kLanes) {
    for (int k = 0; k < kLanes; ++k) lanes[k] += a[c + k] * b[c + k];
  }
  float sum = 0.0f;
  for (; c < n; ++c) sum += a[c] * b[c];
  for (const float lane : lanes) sum += lane;
  return sum;
}

// Rows of one table, stored as kType.
template <RowType kType>
class TableRows {
 public:
  // For positions [first, last), in this order.
  TableRows(const TableView& table, const Batch& batch, const int64_t* slots, int64_t first,
            int64_t last, float* buffer)
      : table_(table),
        batch_(batch),
        slots_(slots),
        last_(last),
        row_bytes_(row_bytes(table)),
        ahead_(std::clamp(kBytesAhead / row_bytes_, kMinAhead, kMaxAhead)),
        rows_(table.rows.backing - table.first_slot * row_bytes_),
        buffer_(buffer) {
    for (int64_t at = first; at < std::min(first + ahead_, last); ++at)
      prefetch(at, 0, table.dim());
  }

  // Called together with stored(at) or columns(at, column, n). Prefetches later rows.
  void before(int64_t at, int32_t column, int32_t n) const {
    if (at + ahead_ < last_) prefetch(at + ahead_, column, n);
  }
  // The row of the id at a position, or null if it has none.
  const char* stored(int64_t at) const {
    const int64_t slot = slots_[at];
    if (slot == kNoSlot) [[unlikely]]
      return nullptr;
    return rows_ + slot * row_bytes_;
  }
  // Columns [column, column + n) as floats, of the initial row if the id has no row. Valid until
  // the next call.
  const float* columns(int64_t at, int32_t column, int32_t n) const {
    const char* const row = stored(at);
    if (row == nullptr) [[unlikely]] {
      initial_row(table_.initial_rows, batch_.ids[at],
                  static_cast<uint32_t>(table_.column_offset + column), n, buffer_);
      return buffer_;
    }
    if constexpr (kType == RowType::kFloat32) return reinterpret_cast<const float*>(row) + column;
    widen_row(kType, row, column, n, buffer_);
    return buffer_;
  }

 private:
  void prefetch(int64_t at, int32_t column, int32_t n) const {
    const char* const row = stored(at);
    if (row == nullptr) [[unlikely]]
      return;
    if constexpr (kType == RowType::kInt8) {  // with the scale
      prefetch_bytes(row, row_bytes_);
    } else {
      prefetch_bytes(row + column * element_size(kType), n * element_size(kType));
    }
  }

  const TableView& table_;
  const Batch& batch_;
  const int64_t* const slots_;
  const int64_t last_;
  const int64_t row_bytes_;
  const int64_t ahead_;
  const char* const rows_;  // where slot 0 of the group would be
  float* const buffer_;     // [dim]
};

// Calls visit(feature, rows, first bag, one past the last) for the bags of each feature in a range
// of bag numbers.
template <typename Visit>
void for_each_feature(const TableView* tables, const Batch& batch, const int64_t* slots,
                      int64_t begin, int64_t end, const Visit& visit) {
  std::vector<float> buffer;
  while (begin < end) {
    const int32_t feature = batch.feature_of_bag(begin);
    const int64_t stop = std::min(end, batch.first_bag(feature + 1));
    const TableView& table = tables[batch.feature_tables[feature]];
    buffer.resize(std::max<size_t>(buffer.size(), table.dim()));
    with_row_type(table.rows.type, [&]<RowType kType>() {
      const TableRows<kType> rows(table, batch, slots, batch.offsets[begin], batch.offsets[stop],
                                  buffer.data());
      visit(feature, rows, begin, stop);
    });
    begin = stop;
  }
}

// Pools bags of one feature.
template <RowType kType, bool kScaled>
class BagPooler {
 public:
  BagPooler(const TableRows<kType>& rows, const Batch& batch, Pooling pooling, Output<char> out,
            int32_t feature, int32_t dim)
      : rows_(rows), batch_(batch), pooling_(pooling), out_(out), feature_(feature), dim_(dim) {}

  void run(int64_t begin, int64_t end) const {
    // If one pass covers all columns, work that depends on columns only is shared by a few bags.
    const int64_t bags = dim_ >= 8 && dim_ <= 64 ? 8 : 1;
    for (; begin < end; begin += bags) {
      const int64_t stop = std::min(end, begin + bags);
      for_vectors_once(dim_, [&]<typename Vector, int kVectors>(int32_t c, int32_t end) {
        for (int64_t bag = begin; bag < stop; ++bag) sum<Vector, kVectors>(bag, c, end);
      });
    }
  }

 private:
  // The sums of the columns of kVectors vectors from c on, which stay in registers. end: the offset
  // of the last one.
  template <typename Vector, int kVectors>
  void sum(int64_t bag, int32_t c, int32_t end) const {
    const int32_t columns_read = end + kColumnsOf<Vector>;
    const int64_t first = batch_.offsets[bag], last = batch_.offsets[bag + 1];
    Vector sums[kVectors];
    unrolled<kVectors>([&](auto v) { sums[v] = Vector{}; });
    for (int64_t at = first; at < last; ++at) {
      rows_.before(at, c, columns_read);
      const char* const row = rows_.stored(at);
      if (row == nullptr) [[unlikely]]
        return sum_with_initial<kVectors * kColumnsOf<Vector>>(bag, c, columns_read);
      const float by = kScaled ? scale(at, last - first) : 1.0f;
      const StoredColumns<kType> from(row, c);
      unrolled<kVectors>([&](auto v) {
        Vector columns;
        from.load(offset_of<Vector, kVectors>(v, end), columns);
        sums[v] += kScaled ? by * columns : columns;
      });
    }
    char* const to = output_at(bag, c);
    with_type(out_.type, [&]<RowType kOut>() {
      unrolled<kVectors>([&](auto v) {
        store_columns<kOut>(sums[v], to + offset_of<Vector, kVectors>(v, end) * element_size(kOut));
      });
    });
  }

  // As sum, if some ids have no row.
  template <int kMax>
  [[gnu::noinline]] void sum_with_initial(int64_t bag, int32_t c, int32_t n) const {
    const int64_t first = batch_.offsets[bag], last = batch_.offsets[bag + 1];
    float sums[kMax] = {};
    for (int64_t at = first; at < last; ++at) {
      rows_.before(at, c, n);
      const float* const from = rows_.columns(at, c, n);
      const float by = kScaled ? scale(at, last - first) : 1.0f;
      for (int k = 0; k < n; ++k) sums[k] += by * from[k];
    }
    narrow_elements(out_.type, sums, n, output_at(bag, c));
  }

  float scale(int64_t at, int64_t length) const {
    const float bag_scale = pooling_.mean ? 1.0f / length : 1.0f;
    return pooling_.weights ? pooling_.weights[at] * bag_scale : bag_scale;
  }
  char* output_at(int64_t bag, int32_t c) const {
    return out_.at(batch_.output_of(feature_, bag - batch_.first_bag(feature_), out_.stride) + c);
  }
  const TableRows<kType>& rows_;
  const Batch& batch_;
  const Pooling pooling_;
  const Output<char> out_;
  const int32_t feature_;
  const int32_t dim_;
};

}  // namespace

void pool_rows(const TableView* tables, const Batch& batch, const int64_t* slots, Pooling pooling,
               Output<char> out, int threads) {
  const bool scaled = pooling.mean || pooling.weights != nullptr;
  parallel_for(batch.num_bags, 64, threads, [&](int64_t begin, int64_t end) {
    const auto pool = [&]<RowType kType>(int32_t feature, const TableRows<kType>& rows,
                                         int64_t first, int64_t last) {
      const int32_t dim = tables[batch.feature_tables[feature]].dim();
      if (scaled) {
        BagPooler<kType, true>(rows, batch, pooling, out, feature, dim).run(first, last);
      } else {
        BagPooler<kType, false>(rows, batch, pooling, out, feature, dim).run(first, last);
      }
    };
    for_each_feature(tables, batch, slots, begin, end, pool);
  });
}

void pool_weights_grad(const TableView* tables, const Batch& batch, const int64_t* slots, bool mean,
                       Output<const char> grad, float* weights_grad, int threads) {
  parallel_for(batch.num_bags, 64, threads, [&](int64_t begin, int64_t end) {
    std::vector<float> widened;  // a bag's gradient, if it is not float32
    const auto visit = [&](int32_t feature, const auto& rows, int64_t begin_bag, int64_t end_bag) {
      const int32_t dim = tables[batch.feature_tables[feature]].dim();
      for (int64_t bag = begin_bag; bag < end_bag; ++bag) {
        const int64_t sample = bag - batch.first_bag(feature);
        const char* const given = grad.at(batch.output_of(feature, sample, grad.stride));
        const auto* from = reinterpret_cast<const float*>(given);
        if (grad.type != RowType::kFloat32) {
          widened.resize(std::max<size_t>(widened.size(), dim));
          widen_elements(grad.type, given, dim, widened.data());
          from = widened.data();
        }
        const int64_t first = batch.offsets[bag], last = batch.offsets[bag + 1];
        const float bag_scale = mean && last > first ? 1.0f / (last - first) : 1.0f;
        for (int64_t at = first; at < last; ++at) {
          rows.before(at, 0, dim);
          weights_grad[at] = dot(from, rows.columns(at, 0, dim), dim) * bag_scale;
        }
      }
    };
    for_each_feature(tables, batch, slots, begin, end, visit);
  });
}

void initial_rows(const InitialRows& init, const int64_t* ids, int64_t n, int32_t dim,
                  int32_t column_offset, float* out, int threads) {
  parallel_for(n, 256, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      initial_row(init, ids[i], static_cast<uint32_t>(column_offset), dim, out + i * dim);
    }
  });
}

}  // namespace torchrec_hkv::hash_table::cpu
