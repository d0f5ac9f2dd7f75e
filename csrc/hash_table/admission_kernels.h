// Admission's kernels, for both devices; see kernels.h. `tables` and what the admissions point to
// are in the memory of the device that runs the kernel.
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

// Counts what the call asks for, then marks each position that has no slot and whose id is not
// admitted: slots[i] = kNotAdmitted. The result does not depend on the number of threads.
void admit(const TableView* tables, const Batch& batch, const Visit& visit,
           const Admissions& admissions, int64_t* slots, int threads);

// The marked positions have no slot: kNoSlot. Where leavers are wanted, their ids are among them.
void finish_admission(const TableView* tables, const Batch& batch, const Visit& visit,
                      const Placement& placement, int64_t* slots, int threads);

// Halves the counts of the tables for which this call is the time to.
void halve_counts(const Admissions& admissions, const Visit& visit, int threads);

}  // namespace cpu

#ifdef TORCHREC_HKV_CUDA
namespace cuda {

// Bytes of scratch that admit needs, aligned to 256; none where no table counts in cells.
size_t admission_scratch(const Admissions& admissions, int64_t num_ids, bool ordered);

// As on the CPU, but for one thing: where the cells of a set are all taken, the order in which ids
// replace others is not that of the batch, unless `ordered` asks for it.
void admit(const TableView* tables, const Batch& batch, const Visit& visit,
           const Admissions& admissions, bool ordered, int64_t* slots, void* scratch,
           cudaStream_t stream);

void finish_admission(const TableView* tables, const Batch& batch, const Visit& visit,
                      const Placement& placement, int64_t* slots, cudaStream_t stream);

void halve_counts(const Admissions& admissions, const Visit& visit, cudaStream_t stream);

}  // namespace cuda
#endif

}  // namespace torchrec_hkv::hash_table
