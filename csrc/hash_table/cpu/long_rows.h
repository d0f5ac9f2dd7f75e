// Sums of the gradients of rows with so many positions that one thread would delay the others: an
// id in most bags of a large batch. All threads sum pieces of such a row, and one adds the pieces
// in their order, so the result has the same bits as that of sum_gradients.
#pragma once

#include <cstdint>
#include <vector>

#include "common/parallel.h"
#include "hash_table/cpu/gradients.h"

namespace torchrec_hkv::hash_table::cpu {

// A row, and copies of the places and scales of its gradients.
struct LongRow {
  int32_t table;
  int64_t slot;  // in the table
  std::vector<int64_t> offsets;
  std::vector<float> scales;  // empty: no scales

  RowGradients gradients(const char* data) const {
    return {data, offsets.data(), scales.empty() ? nullptr : scales.data(),
            static_cast<int64_t>(offsets.size())};
  }
};

// Whether a row of `dim` columns with n gradients is summed by all threads.
inline bool is_long(int64_t n, int32_t dim, int threads) {
  // One thread takes about 100 us for these, much longer than the start of a parallel loop.
  constexpr int64_t kMin = int64_t{1} << 19;
  return threads > 1 && n * (dim + 32) >= kMin;
}

// The sums of the pieces of one row.
template <RowType kType>
class PieceSums {
 public:
  // data: of the gradients.
  PieceSums(const LongRow& row, int32_t dim, const char* data, int threads)
      : gradients_(row.gradients(data)), dim_(dim), sums_(pieces_of(gradients_.n) * dim) {
    parallel_for(pieces_of(gradients_.n), kPiecesATime, threads, [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p) {
        sum_piece<kType>(gradients_, p, dim_, sums_.data() + p * dim_);
      }
    });
  }

  // sum[c] = the sum of column c.
  void total(PieceTotals& totals, float* sum) const {
    totals.clear(dim_);
    for (int64_t p = 0; p < pieces_of(gradients_.n); ++p) {
      totals.add(sums_.data() + p * dim_, dim_);
    }
    totals.round(dim_, sum);
  }

 private:
  static constexpr int64_t kPiecesATime = 8;

  const RowGradients gradients_;
  const int32_t dim_;
  std::vector<float> sums_;
};

}  // namespace torchrec_hkv::hash_table::cpu
