// Arranging the ids and the rows of a read-only table: by parts, and in the order of its index.
#include <algorithm>
#include <cstring>
#include <vector>

#include "common/parallel.h"
#include "serving/kernels_cpu.h"

namespace torchrec_hkv::serving::cpu {

void gather(const Gathered& its, int threads) {
  constexpr int64_t kAhead = 24;
  parallel_for(its.n, std::max(int64_t{1}, (int64_t{1} << 18) / its.row_bytes), threads,
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i) {
                   if (i + kAhead < end) {
                     const char* const next = its.rows + its.order[i + kAhead] * its.row_bytes;
                     for (int64_t at = 0; at < its.row_bytes; at += 64) {
                       __builtin_prefetch(next + at);
                       asm volatile("");  // GCC drops loops that only prefetch
                     }
                     __builtin_prefetch(next + its.row_bytes - 1);
                   }
                   std::memcpy(its.out + i * its.row_bytes, its.rows + its.order[i] * its.row_bytes,
                               static_cast<size_t>(its.row_bytes));
                 }
               });
}

void split(const int64_t* ids, int64_t n, uint32_t parts, int64_t* order, int64_t* counts) {
  const Geometry geometry{parts, 1};
  std::fill_n(counts, parts, 0);
  for (int64_t i = 0; i < n; ++i) ++counts[block_of_mix(mix_of_id(ids[i]), geometry)];
  std::vector<int64_t> ends(parts);
  int64_t at = 0;
  for (uint32_t part = 0; part < parts; ++part) {
    ends[part] = at;
    at += counts[part];
  }
  for (int64_t i = 0; i < n; ++i) order[ends[block_of_mix(mix_of_id(ids[i]), geometry)]++] = i;
}

}  // namespace torchrec_hkv::serving::cpu
