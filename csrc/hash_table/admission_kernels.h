// Admission kernels of both devices; see kernels.h. `tables` and the memory of the admissions are
// on the device that runs the kernel.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hash_table/admission.h"
#include "hash_table/table_view.h"

#ifdef TORCHREC_HKV_CUDA
#include <cuda_runtime.h>
#endif

namespace torchrec_hkv::hash_table {

namespace cpu {

// Counts the occurrences of the call, then marks each position that has no slot and whose id is not
// admitted: slots[i] = kNotAdmitted. The result does not depend on the number of threads.
void admit(const TableView* tables, const Batch& batch, const CallContext& context,
           const Admissions& admissions, int64_t* slots, int threads);

// Replaces kNotAdmitted by kNoSlot. If evicted ids are returned, the ids that were not admitted are
// among them.
void finish_admission(const TableView* tables, const Batch& batch, const CallContext& context,
                      const Placement& placement, int64_t* slots, int threads);

// Halves the counts of the tables that are due in this call.
void halve_counts(const Admissions& admissions, const CallContext& context, int threads);

}  // namespace cpu

#ifdef TORCHREC_HKV_CUDA
namespace cuda {

// Bytes of scratch for admit, aligned to 256; 0 if no table uses kCounted.
size_t admission_scratch(const Admissions& admissions, int64_t num_ids, bool ordered);

// As on the CPU, except that ids replace each other in full sets in any order, unless `ordered` is
// set.
void admit(const TableView* tables, const Batch& batch, const CallContext& context,
           const Admissions& admissions, bool ordered, int64_t* slots, void* scratch,
           cudaStream_t stream);

void finish_admission(const TableView* tables, const Batch& batch, const CallContext& context,
                      const Placement& placement, int64_t* slots, cudaStream_t stream);

void halve_counts(const Admissions& admissions, const CallContext& context, cudaStream_t stream);

}  // namespace cuda
#endif

}  // namespace torchrec_hkv::hash_table
