// The work of a tile of lanes in segments.cu: it sums pieces of long segments, and updates the rows
// of other segments.
//
// Gradients and rows of several positions are copied to shared memory asynchronously, which holds
// no registers. Each lane copies the columns that it updates, so that lanes do not wait for each
// other.
#pragma once

#include <cstdint>

#include "hash_table/cuda/update/row_updater.cuh"
#include "hash_table/cuda/update/sorted_chunk.cuh"
#include "hash_table/cuda/update/update.cuh"

namespace torchrec_hkv::hash_table::cuda {

// The data of one position, or of several positions of a piece with the same gradient.
struct alignas(16) Item {
  const char* gradient;
  union {
    char* row;       // at the end of a segment
    uint64_t times;  // in a piece: number of times that the gradient is added
  };
};

// The layout of a tile's shared memory, in bytes. kInt8: rows have 8 bits.
template <int kLanes, int kStates, bool kInt8>
struct TileMemory {
  // Arrays with a value for each position of a chunk of segments.
  static constexpr int32_t kScales = kLanes * sizeof(Item);
  static constexpr int32_t kSquares = kScales + kLanes * sizeof(float);
  static constexpr int32_t kRenewed = kSquares + kLanes * sizeof(float);
  static constexpr int32_t kStatePlaces = kRenewed + kLanes * sizeof(float);
  static constexpr int32_t kRowScales = kStatePlaces + (kStates > 0 ? kLanes * sizeof(float*) : 0);
  static constexpr int32_t kRoundings = kRowScales + (kInt8 ? kLanes * sizeof(float) : 0);
  static constexpr int32_t kOfSegments = kRoundings + (kInt8 ? kLanes * sizeof(uint64_t) : 0);
  // Arrays with a value for each position of a piece; they share the memory of those above.
  static constexpr int32_t kChunk = kLanes < 16 ? 16 : kLanes;  // positions looked up at once
  static constexpr int32_t kPieceScales = 2 * kChunk * sizeof(Item);
  static constexpr int32_t kOfPiece = kPieceScales + 2 * kChunk * sizeof(float);
  static constexpr int32_t kPlaces =
      ((kOfSegments > kOfPiece ? kOfSegments : kOfPiece) + 15) / 16 * 16;

  int32_t row;          // offset of the row in a place, after the gradient
  int32_t states;       // offset of the states, after the row
  int32_t of_state;     // distance of two column states; size of a gradient
  int32_t of_gradient;  // size of a piece's gradient, of which a part is summed at a time
  int32_t of_place;     // size of a place
  int32_t of_tile;

  // columns: of the widest row. places: number of positions in flight. gradients: of a piece, in
  // flight, with piece_columns columns each.
  TileMemory(int32_t columns, int32_t element_bytes, int places, int gradients,
             int32_t piece_columns) {
    const auto aligned = [](int32_t bytes) { return (bytes + 15) / 16 * 16; };
    const int32_t of_row = aligned(columns * element_bytes);
    // Vectors of 16-bit rows may extend beyond the last columns.
    of_state = max(aligned(columns * static_cast<int32_t>(sizeof(float))), 2 * of_row);
    if (element_bytes == sizeof(float)) of_state = of_row;
    row = of_state;
    states = row + of_row;
    of_gradient = min(of_state, piece_columns * static_cast<int32_t>(sizeof(float)));
    of_place = states + kStates * of_state;
    of_tile = kPlaces + max(places * of_place, gradients * of_gradient);
  }
};

// How a tile of lanes sums a piece. Of wide rows it sums a part of the columns at a time, so that
// the gradients of all samples stay in L2 while pieces of these columns are summed.
template <typename Element, int kVectors, int kDepth>
struct PieceParts {
  static constexpr int kOfPart = kVectors < 2 ? kVectors : 2;  // vectors of a lane
  static constexpr int kParts = kVectors / kOfPart;
  // In flight, in about the memory of kDepth positions.
  static constexpr int kGradients = kParts > 1                         ? 8
                                    : sizeof(Element) == sizeof(float) ? 2 * kDepth
                                                                       : kDepth + kDepth / 2;
};

// kDepth: positions in flight.
template <Optimizer kKind, typename Element, int kLanes, int kVectors, int kDepth>
struct SegmentTile {
  using Lanes = Tile<kLanes>;
  using Updater = RowUpdater<kKind, Element, kLanes, kVectors>;
  using Own = typename Updater::Own;
  using Memory = TileMemory<kLanes, column_states(kKind), Updater::kInt8>;
  using Parts = PieceParts<Element, kVectors, kDepth>;
  using PieceSummer = RowUpdater<kKind, Element, kLanes, Parts::kOfPart>;

