// Lookup and gradients for prefixes with few ids. Each block has an equal share of the sorted
// prefixes. So all blocks run at the same time, and each block reads a middle slice, and adds its
// gradient in memory, only once. A warp has a prefix of a tile. The data of the next tile is loaded
// during the current tile, because latencies of loads and products, not their number, determine the
// time of a tile.
#pragma once

#include <type_traits>

#include "tensor_train/cuda/contract/half_pairs.cuh"
#include "tensor_train/cuda/contract/prefetched_ids.cuh"
#include "tensor_train/cuda/contract/resident_kernel.cuh"

namespace torchrec_hkv::tensor_train::cuda {

// Whether products are in halves (half_tile.cuh), which single precision uses.
template <typename Config>
constexpr bool kOfHalves = Config::kProducts == 3;

// All tables are of the class. Gradients run after sum_repeated_grads, which lets them start when
// the index is complete; they wait for sums of repeated ids after multiplying their first prefixes.
// kPairs: distinct ids are processed two at a time instead of four.
template <typename Config, bool kBackward, bool kPairs>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks) share_kernel(TileInput in) {
  static_assert(Config::kVectors && Config::kRank == 32 && Config::kSlices == 1);
  static_assert(Config::kPrefixes == Config::kWarps);
  static_assert(MiddleGrad<Config>::kTiles == MiddleGrad<Config>::kAllTiles);
  constexpr bool kHalf = kOfHalves<Config>;
  static_assert(kPairs || !kHalf);
  using Half = HalfTile<Config>;
  extern __shared__ float4 memory[];
  __shared__ PrefixList list;
  __shared__ NextIds<Config::kWarps> next_ids;
  __shared__ TableCuda table;
  __shared__ int bounds[2];
  float* middle = reinterpret_cast<float*>(memory);
  float* heads = middle + Config::kMiddleValues;
  float* products = heads + Config::kHeadValues;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  // For products in halves.
  __shared__ std::conditional_t<kHalf, typename Half::Scales, int> scales;
  [[maybe_unused]] __half* const half_middle = reinterpret_cast<__half*>(memory);
  [[maybe_unused]] __half* const half_heads = half_middle + Half::kMiddleHalves;
  [[maybe_unused]] __half* const half_products = half_heads + Half::kHeadHalves;
  [[maybe_unused]] __half* const half_product = half_products + warp * Half::kPrefixStep;
  [[maybe_unused]] int middle_exponent = 0;

  copy_view(in.tables[0], &table);
  bool waits = kBackward;
  if (!waits) wait_for_kernel_before();
  let_next_kernel_start();  // after a lookup, the next kernel may read the index
  const IndexCounts counts = *in.counts;
  if (counts.prefixes == 0 || (in.leaves_dense && counts.dense != 0)) {
    if (waits) wait_for_kernel_before();
    return;
  }
  const bool gather = in.always_gather || counts.gather != 0;
  find_share<Config, false>(in, counts, blockIdx.x, gridDim.x, thread, bounds);
  __syncthreads();
  if (bounds[0] >= bounds[1]) {
    if (waits) wait_for_kernel_before();
    return;
  }
  BlockTask<Config> task;
  task.table = &table;
  task.middle = -1;
  task.first_head_column = 0;
  task.first_middle_column = 0;
  task.find_row_width(in.unit);
  std::conditional_t<kHalf, typename Half::MiddleGrad, MiddleGrad<Config>> middle_grad;
  if constexpr (kBackward) middle_grad.clear();
  auto wait = [] { __syncthreads(); };
  TileWalk<Config> walk{in, task, list, next_ids, thread};
  int number = 0;  // number of the table whose view is loaded
  walk.start(bounds[0], bounds[1], false, number, wait);
#pragma unroll 1
  while (walk.run > 0) {
    const int4* const prefixes = walk.prefixes();
    const int run = walk.run;
    if (prefixes[0].y != number) {  // uniform in the block, like the following conditions
      if constexpr (kBackward) {
        if (task.middle >= 0) middle_grad.flush(thread, task, 0, 0);
        middle_grad.clear();
      }
      task.middle = -1;
      number = prefixes[0].y;
      __syncthreads();
      copy_view(in.tables[number], &table);
      __syncthreads();
      task.find_row_width(in.unit);
      walk.read_heads();
    }
    if (prefixes[0].z != task.middle) {
      if constexpr (kBackward) {
        if (task.middle >= 0) {
          middle_grad.flush(thread, task, 0, 0);
          middle_grad.clear();
        }
      }
      task.middle = prefixes[0].z;
      if constexpr (kHalf) {
        middle_exponent = Half::load_middle(thread, task, scales, half_middle);
      } else {
        load_middle<Config>(thread, task, 0, middle);
      }
    }
    if constexpr (kHalf) {
      Half::store_heads(thread, walk.head_load, scales, half_heads);
    } else {
      walk.head_load.store(thread, heads);
    }
    wait_for_copies();
    __syncthreads();
    const bool has_prefix = walk.has_prefix();
    const int begin = walk.begin(), stop = walk.stop();
    const IdLane id = next_ids.get(warp);
    auto multiply = [&] {
      if constexpr (kHalf) {
        Half::multiply_prefixes(thread, half_heads, half_middle, half_products, run);
      } else {
        multiply_prefixes<Config>(thread, task, heads, middle, products, run);
      }
    };
    if constexpr (kBackward) {
      std::conditional_t<kPairs, TwoIds<Config>, FourIds<Config>> first;
      auto read = [&] {
        if (has_prefix) first.read(in, task, id, 0, min(32, stop - begin));
      };
      if (!waits) read();
      multiply();
      if (waits) {
        wait_for_kernel_before();
        waits = false;
        read();
      }
      __syncthreads();
      if (has_prefix) {
        if constexpr (kHalf) {
          const int e = gradient_pairs(in, task, id, half_product,
                                       Half::prefix_exponent(scales, warp, middle_exponent), begin,
                                       stop, first);
          if (lane == 0) scales.grads[warp] = e;
        } else if constexpr (kPairs) {
          gradient_pairs(in, task, id, products + warp * Config::kPrefixStep, begin, stop, first);
        } else {
          gradient_ids_ahead(in, task, id, products + warp * Config::kPrefixStep, begin, stop,
                             LastGradInMemory<Config>{}, 0, first);
        }
      }
      walk.move_on(number);
      __syncthreads();
      if constexpr (kHalf) {
        middle_grad.add(thread, scales, half_heads, half_products, run);
        Half::add_head_grad(thread, task, prefixes, run, scales, middle_exponent, half_middle,
                            half_products);
      } else {
        middle_grad.add(thread, 0, heads, products, run);
        add_head_grad<Config, 4>(thread, task, prefixes, run, middle, products);
      }
      __syncthreads();
    } else {
      std::conditional_t<kPairs, LastPair, LastValues> values;
      const LastInMemory<Config> last;
      if (has_prefix) {
        if constexpr (kPairs) {
          values.read(task, id, 0, min(32, stop - begin));
        } else {
          last.read(task, begin + lane / 8 < stop, __shfl_sync(kAllLanes, id.last, lane / 8), 0, 0,
                    &values);
        }
      }
      multiply();
      __syncthreads();
      walk.move_on(number);
      if (has_prefix) {
        if constexpr (kHalf) {
          lookup_pairs(in, id, task, half_product,
                       Half::prefix_exponent(scales, warp, middle_exponent), begin, stop, gather,
                       values);
        } else if constexpr (kPairs) {
          lookup_pairs(in, id, task, products + warp * Config::kPrefixStep, begin, stop, gather,
                       values);
        } else {
          lookup_ids_ahead(in, id, task, products + warp * Config::kPrefixStep, begin, stop, gather,
                           last, values);
        }
      }
    }
    walk.refill(number, wait);
  }
  if (kBackward && task.middle >= 0) middle_grad.flush(thread, task, 0, 0);
}

// Launches as many blocks as run at the same time.
template <typename Config, bool kBackward, bool kPairs>
void launch_shares(const TileRun& run, const TileInput& in) {
  auto kernel = share_kernel<Config, kBackward, kPairs>;
  constexpr size_t kBytes =
      kOfHalves<Config> ? HalfTile<Config>::kBytes : Config::shared_bytes(kBackward);
  const auto blocks = static_cast<unsigned>(run.multiprocessors * Config::kMinBlocks);
  launch_dependent(kernel, {dim3(blocks), Config::kThreads, kBytes}, run.stream, in);
}

}  // namespace torchrec_hkv::tensor_train::cuda
