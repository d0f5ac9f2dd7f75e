#include <cstring>
#include <numeric>
#include <vector>

#include "common/parallel.h"
#include "routing/blocks.h"

namespace torchrec_hkv::routing::cpu {
namespace {

template <typename Length>
void copy_lengths(const int64_t* from, int64_t n, int64_t first_id, Length* lengths,
                  int64_t* offsets) {
  for (int64_t b = 0; b < n; ++b) {
    lengths[b] = static_cast<Length>(from[b]);
    offsets[b] = first_id;
    first_id += from[b];
  }
}

template <typename Length>
void count(const Length* lengths, const Counts& out, int threads) {
  const int64_t grain = 1 + 16384 / (1 + out.batch_size);
  parallel_for(out.num_features, grain, threads, [&](int64_t begin, int64_t end) {
    for (int64_t f = begin; f < end; ++f) {
      const Length* const first = lengths + f * out.batch_size;
      out.counts[out.at[f]] = std::accumulate(first, first + out.batch_size, int64_t{0});
    }
  });
  for (int64_t r = 0; r < out.num_ranks; ++r) out.counts[out.samples_at[r]] = out.batch_size;
}

}  // namespace

void count_ids(const void* lengths, bool narrow, const Counts& out, int threads) {
  if (narrow) {
    count(static_cast<const int32_t*>(lengths), out, threads);
  } else {
    count(static_cast<const int64_t*>(lengths), out, threads);
  }
}

void merge_blocks(const Blocks& blocks, MergedBatch out, int threads) {
  const int64_t segments = blocks.num_segments(), features = blocks.num_features;
  const auto count = [&](int64_t s) { return blocks.counts[s + s / features]; };
  // First id of a segment, in the blocks and in the batch.
  std::vector<int64_t> from(segments), to(segments);
  int64_t arrived = 0, placed = 0;
  for (int64_t s = 0; s < segments; ++s) {
    from[s] = arrived;
    arrived += count(s);
    to[s] = placed;
    placed += count(blocks.order[s]);
  }
  const int64_t lengths_of_block = features * blocks.batch_size;
  const int64_t grain = 1 + 4096 * segments / (1 + blocks.num_ids + segments * blocks.batch_size);
  parallel_for(segments, grain, threads, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      const int64_t s = blocks.order[k], rank = s / features, n = count(s);
      const int64_t* const block = blocks.words + from[rank * features] + rank * lengths_of_block;
      const int64_t* const lengths = block + (s % features) * blocks.batch_size;
      const int64_t* const ids = block + lengths_of_block + (from[s] - from[rank * features]);
      const int64_t first_bag = k * blocks.batch_size;
      int64_t* const offsets = out.offsets + first_bag;
      if (out.narrow_lengths) {
        copy_lengths(lengths, blocks.batch_size, to[k],
                     static_cast<int32_t*>(out.lengths) + first_bag, offsets);
      } else {
        copy_lengths(lengths, blocks.batch_size, to[k],
                     static_cast<int64_t*>(out.lengths) + first_bag, offsets);
      }
      std::memcpy(out.ids + to[k], ids, static_cast<size_t>(n) * sizeof(int64_t));
      if (out.weights != nullptr) {
        std::memcpy(out.weights + to[k], blocks.weights + from[s],
                    static_cast<size_t>(n) * sizeof(float));
      }
    }
  });
  out.offsets[segments * blocks.batch_size] = placed;
}

}  // namespace torchrec_hkv::routing::cpu
