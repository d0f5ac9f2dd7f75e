// Processes the found rows of one feature: sums the rows of each bag, or copies each row.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "serving/find_cpu.h"
#include "serving/row_reader_cpu.h"

namespace torchrec_hkv::serving::cpu {

// The rows of some ids.
struct FoundRows {
  const char* const* rows;  // rows of the ids from number `first` on; null for missing ids
  int64_t first;
  int64_t last;   // one past the last id
  int64_t ahead;  // number of rows to prefetch ahead; 0 if rows have been prefetched

  const char* row(int64_t at) const { return rows[at - first]; }
};

// How a row is added to a sum.
enum class Accumulation {
  kPlain,        // sum + row
  kScaled,       // sum + by * row, rounded twice
  kFusedScaled,  // the same, rounded once
};

template <typename Vector>
Vector fused_multiply_add(float row_scale, const Vector& x, const Vector& sum) {
  if constexpr (sizeof(Vector) == sizeof(float)) {
    return std::fma(row_scale, x, sum);
  } else {
#ifdef __FMA__
    return (Vector)_mm256_fmadd_ps(_mm256_set1_ps(row_scale), (__m256)x, (__m256)sum);
#else
    Vector out;
    for (int k = 0; k < kColumnsOf<Vector>; ++k) out[k] = std::fma(row_scale, x[k], sum[k]);
    return out;
#endif
  }
}

// A long bag is summed in blocks of rows. Bytes of a block, which are half of an L1 cache, and its
// least number of rows.
constexpr int64_t kBlockBytes = 16384, kMinBlockRows = 8;

// Sums of the bags of a feature.
template <RowFormat kFormat, Accumulation kAccumulation>
class FeaturePooler {
 public:
  FeaturePooler(const Feature& feature, const FoundRows& found)
      : feature_(feature), table_(*feature.table), found_(found) {}

  void run(int64_t begin, int64_t end) const {
    std::vector<float> partial;
    for (int64_t bag = begin; bag < end; ++bag) {
      const int64_t first = feature_.offsets[bag], last = feature_.offsets[bag + 1];
      // Sums take 64, 8 or 1 columns of all rows at a time. Without blocks, the rows of a long bag
      // would leave the cache before their next columns are read.
      const bool in_one_pass = table_.dim == 64 || table_.dim == 8 || table_.dim == 1;
      const int64_t block =
          in_one_pass ? last - first : std::max(kMinBlockRows, kBlockBytes / table_.row_bytes);
      if (last - first > block) partial.resize(table_.dim);
      int64_t from = first;
      do {
        const int64_t to = std::min(from + block, last);
        add({bag, first, last, from, to, partial.data()});
        from = to;
      } while (from < last);
    }
  }

 private:
  // Some rows of a bag.
  struct RowBlock {
    int64_t bag, first, last;  // number of the bag; its rows are [first, last)
    int64_t from, to;          // the block's rows are [from, to)
    float* partial;            // sums of the earlier blocks; unused if the bag has one block
  };

  void add(const RowBlock& block) const {
    const int32_t dim = table_.dim;
    int32_t c = 0;
    for (; dim - c >= 64; c += 64) sum<Columns, 8>(block, c);
    for (; dim - c >= 8; c += 8) sum<Columns, 1>(block, c);
    for (; c < dim; ++c) sum<float, 1>(block, c);
  }

  template <typename Vector, int kVectors>
  void sum(const RowBlock& block, int32_t c) const {
    constexpr int kLanes = kColumnsOf<Vector>;
    const auto [bag, first, last, from, to, partial] = block;
    Vector sums[kVectors];
    if (from == first) {
      unrolled<kVectors>([&](auto v) { sums[v] = Vector{}; });
    } else {
      std::memcpy(sums, partial + c, sizeof(sums));
    }
    for (int64_t at = from; at < to; ++at) {
      if (c == 0 && found_.ahead > 0 && at + found_.ahead < last) {
        prefetch_row(found_.row(at + found_.ahead), table_.row_bytes);
      }
      const auto add = [&](const auto& reader, int32_t column) {
        [[maybe_unused]] const float row_scale = scale(at, last - first);
        unrolled<kVectors>([&](auto v) {
          Vector columns;
          reader.load(column + v * kLanes, columns);
          if constexpr (kAccumulation == Accumulation::kPlain) {
            sums[v] += columns;
          } else if constexpr (kAccumulation == Accumulation::kScaled) {
            sums[v] += row_scale * columns;
          } else {
            sums[v] = fused_multiply_add(row_scale, columns, sums[v]);
          }
        });
      };
      const char* const row = found_.row(at);
      if (row != nullptr) [[likely]] {
        add(RowReader<kFormat>(row, table_.unit), c);
      } else {
        alignas(32) float unknown[kVectors * kLanes];
        unknown_columns(table_, feature_.ids[at], c, kVectors * kLanes, unknown);
        add(RowReader<RowFormat::kFloat32>(reinterpret_cast<const char*>(unknown), 1.0f), 0);
      }
    }
    if (to < last) {
      std::memcpy(partial + c, sums, sizeof(sums));
      return;
    }
    finish(first, last, [&](auto apply) { unrolled<kVectors>([&](auto v) { apply(sums[v]); }); });
    char* const out =
        feature_.out + bag * feature_.stride + int64_t{c} * element_size(feature_.type);
    with_type(feature_.type, [&]<RowType kOut>() {
      unrolled<kVectors>(
          [&](auto v) { store_columns<kOut>(sums[v], out + v * kLanes * element_size(kOut)); });
    });
  }

