// What ranks send one another of a batch, and the batch that a rank puts together from it.
//
// A rank sends every rank one block of 64-bit words: the lengths of the bags of each feature that
// the other looks up, and then their ids. Before it, it sends counts: the number of ids of each of
// these features, and the number of its samples. A segment is one feature's bags from one rank.
#pragma once

#include <cstdint>

#ifdef TORCHREC_HKV_CUDA
#include <cuda_runtime.h>
#endif

namespace torchrec_hkv::routing {

// Counts to send, of a batch with the features of all ranks, in the order of the ranks.
struct Counts {
  const int64_t* at;          // [num_features] where the count of each feature goes
  const int64_t* samples_at;  // [num_ranks] where the number of samples goes
  int64_t num_features;
  int64_t num_ranks;
  int64_t batch_size;  // bags of a feature, which is the number of samples
  int64_t* counts;
};

// Blocks that have arrived, one after the other. Segment s is feature s % num_features of rank
// s / num_features.
struct Blocks {
  const int64_t* words;
  const float* weights;   // [num_ids] in the order of the ids in the blocks; null: none
  const int64_t* counts;  // [num_ranks, num_features + 1] ids of each segment, and a word unused
  const int32_t* order;   // [num_ranks * num_features] segments in the order of the batch
  int64_t num_ranks;
  int64_t num_features;
  int64_t batch_size;  // bags of a segment
  int64_t num_ids;     // of all segments

  int64_t num_segments() const { return num_ranks * num_features; }
};

// A batch: its segments in order, as arrays of lengths, offsets, ids and weights. All may hold
// nothing but `offsets`, which then are one 0.
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
