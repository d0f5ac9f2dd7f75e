#include "runtime/tensor_train/plan.h"

#ifdef TORCHREC_HKV_CUDA

#include <algorithm>
#include <cstring>

#include "common/hashing.h"
#include "runtime/capture.h"
#include "runtime/tensor_train/group.h"

namespace torchrec_hkv::runtime {
namespace {

using tensor_train::TableCpu;
using tensor_train::cuda::CoreView;
using tensor_train::cuda::HeadView;
using CudaTable = tensor_train::cuda::TableCuda;

constexpr int32_t kMaxRank = 256;

// Assigns offsets in one piece of memory, each aligned for any kernel.
class WorkspaceLayout {
 public:
  size_t take(size_t bytes) {
    constexpr size_t kAlignment = 256;
    const size_t at = bytes_;
    bytes_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return at;
  }
  int64_t bytes() const { return static_cast<int64_t>(bytes_); }

 private:
  size_t bytes_ = 0;
};

at::TensorOptions bytes_on(c10::Device device) {
  return at::TensorOptions().dtype(at::kByte).device(device);
}

// Waits for the device, so that any stream may read the copy.
at::Tensor upload(const at::Tensor& bytes, c10::Device device) { return bytes.to(device); }

void refuse_capture(const char* what, c10::Device device) {
  TORCH_CHECK(!is_capturing(device), "a CUDA graph is captured, but ", what,
              " of this group of Tensor-Train tables were not used before: run a step with them "
              "first.");
}

void check_ranks(const TensorTrainGroup& group) {
  for (int32_t t = 0; t < group.num_tables(); ++t) {
    const TableCpu& table = group.table(t);
    for (const int32_t rank : {table.head_r(), table.last_r()}) {
      TORCH_CHECK_VALUE(rank <= kMaxRank, "table '", group.name(t), "' has rank ", rank,
                        ", but on a GPU the ranks beside the last two cores must be at most ",
                        kMaxRank, ".");
    }
  }
}

// Byte offsets in `zeros` of the gradient and the flags of each core, and of heads of four cores.
// Values of heads are in their own memory.
struct WorkspaceOffsets {
  std::vector<size_t> gradient, touched;                         // of each core
  std::vector<size_t> head_gradient, head_touched, head_values;  // of each table
  int64_t zeros = 0, values = 0;
};

WorkspaceOffsets place_buffers(const TensorTrainGroup& group) {
  WorkspaceOffsets places;
  WorkspaceLayout zeros, values;
  for (int32_t t = 0; t < group.num_tables(); ++t) {
    const TableCpu& table = group.table(t);
    for (int32_t k = 0; k < table.cores; ++k) {
      places.gradient.push_back(zeros.take(sizeof(float) * table.p[k] * table.slice(k)));
      places.touched.push_back(zeros.take(table.p[k]));
    }
    const bool multiplied = table.cores == 4;
    const size_t elements =
        multiplied ? static_cast<size_t>(table.heads()) * table.head_q() * table.head_r() : 0;
    places.head_gradient.push_back(zeros.take(sizeof(float) * elements));
    places.head_touched.push_back(zeros.take(multiplied ? table.heads() : 0));
    places.head_values.push_back(values.take(sizeof(float) * elements));
  }
  places.zeros = zeros.bytes();
  places.values = values.bytes();
  return places;
}

// The view of a table with sizes and types; pointers are null.
CudaTable shape_view(const TableCpu& table, RowType type) {
  CudaTable view{};
  view.head_type = table.cores == 4 ? RowType::kFloat32 : type;
  view.middle_type = view.last_type = type;
  view.head_q = table.head_q();
  view.middle_q = table.middle_q();
  view.last_q = table.last_q();
  view.head_r = table.head_r();
  view.last_r = table.last_r();
  view.rows = table.rows;
  view.heads = table.heads();
  view.middles = table.middles();
  view.lasts = table.lasts();
  return view;
}

// Sets the pointers in a plan's views of tables and heads.
void point_to_cores(const TensorTrainGroup& group, RowType type, TensorTrainPlan* plan,
                    std::vector<CudaTable>* views) {
  const WorkspaceOffsets places = place_buffers(group);
  plan->zeros = at::zeros({places.zeros}, bytes_on(plan->device));
  plan->memory.push_back(at::empty({places.values}, bytes_on(plan->device)));
  auto* const zeros = static_cast<char*>(plan->zeros.mutable_data_ptr());
  auto* const values = static_cast<char*>(plan->memory.back().mutable_data_ptr());
  std::vector<float*> gradients;
  size_t next = 0;
  for (int32_t t = 0; t < group.num_tables(); ++t) {
    const TableCpu& table = group.table(t);
    const size_t first = next;
    for (int32_t k = 0; k < table.cores; ++k, ++next) {
      gradients.push_back(reinterpret_cast<float*>(zeros + places.gradient[next]));
      plan->touched.push_back(reinterpret_cast<uint8_t*>(zeros + places.touched[next]));
      const auto begin = static_cast<int64_t>(places.gradient[next]);
      const auto bytes = static_cast<int64_t>(sizeof(float)) * table.p[k] * table.slice(k);
      plan->gradients.push_back(plan->zeros.slice(0, begin, begin + bytes).view(at::kFloat));
      plan->num_slices += table.p[k];
    }
    CudaTable& view = (*views)[t];
    const size_t last = first + table.last_core();
    view.last = plan->cores[last];
    view.last_grad = gradients[last];
    view.last_touched = plan->touched[last];
    if (table.has_middle()) {
      const size_t middle = first + table.middle_core();
      view.middle = plan->cores[middle];
      view.middle_grad = gradients[middle];
      view.middle_touched = plan->touched[middle];
    }
    if (table.cores != 4) {
      view.head = plan->cores[first];
      view.head_grad = gradients[first];
      view.head_touched = plan->touched[first];
      continue;
    }
    HeadView head{};
    head.first = plan->cores[first];
    head.second = plan->cores[first + 1];
    head.type = type;
    head.heads = reinterpret_cast<float*>(values + places.head_values[t]);
    head.heads_grad = reinterpret_cast<float*>(zeros + places.head_gradient[t]);
    head.heads_touched = reinterpret_cast<uint8_t*>(zeros + places.head_touched[t]);
    head.first_grad = gradients[first];
    head.second_grad = gradients[first + 1];
    head.first_touched = plan->touched[first];
    head.second_touched = plan->touched[first + 1];
    head.p0 = static_cast<int32_t>(table.p[0]);
    head.p1 = static_cast<int32_t>(table.p[1]);
    head.q0 = table.q[0];
    head.q1 = table.q[1];
    head.r1 = table.r[1];
    head.r2 = table.r[2];
    view.head = head.heads;
    view.head_grad = head.heads_grad;
    view.head_touched = head.heads_touched;
    plan->heads.push_back(head);
  }
}

std::shared_ptr<TensorTrainPlan> make_plan(const TensorTrainGroup& group, c10::Device device,
                                           at::ScalarType dtype,
                                           const std::vector<const void*>& cores) {
  check_ranks(group);
  refuse_capture(cores.empty() ? "the tables" : "the cores", device);
  auto plan = std::make_shared<TensorTrainPlan>(device);
  plan->dtype = dtype;
  plan->cores = cores;
  const RowType type = dtype == at::kFloat ? RowType::kFloat32 : RowType::kBFloat16;
  std::vector<CudaTable> views;
  std::vector<int32_t> columns;
  for (int32_t t = 0; t < group.num_tables(); ++t) {
    views.push_back(shape_view(group.table(t), type));
  }
  int32_t column = 0;
  for (int32_t f = 0; f < group.num_features(); ++f) {
    columns.push_back(column);
    column += group.table(group.feature_tables()[f]).dim();
  }
  if (!cores.empty()) point_to_cores(group, type, plan.get(), &views);
  plan->kernels = tensor_train::cuda::plan_tables(views.data(), group.num_tables());

  WorkspaceLayout layout;
  const size_t of_views = views.size() * sizeof(CudaTable);
  const size_t of_features = columns.size() * sizeof(int32_t);
  const size_t at_views = layout.take(of_views);
  const size_t at_tables = layout.take(of_features);
  const size_t at_columns = layout.take(of_features);
  const at::Tensor host = at::zeros({layout.bytes()}, at::kByte);
  auto* const to = static_cast<char*>(host.mutable_data_ptr());
  std::memcpy(to + at_views, views.data(), of_views);
  std::memcpy(to + at_tables, group.feature_tables(), of_features);
  std::memcpy(to + at_columns, columns.data(), of_features);
  plan->memory.push_back(upload(host, device));
  const auto* const from = static_cast<const char*>(plan->memory.back().const_data_ptr());
  plan->kernels.tables = reinterpret_cast<const CudaTable*>(from + at_views);
  plan->feature_tables = reinterpret_cast<const int32_t*>(from + at_tables);
  plan->feature_columns = reinterpret_cast<const int32_t*>(from + at_columns);
  return plan;
}

}  // namespace

const CoreView* TensorTrainPlan::core_views(const TensorTrainGroup& group,
                                            const std::vector<void*>& states) {
  if (!core_views_memory.defined() || states != states_of_views) {
    refuse_capture("the optimizer states", device);
    std::vector<CoreView> views;
    int64_t first = 0;
    for (int32_t t = 0; t < group.num_tables(); ++t) {
      const TableCpu& table = group.table(t);
      for (int32_t k = 0; k < table.cores; ++k) {
        const size_t at = views.size();
        CoreView view{};
        view.values = const_cast<void*>(cores[at]);
        view.grad = gradients[at].mutable_data_ptr<float>();
        view.touched = touched[at];
        view.state = static_cast<float*>(states[at]);
        view.type = dtype == at::kFloat ? RowType::kFloat32 : RowType::kBFloat16;
        view.slice_size = static_cast<int32_t>(table.slice(k));
        view.first_slice = first;
        view.seed = mix64(at + 1);  // the same as on a CPU
        views.push_back(view);
        first += table.p[k];
      }
    }
    const auto bytes = static_cast<int64_t>(views.size() * sizeof(CoreView));
    const at::Tensor host = at::empty({bytes}, at::kByte);
    std::memcpy(host.mutable_data_ptr(), views.data(), bytes);
    core_views_memory = upload(host, device);
    states_of_views = states;
  }
  return static_cast<const CoreView*>(core_views_memory.const_data_ptr());
}

std::shared_ptr<TensorTrainPlan> TensorTrainPlans::find(const TensorTrainGroup& group,
                                                        c10::Device device, at::ScalarType dtype,
                                                        const std::vector<const void*>& cores) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = std::find_if(plans_.begin(), plans_.end(), [&](const auto& plan) {
    return plan->device == device && plan->dtype == dtype && plan->cores == cores;
  });
  if (found != plans_.end()) {
    std::rotate(found, found + 1, plans_.end());
    return plans_.back();
  }
  std::shared_ptr<TensorTrainPlan> made = make_plan(group, device, dtype, cores);
  if (plans_.size() == kMax) plans_.erase(plans_.begin());
  plans_.push_back(made);
  return made;
}

at::Tensor TensorTrainPlans::outside(c10::Device device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const at::Tensor& counter : outside_) {
    if (counter.device() == device) return counter;
  }
  refuse_capture("the tables", device);
  outside_.push_back(upload(at::zeros({1}, at::kLong), device));
  return outside_.back();
}

}  // namespace torchrec_hkv::runtime

#endif
