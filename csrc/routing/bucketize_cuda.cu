#include "common/cuda_check.h"
#include "routing/bucketize.h"

namespace torchrec_hkv::routing::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

unsigned warps_grid(int64_t warps) {
  const int64_t blocks = (warps * kWarp + kThreads - 1) / kThreads;
  // Kernels use grid-stride loops beyond this size.
  return static_cast<unsigned>(blocks < (1 << 20) ? (blocks > 0 ? blocks : 1) : (1 << 20));
}

// One warp for each bag. `kScatter` also writes the ids; otherwise the kernel only counts. Lanes
// take 32 ids at a time; ids of one destination are ranked by lane, which keeps their order.
template <bool kScatter>
__global__ void __launch_bounds__(kThreads)
    bucketize_kernel(Bags bags, int32_t world_size, int64_t* lengths, const int64_t* starts,
                     Bucketized out) {
  const int lane = threadIdx.x % kWarp;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * (kThreads / kWarp);
  int64_t bag = static_cast<int64_t>(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
  for (; bag < bags.num_bags; bag += stride) {
    const int64_t block = bags.block_sizes[bag / bags.batch_size];
    const int64_t begin = bags.offsets[bag], end = bags.offsets[bag + 1];
    // Lane r keeps the running count of rank r, 32 ranks at a time.
    for (int32_t first_rank = 0; first_rank < world_size; first_rank += kWarp) {
      const int32_t my_rank = first_rank + lane;
      int64_t running = 0;
      if (kScatter && my_rank < world_size) {
        const int64_t number = my_rank * bags.num_bags + bag;
        running = starts[number];
        if (out.blocks) {
          out.ids[starts[my_rank * bags.num_bags] + number] = starts[number + 1] - running;
        }
      }
      for (int64_t at = begin; at < end; at += kWarp) {
        const bool valid = at + lane < end;
        Destination to{-1, 0};
        if (valid) to = destination_of(bags.ids[at + lane], block, world_size);
        const unsigned peers = __match_any_sync(kAllLanes, to.rank);
        const int32_t local = to.rank - first_rank;
        const bool mine = valid && local >= 0 && local < kWarp;
        if (kScatter) {
          const int64_t base = __shfl_sync(kAllLanes, running, mine ? local : 0);
          if (mine) {
            const int64_t place = base + __popc(peers & ((1u << lane) - 1));
            out.ids[out.word(place, to.rank, bags.num_bags)] = to.value;
            if (out.weights != nullptr) out.weights[place] = bags.weights[at + lane];
            if (out.permute != nullptr) out.permute[at + lane] = place;
          }
        }
        // The first lane of each destination adds the number of ids to that rank's lane.
        for (unsigned leaders =
                 __ballot_sync(kAllLanes, mine && lane == __ffs(static_cast<int>(peers)) - 1);
             leaders; leaders &= leaders - 1) {
          const int leader = __ffs(static_cast<int>(leaders)) - 1;
          const int32_t rank = __shfl_sync(kAllLanes, to.rank, leader);
          const int number = __popc(__shfl_sync(kAllLanes, peers, leader));
          if (my_rank == rank) running += number;
        }
      }
      if (!kScatter && my_rank < world_size) lengths[my_rank * bags.num_bags + bag] = running;
    }
  }
}

}  // namespace

void count(const Bags& bags, int32_t world_size, int64_t* lengths, cudaStream_t stream) {
  if (bags.num_bags == 0) return;
  bucketize_kernel<false><<<warps_grid(bags.num_bags), kThreads, 0, stream>>>(
      bags, world_size, lengths, nullptr, Bucketized{});
  HKV_CUDA_CHECK_LAUNCH();
}

void scatter(const Bags& bags, int32_t world_size, const int64_t* starts, Bucketized out,
             cudaStream_t stream) {
  if (bags.num_bags == 0) return;
  bucketize_kernel<true>
      <<<warps_grid(bags.num_bags), kThreads, 0, stream>>>(bags, world_size, nullptr, starts, out);
  HKV_CUDA_CHECK_LAUNCH();
}

}  // namespace torchrec_hkv::routing::cuda
