// The rows in host memory that a lookup reads. A GPU reads random pages of host memory at less than
// half of the link's rate. These rows are therefore listed, and copied to GPU memory in the order
// of their addresses (host_rows_cuda.cu).
#pragma once

#include <cstddef>
#include <cstdint>

#include "serving/kernels_cuda.h"

namespace torchrec_hkv::serving::cuda {

// Neighbouring rows form a stretch. Rows are ordered by stretches only.
constexpr uint32_t kMaxBins = 1 << 15;

struct HostRow {
  const char* row;
  uint32_t position;  // found[place] is this row
  uint32_t bytes;
};

struct HostRowList {
  HostRow* listed;     // [capacity]
  HostRow* ordered;    // [capacity]
  char* copies;        // [capacity, slot_bytes]
  uint32_t* counts;    // number of rows of each stretch; later the position of its next row
  uint32_t* number;    // number of listed rows; rows after the first `capacity` are not kept
  uint16_t* bins;      // [capacity], the stretch of each listed row
  const char** found;  // the rows of a lookup
  int64_t slot_bytes;  // a multiple of 16
  uint32_t capacity;   // further rows are read in place; 0: all rows are
  int32_t shift;       // byte offset in the tables' rows >> shift is the stretch

  // Divides staging.memory among these arrays. bytes: out: the required size of the memory.
  static HostRowList in(const Staging& staging, size_t* bytes);

  // Lists a row of this table if it is in host memory. Called by all lanes of a warp.
  __device__ __forceinline__ void list(const Table& table, const char* row, bool is_in_host_memory,
                                       uint32_t position) const {
    if (capacity == 0) return;
    const unsigned lanes = __ballot_sync(0xffffffffu, is_in_host_memory);
    if (lanes == 0) return;
    const unsigned lane = threadIdx.x % 32;
    uint32_t at = 0;
    if (lane == 0) at = atomicAdd(number, static_cast<uint32_t>(__popc(lanes)));
    at = __shfl_sync(0xffffffffu, at, 0) + __popc(lanes & ((1u << lane) - 1));
    if (!is_in_host_memory || at >= capacity) return;
    const int64_t byte = table.hot.bytes_before + (row - table.base.rows);
    const auto bin = static_cast<uint32_t>(byte >> shift);
    listed[at] = {row, position, static_cast<uint32_t>(table.row_bytes)};
    bins[at] = static_cast<uint16_t>(bin);
    atomicAdd(&counts[bin], 1u);
  }
};

// Must be called before rows are listed.
void begin_list(const HostRowList& rows, cudaStream_t stream);
// Copies the listed rows, and points found[] to the copies.
void copy_listed(const HostRowList& rows, cudaStream_t stream);

}  // namespace torchrec_hkv::serving::cuda
