// Updates rows of at most eight columns of 32 or 16 bits by segments of equal slots in the sorted
// order, for SGD, Adagrad and row-wise Adagrad.
//
// A lane takes a whole segment and holds the row in registers. So a warp works on 32 rows at once,
// with as many memory accesses in flight: such rows are bound by latency. First it lists the
// segments that begin at its positions, so that no lane is idle if segments have several positions.
// For rows of 9 to 32 columns, two or four lanes per row were up to 8 % slower than segments.cu in
// some shapes.
#include "common/cuda_check.h"
#include "common/dependent_launch.cuh"
#include "hash_table/cuda/offsets.cuh"
#include "hash_table/cuda/update/row_updater.cuh"
#include "hash_table/cuda/update/segment_kernel.cuh"
#include "hash_table/cuda/update/sorted_chunk.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

constexpr int kNarrowThreads = 128;  // of a block
constexpr int kNarrowWarps = kNarrowThreads / kWarp;
constexpr int kMaxSpan = 4;   // units whose segments a warp lists at a time
constexpr int kInFlight = 2;  // positions whose gradients are in flight
constexpr int kGroups = 2;    // groups of columns in a row
constexpr int kOfGroup = 4;   // columns of a group
using Group = Columns<kOfGroup>;

// Blocks that run on a multiprocessor at once. Their number bounds the registers of a thread.
constexpr int narrow_blocks(int column_states) { return column_states > 0 ? 6 : 8; }

// The columns of a row, with zeros after the last one.
struct RowColumns {
  Group groups[kGroups];

  template <typename Load>
  static __device__ __forceinline__ RowColumns load(int32_t dim, const Load& load) {
    RowColumns columns;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int32_t at = g * kOfGroup;
      columns.groups[g] = at < dim ? load(at) : Group::zero();
    }
    return columns;
  }
  template <typename Store>
  __device__ __forceinline__ void store(int32_t dim, const Store& store) const {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int32_t at = g * kOfGroup;
      if (at < dim) store(groups[g], at);
    }
  }
  __device__ __forceinline__ void add(float scale, const RowColumns& other) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) groups[g].add(scale, other.groups[g]);
  }
};

// The sum of squares of a row, in the order in which a tile adds them (RowUpdater): a vector of
// float32 has four columns, and one of 16 bits has eight.
template <bool kFloat32>
__device__ __forceinline__ float squares_of(const RowColumns& columns) {
  float squares[kGroups] = {};
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    float& sum = squares[kFloat32 ? g : 0];
#pragma unroll
    for (int k = 0; k < kOfGroup; ++k) sum += columns.groups[g].v[k] * columns.groups[g].v[k];
  }
  return squares[0] + squares[1];
}

// Updates the rows of segments, one lane per row.
template <Optimizer kKind, typename Element>
struct NarrowRows {
  static constexpr int kStates = column_states(kKind);
  static constexpr bool kFloat32 = sizeof(Element) == sizeof(float);

  const TableView* __restrict__ tables;
  const UpdateArguments& update;
  const UpdateScratch& scratch;
  const float rate;
  const bool scaled;
  const bool adapts;          // row-wise Adagrad
  uint32_t held_table = ~0u;  // number of the table of `terms`
  RowTerms terms{};

  __device__ __forceinline__ NarrowRows(const TableView* __restrict__ of_tables,
                                        const UpdateArguments& of_update,
                                        const UpdateScratch& of_scratch)
      : tables(of_tables),
        update(of_update),
        scratch(of_scratch),
        rate(*update.learning_rate),
        scaled(update.pooling.mean || update.pooling.weights != nullptr),
        adapts(kKind == Optimizer::kSgd && update.optimizer.kind == Optimizer::kRowWiseAdagrad) {}

  __device__ __forceinline__ RowColumns gradient_of(const GradientRef& ref, int32_t dim) const {
    const char* const from = update.grad.at(ref.gradient);
    return RowColumns::load(dim,
                            [&](int32_t at) { return Group::load(update.grad.type, from, at); });
  }

