// Dispatcher op that merges the ids of replicas for a sync on CPUs. Its fake is in
// torchrec_hkv/hash_table/fake_ops.
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <numeric>
#include <tuple>
#include <vector>

#include "hash_table/replica_ids.h"
#include "runtime/checks.h"
#include "runtime/table_group.h"

namespace torchrec_hkv::bindings {
using namespace runtime;
namespace {

void check_int64s(const at::Tensor& tensor, const char* name) {
  check_dtype(tensor, name, at::kLong);
  check_device(tensor, name, at::kCPU);
  check_vector(tensor, name);
  TORCH_CHECK_VALUE(tensor.is_contiguous(), name, " must be contiguous.");
}

// ids: the ids of each replica. sizes: for each replica, how many of these are new touched ids,
// other touched ids, and ids that left its table, in this order.
std::vector<hash_table::ReplicaIds> check_replicas(at::TensorList ids, at::IntArrayRef sizes) {
  TORCH_CHECK_VALUE(sizes.size() == 3 * ids.size(), "sizes has ", sizes.size(),
                    " elements, but must have three of each of ", ids.size(), " replicas.");
  std::vector<hash_table::ReplicaIds> replicas;
  int64_t all = 0;
  for (size_t r = 0; r < ids.size(); ++r) {
    check_int64s(ids[r], "ids");
    const at::IntArrayRef of = sizes.slice(3 * r, 3);
    const int64_t n = ids[r].numel();
    TORCH_CHECK_VALUE(std::all_of(of.begin(), of.end(), [](int64_t m) { return m >= 0; }) &&
                          std::accumulate(of.begin(), of.end(), int64_t{0}) == n,
                      "sizes of replica ", r, " are ", of,
                      ", but must not be negative, and add up to its ", n, " ids.");
    replicas.push_back({ids[r].const_data_ptr<int64_t>(), of[0], of[1], of[2]});
    all += n;
  }
  TORCH_CHECK_VALUE(all < UINT32_MAX, "there are ", all, " ids, but must be less than 2^32 - 1.");
  return replicas;
}

// Merges the ids of several replicas. slots: slots of the ids that replica `own_rank` touched,
// counted from the table's first slot. Returns (ids, known, touched, is_new, slots, removed,
// touched_indices, absent):
// - ids: distinct ids that a replica touched, in the order of first occurrence;
// - known: whether a replica that touched or lost the id had it before;
// - touched, is_new: whether this replica touched the id, and whether it was new to this replica;
// - slots: slot in this replica, or -1;
// - removed: distinct ids that left a replica and that no replica touched;
// - touched_indices: index in `ids` of each id that this replica touched;
// - absent: indices of ids without a slot.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor,
           at::Tensor>
merge_ids(int64_t handle, int64_t table, at::TensorList ids, at::IntArrayRef sizes,
          int64_t own_rank, const at::Tensor& slots) {
  const std::shared_ptr<TableGroup> group = TableGroup::from_handle(handle);
  const hash_table::TableView& view = group->view(table);
  check_device(slots, "slots", group->device());
  const std::vector<hash_table::ReplicaIds> replicas = check_replicas(ids, sizes);
  const auto number = static_cast<int64_t>(replicas.size());
  TORCH_CHECK_VALUE(own_rank >= 0 && own_rank < number, "own is ", own_rank,
                    ", but must be one of ", number, " replicas.");
  const int64_t touched_here = replicas[own_rank].touched();
  check_int64s(slots, "slots");
  check_length(slots, "slots", touched_here);
  const auto* const at = slots.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < touched_here; ++i) {
    TORCH_CHECK_VALUE(at[i] >= 0 && at[i] < view.num_slots, "slots has ", at[i],
                      ", but the table has ", view.num_slots, ".");
  }
  int64_t most = 0, max_removed = 0;
  for (const hash_table::ReplicaIds& replica : replicas) {
    most += replica.touched();
    max_removed += replica.num_removed;
  }
  const auto numbers = [&](int64_t n) { return at::empty({n}, slots.options()); };
  const auto marks = [&] { return at::empty({most}, slots.options().dtype(at::kBool)); };
  at::Tensor known = marks(), touched = marks(), is_new = marks();
  at::Tensor matched = numbers(most), slots_here = numbers(most), removed = numbers(max_removed);
  at::Tensor touched_indices = numbers(touched_here);
  at::Tensor absent = numbers(most - touched_here);
  const hash_table::MergedIds out{
      matched.data_ptr<int64_t>(),    known.data_ptr<bool>(),
      touched.data_ptr<bool>(),       is_new.data_ptr<bool>(),
      slots_here.data_ptr<int64_t>(), absent.data_ptr<int64_t>(),
      removed.data_ptr<int64_t>(),    touched_indices.data_ptr<int64_t>()};
  hash_table::MergedCounts found{};
  group->order().run(kReadIndex, [&] {
    found = hash_table::cpu::merge_ids(view, replicas.data(), number, own_rank, at, out,
                                       at::get_num_threads());
  });
  const auto first = [&](const at::Tensor& of) { return of.narrow(0, 0, found.ids); };
  return {first(matched),    first(known),
          first(touched),    first(is_new),
          first(slots_here), removed.narrow(0, 0, found.removed),
          touched_indices,   absent.narrow(0, 0, found.absent)};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchrec_hkv, m) {
  m.def(
      "merge_ids(int group, int table, Tensor[] ids, int[] sizes, int own, Tensor slots) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(torchrec_hkv, CPU, m) { m.impl("merge_ids", &merge_ids); }

}  // namespace torchrec_hkv::bindings
