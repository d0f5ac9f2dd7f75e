// The result of index_batch for lookup and gradients, and functions that its kernels share.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tensor_train/cuda/kernels.h"

namespace torchrec_hkv::tensor_train::cuda {

// Number of sorted positions in which one warp sums repeated ids.
constexpr int kChunk = 32;

// Positions are sorted by (table, middle, head, last). Ids that occur once are read from and
// written to the batch's rows. Each id that occurs more often has a slot, of at most num_ids / 2
// slots. Its gradients are first summed in the slot, and its row is distributed from the slot.
constexpr uint32_t kSlotBit = 0x80000000u;
constexpr int32_t kNoSlot = -1;   // the id occurs once
constexpr int32_t kOutside = -2;  // the id is outside its table

// Ids that occur at most this many times may be processed as several ids that occur once: at rank
// 32, summing two gradients would need another pass through memory and save little work.
constexpr int kShortRun = 2;

// Distinct ids per prefix from which on gradients of the last core are summed in shared memory.
constexpr int kDensePrefix = 8;

struct IndexCounts {
  int32_t distinct;
  int32_t prefixes;
  int32_t slots;
  int32_t gather;  // whether enough ids repeat that bags gather the rows of distinct ids
  int32_t dense;   // whether there are many distinct ids per prefix
};

struct Index {
  IndexCounts* counts;
  int4* prefixes;        // [.. + 1] first distinct id, table, middle, head
  int32_t* lasts;        // by distinct id: slice of the last core
  uint32_t* sources;     // by distinct id: kSlotBit | slot, or the place of its only row
  float* factors;        // by distinct id, if rows are scaled; 1 for slots
  int32_t* distinct_of;  // by position in the batch: distinct id, -1 outside the table
  uint32_t* places;      // by sorted position: begin of its row, in units
  int32_t* slots;        // by sorted position: slot, kNoSlot or kOutside
  float* place_factors;  // by sorted position, if rows are scaled
  int32_t* slot_dims;    // by slot, if dims differ
};

// Allocates pieces of a buffer, or only counts their bytes if the buffer is null.
struct BufferAllocator {
  char* base;
  size_t used = 0;

