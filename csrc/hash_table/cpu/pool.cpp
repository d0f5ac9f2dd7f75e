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

// Rows that are on their way from memory; counted in ids, over the ends of bags.
constexpr int64_t kAhead = 16;

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

// Rows of one table, as floats. kFloats: they are stored as such.
template <bool kFloats>
class Rows {
 public:
  // For positions [first, last), in this order.
  Rows(const TableView& table, const Batch& batch, const int64_t* slots, int64_t first,
       int64_t last, float* buffer)
      : table_(table),
        batch_(batch),
        slots_(slots),
        last_(last),
        row_bytes_(row_bytes(table)),
        rows_(table.rows.homes),
        first_slot_(table.first_slot),
        buffer_(buffer) {
    for (int64_t at = first; at < std::min(first + kAhead, last); ++at)
      prefetch(at, 0, table.dim());
  }

  // To be called with columns(at, column, n): so those further on arrive in time.
  void before(int64_t at, int32_t column, int32_t n) const {
    if (at + kAhead < last_) prefetch(at + kAhead, column, n);
  }
  // Columns [column, column + n) of the id at a position; of its initial row where it has none, or
  // null if kThere. Valid until the next call.
  template <bool kThere = false>
  const float* columns(int64_t at, int32_t column, int32_t n) const {
    const int64_t slot = slots_[at];
    if (slot == kNoSlot) [[unlikely]] {
      return kThere ? nullptr : initial_columns(at, column, n);
    }
    const char* const row = row_of(slot);
    if constexpr (kFloats) return reinterpret_cast<const float*>(row) + column;
    const RowType type = table_.rows.type;
    widen_elements(type, row + column * element_size(type), n, buffer_);
    return buffer_;
  }

 private:
  const char* row_of(int64_t slot) const { return rows_ + (slot - first_slot_) * row_bytes_; }
  void prefetch(int64_t at, int32_t column, int32_t n) const {
    const int64_t slot = slots_[at];
    if (slot == kNoSlot) [[unlikely]]
      return;
    const int64_t of_column = kFloats ? sizeof(float) : element_size(table_.rows.type);
    prefetch_bytes(row_of(slot) + column * of_column, n * of_column);
  }
  [[gnu::noinline]] const float* initial_columns(int64_t at, int32_t column, int32_t n) const {
    initial_row(table_.initial_rows, batch_.ids[at],
                static_cast<uint32_t>(table_.column_offset + column), n, buffer_);
    return buffer_;
  }

  const TableView& table_;
  const Batch& batch_;
  const int64_t* const slots_;
  const int64_t last_;
  const int64_t row_bytes_;
  const char* const rows_;
  const int64_t first_slot_;
  float* const buffer_;  // [dim]
};

// Calls visit(feature, sample, table, rows, first position, one past the last) for each bag in the
// range of bag numbers feature * batch_size + sample.
template <typename Visit>
void for_each_bag(const TableView* tables, const Batch& batch, const int64_t* slots, int64_t begin,
                  int64_t end, const Visit& visit) {
  std::vector<float> buffer;
  while (begin < end) {
    const int32_t feature = batch.feature_of_bag(begin);
    const int64_t start = batch.first_bag(feature);
    const int64_t stop = std::min(end, batch.first_bag(feature + 1));
    const TableView& table = tables[batch.feature_tables[feature]];
    buffer.resize(std::max<size_t>(buffer.size(), table.dim()));
    const auto visit_all = [&]<bool kFloats>() {
      const Rows<kFloats> rows(table, batch, slots, batch.offsets[begin], batch.offsets[stop],
                               buffer.data());
      for (int64_t bag = begin; bag < stop; ++bag) {
        const int64_t first = batch.offsets[bag], last = batch.offsets[bag + 1];
        visit(feature, bag - start, table, rows, first, last);
      }
    };
    if (table.rows.type == RowType::kFloat32) {
      visit_all.template operator()<true>();
    } else {
      visit_all.template operator()<false>();
    }
    begin = stop;
  }
}

// Eight columns, of GCC's and Clang's vector extension.
typedef float Columns __attribute__((vector_size(32)));

