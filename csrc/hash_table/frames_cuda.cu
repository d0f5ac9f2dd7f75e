#include <algorithm>

#include "common/cuda_check.h"
#include "hash_table/frames_cuda.cuh"
#include "hash_table/frames_kernels.h"
#include "hash_table/insert_cuda.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

// A tile's lanes move one vector: what the frame holds goes to `out`, what is at `in` comes into
// the frame; either may be null. The same lane reads a piece of the frame and then writes it, so
// the row that comes can be under way while the other leaves.
template <typename Piece>
__device__ __forceinline__ void exchange_pieces(char* frame, char* out, const char* in,
                                                int64_t bytes, int lane) {
  for (int64_t b = lane * static_cast<int64_t>(sizeof(Piece)); b < bytes;
       b += kTile * static_cast<int64_t>(sizeof(Piece))) {
    auto* piece = reinterpret_cast<Piece*>(frame + b);
    Piece comes{};
    if (in != nullptr) comes = *reinterpret_cast<const Piece*>(in + b);
    if (out != nullptr) *reinterpret_cast<Piece*>(out + b) = *piece;
    if (in != nullptr) *piece = comes;
  }
}
__device__ __forceinline__ void exchange_vector(const RowStore& store, int64_t frame,
                                                int64_t leaver, int64_t slot, int lane) {
  char* place = store.at(0, frame);
  char* out = leaver == kNoSlot ? nullptr : store.at(leaver, kNoFrame);
  const char* in = slot == kNoSlot ? nullptr : store.at(slot, kNoFrame);
  const int64_t bytes = store.bytes();
  if (bytes % 16 == 0) {
    exchange_pieces<uint4>(place, out, in, bytes, lane);
  } else if (bytes % 4 == 0) {
    exchange_pieces<uint32_t>(place, out, in, bytes, lane);
  } else {
    exchange_pieces<uint16_t>(place, out, in, bytes, lane);
  }
}
// The row and the state of `leaver` go home, those of `slot` come. kNoSlot: nothing goes, or comes.
__device__ __forceinline__ void exchange(const TableView& table, int64_t frame, int64_t leaver,
                                         int64_t slot, int lane) {
  exchange_vector(table.rows, frame, leaver, slot, lane);
  if (table.states.width > 0) exchange_vector(table.states, frame, leaver, slot, lane);
}

// kNew: positions of new ids; otherwise the others.
template <bool kNew, NewRows kRows>
__global__ void __launch_bounds__(kThreads)
    settle_kernel(const TableView* __restrict__ tables, const Batch batch, const Visit visit,
                  const int64_t* __restrict__ slots, const bool* __restrict__ placed,
                  const uint32_t* __restrict__ any_missing) {
  if (kNew && *any_missing == 0) return;
  constexpr int kTiles = kWarp / kTile;
  const int lane = threadIdx.x % kTile;
  const int tile = threadIdx.x % kWarp / kTile;
  for (int64_t begin = static_cast<int64_t>(blockIdx.x) * kThreads; begin < batch.num_ids;
       begin += static_cast<int64_t>(gridDim.x) * kThreads) {
    const int64_t position = begin + threadIdx.x;
    const TableView* mine = tables;
    int64_t slot = kNoSlot;
    FrameClaim claim;
    if (position < batch.num_ids && placed[position] == kNew && slots[position] >= 0 &&
        slots[position] != kPassedOver) {
      mine = &table_at(tables, batch, position);
      if (mine->frames.tags != nullptr) {
        slot = slots[position] - mine->first_slot;
        claim = claim_frame<kNew>(*mine, slot, visit);
      }
    }
    count_warp(mine, kFetched, !kNew && claim.taken);
    const bool at_home = slot != kNoSlot && (claim.taken || claim.frame == kNoFrame);
    count_warp(mine, kHostHits, !kNew && at_home);
    count_warp(mine, kWrittenHome, claim.leaver != kNoSlot);
    const bool busy = kNew ? slot != kNoSlot : claim.taken;
    const int64_t id = kNew && busy ? batch.ids[position] : 0;
    for (unsigned left = __ballot_sync(kAllLanes, busy); left;) {
      const int source = nth_lane(left, tile);
      const bool working = tile < __popc(left);
      const int64_t their_slot = __shfl_sync(kAllLanes, slot, source);
      const int64_t their_frame = __shfl_sync(kAllLanes, claim.frame, source);
      const int64_t their_leaver = __shfl_sync(kAllLanes, claim.leaver, source);
      const int64_t their_id = __shfl_sync(kAllLanes, id, source);
      const TableView* table = table_of_lane<false>(mine, source);
      if (working && kNew) {
        if (their_leaver != kNoSlot) exchange(*table, their_frame, their_leaver, kNoSlot, lane);
        // The lanes of a tile write other pieces of the frame than they have read.
        __syncwarp(((1u << kTile) - 1) << (tile * kTile));
        write_new_row<kRows>(*table, their_id, their_slot, their_frame, lane);
      } else if (working) {
        exchange(*table, their_frame, their_leaver, their_slot, lane);
      }
#pragma unroll
      for (int t = 0; t < kTiles; ++t) left &= left - 1;
    }
  }
}

