// The ids of a call, checked.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "runtime/table_group.h"
#include "runtime/tensor.h"

namespace torchrec_hkv::runtime {

// Where a gradient must begin on a GPU, whose kernels read four columns at a time.
constexpr uintptr_t kGradAlignment = 16;

// How the bags of a call are dealt out to the group's features, with what says so on the device:
// it must outlive the calls of kernels on its batches.
class BagLayout {
 public:
  // batch_size bags for each feature; or, where `bags` are given, these numbers, and batch_size
  // says nothing. rounds: how often the group's features come. Batches one after the other are one
  // in which they come several times, those of each round with the next columns of the output.
  // Throws ValueError.
  BagLayout(const TableGroup& group, int64_t batch_size, at::OptionalIntArrayRef bags,
            int64_t rounds = 1);
  BagLayout(const BagLayout&) = delete;
  BagLayout& operator=(const BagLayout&) = delete;

  int64_t num_features() const { return num_features_; }
  int64_t num_bags() const { return num_bags_; }
  // Of the outputs: [batch_size, columns]; where bags are given [sum of bags * columns].
  const std::vector<int64_t>& output_shape() const { return output_shape_; }
  // See hash_table::Output.
  int64_t output_stride() const { return is_ragged_ ? 0 : output_shape_[1]; }
  // Number of each feature's first bag, and that of all bags.
  std::vector<int64_t> first_bags() const;
  // Says so in a batch.
  void describe(hash_table::Batch* batch) const;

 private:
  bool is_ragged_;
  int64_t batch_size_;
  int64_t num_features_;
  int64_t num_bags_;
  std::vector<int64_t> output_shape_;
  std::vector<hash_table::FeatureBags> ragged_;  // empty where features have equally many
  at::Tensor ragged_on_device_;                  // on a GPU the bytes of the same
  at::Tensor tables_;   // int32 [rounds * features], undefined for one round
  at::Tensor columns_;  // the same
};

// Throws TypeError or ValueError before anything is read; and what a GPU has found in offsets of an
// earlier call.
hash_table::Batch make_batch(const TableGroup& group, const at::Tensor& ids,
                             const at::Tensor& offsets, const BagLayout& layout);
// Of one bag, where the group has one feature.
hash_table::Batch make_batch(const TableGroup& group, const at::Tensor& ids);

// Memory that find_or_insert works in on a GPU; empty on a CPU. scored: whether scores are given.
at::Tensor insert_scratch(const TableGroup& group, const at::Tensor& ids,
                          const hash_table::Placement& placement, bool scored);

}  // namespace torchrec_hkv::runtime
