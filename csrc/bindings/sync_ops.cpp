// Dispatcher ops for syncs of replicas and for deltas: they find the changed slots of a table, and
// read and write rows with their states as one matrix. Slots are counted from the table's first
// slot. Fakes are in torchrec_hkv/hash_table/fake_ops.
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <tuple>
#include <vector>

#include "bindings/register.h"
#include "hash_table/sync_kernels.h"
#include "runtime/checks.h"
#include "runtime/on_device.h"
#include "runtime/score_keys.h"
#include "runtime/table_group.h"

namespace torchrec_hkv::bindings {
using namespace runtime;
namespace {

using hash_table::TableView;

void check_marks(const at::Tensor& marks, const char* name, int64_t n, at::Device device) {
  check_dtype(marks, name, at::kBool);
  check_device(marks, name, device);
  check_length(marks, name, n);
  TORCH_CHECK_VALUE(marks.is_contiguous(), name, " must be contiguous.");
}

void check_range(const TableView& view, int64_t first, int64_t n, int64_t since) {
  TORCH_CHECK_VALUE(first >= 0 && first <= view.num_slots - n, "slots from ", first, " to ",
                    first + n, " were asked for, but the table has ", view.num_slots, ".");
  TORCH_CHECK_VALUE(since >= 0, "since is ", since, ", but must be at least 0.");
}

// Returns (slots, ascending; bits of SlotChange; ids, undefined for free slots) of the slots from
// `first` on that may have changed. counters: only selects the device. occupied: whether the slots
// had entries before. marked: whether entries have changed without a lookup. since: entries that
// were looked up in this step or later have changed. moved: whether entries may have moved.
std::tuple<at::Tensor, at::Tensor, at::Tensor> slot_changes(const at::Tensor& counters,
                                                            int64_t handle, int64_t table,
                                                            int64_t first,
                                                            const at::Tensor& occupied,
                                                            const std::optional<at::Tensor>& marked,
                                                            int64_t since, bool moved) {
  const std::shared_ptr<TableGroup> group = TableGroup::from_handle(handle);
  check_device(counters, "counters", group->device());
  const TableView& view = group->view(table);
  const int64_t n = occupied.numel();
  check_marks(occupied, "occupied", n, group->device());
  if (marked) check_marks(*marked, "marked", n, group->device());
  check_range(view, first, n, since);
  at::Tensor changes = at::empty({n}, occupied.options().dtype(at::kByte));
  const hash_table::SlotChanges request{first,
                                        n,
                                        occupied.const_data_ptr<bool>(),
                                        marked ? marked->const_data_ptr<bool>() : nullptr,
                                        static_cast<uint32_t>(std::min<int64_t>(since, UINT32_MAX)),
                                        moved,
                                        changes.data_ptr<uint8_t>()};
  return group->order().run(kReadIndex, [&] {
    HKV_ON_DEVICE(group->device(), hash_table::cpu::slot_changes(view, request, threads),
                  hash_table::cuda::slot_changes(view, request, stream));
    at::Tensor slots, bits;
    if (group->device().is_cuda()) {
      const at::Tensor places = changes.nonzero().flatten();
      bits = changes.index_select(0, places);
      slots = places.add(first);
    } else {
      const int64_t number = hash_table::cpu::count_changes(request.changes, n);
      slots = at::empty({number}, occupied.options().dtype(at::kLong));
      bits = at::empty({number}, changes.options());
      hash_table::cpu::list_changes(request.changes, n, first, slots.data_ptr<int64_t>(),
                                    bits.data_ptr<uint8_t>());
    }
    return std::make_tuple(slots, bits, group->ids_and_steps(table, slots).first);
  });
}

void check_slots(const at::Tensor& slots, at::Device device) {
  check_dtype(slots, "slots", at::kLong);
  check_device(slots, "slots", device);
  check_vector(slots, "slots");
  TORCH_CHECK_VALUE(slots.is_contiguous(), "slots must be contiguous.");
}

// Replaces the entries of a snapshot in host memory at distinct `slots`, and returns the previous
// ids. snapshot_ids and snapshot_occupied have all slots. They must be pinned if the other tensors
// are on a GPU, which does not check that slots are in range.
at::Tensor exchange_contents(at::Tensor snapshot_ids, at::Tensor snapshot_occupied,
                             const at::Tensor& slots, const at::Tensor& ids,
                             const at::Tensor& occupied) {
  const int64_t n = slots.numel(), all = snapshot_ids.numel();
  check_slots(slots, slots.device());
  check_dtype(ids, "ids", at::kLong);
  check_device(ids, "ids", slots.device());
  check_length(ids, "ids", n);
  TORCH_CHECK_VALUE(ids.is_contiguous(), "ids must be contiguous.");
  check_marks(occupied, "occupied", n, slots.device());
  check_dtype(snapshot_ids, "snapshot_ids", at::kLong);
  check_vector(snapshot_ids, "snapshot_ids");
  check_device(snapshot_ids, "snapshot_ids", at::kCPU);
  TORCH_CHECK_VALUE(snapshot_ids.is_contiguous(), "snapshot_ids must be contiguous.");
  check_marks(snapshot_occupied, "snapshot_occupied", all, at::kCPU);
  TORCH_CHECK_VALUE(slots.is_cpu() || (snapshot_ids.is_pinned() && snapshot_occupied.is_pinned()),
                    "the snapshot must be pinned, because slots are on ", slots.device(), ".");
  const hash_table::SlotContents contents{snapshot_ids.data_ptr<int64_t>(),
                                          snapshot_occupied.data_ptr<bool>()};
  at::Tensor previous = at::empty_like(ids);
  const auto* const at = slots.const_data_ptr<int64_t>();
  const auto* const present = ids.const_data_ptr<int64_t>();
  const bool* const is_there = occupied.const_data_ptr<bool>();
  if (slots.is_cpu()) {
    for (int64_t i = 0; i < n; ++i) {
      TORCH_CHECK_VALUE(at[i] >= 0 && at[i] < all, "slots has ", at[i], ", but the snapshot has ",
                        all, " slots.");
    }
  }
  HKV_ON_DEVICE(slots.device(),
                hash_table::cpu::exchange_contents(contents, at, present, is_there, n,
                                                   previous.data_ptr<int64_t>()),
                hash_table::cuda::exchange_contents(contents, at, present, is_there, n,
                                                    previous.data_ptr<int64_t>(), stream));
  return previous;
}

template <typename T>
at::Tensor tensor_of(const std::vector<T>& values, at::ScalarType dtype) {
  at::Tensor tensor = at::empty({static_cast<int64_t>(values.size())}, at::dtype(dtype));
  if (!values.empty()) std::memcpy(tensor.data_ptr(), values.data(), values.size() * sizeof(T));
  return tensor;
}

// Returns (slots, ids, whether they are touched, whether they stayed, slots whose ids have left,
// these ids) of the differences in the slots from `first` on; see SlotDifferences. ids and
// occupied: the previous contents of the slots; replaced by the current contents. freed: whether
// slots may have been freed other than by a lookup that replaced the entry. Other arguments as in
// slot_changes.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> compare_slots(
    const at::Tensor& counters, int64_t handle, int64_t table, int64_t first, at::Tensor ids,
    at::Tensor occupied, const std::optional<at::Tensor>& marked, int64_t since, bool moved,
    bool freed) {
  const std::shared_ptr<TableGroup> group = TableGroup::from_handle(handle);
  check_device(counters, "counters", group->device());
  const TableView& view = group->view(table);
  const int64_t n = occupied.numel();
  check_marks(occupied, "occupied", n, group->device());
  if (marked) check_marks(*marked, "marked", n, group->device());
  check_dtype(ids, "ids", at::kLong);
  check_device(ids, "ids", group->device());
  check_length(ids, "ids", n);
  TORCH_CHECK_VALUE(ids.is_contiguous(), "ids must be contiguous.");
  check_range(view, first, n, since);
  const hash_table::SlotComparison comparison{
      first,
      n,
      ids.data_ptr<int64_t>(),
      occupied.data_ptr<bool>(),
      marked ? marked->const_data_ptr<bool>() : nullptr,
      static_cast<uint32_t>(std::min<int64_t>(since, UINT32_MAX)),
      moved,
      freed};
  hash_table::SlotDifferences found;
  group->order().run(kReadIndex, [&] {
    hash_table::cpu::compare_slots(view, comparison, found, at::get_num_threads());
  });
  return {tensor_of(found.slots, at::kLong),         tensor_of(found.ids, at::kLong),
          tensor_of(found.touched, at::kBool),       tensor_of(found.unchanged, at::kBool),
          tensor_of(found.removed_slots, at::kLong), tensor_of(found.removed_ids, at::kLong)};
}

// Checks a matrix for rows and, if `states` is true, their states.
hash_table::ValueMatrix check_values(const TableGroup& group, const TableView& view, int64_t n,
                                     const at::Tensor& values, bool states) {
  TORCH_CHECK_TYPE(view.rows.type == RowType::kFloat32,
                   "values are read and written of tables of float32 rows only; use read_slots and "
                   "overwrite_slots.");
  check_dtype(values, "values", at::kFloat);
  check_device(values, "values", group.device());
  const int64_t columns = view.dim() + (states ? view.states.width : 0);
  TORCH_CHECK_VALUE(values.dim() == 2 && values.size(0) == n && values.size(1) >= columns,
                    "values must have shape [", n, ", at least ", columns, "], but has ",
                    values.sizes(), ".");
  TORCH_CHECK_VALUE(values.stride(1) == 1, "the columns of values must be contiguous.");
  return hash_table::ValueMatrix{values.data_ptr<float>(), values.stride(0), states};
}

// Writes rows and states to `values`. Returns (last steps, scores or undefined).
std::tuple<at::Tensor, at::Tensor> read_values(int64_t handle, int64_t table,
                                               const at::Tensor& slots, at::Tensor values,
                                               bool states) {
  const std::shared_ptr<TableGroup> group = TableGroup::from_handle(handle);
  const TableView& view = group->view(table);
  check_slots(slots, group->device());
  const int64_t n = slots.numel();
  const hash_table::ValueMatrix out = check_values(*group, view, n, values, states);
  const bool scored = keeps_scores(view.eviction);
  at::Tensor last_steps = at::empty({n}, slots.options().dtype(at::kInt));
  at::Tensor keys = at::empty({scored ? n : 0}, slots.options());
  const int64_t* const at = slots.const_data_ptr<int64_t>();
  auto* const steps_out = reinterpret_cast<uint32_t*>(last_steps.data_ptr<int32_t>());
  auto* const keys_out = scored ? reinterpret_cast<uint64_t*>(keys.data_ptr<int64_t>()) : nullptr;
  HKV_ON_GROUP(*group, kReadAll,
               hash_table::cpu::read_values(view, at, n, out, steps_out, keys_out, threads),
               hash_table::cuda::read_values(view, at, n, out, steps_out, keys_out, stream));
  return {last_steps, converted(*group, table, keys)};
}

void write_values(at::Tensor counters, int64_t handle, int64_t table, const at::Tensor& slots,
                  const at::Tensor& ids, const at::Tensor& values, const at::Tensor& last_steps,
                  const at::Tensor& scores, bool states) {
  const std::shared_ptr<TableGroup> group = TableGroup::from_handle(handle);
  check_device(counters, "counters", group->device());
  const TableView& view = group->view(table);
  check_slots(slots, group->device());
  const int64_t n = slots.numel();
  const hash_table::ValueMatrix from = check_values(*group, view, n, values, states);
  const auto check = [&](const at::Tensor& tensor, const char* name, at::ScalarType dtype,
                         int64_t length) {
    check_dtype(tensor, name, dtype);
    check_device(tensor, name, group->device());
    check_length(tensor, name, length);
    TORCH_CHECK_VALUE(tensor.is_contiguous(), name, " must be contiguous.");
  };
  check(ids, "ids", at::kLong, n);
  check(last_steps, "last_steps", at::kInt, n);
  check(scores, "scores", at::kLong, keeps_scores(view.eviction) ? n : 0);
  const at::Tensor keys = converted(*group, table, scores);
  const int64_t* const at = slots.const_data_ptr<int64_t>();
  const int64_t* const of = ids.const_data_ptr<int64_t>();
  const auto* const steps = reinterpret_cast<const uint32_t*>(last_steps.const_data_ptr<int32_t>());
  const auto* const keys_in =
      keeps_scores(view.eviction)
          ? reinterpret_cast<const uint64_t*>(keys.const_data_ptr<int64_t>())
          : nullptr;
  HKV_ON_GROUP(*group, kWriteAll,
               hash_table::cpu::write_values(view, at, n, of, from, steps, keys_in, threads),
               hash_table::cuda::write_values(view, at, n, of, from, steps, keys_in, stream));
}

// The ReplicaRecords of n entries of a table in a message, from word `begin` on.
hash_table::ReplicaRecords check_records(const TableGroup& group, const TableView& view, int64_t n,
                                         const at::Tensor& message, const char* name, int64_t begin,
                                         bool states) {
  const int64_t columns = view.dim() + (states ? view.states.width : 0);
  const int64_t words = (n * (columns + 2) + 1) / 2;
  check_dtype(message, name, at::kLong);
  check_device(message, name, group.device());
  check_vector(message, name);
  TORCH_CHECK_VALUE(message.is_contiguous(), name, " must be contiguous.");
  TORCH_CHECK_VALUE(begin >= 0 && begin <= message.numel() - words, name, " has ", message.numel(),
                    " words, but ", n, " records from ", begin, " on take ", words, ".");
  auto* const records = reinterpret_cast<float*>(message.data_ptr<int64_t>() + begin);
  return hash_table::ReplicaRecords{records, columns, states};
}

// Elements [first, end) of the vectors of a sync. CPU only.
struct SyncSpan {
  int64_t first, n;

