// Shared memory of a tile that pools rows, and the tile's hot slot (pool_tiles.cuh).
#pragma once

#include <cstdint>

#include "hash_table/cuda/async_copy.cuh"
#include "hash_table/cuda/row_vector.cuh"
#include "hash_table/cuda/tile.cuh"
#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cuda {

// The types of rows that a kernel serves: all float32, all of 16 bits, or any.
enum class RowStorage { kFloat32, k16Bits, kAny };

constexpr int columns_of_lane(RowStorage storage) { return storage == RowStorage::k16Bits ? 8 : 4; }

// Blocks of a multiprocessor. Eight columns for each lane take more registers.
constexpr int pool_blocks(RowStorage storage) { return storage == RowStorage::k16Bits ? 4 : 5; }
constexpr int kGroup = 4;   // rows of a group
constexpr int kGroups = 3;  // groups in flight; more of them evict hot rows from L1
constexpr int kTags = 64;   // tags of the chunk and of the groups in flight

// The tag of a position: the number of the bag that ends there, from 1 on, or 0.
constexpr uint32_t kTagInitial = 1u << 31;  // the row is an initial one, whatever the table's type
// With a hot row: the upper bits count how often it is added before the row of the position.
constexpr int kTagBagBits = 12;
constexpr uint32_t kMaxTimes = 1u << 18;

template <int kLanes, bool kScaled>
struct alignas(16) PoolRing {
  float4 rows[kGroups][kGroup][kLanes];  // as they are stored
  const char* addresses[kLanes];         // of the chunk's rows
  uint32_t tags[kTags];
  float scales[kScaled ? kTags : 4];
};
static_assert(kTags >= kWarp + (kGroups + 1) * kGroup);
static_assert(kMaxTimes + kWarp < 1u << (32 - kTagBagBits));

// The place of the scale of a row of 8 bits among the sixteen bytes of a lane, after its columns.
constexpr int kScaleOffset = 8;

// Copies the lane's columns of a stored row, and the scale of a row of 8 bits. offset: of the
// columns in the row. kStay: L2 evicts them last. columns: for 16 bits 8, or 4 at the end of a row.
// together: rows are multiples of 16 bytes.
template <RowStorage kRowStorage, bool kStay>
__device__ __forceinline__ void copy_columns(float4* to, const char* row, int32_t offset,
                                             RowType type, int columns, bool together) {
  const char* const from = row + offset;
  char* const bytes = reinterpret_cast<char*>(to);
  if constexpr (kStay) {
    static_assert(kRowStorage == RowStorage::kFloat32);
    copy_async_cached<16>(to, from, evict_last());
  } else if constexpr (kRowStorage == RowStorage::k16Bits) {
    if (together) {
      copy_async_cached<16>(to, from);
    } else {
      copy_async_cached<8>(to, from);
      if (columns == 8) copy_async_cached<8>(bytes + 8, from + 8);
    }
  } else if (kRowStorage == RowStorage::kFloat32 || type == RowType::kFloat32) {
    copy_async_cached<16>(to, from);
  } else if (type == RowType::kInt8) {
    copy_async_cached<4>(to, from);
    copy_async_cached<4>(bytes + kScaleOffset, row);
  } else {
    copy_async_cached<8>(to, from);
  }
}

// Copies sixteen bytes of a row, or zeros.
__device__ __forceinline__ void copy_or_clear(float4* to, const char* from, bool copies) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(copies ? 16 : 0)
               : "memory");
}

// The items of a chunk: the positions whose rows are copied. These are all positions or, with a hot
// slot, those that end a bag or have another slot. A lane has the data of the position with the
// lane's number.
struct ChunkItems {
  unsigned mask;   // of positions
  int number;      // of items
  int index;       // of the lane's position, if that is an item
  uint32_t times;  // occurrences of the hot row between the previous item and this one
};

// The hot slot of a tile.
template <int kLanes>
struct HotSlot : Tile<kLanes> {
  using Tile<kLanes>::lane;

  int64_t slot = kNoSlot;  // in the table
  uint32_t pending_ = 0;   // occurrences after the last item of earlier chunks

  // Selects the slot at a quarter or more of the positions of the tile's first chunk.
  // slot_in_table: of the lane's position, if that has a row.
  __device__ __forceinline__ void select(int64_t slot_in_table, bool has_row) {
    const uint32_t mine = has_row ? static_cast<uint32_t>(slot_in_table) : ~lane();
    const int same = __popc(Tile<kLanes>::bits_of(__match_any_sync(kAllLanes, mine)));
    const unsigned many = Tile<kLanes>::ballot(has_row && same >= kLanes / 4);
    const int64_t found = Tile<kLanes>::of_lane(slot_in_table, __ffs(static_cast<int>(many)) - 1);
    if (many != 0) slot = found;
  }
  // bag_end: end of the lane's bag (one after its last position) if it ends in the chunk, else 0.
  // all: rows of all positions are copied.
  __device__ __forceinline__ ChunkItems items(int64_t slot_in_table, int count, int bag_end,
                                              bool all) {
    const bool is_valid = lane() < count;
    ChunkItems chunk_items{~0u, count, lane(), lane() == 0 ? pending_ : 0};
    const unsigned ends = Tile<kLanes>::bits_of_all(bag_end > 0 ? 1u << (bag_end - 1) : 0u);
    const bool is_item =
        slot_in_table != slot || (ends >> lane() & 1) != 0 || pending_ >= kMaxTimes;
    const unsigned mask = Tile<kLanes>::ballot(is_valid && is_item);
    if (slot == kNoSlot || all) {
      pending_ = 0;
      return chunk_items;
    }
    chunk_items.mask = mask;
    chunk_items.number = __popc(chunk_items.mask);
    const unsigned before = chunk_items.mask & ((1u << lane()) - 1);
    chunk_items.index = __popc(before);
    chunk_items.times =
        lane() - (kWarp - __clz(static_cast<int>(before))) + (before == 0 ? pending_ : 0);
    pending_ = count - (kWarp - __clz(static_cast<int>(chunk_items.mask))) +
               (chunk_items.mask == 0 ? pending_ : 0);
    return chunk_items;
  }
};

}  // namespace torchrec_hkv::hash_table::cuda
