// Gradients of the positions of a batch, and sums of them, on the CPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/vectors_cpu.h"
#include "hash_table/cpu/bucket.h"
#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cpu {

// Division of 32-bit numbers by a constant divisor, as a multiplication (Lemire, Kaser, Kurz 2019).
class FastDivide {
 public:
  explicit FastDivide(int64_t by)
      : inverse_(by > 1 ? UINT64_MAX / static_cast<uint64_t>(by) + 1 : 0) {}

  uint32_t operator()(uint32_t number) const {
    if (inverse_ == 0) return number;
    return static_cast<uint32_t>(static_cast<unsigned __int128>(inverse_) * number >> 64);
  }

 private:
  uint64_t inverse_;  // 2^64 / the divisor, rounded up; 0 for a divisor of 1
};

// The address of a position's gradient, and its scale.
class Gradients {
 public:
  Gradients(const Batch& batch, Pooling pooling, Output<const char> grad)
      : batch_(batch), pooling_(pooling), grad_(grad), divide_(batch.batch_size) {}

  RowType type() const { return grad_.type; }
  const char* data() const { return grad_.data; }
  const char* from(int32_t feature, int64_t bag) const { return grad_.at(offset(feature, bag)); }
  // A bag's gradient, in elements from data() on.
  int64_t offset(int32_t feature, int64_t bag) const {
    return batch_.output_of(feature, bag - batch_.first_bag(feature), grad_.stride);
  }
  int32_t feature_of_bag(uint32_t bag) const {
    return batch_.ragged != nullptr ? batch_.feature_of_bag(bag)
                                    : static_cast<int32_t>(divide_(bag));
  }
  // Whether gradients have scales.
  bool scaled() const { return pooling_.mean || pooling_.weights != nullptr; }
  float scale(int64_t position, int64_t bag) const {
    const float weight = pooling_.weights ? pooling_.weights[position] : 1.0f;
    if (!pooling_.mean) return weight;
    return weight * (1.0f / (batch_.offsets[bag + 1] - batch_.offsets[bag]));
  }

 private:
  const Batch& batch_;
  Pooling pooling_;
  Output<const char> grad_;
  FastDivide divide_;  // by the batch size
};

// Gradients of one row, in the order of the batch.
struct RowGradients {
  const char* data;
  const int64_t* offsets;  // [n], in elements from `data` on
  const float* scales;     // [n]; null: no scales
  int64_t n;
};

// The rounding error of a float sum grows with the number of its terms, and does not cancel if the
// terms are alike: a million times a tenth is 1 % off. So a row's gradients are summed in float in
// pieces of kPiece (the first may be shorter), and the pieces in double.
constexpr int64_t kPiece = 64;

// The number of pieces of n gradients, and the first gradient of a piece.
inline int64_t pieces_of(int64_t n) { return (n + kPiece - 1) / kPiece; }
inline int64_t piece_start(int64_t n, int64_t piece) {
  return std::max<int64_t>(0, n - (pieces_of(n) - piece) * kPiece);
}

// to[k] = the sum of columns `column` + k of the gradients [first, last), for kVectors vectors. The
// sums stay in registers. end: the offset of the last vector.
template <RowType kType, bool kScaled, typename Vector, int kVectors>
void sum_vectors(const RowGradients& gradients, int64_t first, int64_t last, int32_t column,
                 int32_t end, float* to) {
  const int64_t bytes = element_size(kType);
  const char* const data = gradients.data + column * bytes;
  const int64_t* const offsets = gradients.offsets;
  const auto load = [&](int64_t i, int v, Vector& columns) {
    load_columns<kType>(data + (offsets[i] + offset_of<Vector, kVectors>(v, end)) * bytes, columns);
    if (kScaled) columns *= gradients.scales[i];
  };
  Vector sums[kVectors];
  unrolled<kVectors>([&](auto v) { load(first, v, sums[v]); });
  for (int64_t i = first + 1; i < last; ++i) {
    unrolled<kVectors>([&](auto v) {
      Vector columns;
      load(i, v, columns);
      sums[v] += columns;
    });
  }
  unrolled<kVectors>([&](auto v) {
    store_columns<RowType::kFloat32>(
        sums[v], reinterpret_cast<char*>(to + offset_of<Vector, kVectors>(v, end)));
  });
}

// sum[c] = the sum of column c of a piece, for `dim` columns.
template <RowType kType>
void sum_piece(const RowGradients& gradients, int64_t piece, int32_t dim, float* sum) {
  const int64_t first = piece_start(gradients.n, piece), last = piece_start(gradients.n, piece + 1);
  for_vectors_once(dim, [&]<typename Vector, int kVectors>(int32_t c, int32_t end) {
    if (gradients.scales != nullptr) {
      sum_vectors<kType, true, Vector, kVectors>(gradients, first, last, c, end, sum + c);
    } else {
      sum_vectors<kType, false, Vector, kVectors>(gradients, first, last, c, end, sum + c);
    }
  });
}

// Adds sums of pieces, in their order.
class PieceTotals {
 public:
  explicit PieceTotals(int32_t widest) : totals_(widest) {}

  void clear(int32_t dim) { std::fill_n(totals_.begin(), dim, 0.0); }
  void add(const float* piece, int32_t dim) {
    for (int32_t c = 0; c < dim; ++c) totals_[c] += piece[c];
  }
  void round(int32_t dim, float* sum) const {
    for (int32_t c = 0; c < dim; ++c) sum[c] = static_cast<float>(totals_[c]);
  }

 private:
  std::vector<double> totals_;
};

// sum[c] = the sum of column c, for `dim` columns.
template <RowType kType>
void sum_gradients(const RowGradients& gradients, int32_t dim, PieceTotals& totals, float* sum) {
  if (gradients.n <= kPiece) return sum_piece<kType>(gradients, 0, dim, sum);
  totals.clear(dim);
  for (int64_t piece = 0; piece < pieces_of(gradients.n); ++piece) {
    sum_piece<kType>(gradients, piece, dim, sum);
    totals.add(sum, dim);
  }
  totals.round(dim, sum);
}

}  // namespace torchrec_hkv::hash_table::cpu
