// Sets of read-only tables (serving/table.h) that are open, by the handles that name them in ops.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "runtime/tensor.h"
#include "serving/table.h"

namespace torchrec_hkv::bindings {

// Tables that lookups read; nothing of them changes but the counters.
struct ServingTables {
  std::vector<serving::Table> tables;
  std::vector<at::Tensor> memory;
  at::Tensor counters;  // int64 [tables, 2]: ids looked up, and those that were unknown
  at::Device device = at::kCPU;
  // Groups of Tensor-Train tables: what names each in ops, and its cores.
  std::vector<int64_t> tt_groups;
  std::vector<std::vector<at::Tensor>> tt_cores;
  // On a GPU, bytes of `tables` there, and of the outputs of each pooled lookup that was made.
  at::Tensor on_device;
  int64_t host_bytes = 0;      // of the rows that are in host memory though tables are on a GPU
  int64_t host_row_bytes = 0;  // of the widest of these rows
  mutable std::atomic<uint32_t> calls{0};  // lookups in these tables: see phase_of_call
  mutable std::mutex mutex;
  mutable std::map<std::vector<int64_t>, at::Tensor> outputs;
};

// The open tables that a handle names.
std::shared_ptr<const ServingTables> tables_of(const at::Tensor& handle, const at::Tensor& ids);

// Which ids of this call are sampled (serving::is_sampled): others than in the last one.
inline uint32_t phase_of_call(const ServingTables& tables) {
  return tables.calls.fetch_add(1, std::memory_order_relaxed) * 0x85ebca6bu;
}

// Closes tables, which stay in memory until lookups that use them end.
void close_tables(int64_t handle);

// A copy on a device of bytes in host memory.
at::Tensor bytes_on(at::Device device, const void* from, size_t bytes);

}  // namespace torchrec_hkv::bindings
