// Autograd formulas of the Tensor-Train lookups. tt_lookup returns gradients of its cores, which
// can be differentiated again; tt_lookup_fused updates the cores in its backward.
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>

#include "bindings/once_differentiable.h"
#include "bindings/tensor_train/differentiable_lookup.h"
#include "runtime/tensor_train/group.h"

namespace torchrec_hkv::bindings {
using namespace runtime;
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;
using OptionalTensor = std::optional<at::Tensor>;

template <typename Signature>
auto op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

at::Tensor weights_gradient(const variable_list& cores, int64_t group, const at::Tensor& grad,
                            const variable_list& saved, int64_t batch_size, bool mean) {
  static const auto call =
      op<at::Tensor(at::TensorList, int64_t, const at::Tensor&, const at::Tensor&,
                    const at::Tensor&, const at::Tensor&, int64_t, bool)>(
          "torchrec_hkv::tt_weights_gradient");
  return call.call(cores, group, grad, saved[0], saved[1], saved[2], batch_size, mean);
}

// State of both lookups for their backward, besides saved variables. It is one object, because each
// entry of saved_data costs the host about as much as all of this. It keeps the group alive until
// the backward, or until the graph is dropped.
struct SavedContext : torch::CustomClassHolder {
  explicit SavedContext(int64_t handle)
      : hold(TensorTrainGroup::from_handle(handle)), group(handle) {}

  const std::shared_ptr<TensorTrainGroup> hold;
  const int64_t group;
  int64_t batch_size = 0;
  bool mean = false;
  bool pooled = true;
  bool weights_grad = false;
  bool cores_grad = false;
  // For the fused lookup. They are not saved variables: they may change until the backward, which
  // uses the values at that time.
  std::vector<at::Tensor> cores, states;
  at::Tensor step, learning_rate;

  static c10::intrusive_ptr<SavedContext> make(AutogradContext* ctx, int64_t group,
                                               int64_t batch_size, bool mean, bool pooled,
                                               const OptionalTensor& weights) {
    auto saved_context = c10::make_intrusive<SavedContext>(group);
    saved_context->batch_size = batch_size;
    saved_context->mean = mean;
    saved_context->pooled = pooled;
    saved_context->weights_grad = weights && weights->requires_grad();
    ctx->saved_data["kept"] = at::IValue::make_capsule(saved_context);
    return saved_context;
  }
  static c10::intrusive_ptr<SavedContext> of(AutogradContext* ctx) {
    return c10::static_intrusive_pointer_cast<SavedContext>(ctx->saved_data["kept"].toCapsule());
  }
};

// Detaches a tensor if it requires a gradient. Otherwise returns the tensor itself, because a
// detach takes the host longer than all other work on the tensor here.
at::Tensor detached(const at::Tensor& tensor) {
  return tensor.requires_grad() ? tensor.detach() : tensor;
}

// Returns the index of a batch; sorts the batch if it has none. Called before autograd records the
// lookup, so that the backward has the index.
at::Tensor index_or_sorted(const OptionalTensor& index, int64_t group, const at::Tensor& ids,
                           const at::Tensor& offsets, const OptionalTensor& weights,
                           int64_t batch_size, bool mean, bool pooled) {
  if (index) return *index;
  static const auto call =
      op<at::Tensor(int64_t, const at::Tensor&, const at::Tensor&, const OptionalTensor&, int64_t,
                    bool, bool)>("torchrec_hkv::tt_sort");
  const at::AutoDispatchBelowADInplaceOrView below;
  return call.call(group, ids, offsets, weights, batch_size, mean, pooled);
}

OptionalTensor defined_or_none(const Variable& tensor) {
  if (!tensor.defined()) return std::nullopt;
  return detached(tensor);
}

struct Lookup : torch::autograd::Function<Lookup> {
  static Variable forward(AutogradContext* ctx, at::TensorList cores, const OptionalTensor& weights,
                          int64_t group, const Variable& ids, const Variable& offsets,
                          const Variable& index, int64_t batch_size, bool mean, bool pooled) {
    static const auto call =
        op<at::Tensor(at::TensorList, int64_t, const at::Tensor&, const at::Tensor&,
                      const OptionalTensor&, const OptionalTensor&, int64_t, bool, bool)>(
            "torchrec_hkv::tt_lookup");
    variable_list saved{ids, offsets, index, weights.value_or(Variable())};
    saved.insert(saved.end(), cores.begin(), cores.end());
    ctx->save_for_backward(std::move(saved));
    const auto saved_context = SavedContext::make(ctx, group, batch_size, mean, pooled, weights);
    saved_context->cores_grad = std::any_of(
        cores.begin(), cores.end(), [](const at::Tensor& core) { return core.requires_grad(); });
    const at::AutoDispatchBelowADInplaceOrView below;
    return call.call(cores, group, ids, offsets, weights, index, batch_size, mean, pooled);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto call =
        op<std::vector<at::Tensor>(at::TensorList, int64_t, const at::Tensor&, const at::Tensor&,
                                   const at::Tensor&, const OptionalTensor&, const at::Tensor&,
                                   int64_t, bool, bool)>("torchrec_hkv::tt_gradients");
    const variable_list saved = ctx->get_saved_variables();
    variable_list cores(saved.begin() + 4, saved.end());
    const auto saved_context = SavedContext::of(ctx);
    // With create_graph=True the gradients need a graph of their own, which the kernels don't
    // create.
    if (at::GradMode::is_enabled())
      return differentiable_gradients(cores, *saved_context, saved, grads[0]);
    for (Variable& core : cores) core = core.detach();
    const at::Tensor grad = detached(grads[0]).contiguous();
    variable_list out(cores.size());
    if (saved_context->cores_grad) {
      out = call.call(cores, saved_context->group, grad, saved[0], saved[1],
                      defined_or_none(saved[3]), saved[2], saved_context->batch_size,
                      saved_context->mean, saved_context->pooled);
    }
    out.push_back(saved_context->weights_grad
                      ? weights_gradient(cores, saved_context->group, grad, saved,
                                         saved_context->batch_size, saved_context->mean)
                      : Variable());
    out.resize(cores.size() + kOtherArguments + 1);
    return out;
  }

