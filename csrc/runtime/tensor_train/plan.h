// The form of a group of Tensor-Train tables for GPU kernels, made once for given cores.
#pragma once

#ifdef TORCHREC_HKV_CUDA

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "runtime/stream_order.h"
#include "runtime/tensor.h"
#include "tensor_train/cuda/kernels.h"

namespace torchrec_hkv::runtime {

class TensorTrainGroup;

// A plan for one device and one list of cores; without cores, only for sorting.
struct TensorTrainPlan {
  explicit TensorTrainPlan(c10::Device of) : device(of), order(of) {}

  const c10::Device device;
  at::ScalarType dtype = at::kFloat;                // dtype of the cores
  std::vector<const void*> cores;                   // addresses; empty: only for sorting
  tensor_train::cuda::Plan kernels;                 // points into `memory`
  const int32_t* feature_tables = nullptr;          // on the device
  const int32_t* feature_columns = nullptr;         // on the device
  std::vector<tensor_train::cuda::HeadView> heads;  // of the tables of four cores
  std::vector<at::Tensor> gradients;                // of each core, float32 [slices * slice_size]
  at::Tensor zeros;   // gradients, and flags of touched slices: 0 between calls
  StreamOrder order;  // orders writes to this plan

  // Cores with states of the group's optimizer, on the device; uploaded if the states differ from
  // those of the previous call.
  const tensor_train::cuda::CoreView* core_views(const TensorTrainGroup& group,
                                                 const std::vector<void*>& states);
  int64_t num_slices = 0;  // of all cores

  std::vector<uint8_t*> touched;       // of each core
  std::vector<at::Tensor> memory;      // the memory that pointers refer to
  std::vector<void*> states_of_views;  // the states in core_views_
  at::Tensor core_views_memory;
};

// A group's plans. Plans for the most recently used lists of cores are kept.
class TensorTrainPlans {
 public:
  // cores: addresses of all tables' cores, or none. A new plan is uploaded, which waits for the
  // device and throws while a CUDA graph is captured.
  std::shared_ptr<TensorTrainPlan> find(const TensorTrainGroup& group, c10::Device device,
                                        at::ScalarType dtype,
                                        const std::vector<const void*>& cores);
  // Number of sorted ids outside their tables, on the device: int64 [1].
  at::Tensor outside(c10::Device device);

 private:
  static constexpr size_t kMax = 8;  // maximal number of kept plans
  std::mutex mutex_;
  std::vector<std::shared_ptr<TensorTrainPlan>> plans_;  // the most recently used plan is last
  std::vector<at::Tensor> outside_;                      // one per device
};

}  // namespace torchrec_hkv::runtime

#endif
