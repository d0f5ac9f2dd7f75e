#include <cstring>
#include <vector>

#include "common/parallel.h"
#include "routing/merge_blocks.h"

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

}  // namespace

void merge_blocks(const Blocks& blocks, MergedBatch out, int threads) {
  const int64_t segments = blocks.num_segments(), features = blocks.num_features;
  const auto count = [&](int64_t s) { return blocks.counts[s + s / features]; };
  // Where the ids of a segment begin: in the blocks' ids, and in the batch.
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
