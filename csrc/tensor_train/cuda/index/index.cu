// The plan of a group of tables, and the index of a batch.
#include <stdexcept>
#include <string>

#include "common/cuda_check.h"
#include "tensor_train/cuda/contract/tensor_core.cuh"
#include "tensor_train/cuda/index/index.cuh"

namespace torchrec_hkv::tensor_train::cuda {
namespace {

constexpr int32_t kMaxExactRank = 128;
constexpr int kRanks[] = {32, 64, 128, 256};

bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

KernelClass class_of(const TableCuda& table) {
  KernelClass kernel;
  const int32_t rank = max(table.head_r, table.last_r);
  for (const int candidate : kRanks) {
    if (kernel.rank == 0 && rank <= candidate) kernel.rank = candidate;
  }
  if (kernel.rank == 0) {
    throw std::invalid_argument("A Tensor-Train rank is " + std::to_string(rank) +
                                ", but CUDA kernels take at most 256.");
  }
  bool alike = table.head_type == table.middle_type && table.head_type == table.last_type &&
               table.head_type != RowType::kFloat16;
  for (const void* pointer : {table.head, table.middle, table.last}) {
    alike = alike && aligned(pointer);
  }
  for (const float* pointer : {table.head_grad, table.middle_grad, table.last_grad}) {
    alike = alike && aligned(pointer);
  }
  const bool fp32 = table.head_type == RowType::kFloat32;
  kernel.vectors = alike && fp32 && table.head_r % 4 == 0 && table.last_r % 4 == 0;
  const bool whole = alike && table.middle != nullptr && kernel.rank <= kMaxExactRank &&
                     table.head_r == kernel.rank && table.last_r == kernel.rank;
  kernel.whole = kernel.vectors && whole;
  kernel.lasts = kernel.whole && table.last_q % 4 == 0;
  kernel.narrow = kernel.lasts && kernel.rank == 32 && table.head_q == 4 && table.middle_q == 2 &&
                  table.last_q == 4;
  kernel.exact = whole && table.head_q % 4 == 0 && table.middle_q % 4 == 0 && table.last_q % 4 == 0;
  if (kernel.exact) kernel.type = table.head_type;
  kernel.small = kernel.vectors && table.middle != nullptr && table.head_q <= 4 &&
                 table.middle_q <= 4 && table.last_q <= 4;
  kernel.fours = kernel.exact && kernel.small;
  kernel.quads = kernel.small && !kernel.whole && table.head_q == 4 && table.middle_q == 4 &&
                 table.last_q == 4;
  return kernel;
}

// For quotient in index.cuh.
uint32_t inverse_of(int64_t slices) {
  const uint64_t inverse = (uint64_t{1} << 32) / static_cast<uint64_t>(max(slices, int64_t{1}));
  return static_cast<uint32_t>(min(inverse, uint64_t{0xffffffff}));
}

int32_t number_of(Plan* plan, const KernelClass& kernel) {
  for (int32_t i = 0; i < plan->num_classes; ++i) {
    if (plan->classes[i] == kernel) return i;
  }
  plan->classes[plan->num_classes] = kernel;
  return plan->num_classes++;
}

}  // namespace

Plan plan_tables(TableCuda* tables, int32_t num_tables) {
  Plan plan;
  plan.num_tables = num_tables;
  plan.clusters = compute_capability() >= 9;
  int device = 0;
  HKV_CUDA_CHECK(cudaGetDevice(&device));
  plan.multiprocessors = static_cast<int32_t>(multiprocessors());
  int cooperative = 0;
  HKV_CUDA_CHECK(cudaDeviceGetAttribute(&cooperative, cudaDevAttrCooperativeLaunch, device));
  plan.cooperative = cooperative != 0;
  for (int32_t t = 0; t < num_tables; ++t) {
    TableCuda& table = tables[t];
    table.dim = table.head_q * table.middle_q * table.last_q;
    if (table.middle == nullptr && table.middle_q == 1) {
      table.middle_q = table.head_q % 4 == 0 ? 4 : table.head_q % 2 == 0 ? 2 : 1;
      table.head_q /= table.middle_q;
    }
    const auto prefixes = static_cast<unsigned __int128>(table.heads) * table.middles;
    const unsigned __int128 keys = prefixes * table.lasts;
    if (keys >= (static_cast<unsigned __int128>(1) << 62) - plan.num_keys) {
      throw std::invalid_argument("The first " + std::to_string(t + 1) +
                                  " Tensor-Train tables of a group have 2^62 or more ids, but a "
                                  "group must have fewer.");
    }
    const int64_t most = int64_t{1} << 31;
    if (table.heads >= most || table.middles >= most || table.lasts >= most) {
      throw std::invalid_argument("Table " + std::to_string(t) +
                                  " has a core of 2^31 or more slices, but cores must have fewer: "
                                  "use more cores.");
    }
    if (t == 0) plan.dim = table.dim;
    plan.only_lasts = num_tables == 1 ? table.lasts : 0;
    table.heads_inverse = inverse_of(table.heads);
    table.middles_inverse = inverse_of(table.middles);
    table.lasts_inverse = inverse_of(table.lasts);
    table.first_key = plan.num_keys;
    plan.num_keys += static_cast<uint64_t>(keys);
    plan.num_prefixes += static_cast<int64_t>(prefixes);
    plan.widest = max(plan.widest, (table.dim + 3) / 4 * 4);
    plan.one_dim = plan.one_dim && table.dim == tables[0].dim;
    plan.vectors = plan.vectors && table.dim % 4 == 0;
    table.middle_blocks = (table.middle_q + 3) / 4;
    table.blocks = (table.head_q + 3) / 4 * table.middle_blocks;
    table.kernel = number_of(&plan, class_of(table));
    plan.blocks[table.kernel] = max(plan.blocks[table.kernel], table.blocks);
  }
  return plan;
}

size_t index_bytes(const Plan& plan, const BatchCuda& batch) {
  size_t bytes = 0;
  allocate_index(plan, batch, nullptr, &bytes);
  return bytes;
}

size_t index_scratch_bytes(const Plan& plan, const BatchCuda& batch) {
  if (batch.num_ids == 0 || is_small(plan, batch)) return 0;
  if (is_medium(plan, batch)) return medium_scratch_bytes(plan, batch);
  return large_scratch_bytes(plan, batch);
}

void index_batch(const Plan& plan, const BatchCuda& batch, void* index, void* scratch,
                 int64_t* invalid, float* out, cudaStream_t stream) {
  const int64_t most = int64_t{1} << 31;
  const int32_t unit = unit_of(plan, batch);
  if (batch.num_ids >= most || batch.num_bags() >= most ||
      batch.num_rows() * batch.stride / unit >= most) {
    throw std::invalid_argument(
        "A batch of " + std::to_string(batch.num_ids) + " ids in " +
        std::to_string(batch.num_bags()) + " bags, with an output of " +
        std::to_string(batch.num_rows()) + " rows of " + std::to_string(batch.stride) +
        " columns, is too large: ids and bags are to be fewer than 2^31, and values of the output "
        "fewer than 2^33, or 2^31 where dims or columns are not multiples of 4.");
  }
  const Index parts = allocate_index(plan, batch, index, nullptr);
  if (batch.num_ids == 0) {
    HKV_CUDA_CHECK(cudaMemsetAsync(parts.counts, 0, sizeof(IndexCounts), stream));
    if (out != nullptr) {
      HKV_CUDA_CHECK(cudaMemsetAsync(
          out, 0, static_cast<size_t>(batch.num_rows() * batch.stride) * sizeof(float), stream));
    }
    return;
  }
  IndexInput in;
  in.batch = batch;
  in.tables = plan.tables;
  in.num_tables = plan.num_tables;
  in.unit = unit;
  in.may_gather = gathers(plan, batch);
  in.splits_short = plan.num_classes == 1 && plan.classes[0].rank == 32;
  in.num_keys = plan.num_keys;
  in.invalid = reinterpret_cast<unsigned long long*>(invalid);
  in.cleared = batch.pooled ? out : nullptr;
  in.cleared_values = batch.num_rows() * batch.stride;
  if (is_small(plan, batch)) {
    index_small(in, parts, stream);
  } else if (is_medium(plan, batch)) {
    index_medium(plan, in, parts, scratch, stream);
  } else {
    index_large(in, parts, scratch, stream);
  }
}

}  // namespace torchrec_hkv::tensor_train::cuda
