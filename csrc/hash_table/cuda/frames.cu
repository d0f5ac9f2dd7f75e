#include <algorithm>

#include "common/cuda_check.h"
#include "hash_table/cuda/frames.cuh"
#include "hash_table/cuda/insert/insert.cuh"
#include "hash_table/frames_kernels.h"

namespace torchrec_hkv::hash_table::cuda {
namespace {

// A vector that changes places, as the lanes see it that move it.
struct Exchange {
  char* frame;
  char* out;       // what the frame holds goes there; null: nowhere
  const char* in;  // comes into the frame; null: nothing
  int64_t bytes;   // 0: there is none
};

// Rows, or states, of a warp's lanes in `busy` change places. As many lanes take one as it has
// pieces, so that what goes to host memory goes there in long runs; and kAtOnce go by at a time.
template <typename Piece>
__device__ __forceinline__ void exchange_vectors(RowStore TableView::* store, const TableView* mine,
                                                 unsigned busy, int64_t frame, int64_t leaver,
                                                 int64_t slot) {
  constexpr int kAtOnce = 4;
  constexpr auto kPiece = static_cast<int64_t>(sizeof(Piece));
  const TableView* first = table_of_lane<false>(mine, __ffs(static_cast<int>(busy)) - 1);
  int lanes = 1;  // of a vector
  while (lanes < kWarp && lanes * kPiece < (first->*store).bytes()) lanes *= 2;
  const int vectors = kWarp / lanes;  // beside each other
  const int lane = threadIdx.x % kWarp;
  for (unsigned left = busy; left;) {
    Exchange its[kAtOnce];
    int64_t longest = 0;
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int number = k * vectors + lane / lanes;
      const int source = nth_lane(left, number);
      const TableView* table = table_of_lane<false>(mine, source);
      const int64_t its_frame = __shfl_sync(kAllLanes, frame, source);
      const int64_t its_leaver = __shfl_sync(kAllLanes, leaver, source);
      const int64_t its_slot = __shfl_sync(kAllLanes, slot, source);
      const RowStore& of = table->*store;
      its[k].frame = of.at(0, its_frame);
      its[k].out = its_leaver == kNoSlot ? nullptr : of.at(its_leaver, kNoFrame);
      its[k].in = its_slot == kNoSlot ? nullptr : of.at(its_slot, kNoFrame);
      its[k].bytes = number < __popc(left) ? of.bytes() : 0;
      longest = max(longest, its[k].bytes);
    }
    // The same lane reads a piece of the frame and then writes it, so what comes can be under way
    // while the other leaves.
    for (int64_t b = lane % lanes * kPiece; b < longest; b += lanes * kPiece) {
      Piece comes[kAtOnce], goes[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (b >= its[k].bytes) continue;
        if (its[k].in != nullptr) comes[k] = *reinterpret_cast<const Piece*>(its[k].in + b);
        if (its[k].out != nullptr) goes[k] = *reinterpret_cast<const Piece*>(its[k].frame + b);
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (b >= its[k].bytes) continue;
        if (its[k].out != nullptr) *reinterpret_cast<Piece*>(its[k].out + b) = goes[k];
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (b >= its[k].bytes) continue;
        if (its[k].in != nullptr) *reinterpret_cast<Piece*>(its[k].frame + b) = comes[k];
      }
    }
    for (int n = min(kAtOnce * vectors, __popc(left)); n > 0; --n) left &= left - 1;
  }
}

// Of each lane that is busy, the row and the state of `leaver` go home from its frame, and those of
// `slot` come there. kNoSlot: nothing goes, or comes. All lanes.
__device__ __forceinline__ void exchange_rows(const TableView* mine, bool is_busy, int64_t frame,
                                              int64_t leaver, int64_t slot) {
  const auto of = [&](RowStore TableView::* store, bool wanted) {
    const unsigned busy = __ballot_sync(kAllLanes, wanted);
    if (busy == 0) return;
    const int64_t bytes = wanted ? (mine->*store).bytes() : 0;
    if (__all_sync(kAllLanes, bytes % 16 == 0)) {
      exchange_vectors<uint4>(store, mine, busy, frame, leaver, slot);
    } else if (__all_sync(kAllLanes, bytes % 4 == 0)) {
      exchange_vectors<uint32_t>(store, mine, busy, frame, leaver, slot);
    } else {
      exchange_vectors<uint16_t>(store, mine, busy, frame, leaver, slot);
    }
  };
  is_busy = is_busy && (leaver != kNoSlot || slot != kNoSlot);
  of(&TableView::states, is_busy && mine->states.moves());
  of(&TableView::rows, is_busy);
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
    exchange_rows(mine, busy, claim.frame, claim.leaver, kNew ? kNoSlot : slot);
    if (!kNew) continue;
    // The lanes of a tile write other pieces of the frame than they have read.
    __syncwarp();
    const uint64_t row_of = busy ? row_source<kRows>(*mine, batch.ids[position]) : 0;
    for (unsigned left = __ballot_sync(kAllLanes, busy); left;) {
      const int source = nth_lane(left, tile);
      const bool working = tile < __popc(left);
      const int64_t their_slot = __shfl_sync(kAllLanes, slot, source);
      const int64_t their_frame = __shfl_sync(kAllLanes, claim.frame, source);
      const uint64_t their_source = __shfl_sync(kAllLanes, row_of, source);
      const TableView* table = table_of_lane<false>(mine, source);
      if (working) write_new_row<kRows>(*table, their_source, their_slot, their_frame, lane);
#pragma unroll
      for (int t = 0; t < kTiles; ++t) left &= left - 1;
    }
  }
}

