// Lookup and gradients of a batch: selects kernels, their order and their memory.
#include "common/cuda_check.h"
#include "tensor_train/cuda/contract/tile_config.cuh"
#include "tensor_train/cuda/index/index.cuh"
#include "tensor_train/cuda/index/repeats.cuh"
#include "tensor_train/tiles.h"

namespace torchrec_hkv::tensor_train::cuda {
namespace {

// Least number of ids for dense kernels. With fewer, launching one for a batch that is not dense
// costs more than it saves for a dense batch.
constexpr int64_t kMaybeDense = int64_t{1} << 18;

// Largest number of ids for which several tables use by_shares: the largest that was measured.
constexpr int64_t kMaxShared = int64_t{1} << 18;

// Whether blocks process equal shares of the prefixes (share_kernel.cuh) instead of tiles.
bool by_shares(const Plan& plan, const BatchCuda& batch, bool backward) {
  const KernelClass& kernel = plan.classes[0];
  // If ranks match but q is unknown, tiles are as fast.
  const bool faster = kernel.fours || kernel.narrow || !kernel.lasts;
  const bool has_kernel = kernel.rank == 32 && kernel.small && faster;
  if (plan.num_classes != 1 || !has_kernel || unit_of(plan, batch) != 4) return false;
  if (plan.num_tables != 1 && batch.num_ids > kMaxShared) return false;
  return !(backward && batch.deterministic);
}

// Whether gradients have a kernel for many ids per prefix, which skips batches that have fewer.
bool has_dense_gradients(const Plan& plan, const BatchCuda& batch) {
  const KernelClass& kernel = plan.classes[0];
  if (batch.num_ids < kMaybeDense || batch.deterministic || plan.num_classes != 1) return false;
  if (!kernel.small || unit_of(plan, batch) != 4) return false;
  return (kernel.rank == 32 && has_dense_gradients_32(plan.only_lasts)) ||
         (kernel.rank == 64 && has_dense_gradients_64(plan.only_lasts));
}

size_t slots_bytes(const Plan& plan, const BatchCuda& batch) {
  constexpr size_t kAlignment = 256;  // of the memory after it
  const size_t bytes = static_cast<size_t>(max_slots(batch)) * plan.widest * sizeof(float);
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

TileInput tile_input(const Plan& plan, const BatchCuda& batch, const Index& index) {
  TileInput in = {};
  in.tables = plan.tables;
  in.one_table = plan.num_tables == 1;
  in.counts = index.counts;
  in.prefixes = index.prefixes;
  in.max_prefixes = max_prefixes(plan, batch);
  in.lasts = index.lasts;
  in.sources = index.sources;
  in.factors = index.factors;
  in.unit = unit_of(plan, batch);
  in.widest = plan.widest;
  in.store = !batch.pooled;
  return in;
}

void run_classes(const Plan& plan, const BatchCuda& batch, Precision precision, bool backward,
                 TileInput in, cudaStream_t stream) {
  TileRun run;
  run.precision = precision;
  run.backward = backward;
  run.few = batch.num_ids <= kSmallBatch;
  run.shares = by_shares(plan, batch, backward);
  run.deterministic = batch.deterministic;
  run.may_be_dense = batch.num_ids >= kMaybeDense;
  run.num_ids = batch.num_ids;
  run.max_prefixes = max_prefixes(plan, batch);
  run.only_lasts = plan.only_lasts;
  run.multiprocessors = plan.multiprocessors;
  run.stream = stream;
  for (int32_t i = 0; i < plan.num_classes; ++i) {
    run.kernel = plan.classes[i];
    if (in.unit != 4) {  // rows are not aligned
      run.kernel.vectors = run.kernel.whole = run.kernel.lasts = run.kernel.narrow = false;
      run.kernel.exact = run.kernel.fours = run.kernel.small = run.kernel.quads = false;
    }
    run.blocks = plan.blocks[i];
    in.kernel = i;
    switch (run.kernel.rank) {
      case 32:
        run_tiles_32(run, in);
        break;
      case 64:
        run_tiles_64(run, in);
        break;
      case 128:
        run_tiles_128(run, in);
        break;
      default:
        run_tiles_256(run, in);
    }
  }
}

}  // namespace

size_t lookup_scratch_bytes(const Plan& plan, const BatchCuda& batch) {
  if (!always_gathers(batch)) return slots_bytes(plan, batch);
  return static_cast<size_t>(batch.num_ids) * plan.widest * sizeof(float);
}

void lookup(const Plan& plan, const BatchCuda& batch, Precision precision, const void* index,
            void* scratch, float* out, bool cleared, cudaStream_t stream) {
  const bool always = always_gathers(batch);
  const int64_t values = batch.num_rows() * batch.stride;
  if (batch.num_ids == 0) {
    if (batch.pooled && !cleared) {
      HKV_CUDA_CHECK(cudaMemsetAsync(out, 0, static_cast<size_t>(values) * sizeof(float), stream));
    }
    return;
  }
  const Index parts = allocate_index(plan, batch, const_cast<void*>(index), nullptr);
  const bool clears = batch.pooled && !cleared && !always && values > 0;
  if (clears) clear_output(parts, values, plan.multiprocessors, out, stream);
  auto* slot_rows = static_cast<float*>(scratch);
  TileInput in = tile_input(plan, batch, parts);
  in.out = out;
  in.slot_rows = slot_rows;
  in.always_gather = always;
  in.early = clears;
  run_classes(plan, batch, precision, false, in, stream);
  pool_rows(plan, batch, parts, slot_rows, always, out, stream);
  if (!always && !batch.pooled) clear_outside(repeats_of(plan, batch, parts), out, stream);
}

size_t gradients_scratch_bytes(const Plan& plan, const BatchCuda& batch) {
  return slots_bytes(plan, batch) + partial_grads_bytes(plan, batch);
}

void gradients(const Plan& plan, const BatchCuda& batch, Precision precision, const void* index,
               void* scratch, const float* grad, const FixedPointSums& sums, int64_t* steps,
               cudaStream_t stream) {
  if (batch.num_ids == 0) return;
  const Index parts = allocate_index(plan, batch, const_cast<void*>(index), nullptr);
  auto* slot_grads = static_cast<float*>(scratch);
  void* const partials = static_cast<char*>(scratch) + slots_bytes(plan, batch);
  const TouchInput touch = {plan.tables, parts.counts, parts.prefixes, parts.lasts,
                            has_dense_gradients(plan, batch)};
  sum_repeated_grads(repeats_of(plan, batch, parts), grad, slot_grads, partials, steps, touch,
                     stream);
  TileInput in = tile_input(plan, batch, parts);
  in.grad = grad;
  in.fixed_point = {sums.grads, reinterpret_cast<unsigned long long*>(sums.sums), sums.scales};
  in.slot_grads = slot_grads;
  in.early = true;
  run_classes(plan, batch, precision, true, in, stream);
}

}  // namespace torchrec_hkv::tensor_train::cuda
