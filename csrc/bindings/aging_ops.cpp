// Dispatcher ops of what happens to a table as calls go by: entries expire, counts of ids that are
// not admitted are halved. Fakes are in torchrec_hkv/hash_table/ops.py.
#include <torch/library.h>

#include <algorithm>

#include "bindings/checks.h"
#include "bindings/on_device.h"
#include "bindings/table_group.h"
#include "hash_table/admission_kernels.h"
#include "hash_table/expiry.h"

namespace torchrec_hkv::bindings {
namespace {

void expire(at::Tensor counters, int64_t handle, int64_t step, bool all) {
  const std::shared_ptr<TableGroup> owner = TableGroup::from_handle(handle);
  const TableGroup& group = *owner;
  check_device(counters, "counters", group.device());
  const hash_table::Visit visit = group.visit(step);
  const std::vector<uint32_t>& ages = group.expire_after();
#ifdef TORCHREC_HKV_CUDA
  uint32_t most_buckets = 0;
  for (int64_t t = 0; t < group.num_tables(); ++t) {
    if (ages[t] == 0) continue;
    const uint32_t period = all ? 1 : hash_table::sweep_period(ages[t]);
    most_buckets = std::max(most_buckets, (group.view(t).num_buckets - 1) / period + 1);
  }
#endif
  HKV_ON_DEVICE(
      group.device(),
      for (int64_t t = 0; t < group.num_tables(); ++t) {
        const auto sweep =
            all ? hash_table::sweep_of_all(ages[t]) : hash_table::sweep_of_call(ages[t], visit.now);
        hash_table::cpu::expire(group.view(t), sweep, visit, threads);
      },
      hash_table::cuda::expire(group.views(), group.expire_after_on_device(),
                               static_cast<int32_t>(group.num_tables()), all, most_buckets, visit,
                               stream));
}

void halve_counts(at::Tensor counters, int64_t handle, int64_t step) {
  const std::shared_ptr<TableGroup> owner = TableGroup::from_handle(handle);
  const TableGroup& group = *owner;
  check_device(counters, "counters", group.device());
  const hash_table::Visit visit = group.visit(step);
  const hash_table::Admissions* admissions = group.admission().get();
  if (admissions == nullptr || !admissions->halved) return;
  HKV_ON_DEVICE(group.device(), hash_table::cpu::halve_counts(*admissions, visit, threads),
                hash_table::cuda::halve_counts(*admissions, visit, stream));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchrec_hkv, m) {
  m.def("expire(Tensor(a!) counters, int group, int step, bool all) -> ()");
  m.def("halve_counts(Tensor(a!) counters, int group, int step) -> ()");
}

#define HKV_REGISTER(m)      \
  m.impl("expire", &expire); \
  m.impl("halve_counts", &halve_counts);

TORCH_LIBRARY_IMPL(torchrec_hkv, CPU, m){HKV_REGISTER(m)}
#ifdef TORCHREC_HKV_CUDA
TORCH_LIBRARY_IMPL(torchrec_hkv, CUDA, m) {
  HKV_REGISTER(m)
}
#endif

}  // namespace torchrec_hkv::bindings
