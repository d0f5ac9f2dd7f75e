#include <algorithm>
#include <vector>

#include "common/parallel.h"
#include "tensor_train/cpu/gemm.h"
#include "tensor_train/cpu/index.h"
#include "tensor_train/cpu/kernels.h"
#include "tensor_train/cpu/tile.h"

namespace torchrec_hkv::tensor_train::cpu {
namespace {

// Computes the rows of distinct ids that share a prefix.
class RowMaker {
 public:
  explicit RowMaker(const TableCpu& table)
      : table_(table),
        columns_(table.head_q() * table.middle_q()),
        columns_padded_(padded(columns_)),
        last_size_(table.slice(table.last_core())),
        transposed_(static_cast<int64_t>(table.last_r()) * columns_padded_),
        last_(last_size_),
        row_(static_cast<int64_t>(table.last_q()) * columns_padded_) {}

  // prefix: [columns][padded(last_r)].
  void set_prefix(const float* prefix) {
    const int32_t r = table_.last_r(), stride = padded(r);
    for (int32_t c = 0; c < columns_; ++c) {
      for (int32_t k = 0; k < r; ++k) {
        transposed_[static_cast<int64_t>(k) * columns_padded_ + c] = prefix[c * stride + k];
      }
    }
  }

  void make(int64_t last, float* out) {
    const int32_t r = table_.last_r(), q = table_.last_q();
    const float* slice;
    if (table_.type == RowType::kFloat32) {
      slice = reinterpret_cast<const float*>(table_.core[table_.last_core()]) + last * last_size_;
    } else {
      widen(table_.type, table_.core[table_.last_core()], last * last_size_, last_size_,
            last_.data());
      slice = last_.data();
    }
    gemm(q, columns_padded_, r, {slice, r, 1}, transposed_.data(), columns_padded_, row_.data(),
         columns_padded_, /*add=*/false);
    for (int32_t i = 0; i < q; ++i) {
      const float* const from = row_.data() + static_cast<int64_t>(i) * columns_padded_;
      for (int32_t c = 0; c < columns_; ++c) out[c * q + i] = from[c];
    }
  }

 private:
  const TableCpu& table_;
  const int32_t columns_;  // columns of the product of all cores but the last
  const int32_t columns_padded_;
  const int64_t last_size_;
  std::vector<float> transposed_;  // [last_r][columns_padded]
  std::vector<float> last_;        // a slice of 16-bit elements, converted
  std::vector<float> row_;         // [last_q][columns_padded]
};

// Computes the rows of all distinct ids of a table, [ids][dim].
ZeroedFloats distinct_rows(const TableCpu& table, const Directory& directory, int threads) {
  const int64_t dim = table.dim();
  ZeroedFloats rows(directory.ids() * dim);
  HeadPairs pairs;
  ZeroedFloats products(0);
  if (table.cores == 4) {
    pairs = head_pairs(table, directory.heads);
    products = pair_products(table, pairs, threads);
  }
  const std::vector<int64_t>& heads = table.cores == 4 ? pairs.numbers : directory.heads;
  const Step step = last_step(table, products.data());
  const std::vector<Tile> tiles = tiles_of(directory.middles, step.tile_prefixes());
  parallel_for(static_cast<int64_t>(tiles.size()), 1, threads, [&](int64_t begin, int64_t end) {
    PrefixTile tile(step, /*backward=*/false);
    RowMaker maker(table);
    for (int64_t t = begin; t < end; ++t) {
      const auto [first, last] = tiles[t];
      tile.load(&heads[first], last - first, directory.middles[first]);
      for (int64_t i = first; i < last; ++i) {
        maker.set_prefix(tile.product(i - first));
        for (int64_t u = directory.prefixes[i]; u < directory.prefixes[i + 1]; ++u) {
          maker.make(directory.lasts[u], rows.data() + u * dim);
        }
      }
    }
  });
  products.clear_and_keep();
  return rows;
}

// Calls visit(table number, rows of its distinct ids, directory, first place, last place in order).
template <typename Visit>
void for_each_table(const TableCpu* tables, const BatchCpu& batch, const Places& places,
                    const int64_t* order, int threads, const Visit& visit) {
  for (int32_t t = 0; t < batch.tables; ++t) {
    const int64_t begin = places.table_starts[t], end = places.table_starts[t + 1];
    if (begin == end) continue;
    const Directory directory = directory_of(tables[t], batch, order, begin, end);
    ZeroedFloats rows = distinct_rows(tables[t], directory, threads);
    visit(t, rows.data(), directory);
    rows.clear_and_keep();
  }
}

// Writes the number of each position's distinct id in its table to numbers[position].
void number_positions(const Directory& directory, const int64_t* order, int threads,
                      std::vector<int64_t>& numbers) {
  parallel_for(directory.ids(), 4096, threads, [&](int64_t begin, int64_t end) {
    for (int64_t u = begin; u < end; ++u) {
      for (int64_t at = directory.starts[u]; at < directory.starts[u + 1]; ++at) {
        numbers[order[at]] = u;
      }
    }
  });
}

}  // namespace

void lookup(const TableCpu* tables, const BatchCpu& batch, const int64_t* order, float* out,
            int threads) {
  const Places places = places_of(tables, batch);
  std::vector<int64_t> numbers(batch.n());
  if (batch.pooled) std::fill_n(out, batch.batch_size * places.stride, 0.0f);
  for_each_table(tables, batch, places, order, threads,
                 [&](int32_t t, const float* rows, const Directory& directory) {
                   number_positions(directory, order, threads, numbers);
                   const int64_t dim = tables[t].dim();
                   for (int32_t f = 0; f < batch.features; ++f) {
                     if (batch.feature_tables[f] != t) continue;
                     const int64_t first = f * batch.batch_size;
                     parallel_for(batch.batch_size, 64, threads, [&](int64_t begin, int64_t end) {
                       for (int64_t bag = first + begin; bag < first + end; ++bag) {
                         for (int64_t i = batch.offsets[bag]; i < batch.offsets[bag + 1]; ++i) {
                           const float* const row = rows + numbers[i] * dim;
                           float* const to = out + target_of(batch, places, i);
                           if (!batch.pooled) {
                             std::copy_n(row, dim, to);
                             continue;
                           }
                           const float factor = factor_of(batch, places, i);
                           for (int64_t c = 0; c < dim; ++c) to[c] += factor * row[c];
                         }
                       }
                     });
                   }
                 });
}

void weights_gradient(const TableCpu* tables, const BatchCpu& batch, const int64_t* order,
                      const float* grad, float* out, int threads) {
  const Places places = places_of(tables, batch);
  BatchCpu unweighted = batch;
  unweighted.weights = nullptr;
  for_each_table(tables, batch, places, order, threads,
                 [&](int32_t t, const float* rows, const Directory& directory) {
                   const int64_t dim = tables[t].dim();
                   parallel_for(directory.ids(), 256, threads, [&](int64_t begin, int64_t end) {
                     for (int64_t u = begin; u < end; ++u) {
                       const float* const row = rows + u * dim;
                       for (int64_t at = directory.starts[u]; at < directory.starts[u + 1]; ++at) {
                         const int64_t i = order[at];
                         const float* const from = grad + target_of(batch, places, i);
                         float sum = 0.0f;
                         for (int64_t c = 0; c < dim; ++c) sum += row[c] * from[c];
                         out[i] = sum * factor_of(unweighted, places, i);
                       }
                     }
                   });
                 });
}

}  // namespace torchrec_hkv::tensor_train::cpu
