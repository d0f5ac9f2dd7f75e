// The update of rows whose positions are neighbours in the sorted order, for optimizers that have a
// RowUpdater.
//
// A warp takes 32 neighbouring positions of the sorted order. A tile of its lanes takes as many
// positions as it has lanes, and the segments of equal slots that begin there. Each lane looks up
// what one position needs: where its gradient is and, where a segment ends, its row. Gradients and
// rows of some positions are on their way to shared memory at any time and take no registers
// meanwhile. Each lane copies the columns that it works on, so that lanes don't wait for each
// other.
//
// Long segments are cut in pieces. A tile adds up a piece, whose sum long_segments.cu takes for the
// row. Where neighbouring positions have the same gradient, as those of an id that a bag has
// several times, it is read once. A group whose tables differ in their row classes launches a
// kernel for each class, which takes the warps' positions from a list (list_segments.cu).
#include <algorithm>

#include "common/chain.cuh"
#include "common/cuda_check.h"
#include "hash_table/cuda/frames.cuh"
#include "hash_table/cuda/offsets.cuh"
#include "hash_table/cuda/update/row_updater.cuh"
#include "hash_table/cuda/update/update.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

constexpr int kSegmentThreads = 64;  // of a block: small ones make room without waiting for others
constexpr int kSegmentWarps = kSegmentThreads / kWarp;

// What one position needs, or several of a piece with the same gradient.
struct alignas(16) Item {
  const char* gradient;
  union {
    char* row;       // where the segment ends
    uint64_t times;  // of a piece: how often the gradient is added
  };
};

// The shared memory of a tile. Bytes.
template <int kLanes, int kStates>
struct TileMemory {
  // Arrays with a value for each position of a chunk of segments.
  static constexpr int32_t kScales = kLanes * sizeof(Item);
  static constexpr int32_t kSquares = kScales + kLanes * sizeof(float);
  static constexpr int32_t kRenewed = kSquares + kLanes * sizeof(float);
  static constexpr int32_t kStatePlaces = kRenewed + kLanes * sizeof(float);
  static constexpr int32_t kOfSegments = kStatePlaces + (kStates > 0 ? kLanes * sizeof(float*) : 0);
  // Arrays with a value for each position of a piece; they share the memory of those above.
  static constexpr int32_t kChunk = kLanes < 16 ? 16 : kLanes;  // positions looked up at once
  static constexpr int32_t kPieceScales = 2 * kChunk * sizeof(Item);
  static constexpr int32_t kOfPiece = kPieceScales + 2 * kChunk * sizeof(float);
  static constexpr int32_t kPlaces =
      ((kOfSegments > kOfPiece ? kOfSegments : kOfPiece) + 15) / 16 * 16;

  int32_t row;       // in a place, behind the gradient
  int32_t states;    // behind the row
  int32_t of_state;  // from one column state to the next, and of a gradient
  int32_t of_place;  // of a position under way
  int32_t of_tile;

  // columns: of the widest row. places: of positions under way, and of gradients of a piece.
  TileMemory(int32_t columns, int32_t element_bytes, int places, int gradients) {
    const auto aligned = [](int32_t bytes) { return (bytes + 15) / 16 * 16; };
    const int32_t of_row = aligned(columns * element_bytes);
    // Vectors of 16-bit rows may end behind their last columns.
    of_state = std::max(aligned(columns * static_cast<int32_t>(sizeof(float))), 2 * of_row);
    if (element_bytes == sizeof(float)) of_state = of_row;
    row = of_state;
    states = row + of_row;
    of_place = states + kStates * of_state;
    of_tile = kPlaces + std::max(places * of_place, gradients * of_state);
  }
};

// The number of a piece's gradients that are copied at once, in the memory that holds `depth`
// positions of segments.
template <typename Element>
constexpr int pieces_depth(int depth) {
  return sizeof(Element) == sizeof(float) ? 2 * depth : depth + depth / 2;
}

