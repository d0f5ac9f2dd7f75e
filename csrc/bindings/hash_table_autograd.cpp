// The autograd formula of pooled_lookup: its backward updates the rows. No pin stands for a
// lookup in evaluation, whose rows stay as they are.
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <limits>
#include <vector>

#include "bindings/batch.h"
#include "bindings/once_differentiable.h"
#include "bindings/table_group.h"

namespace torchrec_hkv::bindings {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

// Keeps the rows of a lookup where they are, and their tables alive. Lives in the graph: the pin
// ends with the backward, or when the graph is dropped without one.
struct LookupPin : torch::CustomClassHolder {
  LookupPin(int64_t handle, int64_t number)
      : group(TableGroup::from_handle(handle)), pin(group->clock().find(number)) {}
  const std::shared_ptr<TableGroup> group;
  const std::shared_ptr<Pin> pin;
};

// The slots of a lookup, found again where a table has grown since. What is pinned is still there.
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

// Whether positions are grouped beside the forward, for a backward to come. Where the ops are
// traced the backward does that by itself, so that traces hold no sizes that only a run knows.
bool groups_ahead(const LookupPin& held, const at::Tensor& slots) {
  return slots.is_cuda() && held.group->optimizer().kind != Optimizer::kNone &&
         held.pin->growths() == held.group->growths() &&
         !c10::impl::TorchDispatchModeTLS::any_modes_set() &&
         !slots.key_set().has_any(
             c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::Functionalize}));
}

