// Dispatcher ops of the hash table. An op gets a group by its handle. The schemas of ops that
// change a table declare writes to `counters`, the group's counters tensor. Fakes:
// torchrec_hkv/hash_table/fake_ops.
#include <torch/library.h>

#include "bindings/grouped_positions.h"
#include "bindings/lookups.h"
#include "bindings/register.h"
#include "hash_table/kernels.h"
#include "runtime/batch.h"
#include "runtime/checks.h"
#include "runtime/dtypes.h"
#include "runtime/initial_rows.h"
#include "runtime/on_device.h"
#include "runtime/table_group.h"

namespace torchrec_hkv::bindings {
using namespace runtime;
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

Output<const char> make_grad(const TableGroup& group, const at::Tensor& grad,
                             const BagLayout& layout) {
  const RowType type = row_type_of(grad.scalar_type(), "grad");
  check_device(grad, "grad", group.device());
  const at::IntArrayRef shape = layout.output_shape();
  TORCH_CHECK_VALUE(grad.sizes() == shape, "grad must have shape ", shape, ", but has ",
                    grad.sizes(), ".");
  TORCH_CHECK_VALUE(grad.is_contiguous(), "grad must be contiguous.");
  TORCH_CHECK_VALUE(
      !grad.is_cuda() || reinterpret_cast<uintptr_t>(grad.const_data_ptr()) % kGradAlignment == 0,
      "grad must begin at a multiple of ", kGradAlignment, " bytes.");
  return Output<const char>{static_cast<const char*>(grad.const_data_ptr()), layout.output_stride(),
                            type};
}

at::Tensor find(int64_t handle, const at::Tensor& ids, const std::optional<at::Tensor>& offsets,
                int64_t batch_size, at::OptionalIntArrayRef bags) {
  const std::shared_ptr<TableGroup> owner = TableGroup::from_handle(handle);
  const TableGroup& group = *owner;
  TORCH_CHECK_VALUE(
      offsets || !bags,
      "bags are given, but offsets are None: give offsets, one more than the sum of bags.");
  std::optional<BagLayout> layout;
  if (offsets) layout.emplace(group, batch_size, bags);
  const Batch batch = layout ? make_batch(group, ids, *offsets, *layout) : make_batch(group, ids);
  at::Tensor slots = at::empty_like(ids);
  int64_t* out = slots.data_ptr<int64_t>();
  HKV_ON_GROUP(group, kReadIndex, hash_table::cpu::find(group.views(), batch, out, threads),
               hash_table::cuda::find(group.views(), group.only_view(), batch, out, stream));
  return slots;
}

at::Tensor find_or_insert(at::Tensor counters, int64_t handle, const at::Tensor& ids,
                          const at::Tensor& offsets, int64_t batch_size, std::optional<int64_t> pin,
                          at::OptionalIntArrayRef bags, const std::optional<at::Tensor>& scores) {
  const std::shared_ptr<TableGroup> group = TableGroup::from_handle(handle);
  check_device(counters, "counters", group->device());
  const BagLayout layout(*group, batch_size, bags);
  const Batch batch = make_batch(*group, ids, offsets, layout);
  const std::shared_ptr<Pin> held_pin = pin ? group->clock().find(*pin) : nullptr;
  return insert_missing(*group, ids, offsets, layout, batch, held_pin, scores);
}

at::Tensor weights_gradient(int64_t handle, const at::Tensor& grad, const at::Tensor& ids,
                            const at::Tensor& offsets, const at::Tensor& slots, int64_t batch_size,
                            bool mean, at::OptionalIntArrayRef bags) {
  const std::shared_ptr<TableGroup> owner = TableGroup::from_handle(handle);
  const TableGroup& group = *owner;
  const BagLayout layout(group, batch_size, bags);
  const Batch batch = make_batch(group, ids, offsets, layout);
  check_slots(group, slots, ids);
  const Output<const char> from = make_grad(group, grad, layout);
  // Zeros, because a GPU with invalid offsets writes only a part of the gradient.
  const auto options = grad.options().dtype(at::kFloat);
  at::Tensor result = group.device().is_cuda() ? at::zeros({ids.numel()}, options)
                                               : at::empty({ids.numel()}, options);
  const int64_t* at = slots.const_data_ptr<int64_t>();
  float* out = result.data_ptr<float>();
  HKV_ON_GROUP(
      group, kReadRows,
      hash_table::cpu::pool_weights_grad(group.views(), batch, at, mean, from, out, threads),
      hash_table::cuda::pool_weights_grad(group.views(), batch, at, mean, from, out, stream));
  return result;
}

void update_rows(at::Tensor counters, int64_t handle, const at::Tensor& grad, const at::Tensor& ids,
                 const at::Tensor& offsets, const std::optional<at::Tensor>& weights,
                 const at::Tensor& slots, int64_t batch_size, bool mean,
                 const at::Tensor& learning_rate, int64_t rounds, at::OptionalIntArrayRef bags,
                 const std::optional<at::Tensor>& grouped, const std::optional<at::Tensor>& ways) {
  const std::shared_ptr<TableGroup> owner = TableGroup::from_handle(handle);
  const TableGroup& group = *owner;
  check_device(counters, "counters", group.device());
  TORCH_CHECK_VALUE(
      group.optimizer().kind != Optimizer::kNone,
      "the tables of this group have no optimizer, so that their rows can't be updated: create "
      "the group with one.");
  const c10::OptionalDeviceGuard on_device(group.device());
  const BagLayout layout(group, batch_size, bags, rounds);
  const Batch batch = make_batch(group, ids, offsets, layout);
  check_slots(group, slots, ids);
  const Pooling pooling = make_pooling(group, weights, mean, ids);
  const Output<const char> from = make_grad(group, grad, layout);
  const int64_t* at = slots.const_data_ptr<int64_t>();
  const float* rate = learning_rate_of(group, learning_rate);
  const auto num_tables = static_cast<int32_t>(group.num_tables());
  TORCH_CHECK_VALUE(
      grouped.has_value() == ways.has_value(),
      "one of grouped and ways is None: give both, as pooled_lookup_grouped returned them, or "
      "neither.");
  TORCH_CHECK_VALUE(!grouped || group.device().is_cuda(),
                    "grouped is for tables on a GPU, but these are on ", group.device(), ".");
#ifdef TORCHREC_HKV_CUDA
  std::optional<GroupedPositions> positions;
  const bool weighted = weights.has_value();
  if (grouped) {
    positions.emplace(group, batch, weighted, *grouped, *ways);
  } else if (group.device().is_cuda()) {
    positions.emplace(group, batch, weighted, ids);
  }
#endif
  HKV_ON_GROUP(
      group, kWritePinned,
      hash_table::cpu::update_rows(group.views(), batch, at, pooling, from, group.optimizer(), rate,
                                   num_tables, threads),
      if (!grouped) positions->fill(group, batch, weighted, at, stream);
      hash_table::cuda::update_rows(group.views(), batch, pooling, from, group.optimizer(), rate,
                                    num_tables, group.num_slots(), group.shape(), positions->how,
                                    group.update_hint(), positions->memory.data_ptr(), stream));
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

#ifdef TORCHREC_HKV_CUDA
// Runs pooled_lookup and, concurrently, the part of the update that needs no gradients. The result
// can be used for one update_rows of the same batch, as long as the slots do not change.
std::tuple<at::Tensor, at::Tensor, at::Tensor> pooled_lookup_grouped(
    const at::Tensor& /*anchor*/, int64_t handle, const at::Tensor& ids, const at::Tensor& offsets,
    const std::optional<at::Tensor>& weights, const at::Tensor& slots, int64_t batch_size,
    bool mean, const at::Tensor& learning_rate, at::OptionalIntArrayRef bags,
    std::optional<at::ScalarType> dtype) {
  const std::shared_ptr<TableGroup> group = TableGroup::from_handle(handle);
  learning_rate_of(*group, learning_rate);
  const LookupBatch batch(*group, ids, offsets, weights, batch_size, mean, bags, dtype);
  check_slots(*group, slots, ids);
  PooledRows pooled = pool_rows(*group, batch, slots, kReadPinned, /*groups=*/true);
  return {pooled.rows, pooled.grouped, pooled.ways};
}
#endif

// Below autograd, `anchor` is not used; `learning_rate` is for the backward.
at::Tensor pooled_lookup(const at::Tensor& /*anchor*/, int64_t handle, const at::Tensor& ids,
                         const at::Tensor& offsets, const std::optional<at::Tensor>& weights,
                         const at::Tensor& slots, int64_t batch_size, bool mean,
                         std::optional<int64_t> pin, const at::Tensor& learning_rate,
                         at::OptionalIntArrayRef bags, std::optional<at::ScalarType> dtype) {
  const std::shared_ptr<TableGroup> group = TableGroup::from_handle(handle);
  learning_rate_of(*group, learning_rate);
  const LookupBatch batch(*group, ids, offsets, weights, batch_size, mean, bags, dtype);
  check_slots(*group, slots, ids);
  // A table may have grown since these slots were found.
  at::Tensor present = slots;
  if (pin && group->growths() > 0 && group->clock().find(*pin)->growths() != group->growths()) {
    present = at::where(slots.lt(0), slots, find(handle, ids, offsets, batch_size, bags));
  }
  return pool_rows(*group, batch, present, pin ? kReadPinned : kReadRows, /*groups=*/false).rows;
}

// The forward of the autograd function, for calls without a backward.
at::Tensor train_lookup(at::Tensor counters, const at::Tensor& /*anchor*/, int64_t handle,
                        const at::Tensor& ids, const at::Tensor& offsets,
                        const std::optional<at::Tensor>& weights, int64_t batch_size, bool mean,
                        const at::Tensor& learning_rate, at::OptionalIntArrayRef bags,
                        std::optional<at::ScalarType> dtype,
                        const std::optional<at::Tensor>& scores) {
  const std::shared_ptr<TableGroup> group = TableGroup::from_handle(handle);
  check_device(counters, "counters", group->device());
  learning_rate_of(*group, learning_rate);
  const LookupBatch batch(*group, ids, offsets, weights, batch_size, mean, bags, dtype);
  const std::shared_ptr<Pin> pin = group->pin();  // keeps rows in place until they are pooled
  const at::Tensor slots =
      insert_missing(*group, ids, offsets, batch.layout, batch.batch, pin, scores);
  return pool_rows(*group, batch, slots, kReadPinned, /*groups=*/false).rows;
}

void add_hash_table_ops(torch::Library& m) {
  m.impl("find", &find);
  m.impl("find_or_insert", &find_or_insert);
  m.impl("pooled_lookup", &pooled_lookup);
  m.impl("train_lookup", &train_lookup);
  m.impl("weights_gradient", &weights_gradient);
  m.impl("update_rows", &update_rows);
  m.impl("initial_rows", &initial_rows);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchrec_hkv, m) {
  m.def("find(int group, Tensor ids, Tensor? offsets, int batch_size, int[]? bags=None) -> Tensor");
  m.def(
      "find_or_insert(Tensor(a!) counters, int group, Tensor ids, Tensor offsets, int batch_size, "
      "int? pin, int[]? bags=None, Tensor? scores=None) -> Tensor");
  m.def(
      "pooled_lookup(Tensor anchor, int group, Tensor ids, Tensor offsets, Tensor? weights, "
      "Tensor slots, int batch_size, bool mean, int? pin, Tensor learning_rate, "
      "int[]? bags=None, ScalarType? dtype=None) -> Tensor");
  m.def(
      "train_lookup(Tensor(a!) counters, Tensor anchor, int group, Tensor ids, Tensor offsets, "
      "Tensor? weights, int batch_size, bool mean, Tensor learning_rate, int[]? bags=None, "
      "ScalarType? dtype=None, Tensor? scores=None) -> Tensor");
  m.def(
      "pooled_lookup_grouped(Tensor anchor, int group, Tensor ids, Tensor offsets, "
      "Tensor? weights, Tensor slots, int batch_size, bool mean, Tensor learning_rate, "
      "int[]? bags=None, ScalarType? dtype=None) -> (Tensor, Tensor, Tensor)");
  m.def(
      "weights_gradient(int group, Tensor grad, Tensor ids, Tensor offsets, Tensor slots, "
      "int batch_size, bool mean, int[]? bags=None) -> Tensor");
  m.def(
      "update_rows(Tensor(a!) counters, int group, Tensor grad, Tensor ids, Tensor offsets, "
      "Tensor? weights, Tensor slots, int batch_size, bool mean, Tensor learning_rate, int "
      "rounds=1, int[]? bags=None, Tensor(b!)? grouped=None, Tensor? ways=None) -> ()");
  m.def(
      "initial_rows(Tensor ids, int dim, int column_offset, int seed, str distribution, float low, "
      "float high, float mean, float std) -> Tensor");
}

HKV_REGISTER_ON_DEVICES(add_hash_table_ops)
#ifdef TORCHREC_HKV_CUDA
TORCH_LIBRARY_IMPL(torchrec_hkv, CUDA, m) {
  m.impl("pooled_lookup_grouped", &pooled_lookup_grouped);
}
#endif

}  // namespace torchrec_hkv::bindings
