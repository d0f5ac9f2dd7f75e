// The blocks that ranks exchange for a batch, and the batch that a rank assembles from them.
//
// A rank sends every rank one block of 64-bit words: the lengths of the bags of each feature that
// the receiver looks up, then their ids. Before that it sends counts: the number of ids of each of
// these features, and its number of samples. A segment is the bags of one feature from one rank.
#pragma once

#include <cstdint>

#ifdef TORCHREC_HKV_CUDA
#include <cuda_runtime.h>
#endif

namespace torchrec_hkv::routing {

// Counts to send, for a batch with the features of all ranks in rank order.
struct Counts {
  const int64_t* at;          // [num_features] position of each feature's count
  const int64_t* samples_at;  // [num_ranks] position of each number of samples
  int64_t num_features;
  int64_t num_ranks;
  int64_t batch_size;  // bags of a feature, equal to the number of samples
  int64_t* counts;
};

// The received blocks, concatenated. Segment s is feature s % num_features of rank s /
// num_features.
struct Blocks {
  const int64_t* words;
  const float* weights;   // [num_ids] in the order of the ids in the blocks; null: none
  const int64_t* counts;  // [num_ranks, num_features + 1] ids of each segment, and an unused word
  const int32_t* order;   // [num_ranks * num_features] segments in the order of the batch
  int64_t num_ranks;
  int64_t num_features;
  int64_t batch_size;  // bags of a segment
  int64_t num_ids;     // of all segments

  int64_t num_segments() const { return num_ranks * num_features; }
};

// A batch: its segments in order, as arrays of lengths, offsets, ids and weights. All may be empty
// except `offsets`, which is then a single 0.
struct MergedBatch {
  void* lengths;        // [num_segments * batch_size]
  bool narrow_lengths;  // int32, else int64
  int64_t* offsets;     // [num_segments * batch_size + 1]
  int64_t* ids;         // [num_ids]
  float* weights;       // [num_ids]; null: none
};

namespace cpu {
// lengths: [num_features * batch_size], int32 if `narrow`, else int64.
void count_ids(const void* lengths, bool narrow, const Counts& out, int threads);

void merge_blocks(const Blocks& blocks, MergedBatch out, int threads);
}  // namespace cpu

#ifdef TORCHREC_HKV_CUDA
namespace cuda {
void count_ids(const void* lengths, bool narrow, const Counts& out, cudaStream_t stream);

// Bytes of scratch.
int64_t merge_blocks_scratch(int64_t num_segments);
// Reads the counts on the device.
void merge_blocks(const Blocks& blocks, MergedBatch out, void* scratch, cudaStream_t stream);
}  // namespace cuda
#endif

}  // namespace torchrec_hkv::routing