struct PooledLookup : torch::autograd::Function<PooledLookup> {
  // `anchor` requires grad, so that the op is recorded although rows are no tensors of autograd's.
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
                const at::Tensor&, at::OptionalIntArrayRef, std::optional<at::ScalarType>,
                std::optional<int64_t>)>();
    static const auto lookup =
        c10::Dispatcher::singleton()
            .findSchemaOrThrow("torchrec_hkv::pooled_lookup", "")
            .typed<at::Tensor(const at::Tensor&, int64_t, const at::Tensor&, const at::Tensor&,
                              const std::optional<at::Tensor>&, const at::Tensor&, int64_t, bool,
                              std::optional<int64_t>, const at::Tensor&, at::OptionalIntArrayRef,
                              std::optional<at::ScalarType>)>();
    ctx->save_for_backward({ids, offsets, slots, weights.value_or(Variable())});
    ctx->saved_data["handle"] = handle;
    ctx->saved_data["batch_size"] = batch_size;
    if (bags) ctx->saved_data["bags"] = bags->vec();
    ctx->saved_data["mean"] = mean;
    // Not among the saved variables: it may change until the backward, which takes what it is then.
    ctx->saved_data["learning_rate"] = learning_rate.detach();
    ctx->saved_data["weights_grad"] = weights.has_value() && weights->requires_grad();
    ctx->saved_data["training"] = pin.has_value();
    bool ahead = false;
    if (pin) {
      const auto held = c10::make_intrusive<LookupPin>(handle, *pin);
      ahead = recorded && groups_ahead(*held, slots);
      ctx->saved_data["growths"] = held->pin->growths();
      ctx->saved_data["pin"] = at::IValue::make_capsule(held);
    } else {
      ctx->saved_data["growths"] = TableGroup::from_handle(handle)->growths();
    }
    const at::AutoDispatchBelowADInplaceOrView below;
    if (ahead) {
      auto [pooled, grouped, ways] =
          lookup_grouped.call(anchor, handle, ids, offsets, weights, slots, batch_size, mean,
                              learning_rate, bags, dtype, pin);
      ctx->saved_data["grouped"] = std::move(grouped);
      ctx->saved_data["ways"] = std::move(ways);
      return pooled;
    }
    return lookup.call(anchor, handle, ids, offsets, weights, slots, batch_size, mean, pin,
                       learning_rate, bags, dtype);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto update =
        c10::Dispatcher::singleton()
            .findSchemaOrThrow("torchrec_hkv::update_rows", "")
            .typed<void(at::Tensor, int64_t, const at::Tensor&, const at::Tensor&,
                        const at::Tensor&, const std::optional<at::Tensor>&, const at::Tensor&,
                        int64_t, bool, const at::Tensor&, int64_t, at::OptionalIntArrayRef,
                        const std::optional<at::Tensor>&, const std::optional<at::Tensor>&)>();
    static const auto gradient =
        c10::Dispatcher::singleton()
            .findSchemaOrThrow("torchrec_hkv::weights_gradient", "")
            .typed<at::Tensor(int64_t, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                              const at::Tensor&, int64_t, bool, at::OptionalIntArrayRef)>();
    const variable_list saved = ctx->get_saved_variables();
    const Variable &ids = saved[0], &offsets = saved[1];
    std::optional<at::Tensor> weights;
    if (saved[3].defined()) weights = saved[3].detach();
    const int64_t handle = ctx->saved_data["handle"].toInt();
    const int64_t batch_size = ctx->saved_data["batch_size"].toInt();
    const bool mean = ctx->saved_data["mean"].toBool();
    std::vector<int64_t> numbers;
    at::OptionalIntArrayRef bags;
    if (const auto found = ctx->saved_data.find("bags"); found != ctx->saved_data.end()) {
      numbers = found->second.toIntVector();
      bags = numbers;
    }
    const bool training = ctx->saved_data["training"].toBool();
    c10::intrusive_ptr<LookupPin> held;
    if (training) {
      held = c10::static_intrusive_pointer_cast<LookupPin>(ctx->saved_data["pin"].toCapsule());
    }
    at::Tensor grad = grads[0].detach().contiguous();
    // A view may begin anywhere; GPUs read four columns at a time.
    if (reinterpret_cast<uintptr_t>(grad.const_data_ptr()) % kGradAlignment != 0) {
      grad = grad.clone();
    }
    if (training) {
      const float bound = held->group->optimizer().clip_output;
      if (bound < std::numeric_limits<float>::infinity()) grad = grad.clamp(-bound, bound);
    }
    const bool weighs = ctx->saved_data["weights_grad"].toBool();
    at::Tensor slots;
    if (training || weighs) {
      slots = present_slots(*TableGroup::from_handle(handle), saved[2], ids, offsets, batch_size,
                            bags, ctx->saved_data["growths"].toInt());
    }
    // The weights' gradient reads the rows of the forward: before they change.
    Variable weights_grad;
    if (weighs) {
      weights_grad = once_differentiable(
          gradient.call(handle, grad, ids, offsets, slots, batch_size, mean, bags),
          "The gradient of the weights of a hash table's lookup can't be differentiated, since the "
          "table's rows have no gradients.");
    }
    if (training) {
      if (held->group->optimizer().kind != Optimizer::kNone) {
        std::optional<at::Tensor> grouped, ways;
        const auto ahead = ctx->saved_data.find("grouped");
        if (ahead != ctx->saved_data.end() && slots.is_same(saved[2])) {
          grouped = ahead->second.toTensor();
          ways = ctx->saved_data["ways"].toTensor();
          ctx->saved_data.erase(ahead);  // it serves one backward
        }
        update.call(held->group->counters(), handle, grad, ids, offsets, weights, slots, batch_size,
                    mean, ctx->saved_data["learning_rate"].toTensor(), /*rounds=*/1, bags, grouped,
                    ways);
      }
      held->pin->release();
    }
    return {Variable(), weights_grad, Variable(), Variable(), Variable(), Variable(), Variable(),
            Variable(), Variable(),   Variable(), Variable(), Variable(), Variable()};
  }
};

at::Tensor pooled_lookup_autograd(const at::Tensor& anchor, int64_t handle, const at::Tensor& ids,
                                  const at::Tensor& offsets,
                                  const std::optional<at::Tensor>& weights, const at::Tensor& slots,
                                  int64_t batch_size, bool mean, std::optional<int64_t> pin,
                                  const at::Tensor& learning_rate, at::OptionalIntArrayRef bags,
                                  std::optional<at::ScalarType> dtype) {
  const bool recorded = at::GradMode::is_enabled() &&
                        (anchor.requires_grad() || (weights && weights->requires_grad()));
  return PooledLookup::apply(anchor, weights, handle, ids, offsets, slots, batch_size, mean, pin,
                             learning_rate, bags, dtype, recorded);
}

}  // namespace

TORCH_LIBRARY_IMPL(torchrec_hkv, Autograd, m) { m.impl("pooled_lookup", &pooled_lookup_autograd); }

}  // namespace torchrec_hkv::bindings
