// A group of Tensor-Train tables as the kernels of a GPU see it, made once for given cores.
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

// Of one device and one list of cores; without cores: what sorting needs.
struct TensorTrainPlan {
  explicit TensorTrainPlan(c10::Device of) : device(of), order(of) {}

  const c10::Device device;
  at::ScalarType dtype = at::kFloat;                // of the cores
  std::vector<const void*> cores;                   // addresses; empty: only for sorting
  tensor_train::cuda::Plan kernels;                 // points into `memory`
  const int32_t* feature_tables = nullptr;          // on the device
  const int32_t* feature_columns = nullptr;         // likewise
  std::vector<tensor_train::cuda::HeadView> heads;  // of the tables of four cores
  std::vector<at::Tensor> gradients;                // of each core, float32 [slices * slice_size]
  at::Tensor zeros;   // gradients and flags of what was touched: 0 between calls
  StreamOrder order;  // of what is written here

  // Cores with states of the group's optimizer, on the device; uploaded where states are others
  // than those of the call before.
  const tensor_train::cuda::CoreView* core_views(const TensorTrainGroup& group,
                                                 const std::vector<void*>& states);
  int64_t num_slices = 0;  // of all cores

  std::vector<uint8_t*> touched;       // of each core
  std::vector<at::Tensor> memory;      // that pointers point into
  std::vector<void*> states_of_views;  // for which core_views_ are
  at::Tensor core_views_memory;
};

// A group's plans. Those of the lists of cores that were used last are kept.
class TensorTrainPlans {
 public:
  // cores: addresses, of all tables, or none. Uploads what is not there yet, which waits for the
  // device and is refused while a CUDA graph is captured.
  std::shared_ptr<TensorTrainPlan> find(const TensorTrainGroup& group, c10::Device device,
                                        at::ScalarType dtype,
                                        const std::vector<const void*>& cores);
  // Ids outside of their tables that were sorted, on the device: int64 [1].
  at::Tensor outside(c10::Device device);

 private:
  static constexpr size_t kMost = 8;  // lists of cores at a time
  std::mutex mutex_;
  std::vector<std::shared_ptr<TensorTrainPlan>> plans_;  // the one used last at the end
  std::vector<at::Tensor> outside_;                      // one a device
};

}  // namespace torchrec_hkv::runtime

#endif
