// Arranges the ids and rows of a read-only table: by parts, and in the order of its index.
#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "common/parallel_beside.h"
#include "serving/kernels_cpu.h"

namespace torchrec_hkv::serving::cpu {

void gather(const GatherArguments& arguments, int threads) {
  constexpr int64_t kAhead = 24;
  parallel_for_beside(arguments.n, std::max(int64_t{1}, (int64_t{1} << 18) / arguments.row_bytes),
                      threads, [&](int64_t begin, int64_t end) {
                        for (int64_t i = begin; i < end; ++i) {
                          if (i + kAhead < end) {
                            const char* const next =
                                arguments.rows + arguments.order[i + kAhead] * arguments.row_bytes;
                            for (int64_t at = 0; at < arguments.row_bytes; at += 64) {
                              __builtin_prefetch(next + at);
                              asm volatile("");  // GCC drops loops that only prefetch
                            }
                            __builtin_prefetch(next + arguments.row_bytes - 1);
                          }
                          std::memcpy(arguments.out + i * arguments.row_bytes,
                                      arguments.rows + arguments.order[i] * arguments.row_bytes,
                                      static_cast<size_t>(arguments.row_bytes));
                        }
                      });
}

void split(const int64_t* ids, int64_t n, uint32_t parts, const SplitOutput& out, int threads) {
  const IndexGeometry geometry{parts, 1};
  const auto part_of = [&](int64_t i) { return block_of_mix(mix_of_id(ids[i]), geometry); };
  // Each share of the ids has its own range in each part, so that the order of ids is kept.
  const int64_t shares = std::max(int64_t{1}, std::min<int64_t>(threads, n / (parts + 4096)));
  std::vector<int64_t> places(shares * parts, 0);
  const auto of_shares = [&](const auto& work) {
    parallel_for_beside(shares, 1, threads, [&](int64_t begin, int64_t end) {
      for (int64_t share = begin; share < end; ++share) {
        work(places.data() + share * parts, n * share / shares, n * (share + 1) / shares);
      }
    });
  };
  of_shares([&](int64_t* counts, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) ++counts[part_of(i)];
  });
  int64_t at = 0;
  for (uint32_t part = 0; part < parts; ++part) {
    const int64_t first = at;
    for (int64_t share = 0; share < shares; ++share) {
      at += std::exchange(places[share * parts + part], at);
    }
    out.counts[part] = at - first;
  }
  of_shares([&](int64_t* ends, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t place = ends[part_of(i)]++;
      out.order[place] = i;
      out.ids[place] = ids[i];
    }
  });
}

}  // namespace torchrec_hkv::serving::cpu
