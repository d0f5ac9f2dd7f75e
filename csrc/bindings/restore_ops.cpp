// Dispatcher ops that read a table in the order of a file and write it back. Slots are counted from
// the table's first slot. Fakes are in torchrec_hkv/hash_table/fake_ops.
#include <torch/library.h>

#include <optional>
#include <tuple>
#include <vector>

#include "bindings/register.h"
#include "hash_table/kernels.h"
#include "hash_table/saved_kernels.h"
#include "runtime/checks.h"
#include "runtime/on_device.h"
#include "runtime/score_keys.h"
#include "runtime/table_group.h"

namespace torchrec_hkv::bindings {
using namespace runtime;
namespace {

using hash_table::TableView;

void check_given(const at::Tensor& tensor, const char* name, at::ScalarType dtype,
                 at::IntArrayRef shape, at::Device device) {
  check_dtype(tensor, name, dtype);
  check_device(tensor, name, device);
  TORCH_CHECK_VALUE(tensor.sizes() == shape, name, " must have shape ", shape, ", but has ",
                    tensor.sizes(), ".");
  TORCH_CHECK_VALUE(tensor.is_contiguous(), name, " must be contiguous.");
}

// keys: output for the stored scores, to which the result points.
hash_table::Entries check_entries(const TableGroup& group, int64_t table, const at::Tensor& ids,
                                  const at::Tensor& rows, const at::Tensor& last_steps,
                                  const at::Tensor& scores, const at::Tensor& states,
                                  at::Tensor* keys) {
  const TableView& view = group.view(table);
  const at::Device device = group.device();
  const int64_t n = ids.numel();
  check_given(ids, "ids", at::kLong, {n}, device);
  check_given(rows, "rows", group.row_dtype(table), {n, view.rows.stored_width()}, device);
  check_given(last_steps, "last_steps", at::kInt, {n}, device);
  check_given(scores, "scores", at::kLong, {keeps_scores(view.eviction) ? n : 0}, device);
  check_given(states, "states", at::kFloat, {n, view.states.width}, device);
  *keys = converted(group, table, scores);
  return hash_table::Entries{
      ids.const_data_ptr<int64_t>(),
      static_cast<const char*>(rows.const_data_ptr()),
      reinterpret_cast<const uint32_t*>(last_steps.const_data_ptr<int32_t>()),
      keeps_scores(view.eviction)
          ? reinterpret_cast<const uint64_t*>(keys->const_data_ptr<int64_t>())
          : nullptr,
      states.const_data_ptr<float>(),
      n};
}

// counters: only selects the device.
at::Tensor slot_owners(const at::Tensor& counters, int64_t handle, int64_t table, int64_t first,
                       int64_t n) {
  const std::shared_ptr<TableGroup> group = TableGroup::from_handle(handle);
  check_device(counters, "counters", group->device());
  const TableView& view = group->view(table);
  TORCH_CHECK_VALUE(first >= 0 && n >= 0 && first <= view.num_slots - n, "slots from ", first,
                    " to ", first + n, " were asked for, but the table has ", view.num_slots, ".");
  at::Tensor owners = at::empty({n}, at::dtype(at::kInt).device(group->device()));
  int32_t* out = owners.data_ptr<int32_t>();
  HKV_ON_GROUP(*group, kReadIndex, hash_table::cpu::slot_owners(view, first, n, out, threads),
               hash_table::cuda::slot_owners(view, first, n, out, stream));
  return owners;
}

at::Tensor gather(const TableView& view, const hash_table::RowStore& store, at::ScalarType dtype,
                  const at::Tensor& slots) {
  at::Tensor out = at::empty({slots.numel(), store.stored_width()}, slots.options().dtype(dtype));
  const int64_t* at = slots.const_data_ptr<int64_t>();
  char* to = static_cast<char*>(out.data_ptr());
  HKV_ON_DEVICE(slots.device(),
                hash_table::cpu::gather(view, store, at, slots.numel(), to, threads),
                hash_table::cuda::gather(view, store, at, slots.numel(), to, stream));
  return out;
}

// Returns (ids, rows, last steps, scores, states) of slots, which must not be -1. The scores are
// empty if the table stores none.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> read_slots(
    int64_t handle, int64_t table, const at::Tensor& slots) {
  const std::shared_ptr<TableGroup> group = TableGroup::from_handle(handle);
  const TableView& view = group->view(table);
  check_given(slots, "slots", at::kLong, {slots.numel()}, group->device());
  const auto options = slots.options();
  return group->order().run(kReadAll, [&] {
    at::Tensor scores = at::empty({0}, options);
    if (keeps_scores(view.eviction)) {
      scores = converted(*group, table, group->stored_scores(table, slots));
    }
    const auto [ids, last_steps] = group->ids_and_steps(table, slots);
    return std::make_tuple(ids, gather(view, view.rows, group->row_dtype(table), slots), last_steps,
                           scores, gather(view, view.states, at::kFloat, slots));
  });
}

at::Tensor restore_slots(at::Tensor counters, int64_t handle, int64_t table,
                         const at::Tensor& slots, const at::Tensor& ids, const at::Tensor& rows,
                         const at::Tensor& last_steps, const at::Tensor& scores,
                         const at::Tensor& states) {
  const std::shared_ptr<TableGroup> group = TableGroup::from_handle(handle);
  check_device(counters, "counters", group->device());
  at::Tensor keys;
  const hash_table::Entries entries =
      check_entries(*group, table, ids, rows, last_steps, scores, states, &keys);
  group->expect_entries(table, entries.n);
  check_given(slots, "slots", at::kLong, {entries.n}, group->device());
  at::Tensor placed = at::empty({entries.n}, ids.options().dtype(at::kBool));
  const TableView& view = group->view(table);
  const int64_t* at = slots.const_data_ptr<int64_t>();
  bool* out = placed.data_ptr<bool>();
  HKV_ON_GROUP(*group, kWriteAll, hash_table::cpu::restore_slots(view, entries, at, out, threads),
               hash_table::cuda::restore_slots(view, entries, at, out, stream));
  return placed;
}

void overwrite_slots(at::Tensor counters, int64_t handle, int64_t table, const at::Tensor& slots,
                     const at::Tensor& ids, const at::Tensor& rows, const at::Tensor& last_steps,
                     const at::Tensor& scores, const at::Tensor& states) {
  const std::shared_ptr<TableGroup> group = TableGroup::from_handle(handle);
  check_device(counters, "counters", group->device());
  at::Tensor keys;
  const hash_table::Entries entries =
      check_entries(*group, table, ids, rows, last_steps, scores, states, &keys);
  check_given(slots, "slots", at::kLong, {entries.n}, group->device());
  const TableView& view = group->view(table);
  const int64_t* at = slots.const_data_ptr<int64_t>();
  HKV_ON_GROUP(*group, kWriteAll, hash_table::cpu::overwrite_slots(view, entries, at, threads),
               hash_table::cuda::overwrite_slots(view, entries, at, stream));
}

#ifdef TORCHREC_HKV_CUDA
// Like cuda::restore_entries, but in the order of the entries. Returns a permutation of the
// entries: first those that displaced an entry, in this order. Displaced entries are at the same
// positions.
at::Tensor restore_in_order(const TableGroup& group, const TableView& view,
                            const hash_table::Entries& entries,
                            const hash_table::DisplacedEntries& displaced) {
  const auto options = at::dtype(at::kLong).device(group.device());
  return group.order().run(kWriteAll, [&] {
    const at::Tensor buckets = at::empty({2 * entries.n}, options);
    HKV_ON_DEVICE(
        group.device(), ,
        hash_table::cuda::entry_buckets(view, entries, buckets.data_ptr<int64_t>(), stream));
    const auto [sorted, places] =
        at::sort(buckets, /*stable=*/true, /*dim=*/0, /*descending=*/false);
    const at::Tensor scratch =
        at::zeros({2 * entries.n + view.num_buckets + 1}, options.dtype(at::kInt));
    const at::Tensor moved = at::zeros({entries.n}, options.dtype(at::kByte));
    auto* const words = reinterpret_cast<uint32_t*>(scratch.data_ptr<int32_t>());
    const hash_table::cuda::RestoreOrder order{words + 1, words + 1 + 2 * entries.n, words,
                                               moved.data_ptr<uint8_t>()};
    const int64_t* at = sorted.const_data_ptr<int64_t>();
    const int64_t* stood = places.const_data_ptr<int64_t>();
    HKV_ON_DEVICE(group.device(), ,
                  hash_table::cuda::restore_entries_in_order(view, entries, displaced, at, stood,
                                                             order, stream));
    return std::get<1>(at::sort(moved, /*stable=*/true, /*dim=*/0, /*descending=*/true));
  });
}
#endif

// Returns (ids, rows, last steps, scores, states) of displaced entries, and [number of displaced
// entries, number of entries without a slot].
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> restore_entries(
    at::Tensor counters, int64_t handle, int64_t table, const at::Tensor& ids,
    const at::Tensor& rows, const at::Tensor& last_steps, const at::Tensor& scores,
    const at::Tensor& states) {
  const std::shared_ptr<TableGroup> group = TableGroup::from_handle(handle);
  check_device(counters, "counters", group->device());
  at::Tensor keys;
  const hash_table::Entries entries =
      check_entries(*group, table, ids, rows, last_steps, scores, states, &keys);
  group->expect_entries(table, entries.n);
  at::Tensor out_ids = at::empty_like(ids), out_rows = at::empty_like(rows);
  at::Tensor out_steps = at::empty_like(last_steps), out_scores = at::empty_like(scores);
  at::Tensor out_states = at::empty_like(states);
  at::Tensor counts = at::zeros({2}, ids.options());
  const TableView& view = group->view(table);
  const hash_table::DisplacedEntries displaced{
      out_ids.data_ptr<int64_t>(),
      static_cast<char*>(out_rows.data_ptr()),
      reinterpret_cast<uint32_t*>(out_steps.data_ptr<int32_t>()),
      keeps_scores(view.eviction) ? reinterpret_cast<uint64_t*>(out_scores.data_ptr<int64_t>())
                                  : nullptr,
      out_states.data_ptr<float>(),
      reinterpret_cast<uint64_t*>(counts.data_ptr<int64_t>())};
#ifdef TORCHREC_HKV_CUDA
  if (group->device().is_cuda() && group->deterministic()) {
    const at::Tensor first = restore_in_order(*group, view, entries, displaced);
    const auto sorted = [&](const at::Tensor& out) {
      return out.size(0) == entries.n ? out.index_select(0, first) : out;  // no scores under LRU
    };
    return {sorted(out_ids),    sorted(out_rows),
            sorted(out_steps),  converted(*group, table, sorted(out_scores)),
            sorted(out_states), counts};
  }
#endif
  at::Tensor waiting =
      at::empty({group->device().is_cuda() ? entries.n : 0}, ids.options().dtype(at::kBool));
  [[maybe_unused]] bool* scratch = waiting.data_ptr<bool>();
  HKV_ON_GROUP(*group, kWriteAll, hash_table::cpu::restore_entries(view, entries, displaced),
               hash_table::cuda::restore_entries(view, entries, displaced, scratch, stream));
  out_scores = converted(*group, table, out_scores);
  return {out_ids, out_rows, out_steps, out_scores, out_states, counts};
}

void check_geometry(int64_t num_buckets, int64_t bucket_slots) {
  TORCH_CHECK_VALUE(num_buckets >= 1 && num_buckets <= 0xffffffffll && bucket_slots >= 1 &&
                        bucket_slots <= kBucketDigests,
                    "there are ", num_buckets, " buckets of ", bucket_slots,
                    " slots, but there must be 1 to 2^32 - 1 buckets of 1 to ", kBucketDigests,
                    " slots.");
}

at::Tensor find_misplaced(const at::Tensor& ids, const at::Tensor& slots, int64_t num_buckets,
                          int64_t bucket_slots, int64_t owner_begin, int64_t owner_end) {
  const int64_t n = ids.numel();
  check_given(ids, "ids", at::kLong, {n}, at::kCPU);
  check_given(slots, "slots", at::kLong, {n}, at::kCPU);
  check_geometry(num_buckets, bucket_slots);
  at::Tensor misplaced = at::empty({n}, ids.options().dtype(at::kBool));
  hash_table::cpu::find_misplaced(ids.const_data_ptr<int64_t>(), slots.const_data_ptr<int64_t>(), n,
                                  static_cast<uint32_t>(num_buckets),
                                  static_cast<int32_t>(bucket_slots), owner_begin, owner_end,
                                  misplaced.data_ptr<bool>(), at::get_num_threads());
  return misplaced;
}

// Like restore_slots, for several batches, each with ascending slots. Returns the number of entries
// that were not placed. CPU only.
int64_t restore_batches(at::Tensor counters, int64_t handle, int64_t table, at::TensorList slots,
                        at::TensorList ids, at::TensorList rows, at::TensorList last_steps,
                        at::TensorList scores, at::TensorList states) {
  const std::shared_ptr<TableGroup> group = TableGroup::from_handle(handle);
  check_device(counters, "counters", group->device());
  const size_t n = slots.size();
  TORCH_CHECK_VALUE(ids.size() == n && rows.size() == n && last_steps.size() == n &&
                        scores.size() == n && states.size() == n,
                    "there must be as many tensors of each kind as of slots, ", n, ".");
  const int64_t num_slots = group->view(table).num_slots;
  std::vector<at::Tensor> keys(n);
  std::vector<hash_table::cpu::RestoreBatch> batches;
  for (size_t b = 0; b < n; ++b) {
    const hash_table::Entries entries = check_entries(*group, table, ids[b], rows[b], last_steps[b],
                                                      scores[b], states[b], &keys[b]);
    check_given(slots[b], "slots", at::kLong, {entries.n}, group->device());
    const int64_t* at = slots[b].const_data_ptr<int64_t>();
    bool ascend = entries.n == 0 || (at[0] >= 0 && at[entries.n - 1] < num_slots);
    for (int64_t i = 1; i < entries.n; ++i) ascend &= at[i - 1] < at[i];
    TORCH_CHECK_VALUE(ascend, "slots of batch ", b, " must ascend from 0 on, below ", num_slots,
                      ".");
    batches.push_back({entries, at});
  }
  for (const auto& batch : batches) group->expect_entries(table, batch.entries.n);
  return group->order().run(kWriteAll, [&] {
    return hash_table::cpu::restore_batches(group->view(table), batches, at::get_num_threads());
  });
}

// Returns a slot whose id is also in another slot, or -1. CPU only.
int64_t find_repeated(const at::Tensor& counters, int64_t handle, int64_t table) {
  const std::shared_ptr<TableGroup> group = TableGroup::from_handle(handle);
  check_device(counters, "counters", group->device());
  return group->order().run(kReadIndex, [&] {
    return hash_table::cpu::find_repeated(group->view(table), at::get_num_threads());
  });
}

bool are_placed(const at::Tensor& ids, const at::Tensor& slots, int64_t num_buckets,
                int64_t bucket_slots, int64_t owner_begin, int64_t owner_end) {
  const int64_t n = ids.numel();
  check_given(ids, "ids", at::kLong, {n}, at::kCPU);
  check_given(slots, "slots", at::kLong, {n}, at::kCPU);
  check_geometry(num_buckets, bucket_slots);
  return hash_table::cpu::are_placed(ids.const_data_ptr<int64_t>(), slots.const_data_ptr<int64_t>(),
                                     n, static_cast<uint32_t>(num_buckets),
                                     static_cast<int32_t>(bucket_slots), owner_begin, owner_end);
}

// Adds ids to a hash_table::cpu::IdSet. Returns its new number of ids, and an id that it already
// had or None.
std::tuple<int64_t, std::optional<int64_t>> add_ids(at::Tensor set, int64_t size,
                                                    const at::Tensor& ids, int64_t bits,
                                                    int64_t part) {
  const int64_t capacity = set.numel() - 1;
  check_given(set, "set", at::kLong, {capacity + 1}, at::kCPU);
  check_given(ids, "ids", at::kLong, {ids.numel()}, at::kCPU);
  TORCH_CHECK_VALUE(capacity >= 1 && (capacity & (capacity - 1)) == 0, "set has ", capacity,
                    " places, but their number must be a power of two.");
  TORCH_CHECK_VALUE(bits >= 0 && bits < 64, "bits is ", bits, ", but must be from 0 to 63.");
  hash_table::cpu::IdSet id_set{set.data_ptr<int64_t>(), capacity, size};
  const auto repeated =
      hash_table::cpu::add_ids(id_set, ids.const_data_ptr<int64_t>(), ids.numel(),
                               static_cast<int>(bits), static_cast<uint64_t>(part));
  return {id_set.size, repeated};
}

void add_restore_ops(torch::Library& m) {
  m.impl("slot_owners", &slot_owners);
  m.impl("read_slots", &read_slots);
  m.impl("restore_slots", &restore_slots);
  m.impl("overwrite_slots", &overwrite_slots);
  m.impl("restore_entries", &restore_entries);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchrec_hkv, m) {
  m.def("slot_owners(Tensor counters, int group, int table, int first, int n) -> Tensor");
  m.def(
      "read_slots(int group, int table, Tensor slots) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "restore_slots(Tensor(a!) counters, int group, int table, Tensor slots, Tensor ids, "
      "Tensor rows, Tensor last_steps, Tensor scores, Tensor states) -> Tensor");
  m.def(
      "overwrite_slots(Tensor(a!) counters, int group, int table, Tensor slots, Tensor ids, "
      "Tensor rows, Tensor last_steps, Tensor scores, Tensor states) -> ()");
  m.def(
      "restore_entries(Tensor(a!) counters, int group, int table, Tensor ids, Tensor rows, "
      "Tensor last_steps, Tensor scores, Tensor states) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "find_misplaced(Tensor ids, Tensor slots, int num_buckets, int bucket_slots, "
      "int owner_begin, int owner_end) -> Tensor");
  m.def(
      "restore_batches(Tensor(a!) counters, int group, int table, Tensor[] slots, Tensor[] ids, "
      "Tensor[] rows, Tensor[] last_steps, Tensor[] scores, Tensor[] states) -> int");
  m.def("find_repeated(Tensor counters, int group, int table) -> int");
  m.def(
      "are_placed(Tensor ids, Tensor slots, int num_buckets, int bucket_slots, int owner_begin, "
      "int owner_end) -> bool");
  m.def("add_ids(Tensor(a!) set, int held, Tensor ids, int bits, int part) -> (int, int?)");
}

HKV_REGISTER_ON_DEVICES(add_restore_ops)
TORCH_LIBRARY_IMPL(torchrec_hkv, CPU, m) {
  m.impl("find_misplaced", &find_misplaced);
  m.impl("restore_batches", &restore_batches);
  m.impl("find_repeated", &find_repeated);
  m.impl("are_placed", &are_placed);
  m.impl("add_ids", &add_ids);
}

}  // namespace torchrec_hkv::bindings
