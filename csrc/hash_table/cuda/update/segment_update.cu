// The update from the sorted order, for any optimizer, any type of row and any number of columns.
//
// A tile of lanes takes some neighbouring positions of the sorted order and the segments of equal
// slots that begin there, but for long ones, whose pieces are added up by piece_kernel and whose
// rows long_runs.cu updates. It works through them in chunks: each lane looks up where the gradient
// and the row of one position are, and has them brought into the second-level cache; then the tile
// adds up gradients in the order of the batch, several on their way at once, and updates a row
// where its segment ends.
//
// Tables are updated by a kernel for their width: as many lanes and vectors as a row fills. Rows of
// more than the widest kernel's columns are updated by column tiles, for each of which the
// gradients are added up anew. A group of tables of different widths launches a kernel for each
// width that it has; each skips the other tables' positions.
#include "common/cuda_check.h"
#include "hash_table/cuda/offsets.cuh"
#include "hash_table/cuda/update/row_update.cuh"
#include "hash_table/cuda/update/update.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

constexpr int kSegmentThreads = 128;  // of a block
constexpr int kOwn = 8;               // positions of a tile, and of a chunk

// Of the lanes of a tile, the first kOwn look up a position of a chunk each.
struct Chunk {
  unsigned active;  // bit i: position i belongs to one of the tile's segments
  unsigned ends;    // bit i: a segment ends there
  bool more;        // the last segment goes on behind the chunk
};

// What a lane knows of its position.
struct Position {
  uint64_t key;
  Share share;
};

template <int kLanes>
__device__ __forceinline__ Chunk look_at_chunk(const Pairs& sorted, uint64_t no_slot, int64_t at,
                                               int64_t n, bool carried, Pair* pair) {
  using Lanes = Tile<kLanes>;
  const int lane = Lanes::lane();
  const int64_t mine = at + lane;
  const bool given = lane < kOwn && mine < n;
  constexpr uint64_t kNone = ~0ull;
  *pair = given ? sorted.load(mine) : Pair{};
  const uint64_t key = given ? sorted.key_of(*pair) : no_slot;
  const uint64_t before = given && mine > 0 ? sorted.key(mine - 1) : kNone;
  const uint64_t after = given && mine + 1 < n ? sorted.key(mine + 1) : kNone;
  const bool valid = given && key != no_slot;
  const bool begins = valid && before != key;
  const bool is_long = begins && mine + kLongest < n && sorted.key(mine + kLongest) == key;
  const unsigned valids = Lanes::ballot(valid), begun = Lanes::ballot(begins);
  const unsigned longs = Lanes::ballot(is_long);
  const unsigned ends = Lanes::ballot(valid && after != key);
  Chunk chunk{valids, 0, false};
  if (carried) {
    // Only what is left of the segment that goes on.
    if (ends != 0) chunk.active &= ends ^ (ends - 1);
  } else {
    chunk.active &= begun == 0 ? 0u : ~((begun & (0u - begun)) - 1);
  }
  // A long segment fills the rest of the chunk.
  if (longs != 0) chunk.active &= (longs & (0u - longs)) - 1;
  chunk.ends = ends & chunk.active;
  chunk.more = (chunk.active >> (kOwn - 1) & 1) != 0 && (chunk.ends >> (kOwn - 1) & 1) == 0;
  return chunk;
}

// The gradients of a segment, added up for one column tile at a time.
template <int kLanes, int kVectors, int kWidth>
struct SegmentSum {
  using Gradient = TileColumns<kLanes, kVectors, kWidth>;
  using Raw = RawTileColumns<kLanes, kVectors, kWidth>;
  using Lanes = Tile<kLanes>;

  const Update& update;
  const Scratch& scratch;
  int64_t begin;
  int32_t length, dim;

