// A group of Tensor-Train tables: shapes, features and optimizer. The cores are tensors of the
// caller. Ops identify a group by its handle.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/optimizers.h"
#include "runtime/tensor.h"
#include "runtime/tensor_train/plan.h"
#include "tensor_train/cpu/tables.h"

namespace torchrec_hkv::runtime {

struct TensorTrainShape {
  std::string name;
  int64_t rows;
  std::vector<int64_t> p, q, ranks;  // checked by torchrec_hkv/tensor_train/shapes.py
};

class TensorTrainGroup {
 public:
  static std::shared_ptr<TensorTrainGroup> make(std::vector<TensorTrainShape> shapes,
                                                std::vector<int64_t> feature_tables,
                                                const OptimizerConfig& optimizer, bool tf32);
  static std::shared_ptr<TensorTrainGroup> from_handle(int64_t handle);
  ~TensorTrainGroup();

  int64_t handle() const { return handle_; }
  int32_t num_tables() const { return static_cast<int32_t>(tables_.size()); }
  int32_t num_features() const { return static_cast<int32_t>(feature_tables_.size()); }
  const int32_t* feature_tables() const { return feature_tables_.data(); }
  const std::string& name(int32_t table) const { return names_[table]; }
  // A table without cores and row type.
  const tensor_train::TableCpu& table(int32_t table) const { return tables_[table]; }
  const OptimizerConfig& optimizer() const { return optimizer_; }
  // Whether operands of products on a GPU are rounded to tf32; otherwise products are as accurate
  // as float32.
  bool tf32() const { return tf32_; }
  int64_t num_prefixes() const { return num_prefixes_; }  // of all tables
#ifdef TORCHREC_HKV_CUDA
  TensorTrainPlans& plans() { return plans_; }
#endif
  // Number of ids outside their tables that were sorted on a GPU; waits for the GPU. On a CPU such
  // ids raise.
  int64_t outside(c10::Device device);
  int64_t num_cores() const { return num_cores_; }        // of all tables
  int64_t num_elements() const { return num_elements_; }  // of all cores
  int64_t num_slices() const { return num_slices_; }      // of all cores
  int64_t total_dim() const { return total_dim_; }        // columns of the pooled output
  // Columns of the unpooled output; -1 if the tables differ.
  int64_t common_dim() const { return common_dim_; }

 private:
  TensorTrainGroup() = default;

  int64_t handle_ = -1;
  std::vector<std::string> names_;
  std::vector<tensor_train::TableCpu> tables_;
  std::vector<int32_t> feature_tables_;
  OptimizerConfig optimizer_;
  bool tf32_ = false;
  int64_t num_cores_ = 0, num_elements_ = 0, num_slices_ = 0;
  int64_t num_prefixes_ = 0, total_dim_ = 0, common_dim_ = -1;
#ifdef TORCHREC_HKV_CUDA
  TensorTrainPlans plans_;
#endif
};

}  // namespace torchrec_hkv::runtime
