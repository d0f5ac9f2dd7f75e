// Open sets of read-only tables (serving/table.h). Ops identify them by handles.
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

// Tables for lookups. Only their counters change.
struct ServingTables {
  std::vector<serving::Table> tables;
  std::vector<at::Tensor> memory;
  at::Tensor counters;  // int64 [tables, 2]: number of looked-up ids, and of unknown ids
  at::Device device = at::kCPU;
  // The handles of the groups of Tensor-Train tables, and their cores.
  std::vector<int64_t> tt_groups;
  std::vector<std::vector<at::Tensor>> tt_cores;
  // On a GPU, a copy of the bytes of `tables`.
  at::Tensor on_device;
  int64_t host_bytes = 0;                  // bytes of rows in host memory of tables on a GPU
  int64_t host_row_bytes = 0;              // bytes of the widest of these rows
  mutable std::atomic<uint32_t> calls{0};  // lookups in these tables: see phase_of_call
  mutable std::mutex mutex;
  mutable std::map<std::vector<int64_t>, at::Tensor> outputs;
};

// Returns the open tables with this handle.
std::shared_ptr<const ServingTables> tables_of(const at::Tensor& handle, const at::Tensor& ids);

// The phase that selects the sampled ids of a call (serving::is_sampled). It differs from the last
// call's.
inline uint32_t phase_of_call(const ServingTables& tables) {
  return tables.calls.fetch_add(1, std::memory_order_relaxed) * 0x85ebca6bu;
}

// Closes tables. They stay in memory until lookups that use them end.
void close_tables(int64_t handle);

// Copies bytes in host memory to a device.
at::Tensor bytes_on(at::Device device, const void* from, size_t bytes);

}  // namespace torchrec_hkv::bindings