  // Positions of a warp at which the segments begin that it takes at a time. Wide rows take longer,
  // and fewer of them distribute them more evenly.
  static constexpr int kSpan = kVectors >= 4 ? kLanes / 4 : kLanes;
  static_assert(kSpan == kLanes || kLanes == kWarp);

  const TableView* __restrict__ tables;
  const Update& update;
  const Scratch& scratch;
  const Memory& memory;
  const int32_t row_class;  // of the tables to update, or kAllRowClasses
  const int lane;
  char* const own;     // the tile's shared memory
  char* const places;  // its places
  const float rate;
  const RowType gradient_type;
  const bool scaled;
  Updater updater;
  uint32_t held = ~0u;  // the table of the updater

  __device__ __forceinline__ SegmentTile(const TableView* __restrict__ of_tables,
                                         const Update& of_update, const Scratch& of_scratch,
                                         const Memory& of_memory, int32_t of_class, char* shared)
      : tables(of_tables),
        update(of_update),
        scratch(of_scratch),
        memory(of_memory),
        row_class(of_class),
        lane(Lanes::lane()),
        own(shared + threadIdx.x / kLanes * memory.of_tile),
        places(own + Memory::kPlaces),
        rate(*update.learning_rate),
        gradient_type(update.grad.type),
        scaled(update.pooling.mean || update.pooling.weights != nullptr) {}

  __device__ __forceinline__ Item* items() const { return reinterpret_cast<Item*>(own); }
  __device__ __forceinline__ float* floats(int32_t at) const {
    return reinterpret_cast<float*>(own + at);
  }
  __device__ __forceinline__ void hold(uint32_t table) {
    if (table == held) return;
    held = table;
    updater.begin(tables[table], update.optimizer, rate);
  }

  // Sums a part of a piece's columns; long_segments.cu then updates the row. Neighbouring positions
  // with the same gradient, such as those of an id that a bag has several times, read it once.
  __device__ __forceinline__ void add_piece(uint32_t piece, uint32_t part) {
    constexpr int kGradients = Parts::kGradients;  // under way
    constexpr int kBatches = Memory::kChunk / kLanes;
    char* const last_place = places + (kGradients - 1) * memory.of_gradient;
    const LongSegments& longs = scratch.long_segments;
    const LongSegment segment = longs.segments[longs.segment_of[piece]];
    uint32_t chunk =
        segment.first + (piece - segment.first_piece) * static_cast<uint32_t>(kPieceSize);
    const uint32_t end =
        min(segment.first + segment.length, chunk + static_cast<uint32_t>(kPieceSize));
    Item* const its_items = items();
    float* const scales = floats(Memory::kPieceScales);
    Share shares[kBatches];  // of the chunk's positions
    const auto look = [&] {
#pragma unroll
      for (int b = 0; b < kBatches; ++b) {
        const uint32_t at = chunk + b * kLanes + lane;
        shares[b] =
            at < end ? share_of(update, scratch.bags, scratch.pairs.pairs.value(at)) : Share{};
      }
    };
    look();
    const uint32_t table = Lanes::of_lane(shares[0].table, 0);
    if (!is_of_class(tables[table], row_class)) return;
    const auto first_column = static_cast<int32_t>(part) * PieceSummer::kColumns;
    PieceSummer summer;
    if (!summer.begin_part(tables[table], first_column)) return;
    const int32_t gradient_offset = first_column * element_size(gradient_type);
    // Items are written to a ring of two chunks: those of the next chunk when all others are in
    // flight.
    constexpr uint32_t kItemMask = 2 * Memory::kChunk - 1;
    static_assert(kGradients + Memory::kChunk <= 2 * Memory::kChunk);
    uint32_t written = 0, begun = 0;
    const auto write_items = [&] {
      __syncwarp(Lanes::mask());  // all lanes have read the previous items
#pragma unroll
      for (int b = 0; b < kBatches; ++b) {
        written += write_batch(shares[b], chunk + b * kLanes + lane < end, written, kItemMask);
      }
      __syncwarp(Lanes::mask());
      chunk += Memory::kChunk;
      look();
    };
    const auto begin = [&](char* to) {
      if (begun == written && chunk < end) write_items();
      if (begun < written) {
        summer.copy_gradient(to, its_items[begun++ & kItemMask].gradient + gradient_offset,
                             gradient_type);
      }
      end_copies();
    };
    typename PieceSummer::Own sum;
    sum.clear();
    char* arrived = places;
#pragma unroll 1
    for (int k = 0; k < kGradients; ++k) {
      begin(arrived);
      arrived = arrived == last_place ? places : arrived + memory.of_gradient;
    }
#pragma unroll 1
    for (uint32_t i = 0; i < written; ++i) {
      wait_for_copies<kGradients - 1>();
      const typename PieceSummer::Own gradient = summer.load(gradient_type, arrived);
      const float scale = scaled ? scales[i & kItemMask] : 1.0f;
      const auto times = static_cast<int>(its_items[i & kItemMask].times);
      begin(arrived);
#pragma unroll 1
      for (int k = 0; k < times; ++k) sum.add(scale, gradient);
      arrived = arrived == last_place ? places : arrived + memory.of_gradient;
    }
    summer.store(longs.sums + static_cast<int64_t>(piece) * longs.widest + first_column, sum);
  }

