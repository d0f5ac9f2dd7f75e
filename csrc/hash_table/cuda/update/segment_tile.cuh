// A tile of lanes of segments.cu. It updates the rows of segments that are not long.
//
// Gradients and rows of several positions are copied to shared memory asynchronously, which needs
// no registers. Each lane copies the columns that it updates, so that lanes do not wait for each
// other.
#pragma once

#include <cstdint>

#include "hash_table/cuda/update/row_updater.cuh"
#include "hash_table/cuda/update/sorted_chunk.cuh"
#include "hash_table/cuda/update/update.cuh"

namespace torchrec_hkv::hash_table::cuda {

// The data of one position.
struct alignas(16) SegmentItem {
  const char* gradient;
  char* row;  // at the end of a segment
};

// The layout of a tile's shared memory, in bytes. kInt8: rows have 8 bits.
// kRounds: rows may be rounded stochastically.
template <int kLanes, int kStates, bool kInt8, bool kRounds>
struct TileMemory {
  // Arrays with a value for each position of a chunk of segments.
  static constexpr int32_t kScales = kLanes * sizeof(SegmentItem);
  static constexpr int32_t kSquares = kScales + kLanes * sizeof(float);
  static constexpr int32_t kNewSquares = kSquares + kLanes * sizeof(float);
  static constexpr int32_t kStatePointers = kNewSquares + kLanes * sizeof(float);
  static constexpr int32_t kRowScales =
      kStatePointers + (kStates > 0 ? kLanes * sizeof(float*) : 0);
  static constexpr int32_t kRoundings = kRowScales + (kInt8 ? kLanes * sizeof(float) : 0);
  static constexpr int32_t kArrays = kRoundings + (kRounds ? kLanes * sizeof(uint64_t) : 0);
  static constexpr int32_t kStages = (kArrays + 15) / 16 * 16;

  int32_t row;           // offset of the row in a stage, after the gradient
  int32_t states;        // offset of the states, after the row
  int32_t state_stride;  // distance of two column states; size of a gradient
  int32_t stage_bytes;   // size of a stage
  int32_t tile_bytes;

  // columns: of the widest row. stages: number of positions in flight.
  TileMemory(int32_t columns, int32_t element_bytes, int stages) {
    const auto aligned = [](int32_t bytes) { return (bytes + 15) / 16 * 16; };
    const int32_t of_row = aligned(columns * element_bytes);
    // Vectors of 16-bit rows may extend beyond the last columns.
    state_stride = max(aligned(columns * static_cast<int32_t>(sizeof(float))), 2 * of_row);
    if (element_bytes == sizeof(float)) state_stride = of_row;
    row = state_stride;
    states = row + of_row;
    stage_bytes = states + kStates * state_stride;
    tile_bytes = kStages + stages * stage_bytes;
  }
};

// kDepth: positions in flight.
template <Optimizer kKind, typename Element, int kLanes, int kVectors, int kDepth, bool kPlain>
struct SegmentTile {
  using Lanes = Tile<kLanes>;
  using Updater = RowUpdater<kKind, Element, kLanes, kVectors, kPlain>;
  using LaneColumns = typename Updater::LaneColumns;
  using Memory = TileMemory<kLanes, column_states(kKind), Updater::kInt8,
                            Updater::kInt8 || (Updater::k16Bits && !kPlain)>;

  static constexpr bool kAlone = kLanes == kWarp;  // the only tile of its warp

  // Number of positions whose segments a tile updates at a time. Wide rows take longer; smaller
  // spans distribute them more evenly.
  static constexpr int kSpan = kVectors >= 4 ? kLanes / 4 : kLanes;
  static_assert(kSpan == kLanes || kLanes == kWarp);

  const TableView* __restrict__ tables;
  const UpdateArguments& update;
  const UpdateScratch& scratch;
  const Memory& memory;
  const int32_t row_class;  // of the tables to update, or kAllRowClasses
  const int lane;
  char* const tile_memory;  // the tile's shared memory
  char* const stages;       // its stages
  const float rate;
  const RowType gradient_type;
  const bool scaled;
  const bool adapts;  // row-wise Adagrad
  const bool rounds;  // stochastically
  Updater updater;
  uint32_t held_table = ~0u;  // number of the table in `updater`