  __device__ __forceinline__ Gradient operator()(int32_t first) const {
    const Pairs& sorted = scratch.pairs.pairs;
    const RowType type = update.grad.type;
    Gradient sum = Gradient::zero();
    for (int32_t chunk = 0; chunk < length; chunk += kLanes) {
      const int32_t mine = chunk + Lanes::lane();
      Share share{};
      if (mine < length) share = share_of(update, scratch.bags, sorted.value(begin + mine));
      const int count = min(kLanes, length - chunk);
#pragma unroll 2
      for (int i = 0; i < count; ++i) {
        const Gradient gradient =
            Raw::load(type, update.grad.at(Lanes::of_lane(share.gradient, i)), dim, first)
                .widened(type);
        const float scale = Lanes::of_lane(share.scale, i);
#pragma unroll
        for (int v = 0; v < kVectors; ++v) sum.v[v].add(scale, gradient.v[v]);
      }
    }
    return sum;
  }
};

// A row of more columns than a tile has at once.
template <int kLanes, int kVectors, int kWidth, bool kColumnStates>
__device__ __noinline__ void update_wide_row(const TableView& table, const Update& update,
                                             const Scratch& scratch, int64_t begin, int32_t length,
                                             int64_t slot) {
  using Rows = RowUpdate<kLanes, kVectors, kWidth, kColumnStates>;
  using Gradient = typename Rows::Gradient;
  const Rows rows(table, update.optimizer, *update.learning_rate);
  auto row = rows.load(slot);
  const SegmentSum<kLanes, kVectors, kWidth> sum{update, scratch, begin, length, table.dim()};
  // The tile that was added up last is mostly the next one to be asked for.
  Gradient held;
  int32_t held_first = -1;
  rows.finish_wide(row, [&](int32_t first) {
    if (first != held_first) held = sum(first);
    held_first = first;
    return held;
  });
}

// Blocks of a multiprocessor, which bound the registers.
constexpr int segment_blocks(int vectors, bool column_states) {
  return vectors == 1 && !column_states ? 5 : vectors < 4 ? 4 : 3;
}

// kWide: rows may have more columns than a tile has at once. kAhead: positions whose gradients and
// rows are on their way at once. width_class: of the tables to update, or kAllWidths.
template <int kLanes, int kVectors, int kWidth, bool kColumnStates, int kAhead, bool kWide>
__global__ void __launch_bounds__(kSegmentThreads, segment_blocks(kVectors, kColumnStates))
    segment_kernel(const TableView* __restrict__ tables, const __grid_constant__ Update update,
                   const __grid_constant__ Scratch scratch, int width_class) {
  using Rows = RowUpdate<kLanes, kVectors, kWidth, kColumnStates>;
  using Gradient = typename Rows::Gradient;
  using Raw = RawTileColumns<kLanes, kVectors, kWidth>;
  using Lanes = Tile<kLanes>;
  static_assert(kLanes >= kOwn);
  const int64_t n = update.batch.num_ids;
  const int64_t tile = (static_cast<int64_t>(blockIdx.x) * kSegmentThreads + threadIdx.x) / kLanes;
  int64_t at = tile * kOwn;
  if (at >= n || is_refused(update.batch)) return;
  const Pairs& sorted = scratch.pairs.pairs;
  const RowType type = update.grad.type;
  const float rate = *update.learning_rate;
  bool carried = false;
  bool open = false;   // a wide row's segment goes on
  int64_t begin = at;  // of it
  Gradient sum = Gradient::zero();
  uint32_t held = ~0u;
  Rows rows(tables[0], update.optimizer, rate);
  for (;;) {
    Pair pair;
    const Chunk chunk = look_at_chunk<kLanes>(sorted, update.no_slot, at, n, carried, &pair);
    if (chunk.active == 0) return;
    const int lane = Lanes::lane();
    Neighbour mine{};
    bool wanted = lane < kOwn && (chunk.active >> lane & 1) != 0;
    if (wanted) {
      mine = neighbour_at(tables, update, scratch, sorted.key_of(pair), sorted.value_of(pair));
      if (width_class != kAllWidths) {
        wanted = static_cast<int>(width_class_of(tables[mine.table].dim())) == width_class;
      }
      if (wanted) {
        prefetch_gradient(tables[mine.table], mine, update);
        if (chunk.ends >> lane & 1) prefetch_row(tables[mine.table], mine.slot);
      }
    }
    // Slots of a table follow each other, so those of one width are neighbours, too.
    unsigned left = Lanes::ballot(wanted);
    while (left != 0) {
      const int first = __ffs(static_cast<int>(left)) - 1;
      const uint32_t table = Lanes::of_lane(mine.table, first);
      if (table != held) {
        held = table;
        rows = Rows(tables[table], update.optimizer, rate);
      }
      if (kWide && (kWidth == 4 || rows.dim() > Gradient::kColumns)) {
        left &= left - 1;
        if (!open) begin = at + first;
        open = (chunk.ends >> first & 1) == 0;
        if (!open) {
          update_wide_row<kLanes, kVectors, kWidth, kColumnStates>(
              tables[table], update, scratch, begin, static_cast<int32_t>(at + first + 1 - begin),
              Lanes::of_lane(mine.slot, first));
        }
        continue;
      }
      if constexpr (kWide && kWidth == 4) continue;
      const unsigned same = Lanes::ballot(wanted && mine.table == table) & left;
      Raw gradient[kAhead];
      typename Rows::Row row[kAhead];
      int place[kAhead];
      unsigned of_table = same;
      int number = 0;
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        if (of_table == 0) break;
        number = k + 1;
        place[k] = __ffs(static_cast<int>(of_table)) - 1;
        of_table &= of_table - 1;
        left &= left - 1;
        gradient[k] =
            Raw::load(type, update.grad.at(Lanes::of_lane(mine.gradient, place[k])), rows.dim(), 0);
        if (chunk.ends >> place[k] & 1) row[k] = rows.load(Lanes::of_lane(mine.slot, place[k]));
      }
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        if (k >= number) break;
        const float scale = Lanes::of_lane(mine.scale, place[k]);
        const Gradient its = gradient[k].widened(type);
#pragma unroll
        for (int v = 0; v < kVectors; ++v) sum.v[v].add(scale, its.v[v]);
        if (chunk.ends >> place[k] & 1) {
          rows.finish(row[k], sum);
          sum = Gradient::zero();
        }
      }
    }
    // Nor does a segment matter that goes on, if its table is another kernel's.
    if (!chunk.more || (Lanes::ballot(wanted) >> (kOwn - 1) & 1) == 0) return;
    carried = true;
    at += kOwn;
  }
}

