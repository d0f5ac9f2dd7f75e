// Converts rows to 8 and 4 bits.
#include <algorithm>
#include <cstring>
#include <mutex>

#include "common/dtypes.h"
#include "common/parallel.h"
#include "common/vectors_cpu.h"
#include "serving/kernels_cpu.h"

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace torchrec_hkv::serving::cpu {
namespace {

typedef int32_t Integers __attribute__((vector_size(32)));

constexpr uint32_t kInfinityBits = 0x7f800000u, kNegativeZero = 0x80000000u;
constexpr uint16_t kMaxHalf = 0x7bffu;  // the largest float16
constexpr int kMaxRoom = 1 << 30;       // a zero can be halved without limit
// 1.5 * 2^23: adding a value to it rounds the value to an integer, ties to even.
constexpr float kMagic = 12582912.0f;

struct ValueRange {
  float low, high;
  uint32_t magnitude;  // bits of the largest absolute value; larger than kInfinityBits for NaN
};

// Reduces eight values to one. pick(a, b): selects one of two values, for each element of vectors.
// It reduces by halves: one value after the other would take longer than the rest of a row.
template <typename Vector, typename Pick>
[[gnu::always_inline]] inline auto reduced(const Vector& eight, const Pick& pick) {
  const Vector four = pick(eight, __builtin_shufflevector(eight, eight, 4, 5, 6, 7, 0, 1, 2, 3));
  const Vector two = pick(four, __builtin_shufflevector(four, four, 2, 3, 0, 1, 6, 7, 4, 5));
  return pick(two, __builtin_shufflevector(two, two, 1, 0, 3, 2, 5, 4, 7, 6))[0];
}

ValueRange range_of(const float* row, int32_t dim) {
  ValueRange range{row[0], row[0], 0};
  int32_t c = 0;
  if (dim >= 8) {
    Columns low, high;
    std::memcpy(&low, row, sizeof(low));
    high = low;
    Integers magnitude{};
    for (; dim - c >= 8; c += 8) {
      Columns x;
      std::memcpy(&x, row + c, sizeof(x));
#ifdef __AVX2__  // GCC uses a comparison and a blend for the selections below
      low = (Columns)_mm256_min_ps((__m256)x, (__m256)low);
      high = (Columns)_mm256_max_ps((__m256)x, (__m256)high);
      magnitude =
          (Integers)_mm256_max_epi32((__m256i)((Integers)x & 0x7fffffff), (__m256i)magnitude);
#else
      low = x < low ? x : low;
      high = x > high ? x : high;
      const Integers bits = (Integers)x & 0x7fffffff;
      magnitude = bits > magnitude ? bits : magnitude;
#endif
    }
    range.low = reduced(low, [](auto a, auto b) { return a < b ? a : b; });
    range.high = reduced(high, [](auto a, auto b) { return a > b ? a : b; });
    range.magnitude =
        static_cast<uint32_t>(reduced(magnitude, [](auto a, auto b) { return a > b ? a : b; }));
  }
  for (; c < dim; ++c) {
    range.low = std::min(range.low, row[c]);
    range.high = std::max(range.high, row[c]);
    range.magnitude = std::max(range.magnitude, float_bits(row[c]) & ~kNegativeZero);
  }
  if (range.low == 0.0f) {  // -0 counts as less than 0, independently of the order
    const bool has_negative =
        std::any_of(row, row + dim, [](float x) { return float_bits(x) == kNegativeZero; });
    range.low = has_negative ? -0.0f : 0.0f;
  }
  if (range.high == 0.0f) range.high = 0.0f;
  return range;
}

// Number of times that a float16 can be halved without changing its mantissa.
int room_of(uint16_t half) {
  return (half & 0x7fff) == 0 ? kMaxRoom : std::max((half >> 10 & 31) - 1, 0);
}

// The same for a float.
int room_of(float x) {
  return x == 0.0f ? kMaxRoom : std::max(static_cast<int>(float_bits(x) >> 23 & 255) - 1, 0);
}

// Codes of the columns of a row: (column * inverse - offset) / step, rounded, from 0 to `levels`.
class Coder {
 public:
  Coder(float inverse, float offset, float step, float levels)
      : inverse_(inverse), offset_(offset), step_(step), levels_(levels) {}

  void run(const float* row, int32_t n, uint8_t* codes) const {
    int32_t c = 0;
#ifdef __AVX2__
    for (; n - c >= 32; c += 32) {
      __m256i wide[4];
      unrolled<4>([&](auto k) { wide[k] = (__m256i)eight(row + c + k * 8); });
      const __m256i narrow = _mm256_packus_epi16(_mm256_packus_epi32(wide[0], wide[1]),
                                                 _mm256_packus_epi32(wide[2], wide[3]));
      const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + c),
                          _mm256_permutevar8x32_epi32(narrow, order));
    }
#endif
    for (; n - c >= 8; c += 8) {
      const Integers wide = eight(row + c);
      for (int k = 0; k < 8; ++k) codes[c + k] = static_cast<uint8_t>(wide[k]);
    }
    for (; c < n; ++c) {
      const float code = (row[c] * inverse_ - offset_) / step_;
      const float within = std::min(std::max(code, 0.0f), levels_);
      codes[c] = static_cast<uint8_t>(float_bits(within + kMagic) & 0xffu);
    }
  }

 private:
  [[gnu::always_inline]] Integers eight(const float* from) const {
    Columns x;
    std::memcpy(&x, from, sizeof(x));
    x = (x * inverse_ - offset_) / step_;
#ifdef __AVX2__
    x = (Columns)_mm256_min_ps(_mm256_max_ps((__m256)x, _mm256_setzero_ps()),
                               _mm256_set1_ps(levels_));
#else
    x = x > 0.0f ? x : Columns{};
    x = x < levels_ ? x : Columns{} + levels_;
#endif
    return (Integers)(x + kMagic) & 0xff;
  }

  const float inverse_, offset_, step_, levels_;
};

