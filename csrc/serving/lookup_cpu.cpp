// Lookups in read-only tables on the CPU: rows are found for some bags at a time, then pooled.
#include <algorithm>
#include <cmath>
#include <vector>

#include "common/initial_rows_cpu.h"
#include "common/parallel.h"
#include "common/vectors_cpu.h"
#include "serving/find_cpu.h"
#include "serving/kernels_cpu.h"

namespace torchrec_hkv::serving::cpu {
namespace {

// Ids whose rows are found, and prefetched, before they are pooled: as many as have room in the
// second-level cache. Then rows ahead of the one that is read: as many as have room in the first.
constexpr int64_t kMostFound = 256, kLeastFound = 16, kBytesFound = 131072;
constexpr int64_t kBytesAhead = 4096, kLeastAhead = 2, kMostAhead = 24;
constexpr int64_t kLine = 64;

template <typename Vector>
Vector fused_multiply_add(float by, const Vector& x, const Vector& sum) {
  if constexpr (sizeof(Vector) == sizeof(float)) {
    return std::fma(by, x, sum);
  } else {
#ifdef __FMA__
    return (Vector)_mm256_fmadd_ps(_mm256_set1_ps(by), (__m256)x, (__m256)sum);
#else
    Vector out;
    for (int k = 0; k < kColumnsOf<Vector>; ++k) out[k] = std::fma(by, x[k], sum[k]);
    return out;
#endif
  }
}

// Columns of a row from a column on. A vector of a row of 4 bits begins with an even column.
template <RowFormat kFormat>
class Reader {
 public:
  Reader(const char* row, float unit) : row_(row) {
    if constexpr (kFormat == RowFormat::kInt8 || kFormat == RowFormat::kInt4) {
      scale_ = unit * load_element(RowType::kFloat16, row, 0);
      offset_ = unit * load_element(RowType::kFloat16, row, 1);
      row_ += kQuantizedHeaderBytes;
    }
  }

  template <typename Vector>
  void load(int32_t c, Vector& columns) const {
    if constexpr (kFormat == RowFormat::kInt8) {
      if constexpr (sizeof(Vector) == sizeof(float)) {
        columns = offset_ + scale_ * static_cast<uint8_t>(row_[c]);
      } else {
#ifdef __AVX2__  // GCC takes a byte at a time for the conversion below
        const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(row_ + c));
        dequantize((Codes)_mm256_cvtepu8_epi32(bytes), columns);
#else
        typedef uint8_t Bytes __attribute__((vector_size(8)));
        Bytes bytes;
        std::memcpy(&bytes, row_ + c, sizeof(bytes));
        dequantize(__builtin_convertvector(bytes, Codes), columns);
#endif
      }
    } else if constexpr (kFormat == RowFormat::kInt4) {
      if constexpr (sizeof(Vector) == sizeof(float)) {
        columns = offset_ + scale_ * (static_cast<uint8_t>(row_[c / 2]) >> c % 2 * 4 & 15);
      } else {
        uint32_t bytes;
        std::memcpy(&bytes, row_ + c / 2, sizeof(bytes));
        typedef uint32_t Wide __attribute__((vector_size(32)));
        dequantize((Codes)(bytes >> Wide{0, 4, 8, 12, 16, 20, 24, 28} & 15), columns);
      }
    } else {
      constexpr auto kType = static_cast<RowType>(kFormat);
      load_columns<kType>(row_ + c * element_size(kType), columns);
    }
  }

 private:
  typedef int32_t Codes __attribute__((vector_size(32)));

  template <typename Vector>
  void dequantize(const Codes& codes, Vector& columns) const {
    columns = offset_ + scale_ * __builtin_convertvector(codes, Vector);
  }

  const char* row_;
  float scale_ = 1.0f, offset_ = 0.0f;
};

template <RowFormat kFormat, bool kFused>
class Pool {
 public:
  // rows: of the ids from number `first` on, null where the table has none.
  Pool(const Feature& feature, const char* const* rows, int64_t first, int64_t last)
      : feature_(feature),
        table_(*feature.table),
        rows_(rows - first),
        last_(last),
        lines_((table_.row_bytes + kLine - 1) / kLine),
        ahead_(std::clamp(kBytesAhead / table_.row_bytes, kLeastAhead, kMostAhead)) {
    for (int64_t at = first; at < std::min(first + ahead_, last); ++at) prefetch(at);
  }

  void run(int64_t begin, int64_t end) {
    const int32_t dim = table_.dim;
    for (int64_t bag = begin; bag < end; ++bag) {
      const int64_t first = feature_.offsets == nullptr ? bag : feature_.offsets[bag];
      const int64_t last = feature_.offsets == nullptr ? bag + 1 : feature_.offsets[bag + 1];
      int32_t c = 0;
      for (; dim - c >= 64; c += 64) sum<Columns, 8>(bag, first, last, c);
      for (; dim - c >= 8; c += 8) sum<Columns, 1>(bag, first, last, c);
      for (; c < dim; ++c) sum<float, 1>(bag, first, last, c);
    }
  }

