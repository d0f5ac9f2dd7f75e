// Pooling by tiles: as many lanes as a row has vectors of 16 bytes work on neighbouring bags of one
// feature. A vector holds four columns, or eight if all rows of the group have 16-bit columns. Each
// lane looks up the address of one position's row. Rows are then copied to shared memory in groups,
// several of which are in flight, also across chunks and bags; this holds no registers. Copies go
// through L1, which serves hot rows. Each lane copies the columns that it sums, so lanes do not
// wait for each other.
//
// If batches have a hot id, which is at a large part of a feature's positions, a tile checks
// whether its first chunk has one. The row is then kept in registers and added at its positions
// without a copy.
//
// Blocks are small and short, so that a kernel of a stream with a higher priority starts soon.
#include "common/chain.cuh"
#include "common/cuda_check.h"
#include "hash_table/cuda/async_copy.cuh"
#include "hash_table/cuda/bucket.cuh"
#include "hash_table/cuda/pool/bag_chunks.cuh"
#include "hash_table/cuda/pool/pool_tiles.h"
#include "hash_table/cuda/row_vector.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

// The types of rows that a kernel serves: all float32, all 16 bits, or any.
enum class Storage { kFloat32, k16Bits, kAny };

constexpr int columns_of_lane(Storage storage) { return storage == Storage::k16Bits ? 8 : 4; }

constexpr int kPoolThreads = 128;
// Blocks of a multiprocessor. Eight columns for each lane take more registers.
constexpr int pool_blocks(Storage storage) { return storage == Storage::k16Bits ? 4 : 5; }
constexpr int kGroup = 4;   // rows
constexpr int kGroups = 3;  // groups in flight; more of them evict hot rows from L1
// Chunks of a tile, if all tiles run at once and take three quarters of the GPU.
constexpr int kChunksTogether = 4;
constexpr int kTags = 64;  // tags of the chunk and of the groups in flight

// The tag of a position: the number of the bag that ends there, from 1 on, or 0.
constexpr uint32_t kTagInitial = 1u << 31;  // the row is an initial one, whatever the table's type
// With a hot row: the upper bits count how often it is added before the row of the position.
constexpr int kTagBagBits = 12;
constexpr uint32_t kMostTimes = 1u << 18;

template <int kLanes, bool kScaled>
struct alignas(16) PoolRing {
  float4 rows[kGroups][kGroup][kLanes];  // as they are stored
  const char* addresses[kLanes];         // of the chunk's rows
  uint32_t tags[kTags];
  float scales[kScaled ? kTags : 4];
};
static_assert(kTags >= kWarp + (kGroups + 1) * kGroup);
static_assert(kMostTimes + kWarp < 1u << (32 - kTagBagBits));

