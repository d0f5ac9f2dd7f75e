// A slot's id and last step on the GPU (packed_entries.h), and its score.
#pragma once

#include <cstdint>

#include "hash_table/cuda/bucket.cuh"
#include "hash_table/cuda/score_update.cuh"
#include "hash_table/packed_entries.h"
#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cuda {

// The entry of a slot. Its address takes a few instructions, so keep it if both id and step are
// needed.
struct PackedEntry {
  uint32_t* word;  // of the step
  uint32_t at;     // number of the slot in its sector

  __device__ __forceinline__ uint32_t* step() const { return word; }
  __device__ __forceinline__ uint32_t* low() const { return word + kLowWord; }
  __device__ __forceinline__ uint16_t* high() const {
    return reinterpret_cast<uint16_t*>(word) + kHighHalf - static_cast<int32_t>(at);
  }
  __device__ __forceinline__ uint32_t* flags() const {
    return word + kFlagWord - static_cast<int32_t>(at);
  }
  __device__ __forceinline__ uint32_t flag() const { return 1u << (kFlagShift + at); }
};

// position: in the bucket.
__device__ __forceinline__ PackedEntry entry_at(const TableView& table, int64_t bucket,
                                                uint32_t position) {
  const uint32_t third = position * 171 >> 9;  // position / 3, exact below 128
  return PackedEntry{
      table.entries.sectors_of(bucket) + (position + third * (kSectorWords - kSectorSlots)),
      position - third * kSectorSlots};
}
__device__ __forceinline__ PackedEntry entry_of(const TableView& table, int64_t bucket,
                                                int64_t slot) {
  return entry_at(table, bucket, static_cast<uint32_t>(slot - bucket * table.bucket_slots));
}
__device__ __forceinline__ PackedEntry entry_of(const TableView& table, int64_t slot) {
  return entry_of(table, table.entries.bucket_of(slot), slot);
}
__device__ __forceinline__ uint16_t* digest_of_slot(const TableView& table, int64_t slot) {
  const int64_t bucket = table.entries.bucket_of(slot);
  return table.digests + bucket * kBucketDigests + (slot - bucket * table.bucket_slots);
}

// Whether an entry with the digest of the id holds the id. kOnce: the data should not occupy L1.
template <bool kOnce>
__device__ __forceinline__ bool is_entry_of(const PackedEntry& entry, uint64_t hash) {
  uint32_t low;
  uint16_t high;
  if (kOnce) {
    low = load_once(entry.low());
    asm volatile("ld.global.L1::no_allocate.u16 %0, [%1];" : "=h"(high) : "l"(entry.high()));
  } else {
    low = *entry.low();
    high = *entry.high();
  }
  const PackedId packed = pack_hash(hash);
  if (low != packed.low || high != packed.high) return false;
  if (!is_flagged_digest(digest_of(raw_digest(hash)))) return true;
  return ((load_l2(entry.flags()) & entry.flag()) != 0) == packed.flag;
}

// Writes the id, but not its digest and step.
__device__ __forceinline__ void write_packed_id(const PackedEntry& entry, uint64_t hash) {
  const PackedId packed = pack_hash(hash);
  *entry.low() = packed.low;
  *entry.high() = packed.high;
  if (!is_flagged_digest(digest_of(raw_digest(hash)))) return;
  // The sector's other slots may be claimed at the same time.
  if (packed.flag) {
    atomicOr(entry.flags(), entry.flag());
  } else {
    atomicAnd(entry.flags(), ~entry.flag());
  }
}

// The hash of the id of an entry with this digest. Reads L2, because other threads may just have
// written it.
__device__ __forceinline__ uint64_t hash_of_entry(const PackedEntry& entry, uint16_t digest) {
  const uint16_t high = load_l2(entry.high());
  const uint32_t low = load_l2(entry.low());
  const bool flag = is_flagged_digest(digest) && (load_l2(entry.flags()) & entry.flag()) != 0;
  return unpack_hash(PackedId{low, high, flag}, digest);
}
__device__ __forceinline__ int64_t packed_id_of(const TableView& table, int64_t slot) {
  return id_of_hash(hash_of_entry(entry_of(table, slot), load_l2(digest_of_slot(table, slot))));
}

// For tables that are packed or not:
__device__ __forceinline__ bool is_packed(const TableView& table) {
  return table.entries.words != nullptr;
}
__device__ __forceinline__ uint32_t* step_of(const TableView& table, int64_t slot) {
  return is_packed(table) ? entry_of(table, slot).step() : &table.last_steps[slot];
}
__device__ __forceinline__ int64_t id_of_slot(const TableView& table, int64_t slot) {
  if (is_packed(table)) return packed_id_of(table, slot);
  return static_cast<int64_t>(
      load_l2(reinterpret_cast<const unsigned long long*>(&table.ids[slot])));
}
__device__ __forceinline__ void write_id(const TableView& table, int64_t slot, int64_t id) {
  if (is_packed(table)) {
    write_packed_id(entry_of(table, slot), hash_of_id(id));
  } else {
    table.ids[slot] = id;
  }
}

// Touches an entry as a hit does. One of the lanes of a warp with the same slot writes, so a hot id
// costs one write for each warp. lanes: the calling lanes, found by a vote of all lanes.
// (__activemask may differ between lanes, and additions would be lost or doubled.)
__device__ __forceinline__ void touch(unsigned lanes, const TableView& table, int64_t slot,
                                      const CallContext& context, uint64_t given) {
  const unsigned peers =
      __match_any_sync(lanes, static_cast<unsigned long long>(table.first_slot + slot));
  if ((peers & ((1u << threadIdx.x % kWarp) - 1)) == 0)
    store_l2(step_of(table, slot), context.now());
  if (table.scores != nullptr) update_score_of_lanes(table, slot, peers, context, given);
}

__device__ __forceinline__ Rank rank_of(const TableView& table, int64_t slot) {
  const uint32_t step = load_l2(step_of(table, slot));
  const uint64_t score = table.scores == nullptr ? step : load_score(table, slot);
  return Rank{table.ranking().of(score, step), step};
}

}  // namespace torchrec_hkv::hash_table::cuda