  // Adds the gradients of the segment's positions after its first one.
  __device__ __forceinline__ void add_rest(uint32_t at, uint32_t n, uint64_t key, int32_t dim,
                                           RowColumns* sum) const {
    const Pairs& sorted = scratch.short_pairs;
    for (bool more = true; more;) {
      GradientRef refs[kInFlight];
      bool is_same[kInFlight];
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) {
        Pair pair{};
        if (at + k < n) pair = sorted.load(at + k);
        more = is_same[k] = more && at + k < n && sorted.key_of(pair) == key;
        if (is_same[k]) refs[k] = gradient_ref_of(update, scratch, sorted.value_of(pair));
      }
      RowColumns gradients[kInFlight];
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) {
        if (is_same[k]) gradients[k] = gradient_of(refs[k], dim);
      }
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) {
        if (is_same[k]) sum->add(scaled ? refs[k].scale : 1.0f, gradients[k]);
      }
      at += kInFlight;
    }
  }

  // Updates the row of the segment that begins at a position.
  __device__ __forceinline__ void update_row(uint32_t at, uint32_t n) {
    const Pair pair = scratch.short_pairs.load(at);
    const uint64_t key = scratch.short_pairs.key_of(pair);
    const GradientRef ref = gradient_ref_of(update, scratch, scratch.short_pairs.value_of(pair));
    const TableView& table = tables[ref.table];
    const int32_t dim = table.dim();
    const RowType type = kFloat32 ? RowType::kFloat32 : table.rows.type;
    if (ref.table != held_table) {
      held_table = ref.table;
      terms = begin_row(update.optimizer, rate, static_cast<float>(*table.optimizer_step));
    }
    const RowAddress to(table, key);
    char* const values = in_global(to.row);
    float* const state = in_global(to.state);
    // Requested before the gradients, so that the loads overlap.
    prefetch_l2(values);
    if (kStates > 0) prefetch_l2(state);
    const float square = adapts ? *state : 0.0f;
    RowColumns sum{};
    sum.add(scaled ? ref.scale : 1.0f, gradient_of(ref, dim));
    add_rest(at + 1, n, key, dim, &sum);

    RowTerms row_terms = terms;
    if (adapts) {
      *state = adapt_row(update.optimizer, squares_of<kFloat32>(sum), dim, square, &row_terms);
    }
    RowColumns value = RowColumns::load(dim, [&](int32_t c) {
      return kFloat32 ? Group::load(reinterpret_cast<const float*>(values) + c)
                      : Group::load_16_bits(type, values, c);
    });
    RowColumns sums;  // Adagrad's sums of squares
    if constexpr (kStates > 0) {
      sums = RowColumns::load(dim, [&](int32_t c) { return Group::load(state + c); });
    }
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int k = 0; k < kOfGroup; ++k) {
        float unused = 0.0f;
        float& first = kStates > 0 ? sums.groups[g].v[k] : unused;
        value.groups[g].v[k] = move_column<kKind>(update.optimizer, row_terms, value.groups[g].v[k],
                                                  sum.groups[g].v[k], first, unused);
      }
    }
    value.store(dim, [&](const Group& group, int32_t c) { group.store(type, values, c); });
    if constexpr (kStates > 0) {
      sums.store(dim, [&](const Group& group, int32_t c) { group.store(state + c); });
    }
  }
};