class Quantizer {
 public:
  explicit Quantizer(const QuantizeArguments& arguments)
      : arguments_(arguments),
        row_bytes_(row_bytes_of(arguments.format, arguments.dim)),
        levels_(arguments.format == RowFormat::kInt8 ? 255.0f : 15.0f) {}

  // Converts rows until one exceeds the limit.
  QuantizeResult run(int64_t begin, int64_t end) const {
    QuantizeResult done{end, 0.0f, kMaxRoom};
    for (int64_t i = begin; i < end; ++i) {
      const float* const row = arguments_.rows + i * arguments_.dim;
      const ValueRange range = range_of(row, arguments_.dim);
      const float largest = bits_float(range.magnitude);
      if (range.magnitude >= kInfinityBits || largest > arguments_.limit)
        return {i, largest, done.headroom};
      done.headroom = std::min(done.headroom, write(row, range, arguments_.out + i * row_bytes_));
    }
    return done;
  }

 private:
  int write(const float* row, const ValueRange& range, char* out) const {
    const float inverse = 1.0f / arguments_.unit;  // exact, as the unit is a power of two
    uint16_t halves[2];                            // scale and offset
    const float low = range.low * inverse, high = range.high * inverse;
    halves[1] = to_float16(low);
    if ((halves[1] & 0x7fff) > kMaxHalf) halves[1] = (halves[1] & 0x8000) | kMaxHalf;
    const float offset = from_float16(halves[1]);
    // A scale that is rounded down can't represent the row's largest value.
    const float wanted = (high - offset) / levels_;
    halves[0] = to_float16(wanted);
    if (from_float16(halves[0]) < wanted) ++halves[0];
    std::memcpy(out, halves, sizeof(halves));
    const float scale = from_float16(halves[0]);
    const Coder coder(inverse, offset, scale == 0.0f ? 1.0f : scale, levels_);
    auto* const codes = reinterpret_cast<uint8_t*>(out + kQuantizedHeaderBytes);
    int64_t used = arguments_.dim;
    if (arguments_.format == RowFormat::kInt8) {
      coder.run(row, arguments_.dim, codes);
    } else {
      used = (arguments_.dim + 1) / 2;
      constexpr int32_t kChunk = 64;
      for (int32_t c = 0; c < arguments_.dim; c += kChunk) {
        const int32_t n = std::min(kChunk, arguments_.dim - c);
        uint8_t codes_of_chunk[kChunk];
        coder.run(row + c, n, codes_of_chunk);
        if (n % 2 != 0) codes_of_chunk[n] = 0;
        for (int32_t k = 0; k < (n + 1) / 2; ++k) {
          codes[c / 2 + k] =
              static_cast<uint8_t>(codes_of_chunk[2 * k] | codes_of_chunk[2 * k + 1] << 4);
        }
      }
    }
    for (int64_t at = kQuantizedHeaderBytes + used; at < row_bytes_; ++at) out[at] = 0;
    return std::min({room_of(halves[0]), room_of(halves[1]), room_of(low), room_of(high)});
  }

  const QuantizeArguments& arguments_;
  const int64_t row_bytes_;
  const float levels_;
};

}  // namespace

QuantizeResult quantize(const QuantizeArguments& arguments, int threads) {
  const Quantizer quantizer(arguments);
  QuantizeResult all{arguments.n, 0.0f, kMaxRoom};
  std::mutex mutex;
  const int64_t grain = std::max(int64_t{1}, int64_t{1 << 16} / arguments.dim);
  parallel_for(arguments.n, grain, threads, [&](int64_t begin, int64_t end) {
    const QuantizeResult part = quantizer.run(begin, end);
    const std::lock_guard<std::mutex> guard(mutex);
    all.headroom = std::min(all.headroom, part.headroom);
    if (part.rows < end && part.rows < all.rows) {
      all.rows = part.rows;
      all.largest = part.largest;
    }
  });
  return all;
}

void lower(char* rows, int64_t n, int64_t row_bytes, int doublings) {
  for (int64_t i = 0; i < n; ++i) {
    uint16_t halves[2];
    std::memcpy(halves, rows + i * row_bytes, sizeof(halves));
    for (uint16_t& half : halves) {
      if ((half & 0x7fff) != 0) half = static_cast<uint16_t>(half - (doublings << 10));
    }
    std::memcpy(rows + i * row_bytes, halves, sizeof(halves));
  }
}

}  // namespace torchrec_hkv::serving::cpu