constexpr int32_t kPieceColumns = kWarp * 4;  // of a column tile

// A warp adds up a column tile of a piece of a long segment.
template <int kWidth>
__global__ void __launch_bounds__(kSegmentThreads, 8)
    piece_kernel(const TableView* __restrict__ tables, const __grid_constant__ Update update,
                 const __grid_constant__ Scratch scratch) {
  constexpr int kVectors = kPieceColumns / (kWarp * kWidth);
  constexpr int kAhead = 4;
  using Gradient = TileColumns<kWarp, kVectors, kWidth>;
  using Raw = RawTileColumns<kWarp, kVectors, kWidth>;
  using Lanes = Tile<kWarp>;
  if (is_refused(update.batch)) return;
  const LongRuns& runs = scratch.long_runs;
  const Pairs& sorted = scratch.pairs.pairs;
  const RowType type = update.grad.type;
  const int lane = Lanes::lane();
  const int32_t tiles = (runs.widest + kPieceColumns - 1) / kPieceColumns;
  const int64_t parts = static_cast<int64_t>(*runs.pieces) * tiles;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (kSegmentThreads / kWarp);
  for (int64_t part = (static_cast<int64_t>(blockIdx.x) * kSegmentThreads + threadIdx.x) / kWarp;
       part < parts; part += warps) {
    const int64_t piece = part / tiles;
    const auto first = static_cast<int32_t>(part % tiles) * kPieceColumns;
    const LongRun& run = runs.runs[runs.run_of[piece]];
    const int64_t skipped = (piece - run.first_piece) * kPieceSize;
    const int64_t begin = run.first + skipped;
    const auto length = static_cast<int32_t>(min(kPieceSize, run.length - skipped));
    const auto share_at = [&](int32_t i) {
      return i < length ? share_of(update, scratch.bags, sorted.value(begin + i)) : Share{};
    };
    Share share = share_at(lane);
    const int32_t dim = tables[Lanes::of_lane(share.table, 0)].dim();
    if (first >= dim) continue;
    Gradient sum = Gradient::zero();
    for (int32_t chunk = 0; chunk < length; chunk += kWarp) {
      const Share next = share_at(chunk + kWarp + lane);  // on its way meanwhile
      const int count = min(kWarp, length - chunk);
      for (int group = 0; group < count; group += kAhead) {
        Raw gradient[kAhead];
#pragma unroll
        for (int k = 0; k < kAhead; ++k) {
          if (group + k >= count) break;
          gradient[k] = Raw::load(type, update.grad.at(Lanes::of_lane(share.gradient, group + k)),
                                  dim, first);
        }
#pragma unroll
        for (int k = 0; k < kAhead; ++k) {
          if (group + k >= count) break;
          const float scale = Lanes::of_lane(share.scale, group + k);
          const Gradient its = gradient[k].widened(type);
#pragma unroll
          for (int v = 0; v < kVectors; ++v) sum.v[v].add(scale, its.v[v]);
        }
      }
      share = next;
    }
    sum.store(runs.sums + piece * runs.widest, dim, first);
  }
}