// to[c] = the sum of the rows' columns column + c, for 8 * kVectors columns. scale(at) multiplies
// the row of a position. kThere: stops and returns false at an id that has no row. The sums stay in
// registers, since nothing takes the address of all of them, and kThere calls nothing.
template <int kVectors, bool kThere, bool kFloats, typename Scale>
bool try_sum_columns(const Rows<kFloats>& rows, int64_t first, int64_t last, const Scale& scale,
                     int32_t column, float* to) {
  Columns sums[kVectors];
  for (int v = 0; v < kVectors; ++v) sums[v] = Columns{};
  for (int64_t at = first; at < last; ++at) {
    rows.before(at, column, 8 * kVectors);
    const float* from = rows.template columns<kThere>(at, column, 8 * kVectors);
    if (kThere && from == nullptr) [[unlikely]]
      return false;
    const float by = scale(at);
    for (int v = 0; v < kVectors; ++v) {
      Columns values;
      std::memcpy(&values, from + 8 * v, sizeof(values));
      sums[v] += by * values;
    }
  }
  for (int v = 0; v < kVectors; ++v) std::memcpy(to + 8 * v, &sums[v], sizeof(Columns));
  return true;
}

template <int kVectors, bool kFloats, typename Scale>
void sum_columns(const Rows<kFloats>& rows, int64_t first, int64_t last, const Scale& scale,
                 int32_t column, float* to) {
  if (kFloats && try_sum_columns<kVectors, true>(rows, first, last, scale, column, to)) return;
  try_sum_columns<kVectors, false>(rows, first, last, scale, column, to);
}

template <bool kFloats, typename Scale>
void sum_rows(const Rows<kFloats>& rows, int64_t first, int64_t last, const Scale& scale,
              int32_t dim, float* to) {
  int32_t c = 0;
  for (; dim - c >= 64; c += 64) sum_columns<8>(rows, first, last, scale, c, to + c);
  if (dim - c >= 32) sum_columns<4>(rows, first, last, scale, c, to + c), c += 32;
  if (dim - c >= 16) sum_columns<2>(rows, first, last, scale, c, to + c), c += 16;
  if (dim - c >= 8) sum_columns<1>(rows, first, last, scale, c, to + c), c += 8;
  if (c == dim) return;
  std::fill_n(to + c, dim - c, 0.0f);
  for (int64_t at = first; at < last; ++at) {
    rows.before(at, c, dim - c);
    const float* from = rows.columns(at, c, dim - c);
    for (int32_t k = 0; k < dim - c; ++k) to[c + k] += scale(at) * from[k];
  }
}

}  // namespace

void pool_rows(const TableView* tables, const Batch& batch, const int64_t* slots, Pooling pooling,
               Output<char> out, int threads) {
  parallel_for(batch.num_bags, 64, threads, [&](int64_t begin, int64_t end) {
    std::vector<float> sums;  // of a bag, where outputs are no floats
    for_each_bag(tables, batch, slots, begin, end,
                 [&](int32_t feature, int64_t sample, const TableView& table, const auto& rows,
                     int64_t first, int64_t last) {
                   char* const to = out.at(batch.output_of(feature, sample, out.stride));
                   const float bag_scale =
                       pooling.mean && last > first ? 1.0f / (last - first) : 1.0f;
                   const auto scale = [&](int64_t at) {
                     return pooling.weights ? pooling.weights[at] * bag_scale : bag_scale;
                   };
                   if (out.type == RowType::kFloat32) {
                     sum_rows(rows, first, last, scale, table.dim(), reinterpret_cast<float*>(to));
                     return;
                   }
                   sums.resize(std::max<size_t>(sums.size(), table.dim()));
                   sum_rows(rows, first, last, scale, table.dim(), sums.data());
                   narrow_elements(out.type, sums.data(), table.dim(), to);
                 });
  });
}

void pool_weights_grad(const TableView* tables, const Batch& batch, const int64_t* slots, bool mean,
                       Output<const char> grad, float* weights_grad, int threads) {
  parallel_for(batch.num_bags, 64, threads, [&](int64_t begin, int64_t end) {
    std::vector<float> widened;  // a bag's gradient, where it is no floats
    for_each_bag(tables, batch, slots, begin, end,
                 [&](int32_t feature, int64_t sample, const TableView& table, const auto& rows,
                     int64_t first, int64_t last) {
                   const char* const given = grad.at(batch.output_of(feature, sample, grad.stride));
                   const auto* from = reinterpret_cast<const float*>(given);
                   if (grad.type != RowType::kFloat32) {
                     widened.resize(std::max<size_t>(widened.size(), table.dim()));
                     widen_elements(grad.type, given, table.dim(), widened.data());
                     from = widened.data();
                   }
                   const float bag_scale = mean && last > first ? 1.0f / (last - first) : 1.0f;
                   for (int64_t at = first; at < last; ++at) {
                     rows.before(at, 0, table.dim());
                     weights_grad[at] =
                         dot(from, rows.columns(at, 0, table.dim()), table.dim()) * bag_scale;
                   }
                 });
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
