// Lookup and gradients where prefixes have few ids: each block has an equal share of the sorted
// prefixes, so that all blocks run at the same time and a middle slice is read, and its gradient
// added in memory, once for each block that has it. A warp has a prefix of a tile. What the next
// tile needs is read while this one is worked on: what takes the time of a tile is a chain of reads
// and products, not their number.
#pragma once

#include "tensor_train/ids_ahead.cuh"
#include "tensor_train/resident_kernel.cuh"

namespace torchrec_hkv::tensor_train::cuda {

// All tables are of the class. Gradients follow sum_repeated_grads, which lets them start when the
// index is there: they wait for sums of repeated ids when their first prefixes are multiplied.
template <typename Config, bool kBackward>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks) share_kernel(TileInput in) {
  static_assert(Config::kKnown && Config::kRank == 32 && Config::kSlices == 1);
  static_assert(Config::kPrefixes == Config::kWarps);
  static_assert(MiddleGrad<Config>::kTiles == MiddleGrad<Config>::kAllTiles);
  extern __shared__ float4 memory[];
  __shared__ PrefixList list;
  __shared__ NextIds<Config::kWarps> next_ids;
  __shared__ TableView table;
  __shared__ int bounds[2];
  float* middle = reinterpret_cast<float*>(memory);
  float* heads = middle + Config::kMiddleValues;
  float* products = heads + Config::kHeadValues;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;

  copy_view(in.tables[0], &table);
  bool waits = kBackward;
  if (!waits) wait_for_kernel_before();
  let_next_kernel_start();  // behind a lookup it may read the index
  const Counts counts = *in.counts;
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
  Piece<Config> piece;
  piece.table = &table;
  piece.middle = -1;
  piece.first_head_column = 0;
  piece.first_middle_column = 0;
  MiddleGrad<Config> middle_grad;
  if constexpr (kBackward) middle_grad.clear();
  auto wait = [] { __syncthreads(); };
  TileWalk<Config> walk{in, piece, list, next_ids, thread};
  int number = 0;  // of the table whose view is here
  walk.start(bounds[0], bounds[1], false, number, wait);
#pragma unroll 1
  while (walk.run > 0) {
    const int4* const prefixes = walk.prefixes();
    const int run = walk.run;
    if (prefixes[0].y != number) {  // the same in all threads, as what follows
      if constexpr (kBackward) {
        if (piece.middle >= 0) middle_grad.flush(thread, piece, 0, 0);
        middle_grad.clear();
      }
      piece.middle = -1;
      number = prefixes[0].y;
      __syncthreads();
      copy_view(in.tables[number], &table);
      __syncthreads();
      walk.read_heads();
    }
    if (prefixes[0].z != piece.middle) {
      if constexpr (kBackward) {
        if (piece.middle >= 0) {
          middle_grad.flush(thread, piece, 0, 0);
          middle_grad.clear();
        }
      }
      piece.middle = prefixes[0].z;
      load_middle<Config>(thread, piece, 0, middle);
    }
    walk.head_load.store(thread, heads);
    wait_for_copies();
    __syncthreads();
    const bool mine = walk.mine();
    const int begin = walk.begin(), stop = walk.stop();
    const IdLane id = next_ids.get(warp);
    if constexpr (kBackward) {
      FourIds<Config> four;
      const float* const core = static_cast<const float*>(table.last) + lane / 4 * 4;
      auto read = [&] {
        if (mine) four.read(in, id, core, 0, min(32, stop - begin));
      };
      if (!waits) read();
      multiply_prefixes<Config>(thread, heads, middle, products, run);
      if (waits) {
        wait_for_kernel_before();
        waits = false;
        read();
      }
      __syncthreads();
      if (mine) {
        gradient_ids_ahead(in, piece, core, id, products + warp * Config::kPrefixStep, begin, stop,
                           LastGradInMemory<Config>{}, 0, four);
      }
      walk.move_on(number);
      __syncthreads();
      middle_grad.add(thread, 0, heads, products, run);
      add_head_grad<Config, 4>(thread, piece, prefixes, run, middle, products);
      __syncthreads();
    } else {
      LastValues values;
      const LastInMemory<Config> last;
      if (mine) {
        last.read(piece, begin + lane / 8 < stop, __shfl_sync(kAllLanes, id.last, lane / 8), 0, 0,
                  &values);
      }
      multiply_prefixes<Config>(thread, heads, middle, products, run);
      __syncthreads();
      walk.move_on(number);
      if (mine) {
        lookup_ids_ahead(in, id, piece, products + warp * Config::kPrefixStep, begin, stop, gather,
                         last, values);
      }
    }
    walk.refill(number, wait);
  }
  if (kBackward && piece.middle >= 0) middle_grad.flush(thread, piece, 0, 0);
}

// As many blocks as run at the same time.
template <typename Config, bool kBackward>
void launch_shares(const TileRun& run, const TileInput& in) {
  auto kernel = share_kernel<Config, kBackward>;
  constexpr size_t kBytes = Config::shared_bytes(kBackward);
  const auto blocks = static_cast<unsigned>(run.multiprocessors * Config::kMinBlocks);
  launch_chained(kernel, {dim3(blocks), Config::kThreads, kBytes}, run.stream, in);
}

}  // namespace torchrec_hkv::tensor_train::cuda