// A warp a set.
__global__ void __launch_bounds__(kThreads)
    write_home_kernel(const __grid_constant__ TableView table) {
  const Frames& frames = table.frames;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * (kThreads / kWarp);
  const int lane = threadIdx.x % kWarp;  // of the first, one a frame
  for (int64_t set = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
       set < frames.num_sets; set += stride) {
    const uint64_t tags = frames.load_tags(set);
    const uint32_t tag = lane < frames.frames_of_set ? frames.tag_at(tags, lane) : 0;
    const bool goes = Frames::is_taken(tag) && (tag & kTagDirty);
    exchange_rows(&table, goes, frames.frame_at(set, lane),
                  goes ? frames.slot_of(set, tag) : kNoSlot, kNoSlot);
    const unsigned long long all_dirty = frames.ones * kTagDirty;
    if (lane == 0 && (tags & all_dirty)) atomicAnd(&frames.tags[set], ~all_dirty);
  }
}

// A warp a set. Frames that are taken stay so.
__global__ void __launch_bounds__(kThreads) fill_kernel(const __grid_constant__ TableView table) {
  const Frames& frames = table.frames;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * (kThreads / kWarp);
  const int lane = threadIdx.x % kWarp;
  for (int64_t set = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
       set < frames.num_sets; set += stride) {
    unsigned long long tags = frames.load_tags(set);
    int64_t chosen = kNoSlot;  // by the lane of each frame
    for (int place = 0; place < frames.frames_of_set; ++place) {
      if (Frames::is_taken(frames.tag_at(tags, place))) continue;
      // The highest rank of the slots without a frame, and the first of these.
      Rank best{0, 0};
      int64_t slot = kNoSlot;
      uint32_t number = lane;
      for (int64_t s = set + lane * frames.num_sets; s < frames.num_slots;
           s += kWarp * frames.num_sets, number += kWarp) {
        const uint32_t step = *step_of(table, s);
        if (step == kFreeStep || frames.place_of(tags, number) >= 0) continue;
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
      tags |= Frames::tag_of(frames.home_of(slot).number) << place * frames.bits;
      if (lane == place) chosen = slot;
    }
    exchange_rows(&table, chosen != kNoSlot, frames.frame_at(set, lane), kNoSlot, chosen);
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
  // A block a multiprocessor has the link as busy as more do, and leaves room to kernels on other
  // streams, such as the backward of the batch before. New rows are made, too, by all that fit.
  const unsigned most = kNew ? resident_blocks(kernel) : processors();
  kernel<<<std::min(grid_for(batch.num_ids), most), kThreads, 0, stream>>>(
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
