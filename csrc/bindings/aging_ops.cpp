// Dispatcher op that removes expired entries. Counted calls remove some, too. Its fake is in
// torchrec_hkv/hash_table/fake_ops.
#include <torch/library.h>

#include <algorithm>

#include "bindings/register.h"
#include "hash_table/aging.h"
#include "hash_table/kernels.h"
#include "runtime/checks.h"
#include "runtime/on_device.h"
#include "runtime/table_group.h"

namespace torchrec_hkv::bindings {
using namespace runtime;
namespace {

// Removes all entries that are too old for their tables and have no pending backward.
void expire(at::Tensor counters, int64_t handle) {
  const std::shared_ptr<TableGroup> owner = TableGroup::from_handle(handle);
  const TableGroup& group = *owner;
  check_device(counters, "counters", group.device());
  const hash_table::Aging& aging = group.aging();
  if (aging.expire_after == nullptr) return;
  owner->note_removal();
#ifdef TORCHREC_HKV_CUDA
  int64_t max_buckets = 0;  // at full capacity, because a CUDA graph may be replayed after growth
  for (int64_t t = 0; t < group.num_tables(); ++t) {
    max_buckets = std::max(max_buckets, group.full_slots(t) / group.view(t).bucket_slots);
  }
#endif
  const CountedCall call(group.clock(), std::nullopt, /*counts=*/false);
  const hash_table::CallContext context = call.context(nullptr);
  HKV_ON_GROUP(
      group, call.use(/*inserts=*/false),
      for (int32_t t = 0; t < aging.num_tables; ++t) {
        const auto sweep = hash_table::sweep_of_all(aging.expire_after[t]);
        hash_table::cpu::expire(group.view(t), sweep, context, threads);
      },
      hash_table::cuda::tick(call.clock(), call.tick(), stream);
      hash_table::cuda::expire(group.views(), aging.expire_after, aging.num_tables, /*all=*/true,
                               static_cast<uint32_t>(max_buckets), context, stream));
}

void add_aging_ops(torch::Library& m) { m.impl("expire", &expire); }

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchrec_hkv, m) { m.def("expire(Tensor(a!) counters, int group) -> ()"); }

HKV_REGISTER_ON_DEVICES(add_aging_ops)

}  // namespace torchrec_hkv::bindings
