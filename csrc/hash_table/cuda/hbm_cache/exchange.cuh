// Exchanges rows and states of a warp between frames and host memory.
#pragma once

#include <cstdint>

#include "hash_table/cuda/insert/insert.cuh"
#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cuda {

// A vector to exchange.
struct VectorExchange {
  char* frame;
  char* out;       // destination of the frame's contents; null: not written
  const char* in;  // source of the frame's new contents; null: none
  int64_t bytes;   // 0: no vector
};

// Exchanges the rows or states of the lanes in `busy`. As many lanes move a vector as it has
// pieces, so that writes to host memory are long; kAtOnce vectors are moved at a time.
template <typename Word>
__device__ __forceinline__ void exchange_vectors(RowStore TableView::* store,
                                                 const TableView* lane_table, unsigned busy,
                                                 int64_t frame, int64_t victim, int64_t slot) {
  constexpr int kAtOnce = 4;
  constexpr auto kWordBytes = static_cast<int64_t>(sizeof(Word));
  const TableView* first = table_of_lane<false>(lane_table, __ffs(static_cast<int>(busy)) - 1);
  int lanes = 1;  // of a vector
  while (lanes < kWarp && lanes * kWordBytes < (first->*store).bytes()) lanes *= 2;
  const int vectors = kWarp / lanes;  // vectors side by side
  const int lane = threadIdx.x % kWarp;
  for (unsigned remaining = busy; remaining;) {
    VectorExchange exchanges[kAtOnce];
    int64_t longest = 0;
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int number = k * vectors + lane / lanes;
      const int source = nth_lane(remaining, number);
      const TableView* table = table_of_lane<false>(lane_table, source);
      const int64_t source_frame = __shfl_sync(kAllLanes, frame, source);
      const int64_t source_victim = __shfl_sync(kAllLanes, victim, source);
      const int64_t source_slot = __shfl_sync(kAllLanes, slot, source);
      const RowStore& of = table->*store;
      exchanges[k].frame = of.at(0, source_frame);
      exchanges[k].out = source_victim == kNoSlot ? nullptr : of.at(source_victim, kNoFrame);
      exchanges[k].in = source_slot == kNoSlot ? nullptr : of.at(source_slot, kNoFrame);
      exchanges[k].bytes = number < __popc(remaining) ? of.bytes() : 0;
      longest = max(longest, exchanges[k].bytes);
    }
    // The same lane reads a piece of the frame and then writes it, so both directions overlap.
    for (int64_t b = lane % lanes * kWordBytes; b < longest; b += lanes * kWordBytes) {
      Word loaded[kAtOnce], evicted[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (b >= exchanges[k].bytes) continue;
        if (exchanges[k].in != nullptr)
          loaded[k] = *reinterpret_cast<const Word*>(exchanges[k].in + b);
        if (exchanges[k].out != nullptr)
          evicted[k] = *reinterpret_cast<const Word*>(exchanges[k].frame + b);
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (b >= exchanges[k].bytes) continue;
        if (exchanges[k].out != nullptr)
          *reinterpret_cast<Word*>(exchanges[k].out + b) = evicted[k];
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (b >= exchanges[k].bytes) continue;
        if (exchanges[k].in != nullptr)
          *reinterpret_cast<Word*>(exchanges[k].frame + b) = loaded[k];
      }
    }
    for (int n = min(kAtOnce * vectors, __popc(remaining)); n > 0; --n) remaining &= remaining - 1;
  }
}

// For each busy lane: writes the row and state of `victim` from its frame to host memory, and loads
// those of `slot` into the frame. kNoSlot: nothing to write, or to load. Called by all lanes.
__device__ __forceinline__ void exchange_rows(const TableView* lane_table, bool is_busy,
                                              int64_t frame, int64_t victim, int64_t slot) {
  const auto of = [&](RowStore TableView::* store, bool wanted) {
    const unsigned busy = __ballot_sync(kAllLanes, wanted);
    if (busy == 0) return;
    const int64_t bytes = wanted ? (lane_table->*store).bytes() : 0;
    if (__all_sync(kAllLanes, bytes % 16 == 0)) {
      exchange_vectors<uint4>(store, lane_table, busy, frame, victim, slot);
    } else if (__all_sync(kAllLanes, bytes % 4 == 0)) {
      exchange_vectors<uint32_t>(store, lane_table, busy, frame, victim, slot);
    } else {
      exchange_vectors<uint16_t>(store, lane_table, busy, frame, victim, slot);
    }
  };
  is_busy = is_busy && (victim != kNoSlot || slot != kNoSlot);
  of(&TableView::states, is_busy && lane_table->states.moves());
  of(&TableView::rows, is_busy);
}

}  // namespace torchrec_hkv::hash_table::cuda
