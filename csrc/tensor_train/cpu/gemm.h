// C (+)= A B for the small matrices of Tensor-Train kernels.
#pragma once

#include <cstdint>

#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#endif

namespace torchrec_hkv::tensor_train::cpu {

constexpr int32_t kLanes = 8;

// Rounds columns of B and C up to whole vectors.
inline int32_t padded(int32_t columns) { return (columns + kLanes - 1) / kLanes * kLanes; }

#if defined(__AVX2__) && defined(__FMA__)
struct Vec {
  __m256 v;
  static Vec zero() { return {_mm256_setzero_ps()}; }
  static Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static Vec all(float x) { return {_mm256_set1_ps(x)}; }
  void store(float* p) const { _mm256_storeu_ps(p, v); }
  void add_product(const Vec& a, const Vec& b) { v = _mm256_fmadd_ps(a.v, b.v, v); }
};
#else
struct Vec {
  float v[kLanes];
  static Vec zero() { return {}; }
  static Vec load(const float* p) {
    Vec x;
    for (int32_t i = 0; i < kLanes; ++i) x.v[i] = p[i];
    return x;
  }
  static Vec all(float value) {
    Vec x;
    for (int32_t i = 0; i < kLanes; ++i) x.v[i] = value;
    return x;
  }
  void store(float* p) const {
    for (int32_t i = 0; i < kLanes; ++i) p[i] = v[i];
  }
  void add_product(const Vec& a, const Vec& b) {
    for (int32_t i = 0; i < kLanes; ++i) v[i] += a.v[i] * b.v[i];
  }
};
#endif

// Element (i, k) of A is a[i * row + k * column], so A may be transposed.
struct Strided {
  const float* a;
  int64_t row;
  int64_t column;
};

template <int kRows, int kVectors>
inline void gemm_block(int64_t depth, const Strided& a, const float* b, int64_t ldb, float* c,
                       int64_t ldc, bool add) {
  Vec sums[kRows][kVectors];
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kVectors; ++j) {
      sums[i][j] = add ? Vec::load(c + i * ldc + j * kLanes) : Vec::zero();
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    Vec columns[kVectors];
    for (int j = 0; j < kVectors; ++j) columns[j] = Vec::load(b + k * ldb + j * kLanes);
    for (int i = 0; i < kRows; ++i) {
      const Vec value = Vec::all(a.a[i * a.row + k * a.column]);
      for (int j = 0; j < kVectors; ++j) sums[i][j].add_product(value, columns[j]);
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kVectors; ++j) sums[i][j].store(c + i * ldc + j * kLanes);
  }
}

template <int kVectors>
inline void gemm_panel(int64_t rows, int64_t depth, Strided a, const float* b, int64_t ldb,
                       float* c, int64_t ldc, bool add) {
  for (; rows >= 4; rows -= 4, a.a += 4 * a.row, c += 4 * ldc) {
    gemm_block<4, kVectors>(depth, a, b, ldb, c, ldc, add);
  }
  if (rows == 3) gemm_block<3, kVectors>(depth, a, b, ldb, c, ldc, add);
  if (rows == 2) gemm_block<2, kVectors>(depth, a, b, ldb, c, ldc, add);
  if (rows == 1) gemm_block<1, kVectors>(depth, a, b, ldb, c, ldc, add);
}

// C [rows][columns] = A B, or C += A B if `add`. columns is a multiple of kLanes.
inline void gemm(int64_t rows, int64_t columns, int64_t depth, const Strided& a, const float* b,
                 int64_t ldb, float* c, int64_t ldc, bool add) {
  int64_t j = 0;
  for (; j + 2 * kLanes <= columns; j += 2 * kLanes) {
    gemm_panel<2>(rows, depth, a, b + j, ldb, c + j, ldc, add);
  }
  if (j < columns) gemm_panel<1>(rows, depth, a, b + j, ldb, c + j, ldc, add);
}

}  // namespace torchrec_hkv::tensor_train::cpu
