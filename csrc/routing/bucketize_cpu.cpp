#include <algorithm>
#include <vector>

#include "common/parallel.h"
#include "routing/bucketize.h"

namespace torchrec_hkv::routing::cpu {

void count(const Bags& bags, int32_t world_size, int64_t* lengths, int threads) {
  parallel_for(bags.num_bags, 256, threads, [&](int64_t begin, int64_t end) {
    for (int32_t r = 0; r < world_size; ++r) {
      std::fill(lengths + r * bags.num_bags + begin, lengths + r * bags.num_bags + end, 0);
    }
    for (int64_t bag = begin; bag < end; ++bag) {
      const int64_t block = bags.block_sizes[bag / bags.batch_size];
      for (int64_t at = bags.offsets[bag]; at < bags.offsets[bag + 1]; ++at) {
        ++lengths[destination_of(bags.ids[at], block, world_size).rank * bags.num_bags + bag];
      }
    }
  });
}

void scatter(const Bags& bags, int32_t world_size, const int64_t* starts, Bucketized out,
             int threads) {
  parallel_for(bags.num_bags, 256, threads, [&](int64_t begin, int64_t end) {
    std::vector<int64_t> next(world_size);
    for (int64_t bag = begin; bag < end; ++bag) {
      const int64_t block = bags.block_sizes[bag / bags.batch_size];
      for (int32_t r = 0; r < world_size; ++r) {
        const int64_t number = r * bags.num_bags + bag;
        next[r] = starts[number];
        if (out.blocks) out.ids[starts[r * bags.num_bags] + number] = starts[number + 1] - next[r];
      }
      for (int64_t at = bags.offsets[bag]; at < bags.offsets[bag + 1]; ++at) {
        const Destination to = destination_of(bags.ids[at], block, world_size);
        const int64_t place = next[to.rank]++;
        out.ids[out.word(place, to.rank, bags.num_bags)] = to.value;
        if (out.weights != nullptr) out.weights[place] = bags.weights[at];
        if (out.permute != nullptr) out.permute[at] = place;
      }
    }
  });
}

}  // namespace torchrec_hkv::routing::cpu