// kDepth: positions of a tile under way. row_class: of the tables to update, or kAllRowClasses.
template <Optimizer kKind, typename Element, int kLanes, int kVectors, int kDepth, int kBlocks>
__global__ void __launch_bounds__(kSegmentThreads, kBlocks)
    segment_kernel(const TableView* __restrict__ tables, const __grid_constant__ Update update,
                   const __grid_constant__ Scratch scratch,
                   const __grid_constant__ TileMemory<kLanes, column_states(kKind)> memory,
                   int row_class, bool first) {
  using Lanes = Tile<kLanes>;
  using Updater = RowUpdater<kKind, Element, kLanes, kVectors>;
  using Memory = TileMemory<kLanes, column_states(kKind)>;
  extern __shared__ __align__(16) char shared[];
  // The first of several kernels waits for what all of them need, and the next may start once all
  // of its blocks have.
  if (first) wait_for_kernel_before();
  let_next_kernel_start();
  if (!is_refused(update.batch)) {
    const int lane = Lanes::lane(), first_lane = Lanes::first_lane();
    char* const own_memory = shared + threadIdx.x / kLanes * memory.of_tile;
    auto* const items = reinterpret_cast<Item*>(own_memory);
    auto* const scales = reinterpret_cast<float*>(own_memory + Memory::kScales);
    auto* const squares = reinterpret_cast<float*>(own_memory + Memory::kSquares);
    auto* const renewed = reinterpret_cast<float*>(own_memory + Memory::kRenewed);
    auto* const states = reinterpret_cast<float**>(own_memory + Memory::kStatePlaces);
    char* const places = own_memory + Memory::kPlaces;
    const auto n = static_cast<uint32_t>(update.batch.num_ids);
    const Pairs& sorted = scratch.pairs.pairs;
    const OptimizerConfig& optimizer = update.optimizer;
    const RowType gradient_type = update.grad.type;
    const float rate = *update.learning_rate;
    const bool scaled = update.pooling.mean || update.pooling.weights != nullptr;
    const bool listed = row_class != kAllRowClasses;  // others are in the group
    const uint32_t* const list = listed ? scratch.units.of(row_class) : nullptr;
    const uint32_t units = listed ? scratch.units.number[row_class] : (n + kWarp - 1) / kWarp;
    Updater updater;
    uint32_t held = ~0u;  // the updater's table
    const auto hold = [&](uint32_t table) {
      if (table == held) return;
      held = table;
      updater.begin(tables[table], optimizer, rate);
    };
    const auto is_of_class = [&](const TableView& table) {
      return !listed ||
             row_class_of(table.dim(), table.rows.type == RowType::kFloat32) == row_class;
    };

    const auto add_piece = [&](uint32_t piece) {
      constexpr int kGradients = pieces_depth<Element>(kDepth);  // under way
      constexpr int kBatches = Memory::kChunk / kLanes;
      char* const last_place = places + (kGradients - 1) * memory.of_state;
      const LongSegments& longs = scratch.long_segments;
      const LongSegment segment = longs.segments[longs.segment_of[piece]];
      uint32_t chunk =
          segment.first + (piece - segment.first_piece) * static_cast<uint32_t>(kPieceSize);
      const uint32_t end =
          min(segment.first + segment.length, chunk + static_cast<uint32_t>(kPieceSize));
      auto* const scales = reinterpret_cast<float*>(own_memory + Memory::kPieceScales);
      Share shares[kBatches];  // of the chunk's positions
      const auto look = [&] {
#pragma unroll
        for (int b = 0; b < kBatches; ++b) {
          const uint32_t at = chunk + b * kLanes + lane;
          shares[b] = at < end ? share_of(update, scratch.bags, sorted.value(at)) : Share{};
        }
      };
      look();
      const uint32_t table = Lanes::of_lane(shares[0].table, 0);
      if (!is_of_class(tables[table])) return;
      hold(table);
      // Items are written to a ring of two chunks, the next chunk's when all others are under way.
      constexpr uint32_t kItemMask = 2 * Memory::kChunk - 1;
      static_assert(kGradients + Memory::kChunk <= 2 * Memory::kChunk);
      uint32_t written = 0, begun = 0;
      const auto write_items = [&] {
        __syncwarp(Lanes::mask());  // all have read what the items were before
#pragma unroll
        for (int b = 0; b < kBatches; ++b) {
          const Share& share = shares[b];
          const bool there = chunk + b * kLanes + lane < end;
          const int64_t before = __shfl_up_sync(Lanes::mask(), share.gradient, 1, kLanes);
          const float scale_before = __shfl_up_sync(Lanes::mask(), share.scale, 1, kLanes);
          const bool fresh =
              there && (lane == 0 || before != share.gradient || scale_before != share.scale);
          const unsigned there_mask = Lanes::ballot(there), fresh_mask = Lanes::ballot(fresh);
          if (fresh) {
            const uint32_t number = (written + __popc(fresh_mask & ((1u << lane) - 1))) & kItemMask;
            const unsigned later = fresh_mask & ~((2u << lane) - 1);
            const int stop = later != 0 ? __ffs(static_cast<int>(later)) - 1 : __popc(there_mask);
            items[number].gradient = update.grad.at(share.gradient);
            items[number].times = stop - lane;
            scales[number] = share.scale;
          }
          written += __popc(fresh_mask);
        }
        __syncwarp(Lanes::mask());
        chunk += Memory::kChunk;
        look();
      };
      const auto begin = [&](char* to) {
        if (begun == written && chunk < end) write_items();
        if (begun < written) {
          updater.copy_gradient(to, items[begun++ & kItemMask].gradient, gradient_type);
        }
        end_copies();
      };
      typename Updater::Own sum;
      sum.clear();
      char* arrived = places;
#pragma unroll 1
      for (int k = 0; k < kGradients; ++k) {
        begin(arrived);
        arrived = arrived == last_place ? places : arrived + memory.of_state;
      }
#pragma unroll 1
      for (uint32_t i = 0; i < written; ++i) {
        wait_for_copies<kGradients - 1>();
        const typename Updater::Own gradient = updater.load(gradient_type, arrived);
        const float scale = scaled ? scales[i & kItemMask] : 1.0f;
        const auto times = static_cast<int>(items[i & kItemMask].times);
        begin(arrived);
#pragma unroll 1
        for (int k = 0; k < times; ++k) sum.add(scale, gradient);
        arrived = arrived == last_place ? places : arrived + memory.of_state;
      }
      updater.store(longs.sums + static_cast<int64_t>(piece) * longs.widest, sum);
    };

    const uint32_t pieces = *scratch.long_segments.pieces;
    constexpr uint32_t kTiles = kWarp / kLanes;
    const uint32_t piece_warps = (pieces + kTiles - 1) / kTiles;
    char* const last_place = places + (kDepth - 1) * memory.of_place;
    // Pieces come first, as they take longest.
    const uint32_t works = piece_warps + units;
    for (uint32_t work = blockIdx.x * kSegmentWarps + threadIdx.x / kWarp; work < works;
         work += gridDim.x * kSegmentWarps) {
      if (work < piece_warps) {
        const uint32_t piece = work * kTiles + first_lane / kLanes;
        if (piece < pieces) add_piece(piece);
        continue;
      }
      const uint32_t unit = work - piece_warps;
      uint32_t at = (listed ? list[unit] : unit) * kWarp + first_lane;
      const uint32_t tile_end = at + kLanes;
      SortedPlace place = SortedPlace::load(sorted, at + lane, n);
      typename Updater::Own sum;
      sum.clear();
      bool carried = false;  // the chunk begins in a segment that the tile has begun
      do {
        // Which of the chunk's positions are the tile's, and at which of them segments end.
        const uint64_t key = sorted.key_of(place.pair);
        const bool begins = place.before != key;
        const unsigned begin_mask = Lanes::ballot(begins);
        const unsigned long_mask = Lanes::ballot(begins && place.far == key);
        const unsigned begun = begin_mask & ((2u << lane) - 1);
        const int from =
            31 - __clz(static_cast<int>(begun));  // where the position's segment begins
        bool mine = at + lane < n && key != update.no_slot &&
                    (begun == 0 ? carried : !(long_mask >> from & 1) && at + from < tile_end);
        Share share{};
        const TableView* view = tables;
        if (mine) {
          share = share_of(update, scratch.bags, sorted.value_of(place.pair));
          view = &tables[share.table];
          mine = is_of_class(*view);
        }
        const bool ends = mine && place.after != key;
        unsigned left = Lanes::ballot(mine);
        carried = (left >> (kLanes - 1) & 1) != 0 && (Lanes::ballot(ends) >> (kLanes - 1) & 1) == 0;
        at += kLanes;
        if (carried) place = SortedPlace::load(sorted, at + lane, n);
        char* row = nullptr;
        float* state = nullptr;
        float square = 0.0f;
        if (ends) {
          const int64_t slot = static_cast<int64_t>(key) - view->first_slot;
          const int64_t frame = frame_to_write(view->frames, slot, true);
          row = view->rows.at(slot, frame);
          state = reinterpret_cast<float*>(view->states.at(slot, frame));
          if (optimizer.kind == Optimizer::kRowWiseAdagrad) square = *state;
        }
        while (left != 0) {
          // Neighbours of one table, numbered from 0.
          const uint32_t table = Lanes::of_lane(share.table, __ffs(static_cast<int>(left)) - 1);
          const bool own = (left >> lane & 1) != 0 && share.table == table;
          const unsigned active = Lanes::ballot(own);
          left &= ~active;
          const int count = __popc(active);
          const int number = __popc(active & ((1u << lane) - 1));
          hold(table);
          __syncwarp(Lanes::mask());  // all have read what the items were before
          if (own) {
            items[number] = {update.grad.at(share.gradient), row};
            scales[number] = share.scale;
            if constexpr (Updater::kStates > 0) states[number] = state;
          }
          const unsigned end_mask =
              __reduce_or_sync(Lanes::mask(), own && ends ? 1u << number : 0u);
          __syncwarp(Lanes::mask());
          int begun_items = 0;
          // Begins to copy what the next position needs, if there is one; a group of copies in any
          // case.
          const auto begin = [&](char* to) {
            if (begun_items < count) {
              const Item item = items[begun_items];
              updater.copy_gradient(to, item.gradient, gradient_type);
              if (end_mask >> begun_items & 1) {
                updater.copy_row(to + memory.row, item.row);
                if constexpr (Updater::kStates > 0) {
                  const float* const its = states[begun_items];
#pragma unroll
                  for (int s = 0; s < Updater::kStates; ++s) {
                    updater.template copy_floats<true>(to + memory.states + s * memory.of_state,
                                                       its + s * updater.dim);
                  }
                }
              }
              ++begun_items;
            }
            end_copies();
          };
          char* arrived = places;
#pragma unroll 1
          for (int k = 0; k < kDepth; ++k) {
            begin(arrived);
            arrived = arrived == last_place ? places : arrived + memory.of_place;
          }
          if (kKind == Optimizer::kSgd && updater.adapts) {
            if (own && ends) squares[number] = square;
            __syncwarp(Lanes::mask());
          }
#pragma unroll 1
          for (int i = 0; i < count; ++i) {
            wait_for_copies<kDepth - 1>();
            sum.add(scaled ? scales[i] : 1.0f, updater.load(gradient_type, arrived));
            if (end_mask >> i & 1) {
              const float its = updater.update(
                  optimizer, sum, arrived + memory.row, arrived + memory.states, memory.of_state,
                  items[i].row, Updater::kStates > 0 ? states[i] : nullptr, squares[i]);
              if (kKind == Optimizer::kSgd && lane == 0) renewed[i] = its;
              sum.clear();
            }
            begin(arrived);
            arrived = arrived == last_place ? places : arrived + memory.of_place;
          }
          if (kKind == Optimizer::kSgd && updater.adapts) {
            __syncwarp(Lanes::mask());
            if (own && ends) *state = renewed[number];
          }
        }
      } while (carried);
    }
  }
  if (!first) wait_for_kernel_before();
}