// Calls launch.template operator()<kLanes, kVectors, kColumnStates, kAhead, kWide>() for a width
// class.
template <bool kColumnStates, typename Launch>
void choose_width(WidthClass width, const Launch& launch) {
  constexpr int kAhead = kColumnStates ? 2 : 3;
  switch (width) {
    case WidthClass::k32:
      return launch.template operator()<8, 1, kColumnStates, kAhead, false>();
    case WidthClass::k64:
      return launch.template operator()<16, 1, kColumnStates, kAhead, false>();
    case WidthClass::k128:
      return launch.template operator()<kWarp, 1, kColumnStates, kAhead, false>();
    case WidthClass::k256:
      return launch.template operator()<kWarp, 2, kColumnStates, kAhead - 1, false>();
    case WidthClass::k512:
      return launch.template operator()<kWarp, 4, kColumnStates, 1, false>();
    default:
      // With states a column tile is mostly worked on once, else its gradients may be added up
      // twice: fewer tiles then.
      return launch.template operator()<kWarp, kColumnStates ? 2 : 4, kColumnStates, 1, true>();
  }
}

}  // namespace

void update_segments(const TableView* tables, const Update& update, const Scratch& scratch,
                     const GroupShape& shape, cudaStream_t stream) {
  const int64_t n = update.batch.num_ids;
  const int64_t tiles = (n + kOwn - 1) / kOwn;
  const bool states = has_column_states(update.optimizer);
  const auto launch = [&](auto kernel, int lanes, int width_class) {
    const auto blocks =
        static_cast<unsigned>((tiles * lanes + kSegmentThreads - 1) / kSegmentThreads);
    kernel<<<blocks, kSegmentThreads, 0, stream>>>(tables, update, scratch, width_class);
    HKV_CUDA_CHECK_LAUNCH();
  };
  // Long segments first: their rows are updated last.
  if (n > kLongest) {
    const auto kernel = update.group_four_wide ? piece_kernel<4> : piece_kernel<1>;
    const int64_t parts = (n / kLongest + 1) * ((shape.widest + kPieceColumns - 1) / kPieceColumns);
    kernel<<<resident_grid(16, parts * kWarp), kSegmentThreads, 0, stream>>>(tables, update,
                                                                             scratch);
    HKV_CUDA_CHECK_LAUNCH();
  }
  if (!update.group_four_wide) {
    const auto kernel = states ? segment_kernel<kWarp, 4, 1, true, 1, true>
                               : segment_kernel<kWarp, 4, 1, false, 2, true>;
    launch(kernel, kWarp, kAllWidths);
    return;
  }
  const bool several = (shape.width_classes & (shape.width_classes - 1)) != 0;
  for (int width = 0; width < kWidthClasses; ++width) {
    if ((shape.width_classes >> width & 1) == 0) continue;
    const auto launch_width =
        [&]<int kLanes, int kVectors, bool kColumnStates, int kAhead, bool kWide>() {
          launch(segment_kernel<kLanes, kVectors, 4, kColumnStates, kAhead, kWide>, kLanes,
                 several ? width : kAllWidths);
        };
    if (states) {
      choose_width<true>(static_cast<WidthClass>(width), launch_width);
    } else {
      choose_width<false>(static_cast<WidthClass>(width), launch_width);
    }
  }
}

}  // namespace torchrec_hkv::hash_table::cuda
