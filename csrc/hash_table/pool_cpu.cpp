#include <algorithm>

#include "common/parallel.h"
#include "hash_table/kernels.h"

namespace torchrec_hkv::hash_table::cpu {
namespace {

constexpr int kPrefetchAhead = 4;

// Calls visit(feature, sample, table, first position, one past the last) for each bag in the range
// of bag numbers feature * batch_size + sample.
template <typename Visit>
void for_each_bag(const TableView* tables, const Batch& batch, int64_t begin, int64_t end,
                  const Visit& visit) {
  int32_t feature = static_cast<int32_t>(begin / batch.batch_size);
  int64_t sample = begin % batch.batch_size;
  for (int64_t bag = begin; bag < end; ++bag) {
    visit(feature, sample, tables[batch.feature_tables[feature]], batch.offsets[bag],
          batch.offsets[bag + 1]);
    if (++sample == batch.batch_size) {
      sample = 0;
      ++feature;
    }
  }
}

void prefetch_row(const TableView& table, const int64_t* slots, int64_t at, int64_t end) {
  if (at >= end || slots[at] == kNoSlot) return;
  const char* row = table.rows.row(slots[at] - table.first_slot);
  const int32_t bytes = table.dim() * element_size(table.rows.type);
  for (int32_t b = 0; b < bytes; b += 64) __builtin_prefetch(row + b);
}

// Calls visit(column, value) for the columns of an id's row, or of its initial row where it has
// none. The common type has a loop of its own, which the compiler can vectorise.
template <typename VisitColumn>
void for_each_column(const TableView& table, int64_t slot, int64_t id, const VisitColumn& visit) {
  if (slot == kNoSlot) {
    for_each_initial_value(table.initial_rows, id, static_cast<uint32_t>(table.column_offset),
                           table.dim(), visit);
    return;
  }
  const char* row = table.rows.row(slot - table.first_slot);
  if (table.rows.type == RowType::kFloat32) {
    const float* values = reinterpret_cast<const float*>(row);
    for (int32_t c = 0; c < table.dim(); ++c) visit(c, values[c]);
  } else {
    for (int32_t c = 0; c < table.dim(); ++c) visit(c, load_element(table.rows.type, row, c));
  }
}

}  // namespace

void pool_rows(const TableView* tables, const Batch& batch, const int64_t* slots, Pooling pooling,
               Output<float> out, int threads) {
  parallel_for(batch.num_features * batch.batch_size, 64, threads, [&](int64_t begin, int64_t end) {
    for_each_bag(
        tables, batch, begin, end,
        [&](int32_t feature, int64_t sample, const TableView& table, int64_t first, int64_t last) {
          float* to = out.data + sample * out.stride + batch.feature_columns[feature];
          std::fill_n(to, table.dim(), 0.0f);
          const float bag_scale = pooling.mean && last > first ? 1.0f / (last - first) : 1.0f;
          for (int64_t at = first; at < last; ++at) {
            prefetch_row(table, slots, at + kPrefetchAhead, last);
            const float scale = pooling.weights ? pooling.weights[at] * bag_scale : bag_scale;
            for_each_column(table, slots[at], batch.ids[at],
                            [&](int32_t c, float value) { to[c] += scale * value; });
          }
        });
  });
}

void pool_weights_grad(const TableView* tables, const Batch& batch, const int64_t* slots, bool mean,
                       Output<const float> grad, float* weights_grad, int threads) {
  parallel_for(batch.num_features * batch.batch_size, 64, threads, [&](int64_t begin, int64_t end) {
    for_each_bag(
        tables, batch, begin, end,
        [&](int32_t feature, int64_t sample, const TableView& table, int64_t first, int64_t last) {
          const float* from = grad.data + sample * grad.stride + batch.feature_columns[feature];
          const float bag_scale = mean && last > first ? 1.0f / (last - first) : 1.0f;
          for (int64_t at = first; at < last; ++at) {
            float dot = 0.0f;
            for_each_column(table, slots[at], batch.ids[at],
                            [&](int32_t c, float value) { dot += from[c] * value; });
            weights_grad[at] = dot * bag_scale;
          }
        });
  });
}

void initial_rows(const InitialRows& init, const int64_t* ids, int64_t n, int32_t dim,
                  int32_t column_offset, float* out, int threads) {
  parallel_for(n, 256, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      float* to = out + i * dim;
      for_each_initial_value(init, ids[i], static_cast<uint32_t>(column_offset), dim,
                             [to](int32_t c, float value) { to[c] = value; });
    }
  });
}

}  // namespace torchrec_hkv::hash_table::cpu