 private:
  template <typename Vector, int kVectors>
  void sum(int64_t bag, int64_t first, int64_t last, int32_t c) {
    constexpr int kLanes = kColumnsOf<Vector>;
    // -0 + x is x, also where x is -0: a row that is written out keeps its bits.
    const float zero = feature_.offsets == nullptr ? -0.0f : 0.0f;
    Vector sums[kVectors];
    unrolled<kVectors>([&](auto v) { sums[v] = Vector{} + zero; });
    for (int64_t at = first; at < last; ++at) {
      if (c == 0 && at + ahead_ < last_) prefetch(at + ahead_);
      const char* const row = rows_[at];
      const float by = scale(at, last - first);
      const auto add = [&](const auto& reader, int32_t column) {
        unrolled<kVectors>([&](auto v) {
          Vector columns;
          reader.load(column + v * kLanes, columns);
          if constexpr (kFused) {
            sums[v] = fused_multiply_add(by, columns, sums[v]);
          } else {
            sums[v] += by * columns;
          }
        });
      };
      if (row != nullptr) [[likely]] {
        add(Reader<kFormat>(row, table_.unit), c);
      } else {
        alignas(32) float initial[kVectors * kLanes];
        unknown_columns(at, c, kVectors * kLanes, initial);
        add(Reader<RowFormat::kFloat32>(reinterpret_cast<const char*>(initial), 1.0f), 0);
      }
    }
    finish(first, last, [&](auto apply) { unrolled<kVectors>([&](auto v) { apply(sums[v]); }); });
    char* const out =
        feature_.out + bag * feature_.stride + int64_t{c} * element_size(feature_.type);
    with_type(feature_.type, [&]<RowType kOut>() {
      unrolled<kVectors>(
          [&](auto v) { store_columns<kOut>(sums[v], out + v * kLanes * element_size(kOut)); });
    });
  }

  [[gnu::noinline]] void unknown_columns(int64_t at, int32_t c, int32_t n, float* out) const {
    if (table_.default_row != nullptr) {
      std::copy_n(table_.default_row + c, n, out);
    } else {
      initial_row(table_.initial_rows, feature_.ids[at], static_cast<uint32_t>(c), n, out);
    }
  }

  float scale(int64_t at, int64_t length) const {
    const float bag = feature_.mean == Mean::kScaledRows ? 1.0f / length : 1.0f;
    return feature_.weights == nullptr ? bag : feature_.weights[at] * bag;
  }

  // What is done with the sums of a bag.
  template <typename ForSums>
  void finish(int64_t first, int64_t last, const ForSums& for_sums) const {
    if (feature_.mean == Mean::kScaledSum && last > first) {
      const float by = 1.0f / (last - first);
      for_sums([&](auto& sums) { sums *= by; });
    } else if (feature_.mean == Mean::kDividedSum) {
      float by = feature_.weights == nullptr ? last - first : 0.0f;
      for (int64_t at = first; feature_.weights != nullptr && at < last; ++at) {
        by += feature_.weights[at];
      }
      if (by != 0.0f) for_sums([&](auto& sums) { sums /= by; });
    }
  }

  void prefetch(int64_t at) const {
    const char* const row = rows_[at];
    if (row == nullptr) return;
    for (int64_t line = 0; line < lines_; ++line) prefetch_line(row + line * kLine);
    prefetch_line(row + table_.row_bytes - 1);
  }

  const Feature& feature_;
  const Table& table_;
  const char* const* const rows_;
  const int64_t last_;
  const int64_t lines_;
  const int64_t ahead_;
};

void pool(const Feature& feature, const char* const* rows, int64_t first, int64_t last,
          int64_t begin, int64_t end) {
  const auto run = [&]<RowFormat kFormat, bool kFused>() {
    Pool<kFormat, kFused>(feature, rows, first, last).run(begin, end);
  };
  switch (feature.table->format) {
    case RowFormat::kFloat32:
      return feature.fused ? run.operator()<RowFormat::kFloat32, true>()
                           : run.operator()<RowFormat::kFloat32, false>();
    case RowFormat::kFloat16:
      return feature.fused ? run.operator()<RowFormat::kFloat16, true>()
                           : run.operator()<RowFormat::kFloat16, false>();
    case RowFormat::kBFloat16:
      return run.operator()<RowFormat::kBFloat16, false>();
    case RowFormat::kInt8:
      return run.operator()<RowFormat::kInt8, false>();
    case RowFormat::kInt4:
      return run.operator()<RowFormat::kInt4, false>();
  }
}

}  // namespace

void look_up(const Feature& feature, int threads) {
  const auto start_of = [&](int64_t bag) {
    return feature.offsets == nullptr ? bag : feature.offsets[bag];
  };
  const int64_t ids = start_of(feature.bags) - start_of(0);
  const int64_t found = std::clamp(kBytesFound / feature.table->row_bytes, kLeastFound, kMostFound);
  // A thread is worth some thousand ids.
  const int64_t grain = ids == 0 ? feature.bags + 1 : 4096 * feature.bags / ids + 1;
  parallel_for(feature.bags, grain, threads, [&](int64_t begin, int64_t end) {
    std::vector<const char*> rows;
    while (begin < end) {
      const int64_t first = start_of(begin);
      int64_t stop = begin + 1;
      while (stop < end && start_of(stop + 1) - first <= found) ++stop;
      const int64_t last = start_of(stop);
      if (rows.size() < static_cast<size_t>(last - first)) rows.resize(last - first);
      const int64_t unknown =
          find_rows(*feature.table, feature.ids + first, last - first, rows.data());
      if (unknown > 0) __atomic_fetch_add(feature.unknown, unknown, __ATOMIC_RELAXED);
      pool(feature, rows.data(), first, last, begin, stop);
      begin = stop;
    }
  });
}

}  // namespace torchrec_hkv::serving::cpu
