// Gradients of the positions of a batch, and sums of them, on the CPU.
#pragma once

#include <cstdint>

#include "common/vectors_cpu.h"
#include "hash_table/cpu/bucket.h"
#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cpu {

// Division of 32-bit numbers by a constant divisor, as a multiplication (Lemire, Kaser, Kurz 2019).
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

// The address of a position's gradient, and its scale.
class Gradients {
 public:
  Gradients(const Batch& batch, Pooling pooling, Output<const char> grad)
      : batch_(batch), pooling_(pooling), grad_(grad), divide_(batch.batch_size) {}

  RowType type() const { return grad_.type; }
  const char* data() const { return grad_.data; }
  const char* from(int32_t feature, int64_t bag) const { return grad_.at(place(feature, bag)); }
  // In elements from data() on.
  int64_t place(int32_t feature, int64_t bag) const {
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
  Division divide_;  // by the batch size
};

// Gradients of one row, in the order of the batch.
struct RowGradients {
  const char* data;
  const int64_t* places;  // [n], in elements from `data` on
  const float* scales;    // [n]; null: no scales
  int64_t n;
};

// The rounding error of a float sum grows with the number of its terms, and does not cancel if the
// terms are alike: a million times a tenth is 1 % off. So a row's gradients are summed in float in
// pieces of kPiece (the first may be shorter), and the pieces in double.
constexpr int64_t kPiece = 64;

// to[k] = the sum of columns `column` + k, for kVectors vectors. The sums stay in registers.
template <RowType kType, bool kScaled, typename Vector, int kVectors>
void sum_vectors(const RowGradients& gradients, int32_t column, float* to) {
  constexpr int kLanes = kColumnsOf<Vector>;
  const int64_t bytes = element_size(kType);
  const char* const data = gradients.data + column * bytes;
  const int64_t* const places = gradients.places;
  Vector sums[kVectors];
  const auto add_piece = [&](int64_t first, int64_t last) {
    const auto load = [&](int64_t i, int v, Vector& columns) {
      load_columns<kType>(data + (places[i] + v * kLanes) * bytes, columns);
      if (kScaled) columns *= gradients.scales[i];
    };
    unrolled<kVectors>([&](auto v) { load(first, v, sums[v]); });
    for (int64_t i = first + 1; i < last; ++i) {
      unrolled<kVectors>([&](auto v) {
        Vector columns;
        load(i, v, columns);
        sums[v] += columns;
      });
    }
  };
  const auto put = [](const Vector& columns, float* place) {
    store_columns<RowType::kFloat32>(columns, reinterpret_cast<char*>(place));
  };
  if (gradients.n <= kPiece) {
    add_piece(0, gradients.n);
    unrolled<kVectors>([&](auto v) { put(sums[v], to + v * kLanes); });
    return;
  }
  double totals[kVectors * kLanes] = {};
  float piece[kVectors * kLanes];
  int64_t first = 0;
  for (int64_t last = (gradients.n - 1) % kPiece + 1; first < gradients.n; last += kPiece) {
    add_piece(first, last);
    unrolled<kVectors>([&](auto v) { put(sums[v], piece + v * kLanes); });
    for (int c = 0; c < kVectors * kLanes; ++c) totals[c] += piece[c];
    first = last;
  }
  for (int c = 0; c < kVectors * kLanes; ++c) to[c] = static_cast<float>(totals[c]);
}

// sum[c] = the sum of column c, for `dim` columns.
template <RowType kType>
void sum_gradients(const RowGradients& gradients, int32_t dim, float* sum) {
  for_vectors(dim, [&]<typename Vector, int kVectors>(int32_t c) {
    if (gradients.scales != nullptr) {
      sum_vectors<kType, true, Vector, kVectors>(gradients, c, sum + c);
    } else {
      sum_vectors<kType, false, Vector, kVectors>(gradients, c, sum + c);
    }
  });
}

}  // namespace torchrec_hkv::hash_table::cpu
