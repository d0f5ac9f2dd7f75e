
#include "common/cuda_check.h"
#include "hash_table/cuda/hbm_cache/exchange.cuh"
#include "hash_table/cuda/hbm_cache/frames.cuh"
#include "hash_table/cuda/hbm_cache/moves.cuh"
#include "hash_table/cuda/insert/insert.cuh"
#include "hash_table/frames_kernels.h"

namespace torchrec_hkv::hash_table::cuda {
namespace {

// Writes the rows and states of new ids: to their frames in HBM, or else to host memory.
template <NewRows kRows>
__global__ void __launch_bounds__(kThreads)
    write_new_kernel(const TableView* __restrict__ tables, const Batch batch,
                     const int64_t* __restrict__ slots, const bool* __restrict__ placed,
                     const uint8_t* __restrict__ ways, const uint32_t* __restrict__ any_missing) {
  if (*any_missing == 0) return;
  constexpr int kTiles = kWarp / kTile;
  const int lane = threadIdx.x % kTile;
  const int tile = threadIdx.x % kWarp / kTile;
  for (int64_t begin = static_cast<int64_t>(blockIdx.x) * kThreads; begin < batch.num_ids;
       begin += static_cast<int64_t>(gridDim.x) * kThreads) {
    const int64_t position = begin + threadIdx.x;
    const TableView* lane_table = tables;
    int64_t slot = kNoSlot, frame = kNoFrame;
    if (position < batch.num_ids && placed[position] && slots[position] >= 0 &&
        slots[position] != kSkipped) {
      lane_table = &table_at(tables, batch, position);
      if (lane_table->frames.tags != nullptr) {
        slot = slots[position] - lane_table->first_slot;
        // Another call may have given the frame to another row, which has not moved yet.
        if (ways[position] != 0) {
          const Frames& frames = lane_table->frames;
          frame = frames.frame_at(frames.set_position(slot).set, ways[position] - 1);
        }
      }
    }
    const bool busy = slot != kNoSlot;
    const uint64_t row_of = busy ? row_source<kRows>(*lane_table, batch.ids[position]) : 0;
    for (unsigned remaining = __ballot_sync(kAllLanes, busy); remaining;) {
      const int source = nth_lane(remaining, tile);
      const bool working = tile < __popc(remaining);
      const int64_t source_slot = __shfl_sync(kAllLanes, slot, source);
      const int64_t source_frame = __shfl_sync(kAllLanes, frame, source);
      const uint64_t row_source_bits = __shfl_sync(kAllLanes, row_of, source);
      const TableView* table = table_of_lane<false>(lane_table, source);
      if (working) write_new_row<kRows>(*table, row_source_bits, source_slot, source_frame, lane);
#pragma unroll
      for (int t = 0; t < kTiles; ++t) remaining &= remaining - 1;
    }
  }
}

// One warp for each set.
__global__ void __launch_bounds__(kThreads)
    write_back_kernel(const __grid_constant__ TableView table) {
  const Frames& frames = table.frames;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * (kThreads / kWarp);
  const int lane = threadIdx.x % kWarp;  // the first lanes take one frame each
  for (int64_t set = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
       set < frames.num_sets; set += stride) {
    const uint64_t tags = frames.load_tags(set);
    const uint32_t tag = lane < frames.frames_of_set ? frames.tag_at(tags, lane) : 0;
    const bool is_dirty = Frames::is_taken(tag) && (tag & kTagDirty);
    exchange_rows(&table, is_dirty, frames.frame_at(set, lane),
                  is_dirty ? frames.slot_of(frames.first_of_set(set), tag) : kNoSlot, kNoSlot);
    const unsigned long long all_dirty = frames.ones * kTagDirty;
    if (lane == 0 && (tags & all_dirty)) atomicAnd(&frames.tags[set], ~all_dirty);
  }
}

// One warp for each set. Occupied frames stay occupied.
__global__ void __launch_bounds__(kThreads) fill_kernel(const __grid_constant__ TableView table) {
  const Frames& frames = table.frames;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * (kThreads / kWarp);
  const int lane = threadIdx.x % kWarp;
  for (int64_t set = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
       set < frames.num_sets; set += stride) {
    unsigned long long tags = frames.load_tags(set);
    const Frames::SetPosition in_set = frames.first_of_set(set);
    const int64_t end = frames.end_of(in_set),
                  slot_stride = frames.region_sets;  // distance between the set's slots
    int64_t chosen = kNoSlot;                        // the slot that the lane's frame gets
    for (int way = 0; way < frames.frames_of_set; ++way) {
      if (Frames::is_taken(frames.tag_at(tags, way))) continue;
      // The highest rank of the slots without a frame, and the first of these.
      Rank best{0, 0};
      int64_t slot = kNoSlot;
      uint32_t number = lane;
      for (int64_t s = in_set.first + lane * slot_stride; s < end;
           s += kWarp * slot_stride, number += kWarp) {
        const uint32_t step = *step_of(table, s);
        if (step == kFreeStep || frames.way_of(tags, number) >= 0) continue;
        const uint64_t score = table.scores == nullptr ? step : load_score(table, s);
        const Rank rank{table.ranking().of(score, step), step};
        if (slot == kNoSlot || best < rank) {
          best = rank;
          slot = s;
        }
      }
#pragma unroll
      for (int offset = kWarp / 2; offset; offset /= 2) {
        const Rank other{__shfl_xor_sync(kAllLanes, best.score, offset),
                         __shfl_xor_sync(kAllLanes, best.last_step, offset)};
        const int64_t other_slot = __shfl_xor_sync(kAllLanes, slot, offset);
        if (other_slot == kNoSlot) continue;
        const bool equal = !(best < other) && !(other < best);
        if (slot == kNoSlot || best < other || (equal && other_slot < slot)) {
          best = other;
          slot = other_slot;
        }
      }
      if (slot == kNoSlot) break;
      tags |= Frames::tag_of(frames.set_position(slot).number) << way * frames.bits;
      if (lane == way) chosen = slot;
    }
    exchange_rows(&table, chosen != kNoSlot, frames.frame_at(set, lane), kNoSlot, chosen);
    if (lane == 0) frames.tags[set] = tags;
  }
}

unsigned grid_for_sets(const TableView& table) {
  constexpr int64_t kMaxWarps = int64_t{1} << 20;
  return grid_for(min(table.frames.num_sets, kMaxWarps) * kWarp);
}

}  // namespace

void place_rows_in_frames(const TableView* tables, const Batch& batch, const CallContext& context,
                          NewRows rows, const int64_t* slots, const bool* placed,
                          const uint32_t* any_missing, const FrameMoves& moving, void* scratch,
                          cudaStream_t stream) {
  if (batch.num_ids == 0) return;
  const bool others = rows != NewRows::kUntouched;
  const Moves moves =
      claim_frames(tables, batch, context, slots, placed, others, moving, scratch, stream);
  if (moving.begin != nullptr) moving.begin(moving.begin_context);
  move_rows(tables, batch, moves, moving, stream);
  const auto write_new = rows == NewRows::kInitial      ? write_new_kernel<NewRows::kInitial>
                         : rows == NewRows::kInitialAny ? write_new_kernel<NewRows::kInitialAny>
                         : rows == NewRows::kUniform    ? write_new_kernel<NewRows::kUniform>
                                                        : write_new_kernel<NewRows::kUntouched>;
  write_new<<<min(grid_for(batch.num_ids), resident_blocks(write_new)), kThreads, 0, stream>>>(
      tables, batch, slots, placed, moves.new_ways, any_missing);
  HKV_CUDA_CHECK_LAUNCH();
}

size_t frames_scratch(int64_t num_ids, const FrameMoves& moving) {
  return moving.any() ? moves_scratch(num_ids, moving) : 0;
}

void write_back(const TableView& table, cudaStream_t stream) {
  if (table.frames.tags == nullptr) return;
  write_back_kernel<<<grid_for_sets(table), kThreads, 0, stream>>>(table);
  HKV_CUDA_CHECK_LAUNCH();
}

void fill_frames(const TableView& table, cudaStream_t stream) {
  if (table.frames.tags == nullptr) return;
  fill_kernel<<<grid_for_sets(table), kThreads, 0, stream>>>(table);
  HKV_CUDA_CHECK_LAUNCH();
}

}  // namespace torchrec_hkv::hash_table::cuda
