// Autograd formulas of pooled_lookup and train_lookup: their backward updates the rows.
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <limits>
#include <vector>

#include "bindings/lookups.h"
#include "bindings/once_differentiable.h"
#include "runtime/batch.h"
#include "runtime/checks.h"
#include "runtime/table_group.h"

namespace torchrec_hkv::bindings {
using namespace runtime;
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

// State of a lookup for its backward, besides its saved variables (ids, offsets, slots and
// weights). It lives in the graph. It keeps the tables alive and, in training, the rows in place:
// the pin ends with the backward, or when the graph is dropped.
struct LookupRecord : torch::CustomClassHolder {
  std::shared_ptr<TableGroup> group;
  std::shared_ptr<Pin> pin;  // null if the lookup does not train
  int64_t growths;           // the group's number of growths when the slots were found
  int64_t batch_size;
  std::optional<std::vector<int64_t>> bags;
  bool mean;
  bool weights_grad;
  at::Tensor learning_rate;  // not a saved variable: it may change before the backward
  PooledRows ahead;          // the grouping for one backward; its rows are undefined

  at::OptionalIntArrayRef bag_numbers() const {
    return bags ? at::OptionalIntArrayRef(*bags) : at::OptionalIntArrayRef();
  }
};

// The current slots of a lookup's ids, found again if a table has grown since. Pinned ids are still
// in their tables.
at::Tensor present_slots(const TableGroup& group, const at::Tensor& slots, const at::Tensor& ids,
                         const at::Tensor& offsets, int64_t batch_size,
                         at::OptionalIntArrayRef bags, int64_t growths) {
  if (group.growths() == growths) return slots;
  static const auto find =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("torchrec_hkv::find", "")
          .typed<at::Tensor(int64_t, const at::Tensor&, const std::optional<at::Tensor>&, int64_t,
                            at::OptionalIntArrayRef)>();
  return at::where(slots.lt(0), slots, find.call(group.handle(), ids, offsets, batch_size, bags));
}

// Whether the caller records each op, such as a trace.
bool is_traced(const at::Tensor& ids) {
  return c10::impl::TorchDispatchModeTLS::any_modes_set() ||
         ids.key_set().has_any(
             c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::Functionalize}));
}

// Whether the forward also groups positions for its backward. In traces the backward groups them
// itself, so that a trace has no data-dependent sizes.
bool groups_ahead(const TableGroup& group, const at::Tensor& ids) {
  return ids.is_cuda() && group.optimizer().kind != Optimizer::kNone && !is_traced(ids);
}

// Sets up the backward of a lookup.
void record(AutogradContext* ctx, const c10::intrusive_ptr<LookupRecord>& lookup,
            const Variable& ids, const Variable& offsets, const Variable& slots,
            const std::optional<Variable>& weights, const Variable& learning_rate,
            int64_t batch_size, bool mean, at::OptionalIntArrayRef bags) {
  ctx->save_for_backward({ids, offsets, slots, weights.value_or(Variable())});
  lookup->batch_size = batch_size;
  if (bags) lookup->bags = bags->vec();
  lookup->mean = mean;
  lookup->weights_grad = weights.has_value() && weights->requires_grad();
  lookup->learning_rate = learning_rate.detach();
  ctx->saved_data["lookup"] = at::IValue::make_capsule(lookup);
}