  __device__ __forceinline__ SegmentTile(const TableView* __restrict__ of_tables,
                                         const UpdateArguments& of_update,
                                         const UpdateScratch& of_scratch, const Memory& of_memory,
                                         int32_t of_class, char* shared)
      : tables(of_tables),
        update(of_update),
        scratch(of_scratch),
        memory(of_memory),
        row_class(of_class),
        lane(Lanes::lane()),
        tile_memory(shared + threadIdx.x / kLanes * memory.tile_bytes),
        stages(tile_memory + Memory::kStages),
        rate(*update.learning_rate),
        gradient_type(update.grad.type),
        scaled(update.pooling.mean || update.pooling.weights != nullptr),
        adapts(Updater::adapts(update.optimizer)),
        rounds(Updater::kInt8 ||
               (Updater::k16Bits && !kPlain && update.optimizer.stochastic_rounding)) {}

  __device__ __forceinline__ SegmentItem* items() const {
    return reinterpret_cast<SegmentItem*>(tile_memory);
  }
  __device__ __forceinline__ float* floats(int32_t at) const {
    return reinterpret_cast<float*>(tile_memory + at);
  }
  __device__ __forceinline__ void hold(uint32_t table) {
    if (table == held_table) return;
    held_table = table;
    updater.begin(tables[table], update.optimizer, rate);
  }

  // Updates the rows of the segments that begin at positions [first, last), of n. All tiles of a
  // warp call it together.
  __device__ __forceinline__ void update_segments(uint32_t first, uint32_t last, uint32_t n) {
    const Pairs& sorted = scratch.short_pairs;
    SortedPosition position = SortedPosition::load(sorted, first + lane, n);
    LaneColumns sum;
    sum.clear();
    bool is_continued = false;
    uint32_t at = first;
    do {
      const SortedChunk<kLanes> chunk(tables, update, scratch, position, at, last, n, is_continued,
                                      row_class);
      is_continued = chunk.continues;
      at += kLanes;
      // Loads the next chunk meanwhile.
      if (is_continued || at < last) position = SortedPosition::load(sorted, at + lane, n);
      update_chunk(chunk, &sum);
    } while (Lanes::any(is_continued || at < last));
  }

 private:
  // sum: of the open segment.
  __device__ __forceinline__ void update_chunk(const SortedChunk<kLanes>& chunk, LaneColumns* sum) {
    char* row = nullptr;
    float* state = nullptr;
    RowExtras extras{};
    if (chunk.ends) {
      const RowAddress to(*chunk.table, chunk.key);
      row = to.row;
      state = to.state;
      if (update.optimizer.kind == Optimizer::kRowWiseAdagrad) extras.square = *state;
      if constexpr (Updater::kInt8) extras.scale = *reinterpret_cast<const float*>(row);
      if (rounds) {
        const TableView& table = *chunk.table;
        extras.rounding = rounding_key(update.optimizer.rounding_seed, table.initial_rows.seed,
                                       id_of_slot(table, to.slot), *table.optimizer_step);
      }
    }
    float* const scales = floats(Memory::kScales);
    float* const squares = floats(Memory::kSquares);
    float* const new_squares = floats(Memory::kNewSquares);
    float* const row_scales = floats(Memory::kRowScales);
    auto* const roundings = reinterpret_cast<uint64_t*>(tile_memory + Memory::kRoundings);
    auto* const states = reinterpret_cast<float**>(tile_memory + Memory::kStatePointers);
    unsigned remaining = chunk.mask;
    while (Lanes::any(remaining != 0)) {
      // Numbers the positions of one table from 0.
      const uint32_t table =
          Lanes::of_lane(chunk.ref.table, __ffs(static_cast<int>(remaining)) - 1);
      const bool is_selected = (remaining >> lane & 1) != 0 && chunk.ref.table == table;
      const unsigned active = Lanes::ballot(is_selected);
      remaining &= ~active;
      const int count = __popc(active);
      const int number = __popc(active & ((1u << lane) - 1));
      if (kAlone || active != 0) hold(table);
      __syncwarp();  // all lanes have read the previous items
      if (is_selected) {
        items()[number] = {update.grad.at(chunk.ref.gradient), row};
        scales[number] = chunk.ref.scale;
        if constexpr (Updater::kStates > 0) states[number] = state;
      }
      const unsigned ends = Lanes::bits_of_all(is_selected && chunk.ends ? 1u << number : 0u);
      __syncwarp();
      update_items(count, ends, sum, [&] {
        if (!adapts && !rounds) return;
        if (is_selected && chunk.ends) {
          if (adapts) squares[number] = extras.square;
          if constexpr (Updater::kInt8) row_scales[number] = extras.scale;
          if (rounds) roundings[number] = extras.rounding;
        }
        __syncwarp();
      });
      if (adapts) {
        __syncwarp();
        if (is_selected && chunk.ends) *state = new_squares[number];
      }
    }
  }

