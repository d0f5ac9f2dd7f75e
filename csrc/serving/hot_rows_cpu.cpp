// The hot rows of read-only tables, on the CPU.
#include <cstring>
#include <vector>

#include "common/parallel.h"
#include "serving/find_cpu.h"
#include "serving/kernels_cpu.h"

namespace torchrec_hkv::serving::cpu {
namespace {

constexpr int kHalfBits = 16;
constexpr uint32_t kHalfMask = (uint32_t{1} << kHalfBits) - 1;

// The smallest count of a hot row, and the number of rows with this count that are hot.
struct CountThreshold {
  uint32_t count;
  int64_t rows;
};

// The bin of the `wanted`-th largest value, and the number of wanted values in it.
CountThreshold threshold_of(const std::vector<int64_t>& bins, int64_t wanted) {
  auto bin = static_cast<uint32_t>(bins.size() - 1);
  while (bin > 0 && bins[bin] < wanted) wanted -= bins[bin--];
  return {bin, wanted};
}

// Computed from the upper, then from the lower half of the counts' bits. 0 < wanted <= n.
CountThreshold threshold_of(const uint32_t* counts, int64_t n, int64_t wanted) {
  std::vector<int64_t> bins(size_t{1} << kHalfBits, 0);
  for (int64_t row = 0; row < n; ++row) ++bins[counts[row] >> kHalfBits];
  const CountThreshold high = threshold_of(bins, wanted);
  bins.assign(bins.size(), 0);
  for (int64_t row = 0; row < n; ++row) {
    if (counts[row] >> kHalfBits == high.count) ++bins[counts[row] & kHalfMask];
  }
  const CountThreshold low = threshold_of(bins, high.rows);
  return {high.count << kHalfBits | low.count, low.rows};
}

}  // namespace

void choose_hot_rows(const uint32_t* counts, int64_t n, int64_t wanted, const HotMaskWord* before,
                     HotMaskWord* words) {
  CountThreshold threshold{0, 0};
  if (wanted > 0 && n > 0) threshold = threshold_of(counts, n, wanted < n ? wanted : n);
  const bool none = threshold.rows == 0;
  const auto was_hot = [&](int64_t row) {
    return before != nullptr && hot_index(before[row / kHotMaskRows], row) >= 0;
  };
  // Among rows with the count of the cut, rows that were hot before are chosen first.
  int64_t num_staying = 0;
  for (int64_t row = 0; row < n && before != nullptr; ++row) {
    num_staying += counts[row] == threshold.count && was_hot(row);
  }
  num_staying = num_staying < threshold.rows ? num_staying : threshold.rows;
  int64_t num_coming = threshold.rows - num_staying;
  uint32_t hot = 0;
  for (int64_t first = 0; first < n; first += kHotMaskRows) {
    const int64_t here = n - first < kHotMaskRows ? n - first : kHotMaskRows;
    uint32_t mask = 0;
    for (int64_t k = 0; k < here && !none; ++k) {
      const uint32_t count = counts[first + k];
      bool is_hot = count > threshold.count;
      if (count == threshold.count) is_hot = (was_hot(first + k) ? num_staying : num_coming)-- > 0;
      mask |= static_cast<uint32_t>(is_hot) << k;
    }
    words[first / kHotMaskRows] = {mask, hot};
    hot += bits_of(mask);
  }
}

void copy_hot_rows(const HotRowCopy& arguments, int threads) {
  parallel_for(arguments.rows, 1 << 12, threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t place = hot_index(arguments.words[row / kHotMaskRows], row);
      if (place < 0) continue;
      std::memcpy(arguments.to + place * arguments.row_bytes,
                  arguments.from + row * arguments.row_bytes,
                  static_cast<size_t>(arguments.row_bytes));
    }
  });
}

void find_row_numbers(const RowNumbers& arguments, int threads) {
  const Layer& layer = arguments.layer;
  const auto number_in = [&](int64_t bucket, int64_t id) {
    const Bucket& in = layer.buckets[bucket];
    const int position = position_of(in, id);
    const bool is_there = position >= 0 && !is_erased(in.header, position);
    return is_there ? first_row_of(in.header) + position : int64_t{-1};
  };
  parallel_for(arguments.n, 1 << 12, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const CandidateBuckets choice = choose(arguments.ids[i], layer.geometry);
      arguments.rows[i] = number_in(choice.first, arguments.ids[i]);
      if (arguments.rows[i] < 0) arguments.rows[i] = number_in(choice.second, arguments.ids[i]);
    }
  });
}

}  // namespace torchrec_hkv::serving::cpu