// Copies the lane's columns of a stored row. kStay: L2 evicts them last. columns: for rows of 16
// bits 8, or 4 at the end of a row. together: rows are multiples of 16 bytes.
template <Storage kStorage, bool kStay>
__device__ __forceinline__ void copy_columns(float4* to, const char* from, RowType type,
                                             int columns, bool together) {
  if constexpr (kStay) {
    static_assert(kStorage == Storage::kFloat32);
    copy_async_cached<16>(to, from, evict_last());
  } else if constexpr (kStorage == Storage::k16Bits) {
    if (together) {
      copy_async_cached<16>(to, from);
    } else {
      copy_async_cached<8>(to, from);
      if (columns == 8) copy_async_cached<8>(reinterpret_cast<char*>(to) + 8, from + 8);
    }
  } else if (kStorage == Storage::kFloat32 || type == RowType::kFloat32) {
    copy_async_cached<16>(to, from);
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

// The items of a chunk: the positions whose rows are copied. These are all, or those that end a bag
// or do not have the tile's hot slot. A lane has the data of the position with its number.
struct Items {
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
  uint32_t carried = 0;    // occurrences after the last item of earlier chunks

  // Selects the slot at a quarter or more of the positions of the tile's first chunk.
  // slot_in_table: of the lane's position, if that has a row.
  __device__ __forceinline__ void look(int64_t slot_in_table, bool has_row) {
    const uint32_t mine = has_row ? static_cast<uint32_t>(slot_in_table) : ~lane();
    const int same = __popc(__match_any_sync(Tile<kLanes>::mask(), mine));
    const unsigned many = Tile<kLanes>::ballot(has_row && same >= kLanes / 4);
    if (many == 0) return;
    slot = Tile<kLanes>::of_lane(slot_in_table, __ffs(static_cast<int>(many)) - 1);
  }
  // bag_end: end of the lane's bag (one after its last position) if it ends in the chunk, else 0.
  // all: rows of all positions are copied.
  __device__ __forceinline__ Items items(int64_t slot_in_table, int count, int bag_end, bool all) {
    const bool there = lane() < count;
    Items its{~0u, count, lane(), lane() == 0 ? carried : 0};
    if (slot == kNoSlot || all) {
      carried = 0;
      return its;
    }
    const unsigned ends =
        __reduce_or_sync(Tile<kLanes>::mask(), bag_end > 0 ? 1u << (bag_end - 1) : 0u);
    const bool is_item =
        slot_in_table != slot || (ends >> lane() & 1) != 0 || carried >= kMostTimes;
    its.mask = Tile<kLanes>::ballot(there && is_item);
    its.number = __popc(its.mask);
    const unsigned before = its.mask & ((1u << lane()) - 1);
    its.index = __popc(before);
    its.times = lane() - (kWarp - __clz(static_cast<int>(before))) + (before == 0 ? carried : 0);
    carried = count - (kWarp - __clz(static_cast<int>(its.mask))) + (its.mask == 0 ? carried : 0);
    return its;
  }
};

// kHot: there may be hot slots. kOnce: each bag has one id. Both have float32 rows without scales.
enum class Rows { kAny, kHot, kOnce };

// The length of a tile if not all tiles run at once: such that there are `rounds` rounds of the
// tiles that run at a time, but at most `most`. A tile with a hot slot waits for fewer rows, so its
// start weighs more.
struct TileLength {
  int rounds;
  int most;  // chunks, about
};
constexpr TileLength length_of(Rows rows) {
  switch (rows) {
    case Rows::kHot:
      return {4, 6};
    case Rows::kOnce:
      return {8, 3};
    default:
      return {6, 3};
  }
}

// kFloat32Out: outputs are float32; otherwise of any type.
template <int kLanes, bool kScaled, Storage kStorage, bool kFloat32Out, Rows kRows>
__global__ void __launch_bounds__(kPoolThreads, pool_blocks(kStorage))
    pool_tiles_kernel(const TableView* __restrict__ tables, const __grid_constant__ Batch batch,
                      const int64_t* __restrict__ slots, const __grid_constant__ Pooling pooling,
                      const __grid_constant__ Output<char> out,
                      const __grid_constant__ BagTiling tiling) {
  constexpr int kColumns = columns_of_lane(kStorage);
  constexpr bool kFloat32 = kStorage == Storage::kFloat32;
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
  if (range.bags == 0) return;
  // Kept in registers, because copies to shared memory make the compiler reload all memory.
  const TableView& table = tables[batch.feature_tables[range.feature]];
  const int64_t first_slot = table.first_slot;
  const auto num_slots = static_cast<uint64_t>(table.num_slots);
  const bool framed = table.frames.tags != nullptr;
  const char* const backing = table.rows.backing;
  const RowType type = kFloat32 ? RowType::kFloat32 : table.rows.type;
  const int32_t dim = table.dim();
  const int32_t column_bytes = kStorage == Storage::k16Bits ? 2 : element_size(type);
  const int32_t row_bytes = dim * column_bytes;
  const bool together = row_bytes % 16 == 0;
  const RowType out_type = kFloat32Out ? RowType::kFloat32 : out.type;
  const uint32_t stride = static_cast<uint32_t>(batch.output_stride(range.feature, out.stride)) *
                          element_size(out_type);
  char* const outputs = out.at(batch.output_of(range.feature, range.sample, out.stride));

  for (int32_t column = lane * kColumns; column - lane * kColumns < dim;
       column += kLanes * kColumns) {
    const bool mine = column < dim;
    const int columns = min(kColumns, dim - column);
    const int32_t row_offset = column * column_bytes;
    char* const my_outputs = outputs + column * element_size(out_type);
    const auto write = [&](uint32_t bag, const Row& row) {
      if (!mine) return;
      char* const to = my_outputs + static_cast<uint64_t>(bag) * stride;
#pragma unroll
      for (int k = 0; k < kColumns; k += 4) {  // outputs are aligned to four columns
        if (k < columns) Columns<4>::part_of(row, k).store(out_type, to, k);
      }
    };
    Row sum = Row::zero();
    HotSlot<kLanes> hot;
    Row hot_row = Row::zero();
    bool is_first = true;  // of the chunks
    int group = 0;         // number of the next one
    int place = 0;         // its place among the groups in flight
    int under_way = 0;     // groups
    // Adds the rows of the group at this place, the earliest of those in flight.
    const auto finish = [&](int its_place, int its_tags) {
      const uint4 four_tags = *reinterpret_cast<const uint4*>(&ring.tags[its_tags]);
      const uint32_t tags[kGroup] = {four_tags.x, four_tags.y, four_tags.z, four_tags.w};
      float4 four_scales = make_float4(1.0f, 1.0f, 1.0f, 1.0f);
      if (kScaled) four_scales = *reinterpret_cast<const float4*>(&ring.scales[its_tags]);
      const float scales[kGroup] = {four_scales.x, four_scales.y, four_scales.z, four_scales.w};
      const uint32_t all_tags = four_tags.x | four_tags.y | four_tags.z | four_tags.w;
      if (kStorage == Storage::k16Bits && (all_tags & kTagInitial)) {
        // For an initial row, the ring holds the id. Not unrolled, to save registers.
#pragma unroll 1
        for (int k = 0; k < kGroup; ++k) {
          const float4* const from = &ring.rows[its_place][k][lane];
          const uint32_t tag = ring.tags[its_tags + k];
          Row row;
          if (tag & kTagInitial) {
            row = Row::initial(table.initial_rows, *reinterpret_cast<const int64_t*>(from),
                               table.column_offset + column);
          } else {
            row = Row::load(type, reinterpret_cast<const char*>(from), 0);
          }
          sum.add(kScaled ? ring.scales[its_tags + k] : 1.0f, row);
          if ((tag & ~kTagInitial) == 0) continue;
          write((tag & ~kTagInitial) - 1, sum);
          sum = Row::zero();
        }
        return;
      }
      float4 stored[kGroup];
#pragma unroll
      for (int k = 0; k < kGroup; ++k) stored[k] = ring.rows[its_place][k][lane];
      const auto row_of = [&](int k) {
        if (kFloat32 || (kStorage == Storage::kAny && (tags[k] & kTagInitial))) {
          return Row::load(reinterpret_cast<const float*>(&stored[k]));
        }
        return Row::load(type, reinterpret_cast<const char*>(&stored[k]), 0);
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
    const auto tags_of = [&](int number) { return (number * kGroup) & (kTags - 1); };

    BagChunks<kLanes> chunks(batch, slots, range);
    while (chunks.left()) {
      const BagChunk chunk = chunks.template next<kScaled>(batch, slots, pooling.mean);
      if (!chunk.good) {
        for (int bag = chunk.bag; bag < range.bags; ++bag) write(bag, Row::zero());
        break;
      }
      for (unsigned empty = chunk.empty; empty; empty &= empty - 1) {
        write(chunk.bag + __ffs(static_cast<int>(empty)) - 1, Row::zero());
      }
      const bool there = lane < chunk.count;
      const bool has_row = there && static_cast<uint64_t>(chunk.slot - first_slot) < num_slots;
      const char* address = nullptr;
      if (has_row) {
        const int64_t slot = chunk.slot - first_slot;
        address = framed ? table.row(slot) : backing + slot * row_bytes;
      }
      const unsigned missing = tile.ballot(there && !has_row);
      const bool ends_here = (chunk.done & ~chunk.empty) >> lane & 1;  // the lane's bag
      const int64_t slot_in_table = chunk.slot - first_slot;
      Items items{~0u, chunk.count, lane, 0};
      if (kHot) {
        if (is_first) {
          is_first = false;
          hot.look(slot_in_table, has_row);
          if (hot.slot != kNoSlot && mine) {
            const char* const at = framed ? table.row(hot.slot) : backing + hot.slot * row_bytes;
            hot_row = Row::load(reinterpret_cast<const float*>(at + row_offset));
          }
        }
        items = hot.items(slot_in_table, chunk.count, ends_here ? chunk.end : 0, missing != 0);
      }
      const int tag = (tags_of(group) + items.index) & (kTags - 1);
      __syncwarp(tile.mask());  // all lanes have read the addresses of the previous chunk
      if (kHot) {
        if (lane >= items.number) {
          ring.addresses[lane] = backing;  // nothing is copied from there
          ring.tags[(tags_of(group) + lane) & (kTags - 1)] = 0;
        }
        if (there && (items.mask >> lane & 1)) {
          ring.addresses[items.index] = address;
          ring.tags[tag] = items.times << kTagBagBits;
        }
      } else {
        ring.addresses[lane] = address;
        ring.tags[tag] = !kFloat32 && (missing >> lane & 1) ? kTagInitial : 0;
      }
      if (kScaled) {
        // The number of bags that end at the position or before: its bag.
        int bag = 0;
#pragma unroll
        for (int step = kLanes / 2; step; step /= 2) {
          if (tile.of_lane(chunk.end, bag + step - 1) <= lane) bag += step;
        }
        float scale = tile.of_lane(chunk.mean_scale, bag);
        if (pooling.weights != nullptr && there) scale *= pooling.weights[chunk.at + lane];
        ring.scales[tag] = scale;
      }
      __syncwarp(tile.mask());
      if (ends_here) {
        const int last = chunk.end - 1;
        const int its_index = kHot ? __popc(items.mask & ((1u << last) - 1)) : last;
        uint32_t& its = ring.tags[(tags_of(group) + its_index) & (kTags - 1)];
        its = (kFloat32 && !kHot ? 0 : its) | static_cast<uint32_t>(chunk.bag + lane + 1);
      }
      __syncwarp(tile.mask());
      for (int first = 0; first < items.number; first += kGroup) {
        if (under_way == kGroups) {
          wait_for_copies<kGroups - 1>();
          finish(place, tags_of(group - kGroups));
        } else {
          ++under_way;
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
                copy_columns<kStorage, kStay>(&rows[k][lane], from[k] + row_offset, type, columns,
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
              if constexpr (kStorage == Storage::k16Bits) {
                // Initial rows are not rounded to 16 bits, so they do not fit here.
                *reinterpret_cast<int64_t*>(to) = id;
              } else {
                Row::initial(table.initial_rows, id, table.column_offset + column)
                    .store(reinterpret_cast<float*>(to));
              }
            } else if (mine && first + k < chunk.count) {
              copy_columns<kStorage, kStay>(to, ring.addresses[first + k] + row_offset, type,
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
    for (; under_way > 0; --under_way) {
      const int before = place - under_way;
      finish(before < 0 ? before + kGroups : before, tags_of(group - under_way));
    }
    __syncwarp(tile.mask());
  }
}

template <int kLanes>
void launch(const TableView* tables, const Batch& batch, const int64_t* slots, Pooling pooling,
            Output<char> out, const GroupShape& shape, bool hot, cudaStream_t stream) {
  // The bags of a tile share the latency of its start, but there should be several rounds of tiles.
  // If few chunks for each tile are enough for all tiles to run at once, they do so, and leave room
  // for concurrent kernels.
  int device = 0, processors = 0;
  HKV_CUDA_CHECK(cudaGetDevice(&device));
  HKV_CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  constexpr Storage kFloat32 = Storage::kFloat32, k16Bits = Storage::k16Bits;
  const int blocks_at_once = pool_blocks(shape.rows_of_16_bits() ? k16Bits : kFloat32);
  const int64_t at_once = int64_t{blocks_at_once} * processors * kPoolThreads;  // positions
  const int64_t together = max(int64_t{1}, (batch.num_ids * 4 + at_once * 3 - 1) / (at_once * 3));
  const bool scaled = pooling.mean || pooling.weights != nullptr;
  const bool float32_out = out.type == RowType::kFloat32;
  const bool once = batch.num_ids == batch.num_bags && batch.num_ids >= kManyOnce;
  const bool quick = shape.float32_rows && float32_out && !scaled;
  const Rows rows = quick && once ? Rows::kOnce : quick && hot ? Rows::kHot : Rows::kAny;
  const TileLength length = length_of(rows);
  const int64_t chunks =
      together <= kChunksTogether
          ? together
          : max(int64_t{1}, min(batch.num_ids / (at_once * length.rounds), int64_t{length.most}));
  const BagTiling tiling(batch, chunks * kLanes, chunks * kLanes);
  const auto kernel =
      shape.rows_of_16_bits()
          ? (scaled || !float32_out ? pool_tiles_kernel<kLanes, true, k16Bits, false, Rows::kAny>
                                    : pool_tiles_kernel<kLanes, false, k16Bits, true, Rows::kAny>)
      : !shape.float32_rows ? pool_tiles_kernel<kLanes, true, Storage::kAny, false, Rows::kAny>
      : !float32_out        ? pool_tiles_kernel<kLanes, true, kFloat32, false, Rows::kAny>
      : scaled              ? pool_tiles_kernel<kLanes, true, kFloat32, true, Rows::kAny>
      : rows == Rows::kOnce ? pool_tiles_kernel<kLanes, false, kFloat32, true, Rows::kOnce>
      : rows == Rows::kHot  ? pool_tiles_kernel<kLanes, false, kFloat32, true, Rows::kHot>
                            : pool_tiles_kernel<kLanes, false, kFloat32, true, Rows::kAny>;
  const int64_t threads = tiling.tiles(batch) * kLanes;
  const auto blocks = static_cast<unsigned>((threads + kPoolThreads - 1) / kPoolThreads);
  launch_chained(kernel, blocks, kPoolThreads, stream, tables, batch, slots, pooling, out, tiling);
}

}  // namespace

void pool_four_wide(const TableView* tables, const Batch& batch, const int64_t* slots,
                    Pooling pooling, Output<char> out, const GroupShape& shape, bool hot,
                    cudaStream_t stream) {
  const int32_t lanes_four_wide = shape.widest / (shape.rows_of_16_bits() ? 2 : 1);
  if (lanes_four_wide <= 32) {
    launch<8>(tables, batch, slots, pooling, out, shape, hot, stream);
  } else if (lanes_four_wide <= 64) {
    launch<16>(tables, batch, slots, pooling, out, shape, hot, stream);
  } else {
    launch<32>(tables, batch, slots, pooling, out, shape, hot, stream);
  }
}

}  // namespace torchrec_hkv::hash_table::cuda