  float scale(int64_t at, int64_t length) const {
    const float bag = feature_.mean == Mean::kScaledRows ? 1.0f / length : 1.0f;
    return feature_.weights == nullptr ? bag : feature_.weights[at] * bag;
  }

  // Scales the sums of a bag to its mean. for_sums: calls a function for each vector of sums.
  template <typename ForSums>
  void finish(int64_t first, int64_t last, const ForSums& for_sums) const {
    if (feature_.mean == Mean::kScaledSum && last > first) {
      const float row_scale = 1.0f / (last - first);
      for_sums([&](auto& sums) { sums *= row_scale; });
    } else if (feature_.mean == Mean::kDividedSum) {
      float row_scale = feature_.weights == nullptr ? last - first : 0.0f;
      for (int64_t at = first; feature_.weights != nullptr && at < last; ++at) {
        row_scale += feature_.weights[at];
      }
      if (row_scale != 0.0f) for_sums([&](auto& sums) { sums /= row_scale; });
    }
  }

  const Feature& feature_;
  const Table& table_;
  const FoundRows& found_;
};

// Pools bags `begin` to `end`, whose rows were found.
inline void pool(const Feature& feature, const FoundRows& found, int64_t begin, int64_t end) {
  const bool is_scaled = feature.weights != nullptr || feature.mean == Mean::kScaledRows;
  // Only types of trained tables use fused multiply-adds, which round once.
  const RowFormat format = feature.table->format;
  const bool fused =
      feature.fused && (format == RowFormat::kFloat32 || format == RowFormat::kFloat16);
  with_format(format, [&]<RowFormat kFormat>() {
    if (!is_scaled) {
      FeaturePooler<kFormat, Accumulation::kPlain>(feature, found).run(begin, end);
    } else if (!fused) {
      FeaturePooler<kFormat, Accumulation::kScaled>(feature, found).run(begin, end);
    } else if constexpr (kFormat == RowFormat::kFloat32 || kFormat == RowFormat::kFloat16) {
      FeaturePooler<kFormat, Accumulation::kFusedScaled>(feature, found).run(begin, end);
    }
  });
}

// Writes the found rows.
inline void write_rows(const Feature& feature, const FoundRows& found) {
  const Table& table = *feature.table;
  const int32_t dim = table.dim;
  with_type(feature.type, [&]<RowType kOut>() {
    with_format(table.format, [&]<RowFormat kFormat>() {
      const auto write = [&](const auto& reader, char* out) {
        int32_t c = 0;
        for (; dim - c >= 32; c += 32) {
          Columns columns[4];
          unrolled<4>([&](auto v) { reader.load(c + v * 8, columns[v]); });
          unrolled<4>([&](auto v) {
            store_columns<kOut>(columns[v], out + (c + v * 8) * element_size(kOut));
          });
        }
        for (; dim - c >= 8; c += 8) {
          Columns columns;
          reader.load(c, columns);
          store_columns<kOut>(columns, out + c * element_size(kOut));
        }
        for (; c < dim; ++c) {
          float column;
          reader.load(c, column);
          store_columns<kOut>(column, out + c * element_size(kOut));
        }
      };
      for (int64_t at = found.first; at < found.last; ++at) {
        char* const out = feature.out + at * feature.stride;
        const char* const row = found.row(at);
        if (row != nullptr) [[likely]] {
          write(RowReader<kFormat>(row, table.unit), out);
          continue;
        }
        constexpr int32_t kChunk = 64;
        alignas(32) float unknown[kChunk];
        for (int32_t c = 0; c < dim; c += kChunk) {
          const int32_t n = std::min(kChunk, dim - c);
          unknown_columns(table, feature.ids[at], c, n, unknown);
          for (int32_t k = 0; k < n; ++k) {
            store_columns<kOut>(unknown[k], out + (c + k) * element_size(kOut));
          }
        }
      }
    });
  });
}

}  // namespace torchrec_hkv::serving::cpu
