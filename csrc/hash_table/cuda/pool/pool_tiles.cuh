// Pooling by tiles. A tile has as many lanes as a row has vectors, and works on neighbouring bags
// of a feature. A vector has four columns, or eight if all rows have 16 bits a column. Each lane
// looks up the address of one position's row. Rows are then copied to shared memory in groups,
// several of which are in flight, also across chunks and bags; this needs no registers. Copies go
// through L1, which serves hot rows. Each lane copies the columns that it sums, so lanes do not
// wait for each other.
//
// If batches have a hot id, which is at a large part of a feature's positions, a tile checks
// whether its first chunk has one. The row is then kept in registers and added at its positions
// without a copy.
//
// Blocks are small and short, so that a kernel of a stream with a higher priority starts soon.
#pragma once

#include <cstdint>

#include "common/dependent_launch.cuh"
#include "hash_table/cuda/bucket.cuh"
#include "hash_table/cuda/pool/bag_chunks.cuh"
#include "hash_table/cuda/pool/pool_launch.h"
#include "hash_table/cuda/pool/pool_ring.cuh"
#include "hash_table/group_shape.h"

namespace torchrec_hkv::hash_table::cuda {

// kHot: there may be hot slots. kOnce: each bag has one id. Both have float32 rows without scales.
enum class Rows { kAny, kHot, kOnce };

// A tile with a hot slot waits for fewer rows, so its start weighs more.
constexpr TileLength length_of(Rows rows) {
  switch (rows) {
    case Rows::kHot:
      return {.together = 4, .rounds = 4, .most = 6};
    case Rows::kOnce:
      return {.together = 4, .rounds = 8, .most = 3};
    default:
      return {.together = 4, .rounds = 6, .most = 3};
  }
}

// kFloat32Out: outputs are float32; otherwise of any type.
template <int kLanes, bool kScaled, RowStorage kRowStorage, bool kFloat32Out, Rows kRows>
__global__ void __launch_bounds__(kPoolThreads, pool_blocks(kRowStorage))
    pool_tiles_kernel(const TableView* __restrict__ tables, const __grid_constant__ Batch batch,
                      const int64_t* __restrict__ slots, const __grid_constant__ Pooling pooling,
                      const __grid_constant__ Output<char> out,
                      const __grid_constant__ BagTiling tiling) {
  constexpr int kColumns = columns_of_lane(kRowStorage);
  constexpr bool kFloat32 = kRowStorage == RowStorage::kFloat32;
  using Row = Columns<kColumns>;
  constexpr bool kHot = kRows == Rows::kHot, kStay = kRows == Rows::kOnce;
  static_assert(kRows == Rows::kAny || (kFloat32 && kFloat32Out && !kScaled));
  __shared__ PoolRing<kLanes, kScaled> rings[kPoolThreads / kLanes];
  PoolRing<kLanes, kScaled>& ring = rings[threadIdx.x / kLanes];
  wait_for_kernel_before();  // which may have written slots or offsets
  const Tile<kLanes> tile;
  const int lane = tile.lane();
  const BagRange range = tiling.range_of(
      batch, (static_cast<int64_t>(blockIdx.x) * kPoolThreads + threadIdx.x) / kLanes);
  const TileTable table(tables[batch.feature_tables[range.feature]]);
  const RowType type = kFloat32 ? RowType::kFloat32 : table.view.rows.type;
  const bool int8 = kRowStorage == RowStorage::kAny && type == RowType::kInt8;
  const int32_t dim = range.bags > 0 ? table.view.dim() : 0;
  const int32_t column_bytes = kRowStorage == RowStorage::k16Bits ? 2 : element_size(type);
  const int32_t row_bytes = int8 ? static_cast<int32_t>(row_size(type, dim)) : dim * column_bytes;
  const bool together = row_bytes % 16 == 0;
  const RowType out_type = kFloat32Out ? RowType::kFloat32 : out.type;
  const uint32_t stride = static_cast<uint32_t>(batch.output_stride(range.feature, out.stride)) *
                          element_size(out_type);
  char* const outputs = out.at(batch.output_of(range.feature, range.sample, out.stride));

  for (int32_t first_column = 0; tile.any(first_column < dim); first_column += kLanes * kColumns) {
    const int32_t column = first_column + lane * kColumns;
    const bool mine = column < dim;
    const int columns = min(kColumns, dim - column);
    const int32_t row_offset = column * column_bytes + (int8 ? kInt8Start : 0);
    char* const my_outputs = outputs + column * element_size(out_type);
    const auto write = [&](uint32_t bag, const Row& row) {
      if (!mine) return;
      char* const to = my_outputs + static_cast<uint64_t>(bag) * stride;
#pragma unroll
      for (int k = 0; k < kColumns; k += 4) {  // outputs are aligned to four columns
        if (k < columns) Columns<4>::part_of(row, k).store(out_type, to, k);
      }
    };
    // A row as it was copied. stored_type: the type of rows.
    const auto stored_row = [&](RowType stored_type, const float4& stored) {
      const auto* const from = reinterpret_cast<const char*>(&stored);
      if (int8) return Row::load_int8(from, *reinterpret_cast<const float*>(from + kScaleOffset));
      return Row::load(stored_type, from, 0);
    };
    Row sum = Row::zero();
    HotSlot<kLanes> hot;
    Row hot_row = Row::zero();
    bool is_first = true;      // whether the next chunk is the first
    int group = 0;             // number of the next group
    int place = 0;             // its place among the groups in flight
    int groups_in_flight = 0;  // number of groups in flight
    // Adds the rows of the group at this place, the earliest of those in flight.
    // kType: the type of rows of 16 bits.
    const auto finish_as = [&]<RowType kType>(int stage, int first_tag) {
      const RowType stored_type = kRowStorage == RowStorage::k16Bits ? kType : type;
      const uint4 four_tags = *reinterpret_cast<const uint4*>(&ring.tags[first_tag]);
      const uint32_t tags[kGroup] = {four_tags.x, four_tags.y, four_tags.z, four_tags.w};
      float4 four_scales = make_float4(1.0f, 1.0f, 1.0f, 1.0f);
      if (kScaled) four_scales = *reinterpret_cast<const float4*>(&ring.scales[first_tag]);
      const float scales[kGroup] = {four_scales.x, four_scales.y, four_scales.z, four_scales.w};
      const uint32_t all_tags = four_tags.x | four_tags.y | four_tags.z | four_tags.w;
      if (kRowStorage == RowStorage::k16Bits && (all_tags & kTagInitial)) {
        // For an initial row, the ring holds the id. Not unrolled, to save registers.
#pragma unroll 1
        for (int k = 0; k < kGroup; ++k) {
          const float4* const from = &ring.rows[stage][k][lane];
          const uint32_t tag = ring.tags[first_tag + k];
          Row row;
          if (tag & kTagInitial) {
            row = Row::initial(table.view.initial_rows, *reinterpret_cast<const int64_t*>(from),
                               table.view.column_offset + column);
          } else {
            row = stored_row(stored_type, *from);
          }
          sum.add(kScaled ? ring.scales[first_tag + k] : 1.0f, row);
          if ((tag & ~kTagInitial) == 0) continue;
          write((tag & ~kTagInitial) - 1, sum);
          sum = Row::zero();
        }
        return;
      }
      float4 stored[kGroup];
#pragma unroll
      for (int k = 0; k < kGroup; ++k) stored[k] = ring.rows[stage][k][lane];
      const auto row_of = [&](int k) {
        if (kFloat32 || (kRowStorage == RowStorage::kAny && (tags[k] & kTagInitial))) {
          return Row::load(reinterpret_cast<const float*>(&stored[k]));
        }
        return stored_row(stored_type, stored[k]);
      };
      if (all_tags == 0) {  // the fast case
#pragma unroll
        for (int k = 0; k < kGroup; ++k) sum.add(kScaled ? scales[k] : 1.0f, row_of(k));
        return;
      }
#pragma unroll
      for (int k = 0; k < kGroup; ++k) {
        if (kHot) {
#pragma unroll 1
          for (uint32_t times = tags[k] >> kTagBagBits; times > 0; --times) sum.add(1.0f, hot_row);
        }
        sum.add(kScaled ? scales[k] : 1.0f, row_of(k));
        const uint32_t end = kHot       ? tags[k] & ((1u << kTagBagBits) - 1)
                             : kFloat32 ? tags[k]
                                        : tags[k] & ~kTagInitial;
        if (end != 0) {
          write(end - 1, sum);
          sum = Row::zero();
        }
      }
    };
    const auto finish = [&](int stage, int first_tag) {
      if (kRowStorage == RowStorage::k16Bits && type == RowType::kBFloat16) {
        finish_as.template operator()<RowType::kBFloat16>(stage, first_tag);
      } else {
        finish_as.template operator()<RowType::kFloat16>(stage, first_tag);
      }
    };
    const auto tags_of = [&](int number) { return (number * kGroup) & (kTags - 1); };

    BagChunks<kLanes> chunks(batch, slots, range, first_column < dim);
    while (tile.any(chunks.more())) {
      BagChunk chunk = chunks.template next<kScaled>(batch, slots, pooling.mean);
      if (!chunk.good) {
        for (int bag = chunk.bag; bag < range.bags; ++bag) write(bag, Row::zero());
        chunks.stop();
        chunk.count = chunk.done = chunk.empty = 0;
      }
      for (unsigned empty = chunk.empty; empty; empty &= empty - 1) {
        write(chunk.bag + __ffs(static_cast<int>(empty)) - 1, Row::zero());
      }
      const bool is_valid = lane < chunk.count;
      const int64_t slot_in_table = chunk.slot - table.first_slot;
      const bool has_row = is_valid && static_cast<uint64_t>(slot_in_table) < table.num_slots;
      const char* const address = has_row ? table.row(slot_in_table, row_bytes) : nullptr;
      const unsigned missing = tile.ballot(is_valid && !has_row);
      const bool ends_here = chunk.ends_a_bag(lane);
      ChunkItems items{~0u, chunk.count, lane, 0};
      if (kHot) {
        if (is_first) {
          is_first = false;
          hot.select(slot_in_table, has_row);
          if (hot.slot != kNoSlot && mine) {
            const char* const at = table.row(hot.slot, row_bytes) + row_offset;
            hot_row = Row::load(reinterpret_cast<const float*>(at));
          }
        }
        items = hot.items(slot_in_table, chunk.count, ends_here ? chunk.end : 0, missing != 0);
      }
      const int tag = (tags_of(group) + items.index) & (kTags - 1);
      __syncwarp();  // all lanes have read the addresses of the previous chunk
      if (kHot) {
        if (lane >= items.number) {
          ring.addresses[lane] = table.backing;  // nothing is copied from there
          ring.tags[(tags_of(group) + lane) & (kTags - 1)] = 0;
        }
        if (is_valid && (items.mask >> lane & 1)) {
          ring.addresses[items.index] = address;
          ring.tags[tag] = items.times << kTagBagBits;
        }
      } else {
        ring.addresses[lane] = address;
        ring.tags[tag] = !kFloat32 && (missing >> lane & 1) ? kTagInitial : 0;
      }
      if (kScaled) ring.scales[tag] = chunks.scale_of(chunk, pooling.weights);
      __syncwarp();
      if (ends_here) {
        const int last = chunk.end - 1;
        const int item_index = kHot ? __popc(items.mask & ((1u << last) - 1)) : last;
        uint32_t& end_tag = ring.tags[(tags_of(group) + item_index) & (kTags - 1)];
        end_tag = (kFloat32 && !kHot ? 0 : end_tag) | static_cast<uint32_t>(chunk.bag + lane + 1);
      }
      __syncwarp();
      for (int first = 0; first < items.number; first += kGroup) {
        if (groups_in_flight == kGroups) {
          wait_for_copies<kGroups - 1>();
          finish(place, tags_of(group - kGroups));
        } else {
          ++groups_in_flight;
        }
        float4(&rows)[kGroup][kLanes] = ring.rows[place];
        if ((kHot || first + kGroup <= chunk.count) &&
            (missing >> first & ((1u << kGroup) - 1)) == 0) {
          const char* from[kGroup];
#pragma unroll
          for (int k = 0; k < kGroup; k += 2) {
            const ulonglong2 two = *reinterpret_cast<const ulonglong2*>(&ring.addresses[first + k]);
            from[k] = reinterpret_cast<const char*>(two.x);
            from[k + 1] = reinterpret_cast<const char*>(two.y);
          }
          if (mine) {
#pragma unroll
            for (int k = 0; k < kGroup; ++k) {
              if (kHot) {
                copy_or_clear(&rows[k][lane], from[k] + row_offset, first + k < items.number);
              } else {
                copy_columns<kRowStorage, kStay>(&rows[k][lane], from[k], row_offset, type, columns,
                                                 together);
              }
            }
          }
        } else {
#pragma unroll 1
          for (int k = 0; k < kGroup; ++k) {
            float4* const to = &rows[k][lane];
            if (mine && missing >> (first + k) & 1) {
              const int64_t id = batch.ids[chunk.at + first + k];
              if constexpr (kRowStorage == RowStorage::k16Bits) {
                // Initial rows are not rounded to 16 bits and do not fit: the id is stored.
                *reinterpret_cast<int64_t*>(to) = id;
              } else {
                Row::initial(table.view.initial_rows, id, table.view.column_offset + column)
                    .store(reinterpret_cast<float*>(to));
              }
            } else if (mine && first + k < chunk.count) {
              copy_columns<kRowStorage, kStay>(to, ring.addresses[first + k], row_offset, type,
                                               columns, together);
            } else {
              *to = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            }
          }
        }
        end_copies();
        ++group;
        place = place + 1 == kGroups ? 0 : place + 1;
      }
    }
    wait_for_copies<0>();
    for (; groups_in_flight > 0; --groups_in_flight) {
      const int before = place - groups_in_flight;
      finish(before < 0 ? before + kGroups : before, tags_of(group - groups_in_flight));
    }
    __syncwarp();
  }
}

template <int kLanes, bool kScaled, RowStorage kRowStorage, bool kFloat32Out, Rows kRows>
void launch_tiles(const PoolCall& call) {
  launch_pool(pool_tiles_kernel<kLanes, kScaled, kRowStorage, kFloat32Out, kRows>, kLanes,
              pool_blocks(kRowStorage), length_of(kRows), call);
}

}  // namespace torchrec_hkv::hash_table::cuda