// Updates the rows. Returns the gradient of the weights, undefined if it is not needed.
Variable update(AutogradContext* ctx, const Variable& gradient) {
  static const auto update_rows =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("torchrec_hkv::update_rows", "")
          .typed<void(at::Tensor, int64_t, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                      const std::optional<at::Tensor>&, const at::Tensor&, int64_t, bool,
                      const at::Tensor&, int64_t, at::OptionalIntArrayRef,
                      const std::optional<at::Tensor>&, const std::optional<at::Tensor>&)>();
  static const auto weights_gradient =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("torchrec_hkv::weights_gradient", "")
          .typed<at::Tensor(int64_t, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                            const at::Tensor&, int64_t, bool, at::OptionalIntArrayRef)>();
  const auto lookup =
      c10::static_intrusive_pointer_cast<LookupRecord>(ctx->saved_data["lookup"].toCapsule());
  const TableGroup& group = *lookup->group;
  const bool training = lookup->pin != nullptr;
  if (!training && !lookup->weights_grad) return {};
  const variable_list saved = ctx->get_saved_variables();
  const Variable &ids = saved[0], &offsets = saved[1];
  const at::OptionalIntArrayRef bags = lookup->bag_numbers();
  at::Tensor grad = gradient.detach().contiguous();
  // A view may be unaligned; GPUs read four columns at a time.
  if (reinterpret_cast<uintptr_t>(grad.const_data_ptr()) % kGradAlignment != 0) {
    grad = grad.clone();
  }
  if (training) {
    const float bound = group.optimizer().clip_output;
    if (bound < std::numeric_limits<float>::infinity()) grad = grad.clamp(-bound, bound);
  }
  const at::Tensor slots =
      present_slots(group, saved[2], ids, offsets, lookup->batch_size, bags, lookup->growths);
  // The weights' gradient uses the rows of the forward, so it comes before the update.
  Variable weights_grad;
  if (lookup->weights_grad) {
    weights_grad = once_differentiable(
        weights_gradient.call(group.handle(), grad, ids, offsets, slots, lookup->batch_size,
                              lookup->mean, bags),
        "The gradient of the weights of a hash table's lookup can't be differentiated, since the "
        "table's rows have no gradients.");
  }
  if (training) {
    if (group.optimizer().kind != Optimizer::kNone) {
      std::optional<at::Tensor> weights, grouped, ways;
      if (saved[3].defined()) weights = saved[3].detach();
      if (lookup->ahead.grouped.defined() && slots.is_same(saved[2])) {
        grouped = std::move(lookup->ahead.grouped);
        ways = std::move(lookup->ahead.ways);
        lookup->ahead = {};  // can be used once
      }
      update_rows.call(group.counters(), group.handle(), grad, ids, offsets, weights, slots,
                       lookup->batch_size, lookup->mean, lookup->learning_rate, /*rounds=*/1, bags,
                       grouped, ways);
    }
    lookup->pin->release();
  }
  return weights_grad;
}

const auto& pooled_lookup_op() {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("torchrec_hkv::pooled_lookup", "")
          .typed<at::Tensor(const at::Tensor&, int64_t, const at::Tensor&, const at::Tensor&,
                            const std::optional<at::Tensor>&, const at::Tensor&, int64_t, bool,
                            std::optional<int64_t>, const at::Tensor&, at::OptionalIntArrayRef,
                            std::optional<at::ScalarType>)>();
  return op;
}

// `anchor` requires grad, so that autograd records the op although rows are not its tensors.
struct PooledLookup : torch::autograd::Function<PooledLookup> {
  static Variable forward(AutogradContext* ctx, const Variable& anchor,
                          const std::optional<Variable>& weights, int64_t handle,
                          const Variable& ids, const Variable& offsets, const Variable& slots,
                          int64_t batch_size, bool mean, std::optional<int64_t> pin,
                          const Variable& learning_rate, at::OptionalIntArrayRef bags,
                          std::optional<at::ScalarType> dtype, bool recorded) {
    static const auto lookup_grouped =
        c10::Dispatcher::singleton()
            .findSchemaOrThrow("torchrec_hkv::pooled_lookup_grouped", "")
            .typed<std::tuple<at::Tensor, at::Tensor, at::Tensor>(
                const at::Tensor&, int64_t, const at::Tensor&, const at::Tensor&,
                const std::optional<at::Tensor>&, const at::Tensor&, int64_t, bool,
                const at::Tensor&, at::OptionalIntArrayRef, std::optional<at::ScalarType>)>();
    const auto recording = c10::make_intrusive<LookupRecord>();
    recording->group = TableGroup::from_handle(handle);
    const TableGroup& group = *recording->group;
    if (pin) recording->pin = group.clock().find(*pin);
    recording->growths = pin ? recording->pin->growths() : group.growths();
    record(ctx, recording, ids, offsets, slots, weights, learning_rate, batch_size, mean, bags);
    const at::AutoDispatchBelowADInplaceOrView below;
    if (pin && recorded && recording->growths == group.growths() && groups_ahead(group, slots)) {
      auto [pooled, grouped, ways] =
          lookup_grouped.call(anchor, handle, ids, offsets, weights, slots, batch_size, mean,
                              learning_rate, bags, dtype);
      recording->ahead = {{}, std::move(grouped), std::move(ways)};
      return pooled;
    }
    return pooled_lookup_op().call(anchor, handle, ids, offsets, weights, slots, batch_size, mean,
                                   pin, learning_rate, bags, dtype);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list gradients(13);
    gradients[1] = update(ctx, grads[0]);
    return gradients;
  }
};