  // Updates the rows of the segments that begin at kSpan positions from `first` on. n: number of
  // positions.
  __device__ __forceinline__ void update_segments(uint32_t first, uint32_t n) {
    const Pairs& sorted = scratch.short_pairs;
    SortedPlace place = SortedPlace::load(sorted, first + lane, n);
    Own sum;
    sum.clear();
    bool carried = false;
    uint32_t at = first;
    do {
      const SortedChunk<kLanes> chunk(tables, update, scratch, place, at, first + kSpan, n, carried,
                                      row_class);
      carried = chunk.goes_on;
      at += kLanes;
      if (carried) place = SortedPlace::load(sorted, at + lane, n);  // loaded meanwhile
      update_chunk(chunk, &sum);
    } while (carried);
  }

 private:
  // Writes an item for each run of equal gradients among the positions of the lanes. Returns the
  // number of items.
  __device__ __forceinline__ uint32_t write_batch(const Share& share, bool there, uint32_t written,
                                                  uint32_t item_mask) const {
    const int64_t before = __shfl_up_sync(Lanes::mask(), share.gradient, 1, kLanes);
    const float scale_before = __shfl_up_sync(Lanes::mask(), share.scale, 1, kLanes);
    const bool fresh =
        there && (lane == 0 || before != share.gradient || scale_before != share.scale);
    const unsigned there_mask = Lanes::ballot(there), fresh_mask = Lanes::ballot(fresh);
    if (fresh) {
      const uint32_t number = (written + __popc(fresh_mask & ((1u << lane) - 1))) & item_mask;
      const unsigned later = fresh_mask & ~((2u << lane) - 1);
      const int stop = later != 0 ? __ffs(static_cast<int>(later)) - 1 : __popc(there_mask);
      items()[number].gradient = update.grad.at(share.gradient);
      items()[number].times = stop - lane;
      floats(Memory::kPieceScales)[number] = share.scale;
    }
    return __popc(fresh_mask);
  }