// row_class: of the tables to update, or kAllRowClasses. span: units that a warp takes at a time.
template <Optimizer kKind, typename Element>
__global__ void __launch_bounds__(kNarrowThreads, narrow_blocks(column_states(kKind)))
    narrow_segment_kernel(const TableView* __restrict__ tables,
                          const __grid_constant__ UpdateArguments update,
                          const __grid_constant__ UpdateScratch scratch, int32_t row_class,
                          uint32_t span, bool first) {
  // The positions of a warp at which segments begin.
  __shared__ uint32_t begins_of_block[kNarrowWarps][kMaxSpan * kWarp];
  uint32_t* const begins = begins_of_block[threadIdx.x / kWarp];
  const uint32_t lane = threadIdx.x % kWarp;
  // As in segment_kernel.
  if (first) wait_for_kernel_before();
  let_next_kernel_start();
  if (!is_refused(update.batch)) {
    const bool listed = row_class != kAllRowClasses;  // the group has other classes
    const Pairs& sorted = scratch.short_pairs;
    const uint32_t n = scratch.short_positions(update.batch.num_ids);
    const uint32_t* const list = listed ? scratch.units.of(row_class) : nullptr;
    const uint32_t units = listed ? scratch.units.number[row_class] : (n + kWarp - 1) / kWarp;
    NarrowRows<kKind, Element> rows(tables, update, scratch);
    for (uint32_t unit = (blockIdx.x * kNarrowWarps + threadIdx.x / kWarp) * span; unit < units;
         unit += gridDim.x * kNarrowWarps * span) {
      uint32_t number = 0;
      for (uint32_t u = unit; u < min(unit + span, units); ++u) {
        const uint32_t at = (listed ? list[u] : u) * kWarp + lane;
        const SortedPosition position = SortedPosition::load(sorted, at, n);
        const uint64_t key = sorted.key_of(position.pair);
        bool begins_here =
            at < n && key != update.no_slot && position.before != key && position.far != key;
        if (begins_here && listed) {
          const uint32_t bag = scratch.bag_of(sorted.value_of(position.pair));
          begins_here = is_of_class(table_of(tables, update.batch, bag), row_class);
        }
        const unsigned all = __ballot_sync(kAllLanes, begins_here);
        if (begins_here) begins[number + __popc(all & ((1u << lane) - 1))] = at;
        number += __popc(all);
      }
      __syncwarp();
      for (uint32_t i = lane; i < number; i += kWarp) rows.update_row(begins[i], n);
      __syncwarp();  // the next turn overwrites the list
    }
  }
  if (!first) wait_for_kernel_before();
}

template <Optimizer kKind, typename Element>
void launch_narrow(const SegmentCall& call) {
  constexpr int kBlocks = narrow_blocks(column_states(kKind));
  const int64_t units = (call.update.batch.num_ids + kWarp - 1) / kWarp;
  // Small batches need spans of 1 to keep all warps busy.
  const int64_t at_once = int64_t{multiprocessors()} * kBlocks * kNarrowWarps;
  const int64_t span = min(max(units / at_once, int64_t{1}), int64_t{kMaxSpan});
  const int64_t warps = (units + span - 1) / span;
  launch_dependent(narrow_segment_kernel<kKind, Element>,
                   static_cast<unsigned>((warps + kNarrowWarps - 1) / kNarrowWarps), kNarrowThreads,
                   call.stream, call.tables, call.update, call.scratch,
                   call.scratch.units.any() ? call.row_class : kAllRowClasses,
                   static_cast<uint32_t>(span), call.first);
}

}  // namespace

bool updates_narrow_segments(const GroupShape& shape, const OptimizerConfig& optimizer) {
  // Adam has two states per column, twice the bytes: uniform batches were 4 % slower here.
  return shape.widest <= kGroups * kOfGroup && column_states(optimizer.kind) < 2;
}

void update_narrow_segments(const SegmentCall& call) {
  const auto launch = [&]<Optimizer kKind>() {
    call.row_class < kWidthClasses ? launch_narrow<kKind, float>(call)
                                   : launch_narrow<kKind, uint16_t>(call);
  };
  if (call.update.optimizer.kind == Optimizer::kAdagrad) {
    launch.template operator()<Optimizer::kAdagrad>();
  } else {
    launch.template operator()<Optimizer::kSgd>();
  }
}

}  // namespace torchrec_hkv::hash_table::cuda