 private:
  // Arguments of forward after the cores and the weights; they have no gradients.
  static constexpr size_t kOtherArguments = 7;

  // Computes the same gradients with operations that autograd records.
  static variable_list differentiable_gradients(const variable_list& cores,
                                                const SavedContext& saved_context,
                                                const variable_list& saved, const Variable& grad) {
    const OptionalTensor weights = saved[3].defined() ? OptionalTensor(saved[3]) : std::nullopt;
    const Variable output =
        differentiable_lookup(cores, saved_context.group, saved[0], saved[1], weights,
                              saved_context.batch_size, saved_context.mean, saved_context.pooled);
    variable_list candidates = cores;
    candidates.push_back(saved[3]);
    variable_list inputs, out(cores.size() + 1 + kOtherArguments);
    std::vector<size_t> places;
    for (size_t i = 0; i < candidates.size(); ++i) {
      if (!candidates[i].defined() || !candidates[i].requires_grad()) continue;
      inputs.push_back(candidates[i]);
      places.push_back(i);
    }
    const variable_list gradients =
        torch::autograd::grad({output}, inputs, {grad}, /*retain_graph=*/true,
                              /*create_graph=*/true, /*allow_unused=*/true);
    for (size_t i = 0; i < places.size(); ++i) out[places[i]] = gradients[i];
    return out;
  }
};

struct FusedLookup : torch::autograd::Function<FusedLookup> {
  // `anchor` requires grad, so that the op is recorded although the cores do not.
  static Variable forward(AutogradContext* ctx, const Variable& anchor,
                          const OptionalTensor& weights, const std::vector<at::Tensor>& cores,
                          const std::vector<at::Tensor>& states, const at::IValue& step,
                          int64_t group, const Variable& ids, const Variable& offsets,
                          const Variable& index, int64_t batch_size, bool mean, bool pooled,
                          const at::IValue& learning_rate) {
    static const auto call =
        op<at::Tensor(const at::Tensor&, at::TensorList, at::TensorList, const at::Tensor&, int64_t,
                      const at::Tensor&, const at::Tensor&, const OptionalTensor&,
                      const OptionalTensor&, int64_t, bool, bool, const at::Tensor&)>(
            "torchrec_hkv::tt_lookup_fused");
    ctx->save_for_backward({ids, offsets, index, weights.value_or(Variable())});
    const auto saved_context = SavedContext::make(ctx, group, batch_size, mean, pooled, weights);
    saved_context->cores = cores;
    saved_context->states = states;
    saved_context->step = step.toTensor();
    saved_context->learning_rate = learning_rate.toTensor();
    const at::AutoDispatchBelowADInplaceOrView below;
    return call.call(anchor, cores, states, step.toTensor(), group, ids, offsets, weights, index,
                     batch_size, mean, pooled, learning_rate.toTensor());
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto call =
        op<void(at::TensorList, at::TensorList, at::Tensor, int64_t, const at::Tensor&,
                const at::Tensor&, const at::Tensor&, const OptionalTensor&, const at::Tensor&,
                int64_t, bool, bool, const at::Tensor&)>("torchrec_hkv::tt_update");
    const variable_list saved = ctx->get_saved_variables();
    const auto saved_context = SavedContext::of(ctx);
    at::Tensor grad = detached(grads[0]).contiguous();
    const float bound = saved_context->hold->optimizer().clip_output;
    if (bound < std::numeric_limits<float>::infinity()) grad = grad.clamp(-bound, bound);
    variable_list out(13);
    // Reads the cores, so it comes before their update.
    if (saved_context->weights_grad) {
      out[1] = once_differentiable(
          weights_gradient(saved_context->cores, saved_context->group, grad, saved,
                           saved_context->batch_size, saved_context->mean),
          "The gradient of the weights of a Tensor-Train lookup can't be differentiated, since a "
          "fused optimizer trains the cores: give the table no fused optimizer (sparse=False).");
    }
    call.call(saved_context->cores, saved_context->states, saved_context->step,
              saved_context->group, grad, saved[0], saved[1], defined_or_none(saved[3]), saved[2],
              saved_context->batch_size, saved_context->mean, saved_context->pooled,
              saved_context->learning_rate);
    return out;
  }
};

at::Tensor lookup(at::TensorList cores, int64_t group, const at::Tensor& ids,
                  const at::Tensor& offsets, const OptionalTensor& weights,
                  const OptionalTensor& index, int64_t batch_size, bool mean, bool pooled) {
  const at::Tensor sorted =
      index_or_sorted(index, group, ids, offsets, weights, batch_size, mean, pooled);
  return Lookup::apply(cores, weights, group, ids, offsets, sorted, batch_size, mean, pooled);
}

at::Tensor lookup_fused(const at::Tensor& anchor, at::TensorList cores, at::TensorList states,
                        const at::Tensor& step, int64_t group, const at::Tensor& ids,
                        const at::Tensor& offsets, const OptionalTensor& weights,
                        const OptionalTensor& index, int64_t batch_size, bool mean, bool pooled,
                        const at::Tensor& learning_rate) {
  const at::Tensor sorted =
      index_or_sorted(index, group, ids, offsets, weights, batch_size, mean, pooled);
  std::vector<at::Tensor> values;
  values.reserve(cores.size());
  for (const at::Tensor& core : cores) values.push_back(detached(core));
  const at::Tensor out = FusedLookup::apply(
      anchor, weights, values, states.vec(), at::IValue(detached(step)), group, ids, offsets,
      sorted, batch_size, mean, pooled, at::IValue(detached(learning_rate)));
  // An anchor without elements has an empty gradient, so the backward need not visit it.
  if (anchor.numel() == 0 && out.grad_fn()) out.grad_fn()->set_next_edge(0, {});
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(torchrec_hkv, Autograd, m) {
  m.impl("tt_lookup", &lookup);
  m.impl("tt_lookup_fused", &lookup_fused);
}

}  // namespace torchrec_hkv::bindings
