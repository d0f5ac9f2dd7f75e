// Exchanges rows and states of a warp between frames and host memory.
#pragma once

#include <cstdint>

#include "hash_table/cuda/insert/insert.cuh"
#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cuda {

// A vector to exchange.
struct Exchange {
  char* frame;
  char* out;       // destination of the frame's contents; null: not written
  const char* in;  // source of the frame's new contents; null: none
  int64_t bytes;   // 0: no vector
};

// Exchanges the rows or states of the lanes in `busy`. As many lanes move a vector as it has
// pieces, so that writes to host memory are long; kAtOnce vectors are moved at a time.
template <typename Piece>
__device__ __forceinline__ void exchange_vectors(RowStore TableView::* store, const TableView* mine,
                                                 unsigned busy, int64_t frame, int64_t leaver,
                                                 int64_t slot) {
  constexpr int kAtOnce = 4;
  constexpr auto kPiece = static_cast<int64_t>(sizeof(Piece));
  const TableView* first = table_of_lane<false>(mine, __ffs(static_cast<int>(busy)) - 1);
  int lanes = 1;  // of a vector
  while (lanes < kWarp && lanes * kPiece < (first->*store).bytes()) lanes *= 2;
  const int vectors = kWarp / lanes;  // vectors side by side
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
    // The same lane reads a piece of the frame and then writes it, so both directions overlap.
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

// For each busy lane: writes the row and state of `leaver` from its frame to host memory, and loads
// those of `slot` into the frame. kNoSlot: nothing to write, or to load. Called by all lanes.
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

}  // namespace torchrec_hkv::hash_table::cuda