  // Sums `count` items of one table, and updates the rows of those whose bit is set in `ends`.
  // Calls meanwhile() after the first copies have begun.
  template <typename Meanwhile>
  __device__ __forceinline__ void update_items(int count, unsigned ends, LaneColumns* sum,
                                               const Meanwhile& meanwhile) {
    char* const last_stage = stages + (kDepth - 1) * memory.stage_bytes;
    const float* const scales = floats(Memory::kScales);
    const float* const squares = floats(Memory::kSquares);
    float* const new_squares = floats(Memory::kNewSquares);
    const float* const row_scales = floats(Memory::kRowScales);
    const auto* const roundings =
        reinterpret_cast<const uint64_t*>(tile_memory + Memory::kRoundings);
    auto* const states = reinterpret_cast<float* const*>(tile_memory + Memory::kStatePointers);
    const auto next_stage = [&](char* it) {
      return it == last_stage ? stages : it + memory.stage_bytes;
    };
    int begun = 0;
    // Begins to copy the data of the next item, if there is one. Always ends a group of copies.
    const auto begin = [&](char* to) {
      if (begun < count) {
        const SegmentItem item = items()[begun];
        updater.copy_gradient(to, item.gradient, gradient_type);
        if (ends >> begun & 1) {
          updater.copy_row(to + memory.row, item.row);
          if constexpr (Updater::kStates > 0) {
            const float* const source_state = states[begun];
#pragma unroll
            for (int s = 0; s < Updater::kStates; ++s) {
              updater.template copy_floats<true>(to + memory.states + s * memory.state_stride,
                                                 source_state + s * updater.dim);
            }
          }
        }
        ++begun;
      }
      end_copies();
    };
    char* arrived = stages;
#pragma unroll 1
    for (int k = 0; k < kDepth; ++k) {
      begin(arrived);
      arrived = next_stage(arrived);
    }
    meanwhile();
    const int most = kAlone ? count : __reduce_max_sync(kAllLanes, count);  // of the warp's tiles
#pragma unroll 1
    for (int i = 0; i < most; ++i) {
      wait_for_copies<kDepth - 1>();
      if (kAlone || i < count) {
        sum->add(scaled ? scales[i] : 1.0f, updater.load(gradient_type, arrived));
      }
      const bool ends_here = (ends >> i & 1) != 0;
      if (Lanes::any(ends_here)) {
        // A tile without a row to update takes part, but what it reads is not used.
        const bool active = kAlone || ends_here;
        RowExtras extras{squares[i], 0.0f, 0};
        if constexpr (Updater::kInt8) extras.scale = row_scales[i];
        if (rounds) extras.rounding = roundings[i];
        const float mean_square =
            updater.update(active, update.optimizer, *sum, arrived + memory.row,
                           arrived + memory.states, memory.state_stride, items()[i].row,
                           Updater::kStates > 0 ? states[i] : nullptr, extras, adapts);
        if (active) {
          if (kKind == Optimizer::kSgd && lane == 0) new_squares[i] = mean_square;
          sum->clear();
        }
      }
      begin(arrived);
      arrived = next_stage(arrived);
    }
  }
};

}  // namespace torchrec_hkv::hash_table::cuda