// Blocks that run on a multiprocessor at once. Their number bounds the registers of a thread.
constexpr int blocks_of(int vectors, bool column_states) {
  return column_states ? (vectors <= 2 ? 8 : 6) : (vectors <= 2 ? 12 : vectors <= 4 ? 10 : 8);
}

}  // namespace

bool updates_segments(const OptimizerConfig& optimizer, int32_t row_class) {
  return has_row_updater(optimizer) &&
         row_class % kWidthClasses != static_cast<int32_t>(WidthClass::kWider);
}

void update_segments(const TableView* tables, const Update& update, const Scratch& scratch,
                     const GroupShape& shape, int32_t row_class, bool first, cudaStream_t stream) {
  const bool listed = scratch.units.any();
  const auto launch =
      [&]<Optimizer kKind, typename Element, int kLanes, int kVectors, int kDepth>() {
        constexpr int kStates = column_states(kKind);
        constexpr int kBlocks = blocks_of(kVectors * (sizeof(Element) == 2 ? 2 : 1), kStates > 0);
        const auto kernel = segment_kernel<kKind, Element, kLanes, kVectors, kDepth, kBlocks>;
        const int32_t columns = std::min(
            shape.widest, most_columns(static_cast<WidthClass>(row_class % kWidthClasses)));
        const TileMemory<kLanes, kStates> memory(columns, sizeof(Element), kDepth,
                                                 pieces_depth<Element>(kDepth));
        const int bytes = kSegmentThreads / kLanes * memory.of_tile;
        const int64_t n = update.batch.num_ids;
        const int64_t warps = (n + kWarp - 1) / kWarp + (n / kLongest + 1) * kLanes / kWarp + 1;
        const int64_t all = (warps + kSegmentWarps - 1) / kSegmentWarps;
        const int64_t blocks = listed ? std::min<int64_t>(all, resident_grid(2 * kBlocks, n)) : all;
        LaunchShape launch_shape{dim3(static_cast<unsigned>(blocks)), kSegmentThreads};
        launch_shape.shared_bytes = bytes;
        launch_chained(kernel, launch_shape, stream, tables, update, scratch, memory,
                       listed ? row_class : kAllRowClasses, first);
      };
  const auto choose_width = [&]<Optimizer kKind>() {
    // The last argument is kDepth. Two wide rows keep the memory as busy as four narrow ones.
    switch (row_class) {
      case 0:
        return launch.template operator()<kKind, float, 8, 1, 4>();
      case 1:
        return launch.template operator()<kKind, float, 16, 1, 4>();
      case 2:
        return launch.template operator()<kKind, float, 32, 1, 4>();
      case 3:
        return launch.template operator()<kKind, float, 32, 2, 4>();
      case 4:
        return launch.template operator()<kKind, float, 32, 4, 2>();
      case 5:
        return launch.template operator()<kKind, float, 32, 8, 2>();
      case kWidthClasses:
      case kWidthClasses + 1:
        return launch.template operator()<kKind, uint16_t, 8, 1, 4>();
      case kWidthClasses + 2:
        return launch.template operator()<kKind, uint16_t, 16, 1, 4>();
      case kWidthClasses + 3:
        return launch.template operator()<kKind, uint16_t, 32, 1, 4>();
      case kWidthClasses + 4:
        return launch.template operator()<kKind, uint16_t, 32, 2, 4>();
      case kWidthClasses + 5:
        return launch.template operator()<kKind, uint16_t, 32, 4, 2>();
      default:
        return;
    }
  };
  switch (update.optimizer.kind) {
    case Optimizer::kAdagrad:
      return choose_width.template operator()<Optimizer::kAdagrad>();
    case Optimizer::kAdam:
      return choose_width.template operator()<Optimizer::kAdam>();
    default:
      return choose_width.template operator()<Optimizer::kSgd>();
  }
}

}  // namespace torchrec_hkv::hash_table::cuda
