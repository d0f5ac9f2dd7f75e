// The checked ids of a call.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "runtime/table_group.h"
#include "runtime/tensor.h"

namespace torchrec_hkv::runtime {

// Alignment of a gradient on a GPU, whose kernels read four columns at a time.
constexpr uintptr_t kGradAlignment = 16;

// The assignment of a call's bags to the group's features, with the arrays that describe it on the
// device. It must outlive the kernels of its batches.
class BagLayout {
 public:
  // batch_size: number of bags of each feature; ignored if `bags` gives the number by feature.
  // rounds: number of batches that form one batch, in which the features occur once for each round;
  // each round has the next columns of the output. Throws ValueError.
  BagLayout(const TableGroup& group, int64_t batch_size, at::OptionalIntArrayRef bags,
            int64_t rounds = 1);
  BagLayout(const BagLayout&) = delete;
  BagLayout& operator=(const BagLayout&) = delete;

  int64_t num_features() const { return num_features_; }
  int64_t num_bags() const { return num_bags_; }
  // Shape of the outputs: [batch_size, columns]; with bags [sum of bags * columns].
  const std::vector<int64_t>& output_shape() const { return output_shape_; }
  // See hash_table::Output.
  int64_t output_stride() const { return is_ragged_ ? 0 : output_shape_[1]; }
  // Number of each feature's first bag, and at the end the number of all bags.
  std::vector<int64_t> first_bags() const;
  // Writes the layout into a batch.
  void describe(hash_table::Batch* batch) const;

 private:
  bool is_ragged_;
  int64_t batch_size_;
  int64_t num_features_;
  int64_t num_bags_;
  std::vector<int64_t> output_shape_;
  std::vector<hash_table::FeatureBags> ragged_;  // empty if all features have equally many bags
  at::Tensor ragged_on_device_;                  // the bytes of ragged_, on a GPU
  at::Tensor tables_;   // int32 [rounds * features], undefined for one round
  at::Tensor columns_;  // like tables_
};

// Checks the arguments of a call. Throws TypeError or ValueError, also if a GPU has reported bad
// offsets of an earlier call.
hash_table::Batch make_batch(const TableGroup& group, const at::Tensor& ids,
                             const at::Tensor& offsets, const BagLayout& layout);
// The same for a batch of one bag. The group must have one feature.
hash_table::Batch make_batch(const TableGroup& group, const at::Tensor& ids);

// Scratch memory of find_or_insert on a GPU; empty on a CPU. scored: whether scores are given.
at::Tensor insert_scratch(const TableGroup& group, const at::Tensor& ids,
                          const hash_table::Placement& placement, bool scored);

}  // namespace torchrec_hkv::runtime