  template <typename T>
  T* take(int64_t count) {
    constexpr size_t kAlignment = 256;
    T* task = base == nullptr ? nullptr : reinterpret_cast<T*>(base + used);
    used += (static_cast<size_t>(count) * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return task;
  }
};

inline bool is_scaled(const BatchCuda& batch) {
  return batch.weights != nullptr || (batch.mean && batch.pooled);
}
// Places are in units of this number of values.
inline int32_t unit_of(const Plan& plan, const BatchCuda& batch) {
  return plan.vectors && batch.aligned ? 4 : 1;
}
inline int64_t max_prefixes(const Plan& plan, const BatchCuda& batch) {
  return plan.num_prefixes < batch.num_ids ? plan.num_prefixes : batch.num_ids;
}
inline int64_t max_slots(const BatchCuda& batch) { return batch.num_ids / 2 + 1; }
// Up to this number of ids, one cluster sorts, and repeated rows are always distributed by slots.
constexpr int64_t kSmallBatch = 16384;
inline bool is_small(const Plan& plan, const BatchCuda& batch) {
  return plan.clusters && batch.num_ids <= kSmallBatch && plan.num_keys < 0xffffffffu;
}
// Whether bags may gather the rows of distinct ids; the device decides by the number of repeats.
inline bool gathers(const Plan& plan, const BatchCuda& batch) { return !is_small(plan, batch); }
// Whether bags gather for any number of repeats: in deterministic mode, and in a small batch, in
// which launches cost more than traffic, and gathering needs no cleared output.
inline bool always_gathers(const BatchCuda& batch) {
  return batch.num_ids <= kSmallBatch || batch.deterministic;
}

// Allocates the index in memory, or only counts its bytes if memory is null.
inline Index allocate_index(const Plan& plan, const BatchCuda& batch, void* memory, size_t* bytes) {
  BufferAllocator allocator{static_cast<char*>(memory)};
  const int64_t n = batch.num_ids;
  const bool scaled = is_scaled(batch);
  Index index = {};
  index.counts = allocator.take<IndexCounts>(1);
  index.prefixes = allocator.take<int4>(max_prefixes(plan, batch) + 1);
  index.lasts = allocator.take<int32_t>(n);
  index.sources = allocator.take<uint32_t>(n);
  index.factors = scaled ? allocator.take<float>(n) : nullptr;
  index.distinct_of = allocator.take<int32_t>(n);
  index.places = allocator.take<uint32_t>(n);
  index.slots = allocator.take<int32_t>(n);
  index.place_factors = scaled ? allocator.take<float>(n) : nullptr;
  index.slot_dims = plan.one_dim ? nullptr : allocator.take<int32_t>(max_slots(batch));
  if (bytes != nullptr) *bytes = allocator.used;
  return index;
}

// A batch for index kernels.
struct IndexInput {
  BatchCuda batch;
  const TableCuda* tables;
  int32_t num_tables;
  int32_t unit;
  bool may_gather;
  bool splits_short;  // whether runs of up to kShortRun positions are split; only large batches
  uint64_t num_keys;  // also the key of ids outside their tables, which sorts last
  unsigned long long* invalid;
  float* cleared;  // output to zero, or null
  int64_t cleared_values;
};

// Zeroes in.cleared. Called by all threads of the grid.
__device__ __forceinline__ void clear_on_the_way(const IndexInput& in) {
  if (in.cleared == nullptr) return;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const bool quads =
      in.cleared_values % 4 == 0 && reinterpret_cast<uintptr_t>(in.cleared) % 16 == 0;
  if (quads) {
    for (int64_t i = thread; i < in.cleared_values / 4; i += threads) {
      reinterpret_cast<float4*>(in.cleared)[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  } else {
    for (int64_t i = thread; i < in.cleared_values; i += threads) in.cleared[i] = 0.0f;
  }
}

// The place of a position's row, and the row's factor.
struct RowPosition {
  uint32_t row;
  float factor;
};

__device__ __forceinline__ uint32_t feature_of(const BatchCuda& batch, int64_t bag) {
  if (batch.num_features == 1) return 0;
  return static_cast<uint32_t>(bag) / static_cast<uint32_t>(batch.batch_size);
}

__device__ __forceinline__ RowPosition place_of(const IndexInput& in, int64_t at, int64_t bag) {
  const BatchCuda& batch = in.batch;
  RowPosition place;
  place.factor = batch.weights != nullptr ? batch.weights[at] : 1.0f;
  if (!batch.pooled) {
    place.row = static_cast<uint32_t>(in.unit == 4 ? at * batch.stride >> 2 : at * batch.stride);
    return place;
  }
  const uint32_t feature = feature_of(batch, bag);
  const int64_t sample = bag - static_cast<int64_t>(feature) * batch.batch_size;
  const int64_t first = sample * batch.stride + batch.feature_columns[feature];
  // Units are 1 or 4 values.
  place.row = static_cast<uint32_t>(in.unit == 4 ? first >> 2 : first);
  if (batch.mean) {
    place.factor /= static_cast<float>(batch.offsets[bag + 1] - batch.offsets[bag]);
  }
  return place;
}

// Computes number / by in fewer instructions than a division. inverse: 2^32 / by, rounded down; the
// product is at most one too small.
__device__ __forceinline__ uint32_t quotient(uint32_t number, int64_t by, uint32_t inverse) {
  const uint32_t low = __umulhi(number, inverse);
  const auto of = static_cast<uint32_t>(by);
  return number - low * of >= of ? low + 1 : low;
}

// Returns the sort key of an id of a bag. Counts ids outside their tables.
__device__ __forceinline__ uint64_t key_of(const IndexInput& in, int64_t id, int64_t bag) {
  const TableCuda& table = in.tables[in.batch.feature_tables[feature_of(in.batch, bag)]];
  if (id < 0 || id >= table.rows) {
    if (in.invalid != nullptr) atomicAdd(in.invalid, 1ull);
    return in.num_keys;
  }
  if (table.rows <= 0xffffffffll) {
    const uint32_t lasts = static_cast<uint32_t>(table.lasts);
    const uint32_t middles = static_cast<uint32_t>(table.middles);
    const uint32_t prefix = quotient(static_cast<uint32_t>(id), lasts, table.lasts_inverse);
    const uint32_t head = quotient(prefix, middles, table.middles_inverse);
    const uint64_t number = static_cast<uint64_t>(prefix - head * middles) * table.heads + head;
    return table.first_key + number * table.lasts + (static_cast<uint32_t>(id) - prefix * lasts);
  }
  const int64_t prefix = id / table.lasts;
  const int64_t head = prefix / table.middles;
  const int64_t number = (prefix - head * table.middles) * table.heads + head;
  return table.first_key + number * table.lasts + (id - prefix * table.lasts);
}

// The parts of a key: the table, and (middle * heads + head) in the table. Number: uint32_t if all
// keys are below 2^32.
template <typename Number>
struct KeyParts {
  int32_t table;
  Number prefix;
  Number last;

  __device__ __forceinline__ bool same_prefix(const KeyParts& other) const {
    return table == other.table && prefix == other.prefix;
  }
};

// The quotient, in 32 bits if keys have 32 bits. by: number of slices of a core.
template <typename Number>
__device__ __forceinline__ Number divided(Number number, int64_t by, uint32_t inverse) {
  if (sizeof(Number) == 4 || number <= 0xffffffffull) {
    return quotient(static_cast<uint32_t>(number), by, inverse);
  }
  return static_cast<Number>(number / static_cast<uint64_t>(by));
}

template <typename Number>
__device__ __forceinline__ KeyParts<Number> parts_of(const IndexInput& in, Number key) {
  int32_t low = 0;
  int32_t high = in.num_tables;
  while (high - low > 1) {
    const int32_t middle = (low + high) >> 1;
    if (in.tables[middle].first_key <= key) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const TableCuda& table = in.tables[low];
  const Number number = key - static_cast<Number>(table.first_key);
  const Number prefix = divided(number, table.lasts, table.lasts_inverse);
  return {low, prefix, number - prefix * static_cast<Number>(table.lasts)};
}

// Returns the bag of a position: the last bag in [low, high) that begins at or before it.
__device__ __forceinline__ int64_t bag_between(const int64_t* __restrict__ offsets, int64_t low,
                                               int64_t high, int64_t at) {
  while (high - low > 1) {
    const int64_t middle = (low + high) >> 1;
    if (offsets[middle] <= at) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// One sorted position, with data of its neighbours and of earlier positions.
struct SortedEntry {
  int64_t at;        // place in the sorted order
  int32_t position;  // position in the batch
  int32_t distinct;  // distinct id
  int32_t prefix;    // prefix
  int32_t slot;      // slot, if the id repeats
  bool first;        // whether it is the first position of its id
  bool first_of_prefix;
  bool repeats;
};

// The place of the row of a distinct id, or its slot.
__device__ __forceinline__ uint32_t source_of(const SortedEntry& s, uint32_t place) {
  return s.repeats ? kSlotBit | static_cast<uint32_t>(s.slot) : place;
}

// Writes the data of an id from its first position, except for its last core and its source.
template <typename Number>
__device__ __forceinline__ void write_first(const IndexInput& in, const Index& index,
                                            const SortedEntry& s, const KeyParts<Number>& parts,
                                            float factor) {
  if (index.factors != nullptr) index.factors[s.distinct] = s.repeats ? 1.0f : factor;
  const TableCuda& table = in.tables[parts.table];
  if (s.repeats && index.slot_dims != nullptr) index.slot_dims[s.slot] = table.dim;
  if (s.first_of_prefix) {
    const Number middle = divided(parts.prefix, table.heads, table.heads_inverse);
    index.prefixes[s.prefix] =
        make_int4(s.distinct, parts.table, static_cast<int>(middle),
                  static_cast<int>(parts.prefix - middle * static_cast<Number>(table.heads)));
  }
}

template <typename Number>
__device__ __forceinline__ void write_sorted(const IndexInput& in, const Index& index,
                                             const SortedEntry& s, const KeyParts<Number>& parts,
                                             uint32_t place, float factor) {
  index.distinct_of[s.position] = s.distinct;
  index.places[s.at] = place;
  index.slots[s.at] = s.repeats ? s.slot : kNoSlot;
  if (index.place_factors != nullptr) index.place_factors[s.at] = factor;
  if (!s.first) return;
  index.lasts[s.distinct] = static_cast<int32_t>(parts.last);
  index.sources[s.distinct] = source_of(s, place);
  write_first(in, index, s, parts, factor);
}

// Writes a position whose id is outside its table.
__device__ __forceinline__ void write_outside(const Index& index, int64_t at, int32_t position,
                                              uint32_t place) {
  index.distinct_of[position] = -1;
  index.places[at] = place;
  index.slots[at] = kOutside;
}

__device__ __forceinline__ void write_counts(const IndexInput& in, const Index& index,
                                             int32_t distinct, int32_t prefixes, int32_t slots) {
  const bool gather = in.may_gather && static_cast<int64_t>(distinct) <= in.batch.num_ids / 2;
  *index.counts = {distinct, prefixes, slots, gather ? 1 : 0,
                   distinct / kDensePrefix >= prefixes ? 1 : 0};
  index.prefixes[prefixes] = make_int4(distinct, -1, -1, -1);
}

void index_small(const IndexInput& in, const Index& index, cudaStream_t stream);
// Whether one launch sorts the batch although the batch is not small.
bool is_medium(const Plan& plan, const BatchCuda& batch);
size_t medium_scratch_bytes(const Plan& plan, const BatchCuda& batch);
void index_medium(const Plan& plan, const IndexInput& in, const Index& index, void* scratch,
                  cudaStream_t stream);
size_t large_scratch_bytes(const Plan& plan, const BatchCuda& batch);
void index_large(const IndexInput& in, const Index& index, void* scratch, cudaStream_t stream);

}  // namespace torchrec_hkv::tensor_train::cuda
