#include "bindings/lookups.h"

#include <functional>

#include "bindings/grouped_positions.h"
#include "common/side_stream.h"
#include "hash_table/kernels.h"
#include "runtime/checks.h"
#include "runtime/dtypes.h"
#include "runtime/on_device.h"
#include "runtime/score_keys.h"

namespace torchrec_hkv::bindings {

using hash_table::Batch;
using hash_table::Output;
using hash_table::Pooling;

Pooling make_pooling(const TableGroup& group, const std::optional<at::Tensor>& weights, bool mean,
                     const at::Tensor& ids) {
  if (!weights) return Pooling{mean, nullptr};
  check_dtype(*weights, "weights", at::kFloat);
  check_device(*weights, "weights", group.device());
  check_length(*weights, "weights", ids.numel());
  TORCH_CHECK_VALUE(weights->is_contiguous(), "weights must be contiguous.");
  return Pooling{mean, weights->const_data_ptr<float>()};
}

LookupBatch::LookupBatch(const TableGroup& group, const at::Tensor& ids, const at::Tensor& offsets,
                         const std::optional<at::Tensor>& weights, int64_t batch_size, bool mean,
                         at::OptionalIntArrayRef bags, std::optional<at::ScalarType> dtype)
    : ids(ids),
      offsets(offsets),
      layout(group, batch_size, bags),
      batch(make_batch(group, ids, offsets, layout)),
      pooling(make_pooling(group, weights, mean, ids)),
      dtype(dtype.value_or(at::kFloat)),
      type(row_type_of(this->dtype, "the output")) {}

// learning_rate: one value on the group's device. It is read when the rows are updated, so it may
// change until then, and between replays of a CUDA graph.
const float* learning_rate_of(const TableGroup& group, const at::Tensor& learning_rate) {
  check_dtype(learning_rate, "learning_rate", at::kFloat);
  check_device(learning_rate, "learning_rate", group.device());
  TORCH_CHECK_VALUE(learning_rate.dim() == 0,
                    "learning_rate must have no dimensions, but has shape ", learning_rate.sizes(),
                    ".");
  return learning_rate.const_data_ptr<float>();
}

at::Tensor insert_missing(TableGroup& group, const at::Tensor& ids, const at::Tensor& offsets,
                          const BagLayout& layout, const Batch& batch,
                          const std::shared_ptr<Pin>& pin, const std::optional<at::Tensor>& scores,
                          bool* found) {
  at::Tensor keys;
  if (scores || group.needs_scores()) {
    keys = keys_of_lookup(group, scores, ids.numel(), offsets, layout.first_bags());
  }
  const uint64_t* given = data_of(keys);
  hash_table::Placement placement{
      group.initial_rows(), hash_table::RefuseLower::kAged, /*given_rows=*/{}, {}};
  placement.admissions = group.admission().get();
  placement.moving = group.frame_moves();
#ifdef TORCHREC_HKV_CUDA
  if (group.device().is_cuda()) {
    placement.mostly_unique = hash_table::cuda::expects_unique_ids(group.update_hint());
  }
#endif
  placement.scores = group.shape().scores;
  placement.remembers = group.remembers_evicted();
  placement.restores = group.restores_counts();
  placement.simulates = group.simulates();
  placement.ordered = group.deterministic();
  // For other threads, growth and insertion are one call.
  const HoldToGrow hold(group);
  if (group.growing()) group.make_room(batch, ids, offsets, layout.first_bags());
  if (pin) pin->set_growths(group.growths());
  const at::Tensor scratch = insert_scratch(group, ids, placement, given != nullptr);
  at::Tensor slots = at::empty_like(ids);
  int64_t* out = slots.data_ptr<int64_t>();
  const CountedCall call(group.clock(), pin ? std::optional<int64_t>(pin->number()) : std::nullopt);
  const auto enqueue = [&] {
    HKV_ON_DEVICE(
        group.device(),
        hash_table::cpu::find_or_insert(group.views(), batch, call.context(given), group.aging(),
                                        placement, out, found, threads),
        hash_table::cuda::find_or_insert(group.views(), group.only_view_now(), batch, call.clock(),
                                         call.tick(), group.aging(), given, placement, out, found,
                                         nullptr, scratch.data_ptr(), stream))
    keep_last_scores(group, slots, given);
  };
  if (pin && group.has_frames()) {
    // The pin keeps the rows in place until they have moved to their frames.
    group.order().run_and_move(call.use(/*inserts=*/true), [&](const auto& moves_begin) {
      placement.moving.begin = [](const void* of) {
        (*static_cast<const std::function<void()>*>(of))();
      };
      placement.moving.begin_context = &moves_begin;
      enqueue();
    });
  } else {
    group.order().run(call.use(/*inserts=*/true), enqueue);
  }
  return slots;
}

PooledRows pool_rows(const TableGroup& group, const LookupBatch& batch, const at::Tensor& slots,
                     const AccessSet& use, [[maybe_unused]] bool groups) {
  PooledRows pooled;
  pooled.rows = at::empty(batch.layout.output_shape(), batch.ids.options().dtype(batch.dtype));
  const Output<char> out{static_cast<char*>(pooled.rows.data_ptr()), batch.layout.output_stride(),
                         batch.type};
  const int64_t* at = slots.const_data_ptr<int64_t>();
#ifdef TORCHREC_HKV_CUDA
  if (groups) {
    const bool weighted = batch.pooling.weights != nullptr;
    GroupedPositions grouped(group, batch.batch, weighted, batch.ids);
    group.order().run(use, [&] {
      const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(group.device().index());
      SideStream side(stream);
      grouped.fill(group, batch.batch, weighted, at, side.stream(), &side);
      hash_table::cuda::pool_rows(group.views(), batch.batch, at, batch.pooling, out, group.shape(),
                                  group.update_hint(), stream);
      side.join();
    });
    pooled.grouped = grouped.memory;
    pooled.ways = grouped.ways();
    return pooled;
  }
#endif
  HKV_ON_GROUP(
      group, use,
      hash_table::cpu::pool_rows(group.views(), batch.batch, at, batch.pooling, out, threads),
      hash_table::cuda::pool_rows(group.views(), batch.batch, at, batch.pooling, out, group.shape(),
                                  group.update_hint(), stream));
  return pooled;
}

}  // namespace torchrec_hkv::bindings