  SyncSpan(const TableView& view, const at::Tensor& slots, int64_t first, int64_t end)
      : first(first), n(end - first) {
    TORCH_CHECK_VALUE(first >= 0 && first <= end && end <= slots.numel(), "elements from ", first,
                      " to ", end, " were asked for, but slots has ", slots.numel(), ".");
    const int64_t* const at = slots.const_data_ptr<int64_t>();
    for (int64_t i = first; i < end; ++i) {
      TORCH_CHECK_VALUE(at[i] >= hash_table::kNoSlot && at[i] < view.num_slots, "slots has ", at[i],
                        ", but the table has ", view.num_slots, ".");
    }
  }

  template <typename T>
  const T* of(const at::Tensor& vector) const {
    return vector.const_data_ptr<T>() + first;
  }
};

// Writes records of the entries at slots[first] to slots[end - 1] to a message, from word `begin`
// on. Returns their scores if the table stores scores.
at::Tensor pack_records(int64_t handle, int64_t table, const at::Tensor& slots,
                        const at::Tensor& is_new, int64_t first, int64_t end, at::Tensor message,
                        int64_t begin, bool states) {
  const std::shared_ptr<TableGroup> group = TableGroup::from_handle(handle);
  const TableView& view = group->view(table);
  check_slots(slots, group->device());
  check_marks(is_new, "is_new", slots.numel(), group->device());
  const SyncSpan span(view, slots, first, end);
  const hash_table::ReplicaRecords out =
      check_records(*group, view, span.n, message, "message", begin, states);
  const bool scored = keeps_scores(view.eviction);
  at::Tensor keys = at::empty({scored ? span.n : 0}, slots.options());
  group->order().run(kReadAll, [&] {
    hash_table::cpu::pack_records(
        view, span.of<int64_t>(slots), span.of<bool>(is_new), span.n, out,
        scored ? reinterpret_cast<uint64_t*>(keys.data_ptr<int64_t>()) : nullptr,
        at::get_num_threads());
  });
  return converted(*group, table, keys);
}

// Merges the corresponding records of two messages. scores: scores of the entries in [first, end);
// ids and known: for all elements of slots.
void merge_records(at::Tensor counters, int64_t handle, int64_t table, const at::Tensor& slots,
                   const at::Tensor& ids, const at::Tensor& known, int64_t first, int64_t end,
                   at::Tensor message, const at::Tensor& theirs, int64_t begin,
                   const at::Tensor& scores, bool states, int64_t highest_column) {
  const std::shared_ptr<TableGroup> group = TableGroup::from_handle(handle);
  check_device(counters, "counters", group->device());
  const TableView& view = group->view(table);
  check_slots(slots, group->device());
  const SyncSpan span(view, slots, first, end);
  const auto check = [&](const at::Tensor& tensor, const char* name, int64_t length) {
    check_dtype(tensor, name, at::kLong);
    check_device(tensor, name, group->device());
    check_length(tensor, name, length);
    TORCH_CHECK_VALUE(tensor.is_contiguous(), name, " must be contiguous.");
  };
  const bool scored = keeps_scores(view.eviction);
  check(ids, "ids", slots.numel());
  check(scores, "scores", scored ? span.n : 0);
  check_marks(known, "known", slots.numel(), group->device());
  const auto records = [&](const at::Tensor& of, const char* name) {
    return check_records(*group, view, span.n, of, name, begin, states);
  };
  const hash_table::ReplicaRecords own_records = records(message, "message");
  const float* const other = records(theirs, "theirs").data;
  TORCH_CHECK_VALUE(highest_column >= -1 && highest_column < own_records.columns,
                    "highest_column is ", highest_column, ", but must be -1 or one of ",
                    own_records.columns, " columns.");
  const at::Tensor keys = converted(*group, table, scores);
  const auto* const keys_in =
      scored ? reinterpret_cast<const uint64_t*>(keys.const_data_ptr<int64_t>()) : nullptr;
  const hash_table::MergedEntries entries{
      span.of<int64_t>(slots), span.of<int64_t>(ids), span.of<bool>(known), keys_in, span.n,
      highest_column};
  group->order().run(kWriteAll, [&] {
    hash_table::cpu::merge_records(view, entries, own_records, other, at::get_num_threads());
  });
}

void add_sync_ops(torch::Library& m) {
  m.impl("slot_changes", &slot_changes);
  m.impl("exchange_contents", &exchange_contents);
  m.impl("read_values", &read_values);
  m.impl("write_values", &write_values);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchrec_hkv, m) {
  m.def(
      "slot_changes(Tensor counters, int group, int table, int first, Tensor occupied, "
      "Tensor? marked, int since, bool moved) -> (Tensor, Tensor, Tensor)");
  m.def(
      "exchange_contents(Tensor(a!) snapshot_ids, Tensor(b!) snapshot_occupied, Tensor slots, "
      "Tensor ids, Tensor occupied) -> Tensor");
  m.def(
      "read_values(int group, int table, Tensor slots, Tensor(a!) values, bool states) "
      "-> (Tensor, Tensor)");
  m.def(
      "write_values(Tensor(a!) counters, int group, int table, Tensor slots, Tensor ids, "
      "Tensor values, Tensor last_steps, Tensor scores, bool states) -> ()");
  // For groups on a CPU only.
  m.def(
      "compare_slots(Tensor counters, int group, int table, int first, Tensor(a!) ids, "
      "Tensor(b!) occupied, Tensor? marked, int since, bool moved, bool freed) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "pack_records(int group, int table, Tensor slots, Tensor is_new, int first, int end, "
      "Tensor(a!) message, int begin, bool states) -> Tensor");
  m.def(
      "merge_records(Tensor(a!) counters, int group, int table, Tensor slots, Tensor ids, "
      "Tensor known, int first, int end, Tensor(b!) message, Tensor theirs, int begin, "
      "Tensor scores, bool states, int highest_column) -> ()");
}

HKV_REGISTER_ON_DEVICES(add_sync_ops)

TORCH_LIBRARY_IMPL(torchrec_hkv, CPU, m) {
  m.impl("compare_slots", &compare_slots);
  m.impl("pack_records", &pack_records);
  m.impl("merge_records", &merge_records);
}

}  // namespace torchrec_hkv::bindings
