// Dispatcher ops of the hash table. A group is named by its handle; ops that change a table say so
// by writing `counters`, the group's counters tensor. Fakes are in torchrec_hkv/hash_table/ops.py.
#include <torch/library.h>

#include "bindings/batch.h"
#include "bindings/checks.h"
#include "bindings/initial_rows.h"
#include "bindings/on_device.h"
#include "bindings/table_group.h"
#include "hash_table/kernels.h"

namespace torchrec_hkv::bindings {
namespace {

using hash_table::Batch;
using hash_table::Output;
using hash_table::Pooling;

void check_slots(const TableGroup& group, const at::Tensor& slots, const at::Tensor& ids) {
  check_dtype(slots, "slots", at::kLong);
  check_device(slots, "slots", group.device());
  check_length(slots, "slots", ids.numel());
  TORCH_CHECK_VALUE(slots.is_contiguous(), "slots must be contiguous.");
}

Pooling make_pooling(const TableGroup& group, const std::optional<at::Tensor>& weights, bool mean,
                     const at::Tensor& ids) {
  if (!weights) return Pooling{mean, nullptr};
  check_dtype(*weights, "weights", at::kFloat);
  check_device(*weights, "weights", group.device());
  check_length(*weights, "weights", ids.numel());
  TORCH_CHECK_VALUE(weights->is_contiguous(), "weights must be contiguous.");
  return Pooling{mean, weights->const_data_ptr<float>()};
}

Output<const float> make_grad(const TableGroup& group, const at::Tensor& grad, int64_t batch_size) {
  check_dtype(grad, "grad", at::kFloat);
  check_device(grad, "grad", group.device());
  TORCH_CHECK_VALUE(
      grad.dim() == 2 && grad.size(0) == batch_size && grad.size(1) == group.total_dim(),
      "grad must have shape [", batch_size, ", ", group.total_dim(), "], but has ", grad.sizes(),
      ".");
  TORCH_CHECK_VALUE(grad.is_contiguous(), "grad must be contiguous.");
  return Output<const float>{grad.const_data_ptr<float>(), group.total_dim()};
}

at::Tensor find(int64_t handle, const at::Tensor& ids, const std::optional<at::Tensor>& offsets,
                int64_t batch_size) {
  const std::shared_ptr<TableGroup> owner = TableGroup::from_handle(handle);
  const TableGroup& group = *owner;
  const Batch batch = make_batch(group, ids, offsets, batch_size);
  at::Tensor slots = at::empty_like(ids);
  int64_t* out = slots.data_ptr<int64_t>();
  HKV_ON_DEVICE(group.device(), hash_table::cpu::find(group.views(), batch, out, threads),
                hash_table::cuda::find(group.views(), group.only_view(), batch, out, stream));
  return slots;
}

at::Tensor find_or_insert(at::Tensor counters, int64_t handle, const at::Tensor& ids,
                          const at::Tensor& offsets, int64_t batch_size, int64_t step) {
  const std::shared_ptr<TableGroup> owner = TableGroup::from_handle(handle);
  const TableGroup& group = *owner;
  check_device(counters, "counters", group.device());
  const Batch batch = make_batch(group, ids, offsets, batch_size);
  TORCH_CHECK_VALUE(!group.needs_scores(),
                    "a table with eviction 'customized' needs scores, which this lookup has not.");
  const hash_table::Visit visit = group.visit(step);
  const hash_table::Placement placement{/*initialize=*/true, /*refuse_lower=*/false, {}};
  owner->make_room(batch, ids, offsets);
  const at::Tensor scratch = insert_scratch(group, ids);
  at::Tensor slots = at::empty_like(ids);
  int64_t* out = slots.data_ptr<int64_t>();
  HKV_ON_DEVICE(
      group.device(),
      hash_table::cpu::find_or_insert(group.views(), batch, visit, placement, out, nullptr,
                                      threads),
      hash_table::cuda::find_or_insert(group.views(), group.only_view(), batch, visit, placement,
                                       out, nullptr, scratch.data_ptr(), stream));
  return slots;
}

at::Tensor weights_gradient(int64_t handle, const at::Tensor& grad, const at::Tensor& ids,
                            const at::Tensor& offsets, const at::Tensor& slots, int64_t batch_size,
                            bool mean) {
  const std::shared_ptr<TableGroup> owner = TableGroup::from_handle(handle);
  const TableGroup& group = *owner;
  const Batch batch = make_batch(group, ids, offsets, batch_size);
  check_slots(group, slots, ids);
  const Output<const float> from = make_grad(group, grad, batch_size);
  at::Tensor result = at::empty({ids.numel()}, grad.options());
  const int64_t* at = slots.const_data_ptr<int64_t>();
  float* out = result.data_ptr<float>();
  HKV_ON_DEVICE(
      group.device(),
      hash_table::cpu::pool_weights_grad(group.views(), batch, at, mean, from, out, threads),
      hash_table::cuda::pool_weights_grad(group.views(), batch, at, mean, from, out, stream));
  return result;
}

void update_rows(at::Tensor counters, int64_t handle, const at::Tensor& grad, const at::Tensor& ids,
                 const at::Tensor& offsets, const std::optional<at::Tensor>& weights,
                 const at::Tensor& slots, int64_t batch_size, bool mean, double learning_rate) {
  const std::shared_ptr<TableGroup> owner = TableGroup::from_handle(handle);
  const TableGroup& group = *owner;
  check_device(counters, "counters", group.device());
  TORCH_CHECK_VALUE(group.optimizer().kind != Optimizer::kNone,
                    "the tables of this group were built without an optimizer.");
  const Batch batch = make_batch(group, ids, offsets, batch_size);
  check_slots(group, slots, ids);
  const Pooling pooling = make_pooling(group, weights, mean, ids);
  const Output<const float> from = make_grad(group, grad, batch_size);
  const int64_t* at = slots.const_data_ptr<int64_t>();
  const float rate = static_cast<float>(learning_rate);
#ifdef TORCHREC_HKV_CUDA
  at::Tensor scratch;
  if (group.device().is_cuda()) {
    const c10::OptionalDeviceGuard guard(group.device());
    const size_t bytes = hash_table::cuda::update_rows_scratch(batch.num_ids, group.num_slots());
    scratch = at::empty({static_cast<int64_t>(bytes)}, ids.options().dtype(at::kByte));
  }
#endif
  HKV_ON_DEVICE(group.device(),
                hash_table::cpu::update_rows(group.views(), batch, at, pooling, from,
                                             group.optimizer(), rate, threads),
                hash_table::cuda::update_rows(group.views(), batch, at, pooling, from,
                                              group.optimizer(), rate, group.num_slots(),
                                              group.four_wide(), scratch.data_ptr(), stream));
}

at::Tensor initial_rows(const at::Tensor& ids, int64_t dim, int64_t column_offset, int64_t seed,
                        c10::string_view distribution, double low, double high, double mean,
                        double std) {
  check_dtype(ids, "ids", at::kLong);
  check_vector(ids, "ids");
  TORCH_CHECK_VALUE(dim >= 1, "dim is ", dim, ", but must be at least 1.");
  TORCH_CHECK_VALUE(column_offset >= 0, "column_offset is ", column_offset,
                    ", but must not be negative.");
  const InitialConfig config{std::string(distribution), low, high, mean, std};
  const InitialRows init = make_initial_rows(config, static_cast<uint64_t>(seed), "");
  const at::Tensor from = ids.contiguous();
  at::Tensor rows = at::empty({ids.numel(), dim}, ids.options().dtype(at::kFloat));
  const int64_t* in = from.const_data_ptr<int64_t>();
  float* out = rows.data_ptr<float>();
  const auto width = static_cast<int32_t>(dim);
  const auto first = static_cast<int32_t>(column_offset);
  HKV_ON_DEVICE(ids.device(),
                hash_table::cpu::initial_rows(init, in, ids.numel(), width, first, out, threads),
                hash_table::cuda::initial_rows(init, in, ids.numel(), width, first, out, stream));
  return rows;
}

// Below autograd, `anchor` and `learning_rate` have nothing to say. step: of the training lookup
// that found the slots, 0 in evaluation.
at::Tensor pooled_lookup(const at::Tensor& /*anchor*/, int64_t handle, const at::Tensor& ids,
                         const at::Tensor& offsets, const std::optional<at::Tensor>& weights,
                         const at::Tensor& slots, int64_t batch_size, bool mean, int64_t step,
                         double /*learning_rate*/) {
  const std::shared_ptr<TableGroup> owner = TableGroup::from_handle(handle);
  const TableGroup& group = *owner;
  const Batch batch = make_batch(group, ids, offsets, batch_size);
  check_slots(group, slots, ids);
  // Other lookups may have made the table grow since.
  const at::Tensor present =
      step > 0 && group.grown_since(step)
          ? at::where(slots.lt(0), slots, find(handle, ids, offsets, batch_size))
          : slots;
  const Pooling pooling = make_pooling(group, weights, mean, ids);
  at::Tensor pooled = at::empty({batch_size, group.total_dim()}, ids.options().dtype(at::kFloat));
  const Output<float> out{pooled.data_ptr<float>(), group.total_dim()};
  const int64_t* at = present.const_data_ptr<int64_t>();
  HKV_ON_DEVICE(group.device(),
                hash_table::cpu::pool_rows(group.views(), batch, at, pooling, out, threads),
                hash_table::cuda::pool_rows(group.views(), batch, at, pooling, out, stream));
  return pooled;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchrec_hkv, m) {
  m.def("find(int group, Tensor ids, Tensor? offsets, int batch_size) -> Tensor");
  m.def(
      "find_or_insert(Tensor(a!) counters, int group, Tensor ids, Tensor offsets, int batch_size, "
      "int step) -> Tensor");
  m.def(
      "pooled_lookup(Tensor anchor, int group, Tensor ids, Tensor offsets, Tensor? weights, "
      "Tensor slots, int batch_size, bool mean, int step, float learning_rate) -> Tensor");
  m.def(
      "weights_gradient(int group, Tensor grad, Tensor ids, Tensor offsets, Tensor slots, "
      "int batch_size, bool mean) -> Tensor");
  m.def(
      "update_rows(Tensor(a!) counters, int group, Tensor grad, Tensor ids, Tensor offsets, "
      "Tensor? weights, Tensor slots, int batch_size, bool mean, float learning_rate) -> ()");
  m.def(
      "initial_rows(Tensor ids, int dim, int column_offset, int seed, str distribution, float low, "
      "float high, float mean, float std) -> Tensor");
}

#define HKV_REGISTER(m)                          \
  m.impl("find", &find);                         \
  m.impl("find_or_insert", &find_or_insert);     \
  m.impl("pooled_lookup", &pooled_lookup);       \
  m.impl("weights_gradient", &weights_gradient); \
  m.impl("update_rows", &update_rows);           \
  m.impl("initial_rows", &initial_rows);

TORCH_LIBRARY_IMPL(torchrec_hkv, CPU, m){HKV_REGISTER(m)}
#ifdef TORCHREC_HKV_CUDA
TORCH_LIBRARY_IMPL(torchrec_hkv, CUDA, m) {
  HKV_REGISTER(m)
}
#endif

}  // namespace torchrec_hkv::bindings