  // sum: of the open segment.
  __device__ __forceinline__ void update_chunk(const SortedChunk<kLanes>& chunk, Own* sum) {
    char* row = nullptr;
    float* state = nullptr;
    RowExtras extras{};
    if (chunk.ends) {
      const RowPlace to(*chunk.table, chunk.key);
      row = to.row;
      state = to.state;
      if (update.optimizer.kind == Optimizer::kRowWiseAdagrad) extras.square = *state;
      if constexpr (Updater::kInt8) {
        const TableView& table = *chunk.table;
        extras.scale = *reinterpret_cast<const float*>(row);
        extras.rounding = rounding_key(update.optimizer.rounding_seed, table.initial_rows.seed,
                                       id_of_slot(table, to.slot), *table.optimizer_step);
      }
    }
    float* const scales = floats(Memory::kScales);
    float* const squares = floats(Memory::kSquares);
    float* const renewed = floats(Memory::kRenewed);
    float* const row_scales = floats(Memory::kRowScales);
    auto* const roundings = reinterpret_cast<uint64_t*>(own + Memory::kRoundings);
    auto* const states = reinterpret_cast<float**>(own + Memory::kStatePlaces);
    unsigned left = chunk.mask;
    while (left != 0) {
      // Neighbours of one table, numbered from 0.
      const uint32_t table = Lanes::of_lane(chunk.share.table, __ffs(static_cast<int>(left)) - 1);
      const bool mine = (left >> lane & 1) != 0 && chunk.share.table == table;
      const unsigned active = Lanes::ballot(mine);
      left &= ~active;
      const int count = __popc(active);
      const int number = __popc(active & ((1u << lane) - 1));
      hold(table);
      __syncwarp(Lanes::mask());  // all lanes have read the previous items
      if (mine) {
        items()[number] = {update.grad.at(chunk.share.gradient), row};
        scales[number] = chunk.share.scale;
        if constexpr (Updater::kStates > 0) states[number] = state;
      }
      const unsigned ends = __reduce_or_sync(Lanes::mask(), mine && chunk.ends ? 1u << number : 0u);
      __syncwarp(Lanes::mask());
      const bool adapts = kKind == Optimizer::kSgd && updater.adapts;
      update_items(count, ends, sum, [&] {
        if (!adapts && !Updater::kInt8) return;
        if (mine && chunk.ends) {
          if (adapts) squares[number] = extras.square;
          if constexpr (Updater::kInt8) {
            row_scales[number] = extras.scale;
            roundings[number] = extras.rounding;
          }
        }
        __syncwarp(Lanes::mask());
      });
      if (adapts) {
        __syncwarp(Lanes::mask());
        if (mine && chunk.ends) *state = renewed[number];
      }
    }
  }

  // Sums `count` items of one table, and updates the rows of those whose bit is set in `ends`.
  // Calls meanwhile() after the first copies have begun.
  template <typename Meanwhile>
  __device__ __forceinline__ void update_items(int count, unsigned ends, Own* sum,
                                               const Meanwhile& meanwhile) {
    char* const last_place = places + (kDepth - 1) * memory.of_place;
    const float* const scales = floats(Memory::kScales);
    const float* const squares = floats(Memory::kSquares);
    float* const renewed = floats(Memory::kRenewed);
    const float* const row_scales = floats(Memory::kRowScales);
    const auto* const roundings = reinterpret_cast<const uint64_t*>(own + Memory::kRoundings);
    auto* const states = reinterpret_cast<float* const*>(own + Memory::kStatePlaces);
    const auto next_place = [&](char* it) {
      return it == last_place ? places : it + memory.of_place;
    };
    int begun = 0;
    // Begins to copy the data of the next item, if there is one, and ends a group of copies in any
    // case.
    const auto begin = [&](char* to) {
      if (begun < count) {
        const Item item = items()[begun];
        updater.copy_gradient(to, item.gradient, gradient_type);
        if (ends >> begun & 1) {
          updater.copy_row(to + memory.row, item.row);
          if constexpr (Updater::kStates > 0) {
            const float* const its = states[begun];
#pragma unroll
            for (int s = 0; s < Updater::kStates; ++s) {
              updater.template copy_floats<true>(to + memory.states + s * memory.of_state,
                                                 its + s * updater.dim);
            }
          }
        }
        ++begun;
      }
      end_copies();
    };
    char* arrived = places;
#pragma unroll 1
    for (int k = 0; k < kDepth; ++k) {
      begin(arrived);
      arrived = next_place(arrived);
    }
    meanwhile();
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      wait_for_copies<kDepth - 1>();
      sum->add(scaled ? scales[i] : 1.0f, updater.load(gradient_type, arrived));
      if (ends >> i & 1) {
        RowExtras extras{squares[i], 0.0f, 0};
        if constexpr (Updater::kInt8) {
          extras.scale = row_scales[i];
          extras.rounding = roundings[i];
        }
        const float its = updater.update(update.optimizer, *sum, arrived + memory.row,
                                         arrived + memory.states, memory.of_state, items()[i].row,
                                         Updater::kStates > 0 ? states[i] : nullptr, extras);
        if (kKind == Optimizer::kSgd && lane == 0) renewed[i] = its;
        sum->clear();
      }
      begin(arrived);
      arrived = next_place(arrived);
    }
  }
};

}  // namespace torchrec_hkv::hash_table::cuda