// The same for a call that also inserts ids.
struct TrainLookup : torch::autograd::Function<TrainLookup> {
  static Variable forward(AutogradContext* ctx, const Variable& /*anchor*/,
                          const std::optional<Variable>& weights,
                          const std::shared_ptr<TableGroup>& group, const Variable& ids,
                          const Variable& offsets, int64_t batch_size, bool mean,
                          const Variable& learning_rate, at::OptionalIntArrayRef bags,
                          std::optional<at::ScalarType> dtype,
                          const std::optional<at::Tensor>& scores, bool recorded) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const LookupBatch batch(*group, ids, offsets, weights, batch_size, mean, bags, dtype);
    const auto recording = c10::make_intrusive<LookupRecord>();
    recording->group = group;
    recording->pin = group->pin();
    const at::Tensor slots =
        insert_missing(*group, ids, offsets, batch.layout, batch.batch, recording->pin, scores);
    // Another thread may have grown a table meanwhile.
    recording->growths = recording->pin->growths();
    const bool found = recording->growths == group->growths();
    recording->ahead =
        pool_rows(*group, batch,
                  present_slots(*group, slots, ids, offsets, batch_size, bags, recording->growths),
                  kReadPinned, found && recorded && groups_ahead(*group, ids));
    at::Tensor pooled = std::move(recording->ahead.rows);
    record(ctx, recording, ids, offsets, slots, weights, learning_rate, batch_size, mean, bags);
    return pooled;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list gradients(12);
    gradients[1] = update(ctx, grads[0]);
    return gradients;
  }
};

bool is_recorded(const at::Tensor& anchor, const std::optional<at::Tensor>& weights) {
  return at::GradMode::is_enabled() &&
         (anchor.requires_grad() || (weights && weights->requires_grad()));
}

at::Tensor pooled_lookup_autograd(const at::Tensor& anchor, int64_t handle, const at::Tensor& ids,
                                  const at::Tensor& offsets,
                                  const std::optional<at::Tensor>& weights, const at::Tensor& slots,
                                  int64_t batch_size, bool mean, std::optional<int64_t> pin,
                                  const at::Tensor& learning_rate, at::OptionalIntArrayRef bags,
                                  std::optional<at::ScalarType> dtype) {
  return PooledLookup::apply(anchor, weights, handle, ids, offsets, slots, batch_size, mean, pin,
                             learning_rate, bags, dtype, is_recorded(anchor, weights));
}

at::Tensor train_lookup_autograd(at::Tensor counters, const at::Tensor& anchor, int64_t handle,
                                 const at::Tensor& ids, const at::Tensor& offsets,
                                 const std::optional<at::Tensor>& weights, int64_t batch_size,
                                 bool mean, const at::Tensor& learning_rate,
                                 at::OptionalIntArrayRef bags, std::optional<at::ScalarType> dtype,
                                 const std::optional<at::Tensor>& scores) {
  const std::shared_ptr<TableGroup> group = TableGroup::from_handle(handle);
  if (is_traced(ids)) {  // records its component ops
    static const auto find_or_insert =
        c10::Dispatcher::singleton()
            .findSchemaOrThrow("torchrec_hkv::find_or_insert", "")
            .typed<at::Tensor(at::Tensor, int64_t, const at::Tensor&, const at::Tensor&, int64_t,
                              std::optional<int64_t>, at::OptionalIntArrayRef,
                              const std::optional<at::Tensor>&)>();
    const std::shared_ptr<Pin> pin = group->pin();
    const at::Tensor slots = find_or_insert.call(counters, handle, ids, offsets, batch_size,
                                                 pin->number(), bags, scores);
    return pooled_lookup_op().call(anchor, handle, ids, offsets, weights, slots, batch_size, mean,
                                   pin->number(), learning_rate, bags, dtype);
  }
  check_device(counters, "counters", group->device());
  learning_rate_of(*group, learning_rate);
  return TrainLookup::apply(anchor, weights, group, ids, offsets, batch_size, mean, learning_rate,
                            bags, dtype, scores, is_recorded(anchor, weights));
}

}  // namespace

TORCH_LIBRARY_IMPL(torchrec_hkv, Autograd, m) {
  m.impl("pooled_lookup", &pooled_lookup_autograd);
  m.impl("train_lookup", &train_lookup_autograd);
}

}  // namespace torchrec_hkv::bindings