// A warp a set.
__global__ void __launch_bounds__(kThreads) write_home_kernel(TableView table) {
  const Frames& frames = table.frames;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * (kThreads / kWarp);
  const int tile = threadIdx.x % kWarp / kTile;
  static_assert(kWarp / kTile == kFramesOfSet, "a tile a frame");
  for (int64_t set = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
       set < frames.num_sets; set += stride) {
    const uint64_t tags = frames.load_tags(set);
    const uint32_t tag = Frames::tag_at(tags, tile);
    if ((tag & kTagTaken) && (tag & kTagDirty)) {
      exchange(table, set * kFramesOfSet + tile, frames.slot_of(set, tag), kNoSlot,
               threadIdx.x % kTile);
    }
    constexpr unsigned long long kAllDirty = 0x0001000100010001ull * kTagDirty;
    if (threadIdx.x % kWarp == 0 && (tags & kAllDirty)) atomicAnd(&frames.tags[set], ~kAllDirty);
  }
}

// A warp a set. Frames that are taken stay so.
__global__ void __launch_bounds__(kThreads) fill_kernel(TableView table) {
  const Frames& frames = table.frames;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * (kThreads / kWarp);
  const int lane = threadIdx.x % kWarp;
  for (int64_t set = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
       set < frames.num_sets; set += stride) {
    unsigned long long tags = frames.load_tags(set);
    int64_t chosen = kNoSlot;  // by the tile of each frame
    for (int place = 0; place < kFramesOfSet; ++place) {
      if (Frames::tag_at(tags, place) & kTagTaken) continue;
      // The highest rank of the slots without a frame, and the first of these.
      Rank best{0, 0};
      int64_t slot = kNoSlot;
      uint32_t number = lane;
      for (int64_t s = set + lane * frames.num_sets; s < frames.num_slots;
           s += kWarp * frames.num_sets, number += kWarp) {
        const uint32_t step = table.last_steps[s];
        if (step == kFreeStep || Frames::place_of(tags, number) >= 0) continue;
        const Rank rank{table.scores == nullptr ? step : table.scores[s], step};
        if (slot == kNoSlot || best < rank) {
          best = rank;
          slot = s;
        }
      }
#pragma unroll
      for (int offset = kWarp / 2; offset; offset /= 2) {
        const Rank other{__shfl_xor_sync(kAllLanes, best.score, offset),
                         __shfl_xor_sync(kAllLanes, best.last_step, offset)};
        const int64_t theirs = __shfl_xor_sync(kAllLanes, slot, offset);
        if (theirs == kNoSlot) continue;
        const bool equal = !(best < other) && !(other < best);
        if (slot == kNoSlot || best < other || (equal && theirs < slot)) {
          best = other;
          slot = theirs;
        }
      }
      if (slot == kNoSlot) break;
      const unsigned long long tag = kTagTaken | frames.home_of(slot).number;
      tags |= tag << place * kTagBits;
      if (lane / kTile == place) chosen = slot;
    }
    if (chosen != kNoSlot) {
      exchange(table, set * kFramesOfSet + lane / kTile, kNoSlot, chosen, lane % kTile);
    }
    if (lane == 0) frames.tags[set] = tags;
  }
}

unsigned grid_for_sets(const TableView& table) {
  constexpr int64_t kMostWarps = int64_t{1} << 20;
  return grid_for(std::min(table.frames.num_sets, kMostWarps) * kWarp);
}

template <bool kNew>
void launch_settle(const TableView* tables, const Batch& batch, const Visit& visit, NewRows rows,
                   const int64_t* slots, const bool* placed, const uint32_t* any_missing,
                   cudaStream_t stream) {
  const auto kernel = !kNew                       ? settle_kernel<false, NewRows::kUntouched>
                      : rows == NewRows::kInitial ? settle_kernel<true, NewRows::kInitial>
                      : rows == NewRows::kUniform ? settle_kernel<true, NewRows::kUniform>
                                                  : settle_kernel<true, NewRows::kUntouched>;
  kernel<<<std::min(grid_for(batch.num_ids), resident_blocks(kernel)), kThreads, 0, stream>>>(
      tables, batch, visit, slots, placed, any_missing);
  HKV_CUDA_CHECK_LAUNCH();
}

}  // namespace

void settle_rows(const TableView* tables, const Batch& batch, const Visit& visit, NewRows rows,
                 const int64_t* slots, const bool* placed, const uint32_t* any_missing,
                 cudaStream_t stream) {
  if (batch.num_ids == 0) return;
  launch_settle<true>(tables, batch, visit, rows, slots, placed, any_missing, stream);
  if (rows == NewRows::kUntouched) return;
  launch_settle<false>(tables, batch, visit, rows, slots, placed, any_missing, stream);
}

void write_home(const TableView& table, cudaStream_t stream) {
  if (table.frames.tags == nullptr) return;
  write_home_kernel<<<grid_for_sets(table), kThreads, 0, stream>>>(table);
  HKV_CUDA_CHECK_LAUNCH();
}

void fill_frames(const TableView& table, cudaStream_t stream) {
  if (table.frames.tags == nullptr) return;
  fill_kernel<<<grid_for_sets(table), kThreads, 0, stream>>>(table);
  HKV_CUDA_CHECK_LAUNCH();
}

}  // namespace torchrec_hkv::hash_table::cuda
