// Asynchronous copies from global to shared memory, which need no registers. Copies of 4, 8 or 16
// bytes a lane form groups, for which the lane that began them waits. On sm_90 one lane copies many
// bytes at once (bulk copies), and a barrier in shared memory counts them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "hash_table/cuda/row_vector.cuh"

namespace torchrec_hkv::hash_table::cuda {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// kBytes: 4, 8 or 16; both addresses are multiples of them. Copies of 16 bytes bypass L1.
template <int kBytes>
__device__ __forceinline__ void copy_async(void* to, const void* from) {
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from),
                 "n"(kBytes)
                 : "memory");
  }
}
// Copies sixteen bytes with an L2 cache policy.
__device__ __forceinline__ void copy_async(void* to, const void* from, uint64_t policy) {
  asm volatile(
      "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
      "l"(from), "l"(policy)
      : "memory");
}
// Without a cache policy, through L1 for all sizes. kBytes: 4, 8 or 16.
template <int kBytes>
__device__ __forceinline__ void copy_async_cached(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from),
               "n"(kBytes)
               : "memory");
}
// The same with an L2 cache policy.
template <int kBytes>
__device__ __forceinline__ void copy_async_cached(void* to, const void* from, uint64_t policy) {
  asm volatile(
      "cp.async.ca.shared.global.L2::cache_hint [%0], [%1], %2, %3;" ::"r"(shared_address(to)),
      "l"(from), "n"(kBytes), "l"(policy)
      : "memory");
}
// Ends a group of the lane's copies.
__device__ __forceinline__ void end_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until all of the lane's groups but the latest kLeft have arrived.
template <int kLeft>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

#if __CUDA_ARCH__ >= 900
// The barrier of bulk copies. A phase ends when one lane has announced the number of bytes
// (expect_bytes) and these have arrived.
struct CopyBarrier {
  unsigned long long state;

  __device__ __forceinline__ void init() {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&state)) : "memory");
  }
  __device__ __forceinline__ void expect_bytes(uint32_t bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&state)),
        "r"(bytes)
        : "memory");
  }
  // Waits until the phase of this parity has ended.
  __device__ __forceinline__ void wait(uint32_t parity) {
    uint32_t done = 0;
    while (!done) {
      asm volatile(
          "{\n"
          ".reg .pred p;\n"
          "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
          "selp.u32 %0, 1, 0, p;\n"
          "}\n"
          : "=r"(done)
          : "r"(shared_address(&state)), "r"(parity)
          : "memory");
    }
  }
};

// Call it after the initialisation of barriers and before copies that use them.
__device__ __forceinline__ void fence_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Copies to shared memory. Bytes and addresses are multiples of 16.
__device__ __forceinline__ void copy_bulk(void* to, const void* from, uint32_t bytes,
                                          CopyBarrier* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(&barrier->state))
      : "memory");
}
// The same with an L2 cache policy.
__device__ __forceinline__ void copy_bulk(void* to, const void* from, uint32_t bytes,
                                          CopyBarrier* barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(&barrier->state)), "l"(policy)
      : "memory");
}
// Copies from shared memory. Bytes and addresses are multiples of 16. Copies form groups of the
// lane that began them.
__device__ __forceinline__ void copy_bulk_out(void* to, const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void end_bulk_copies_out() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Wait until all of the lane's groups have read shared memory, or have arrived.
__device__ __forceinline__ void wait_for_bulk_reads() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void wait_for_bulk_copies_out() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
#endif

__device__ __forceinline__ void store_once(float* to, const Columns<4>& columns, uint64_t policy) {
  asm volatile("st.global.L2::cache_hint.v4.f32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to),
               "f"(columns.v[0]), "f"(columns.v[1]), "f"(columns.v[2]), "f"(columns.v[3]),
               "l"(policy)
               : "memory");
}

}  // namespace torchrec_hkv::hash_table::cuda
