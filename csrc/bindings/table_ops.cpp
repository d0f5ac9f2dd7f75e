// Dispatcher ops on the entries of a group's tables. Slots are numbered over all tables. `offsets`
// and `batch_size` assign ids to features and thus to tables; a group of one feature needs none.
// The rows of all tables are in one matrix (hash_table/row_matrix.h). Fakes are in
// torchrec_hkv/hash_table/fake_ops.
#include <torch/library.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "bindings/register.h"
#include "hash_table/kernels.h"
#include "runtime/batch.h"
#include "runtime/checks.h"
#include "runtime/on_device.h"
#include "runtime/score_keys.h"
#include "runtime/sorted_slots.h"
#include "runtime/table_group.h"

namespace torchrec_hkv::bindings {
using namespace runtime;
namespace {

using hash_table::RowMatrix;
using hash_table::TableView;

void check_slots(const TableGroup& group, const at::Tensor& slots, int64_t least) {
  check_dtype(slots, "slots", at::kLong);
  check_vector(slots, "slots");
  check_device(slots, "slots", group.device());
  TORCH_CHECK_VALUE(slots.is_contiguous(), "slots must be contiguous.");
  // On a GPU, reading the slots would wait for the device.
  if (group.device().is_cuda() || slots.numel() == 0) return;
  const auto tables = static_cast<int32_t>(group.num_tables());
  const int64_t end = tables == 1 ? group.present_slots(0) : group.num_slots();
  const int64_t highest = slots.max().item<int64_t>(), lowest = slots.min().item<int64_t>();
  TORCH_CHECK_VALUE(lowest >= least && highest < end, "slots must be from ", least, " to ", end - 1,
                    ", but go from ", lowest, " to ", highest, ".");
  const int64_t* at = slots.const_data_ptr<int64_t>();
  for (int64_t i = 0; tables > 1 && i < slots.numel(); ++i) {
    if (at[i] < 0) continue;
    const TableView& table = group.views()[table_of_slot(group.views(), tables, at[i])];
    TORCH_CHECK_VALUE(at[i] < table.first_slot + table.num_slots, "slot ", at[i],
                      " is of a table that has grown to the slots from ", table.first_slot, " to ",
                      table.first_slot + table.num_slots - 1, " only.");
  }
}

// Returns the keys for the kernels; undefined without scores.
at::Tensor check_scores(const TableGroup& group, const std::optional<at::Tensor>& scores, int64_t n,
                        const std::optional<at::Tensor>& offsets, at::IntArrayRef first_bags) {
  if (!scores) {
    TORCH_CHECK_VALUE(!group.needs_scores(), "scores must be given under eviction 'customized'.");
    return at::Tensor();
  }
  TORCH_CHECK_VALUE(group.takes_scores(),
                    "scores must not be given under an eviction policy that makes its own.");
  check_dtype(*scores, "scores", at::kLong);
  check_device(*scores, "scores", group.device());
  check_length(*scores, "scores", n);
  TORCH_CHECK_VALUE(scores->is_contiguous(), "scores must be contiguous.");
  return keys_of_given(group, *scores, offsets, first_bags);
}

// The ids of a call, and the layout of their bags on the device. Without offsets, the ids form one
// bag of the group's only feature.
struct GivenIds {
  GivenIds(const TableGroup& group, const at::Tensor& ids, const std::optional<at::Tensor>& offsets,
           int64_t batch_size) {
    if (offsets) layout.emplace(group, batch_size, at::OptionalIntArrayRef());
    batch = layout ? make_batch(group, ids, *offsets, *layout) : make_batch(group, ids);
  }
  std::vector<int64_t> first_bags() const {
    return layout ? layout->first_bags() : std::vector<int64_t>{};
  }

  std::optional<BagLayout> layout;
  hash_table::Batch batch;
};

// A matrix of rows for all tables of the group, or of states.
RowMatrix matrix_of(const at::Tensor& rows, RowType type) {
  return RowMatrix{static_cast<char*>(rows.data_ptr()), static_cast<int32_t>(rows.size(1)), type};
}

// Checks given rows, and aligns them for kernels, which read 16 bytes at a time.
at::Tensor check_rows(const TableGroup& group, const at::Tensor& rows, int64_t n) {
  const int64_t width = group.shape().widest;
  check_dtype(rows, "rows", group.matrix_dtype());
  check_device(rows, "rows", group.device());
  TORCH_CHECK_VALUE(rows.dim() == 2 && rows.size(0) == n && rows.size(1) == width,
                    "rows must have shape [", n, ", ", width, "], but have ", rows.sizes(), ".");
  TORCH_CHECK_VALUE(rows.is_contiguous(), "rows must be contiguous.");
  const bool aligned =
      rows.is_cpu() || reinterpret_cast<uintptr_t>(rows.const_data_ptr()) % kGradAlignment == 0;
  return aligned ? rows : rows.clone();
}

// Writes rows to slots, in the turn of a call that writes rows. writer (CUDA, bool, by position):
// selects one of several rows for a slot. Without it, one of them is written; the last one if the
// group is deterministic, as on a CPU.
void write(const TableGroup& group, const at::Tensor& slots, const RowMatrix& rows, bool add,
           [[maybe_unused]] const at::Tensor& writer) {
  const int64_t n = slots.numel();
  const int64_t* at = slots.const_data_ptr<int64_t>();
  const auto tables = static_cast<int32_t>(group.num_tables());
#ifdef TORCHREC_HKV_CUDA
  // The columns of a row of 8 bits share a scale, so rows are added as a whole, in order.
  const bool in_order = group.deterministic() || (add && group.shape().int8_rows);
  if (group.device().is_cuda() && in_order) {
    const SortedSlots sorted(slots);
    HKV_ON_DEVICE(group.device(), ,
                  hash_table::cuda::write_rows_in_order(group.views(), tables, sorted.slot(),
                                                        sorted.position(), rows, n, add, stream));
    return;
  }
  at::Tensor claims;
  uint32_t* bits = nullptr;
  if (group.device().is_cuda() && !add && !writer.defined()) {
    claims = at::zeros({(group.num_slots() + 31) / 32}, slots.options().dtype(at::kInt));
    bits = reinterpret_cast<uint32_t*>(claims.data_ptr<int32_t>());
  }
  const bool* chosen = writer.defined() ? writer.const_data_ptr<bool>() : nullptr;
#endif
  HKV_ON_DEVICE(group.device(),
                hash_table::cpu::write_rows(group.views(), tables, at, n, rows, add, threads),
                hash_table::cuda::write_rows(group.views(), group.only_table(), tables, at, n, rows,
                                             add, chosen, bits, stream));
}

using Inserted =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// Inserts ids. Returns (slots, found, ids, rows and scores of evicted and refused entries, their
// number, and their tables if the group has several tables). With rows and `assign`, assigns one of
// the given rows to each id. expected_present: see Placement; skipped ids have slot -1.
Inserted insert(at::Tensor counters, int64_t handle, const at::Tensor& ids,
                const std::optional<at::Tensor>& scores, const std::optional<at::Tensor>& rows,
                const std::optional<at::Tensor>& expected_present, bool initialize, bool assign,
                bool returns_evicted, const std::optional<at::Tensor>& offsets,
                int64_t batch_size) {
  const std::shared_ptr<TableGroup> owner = TableGroup::from_handle(handle);
  const TableGroup& group = *owner;
  check_device(counters, "counters", group.device());
  const GivenIds given_ids(group, ids, offsets, batch_size);
  const hash_table::Batch& batch = given_ids.batch;
  const int64_t n = ids.numel();
  const at::Tensor keys = check_scores(group, scores, n, offsets, given_ids.first_bags());
  const uint64_t* given_scores = data_of(keys);
  const at::Tensor given_tensor = rows ? check_rows(group, *rows, n) : at::Tensor();
  const RowMatrix given_rows = rows ? matrix_of(given_tensor, group.matrix_type()) : RowMatrix{};
  TORCH_CHECK_VALUE(rows || !assign, "rows must be given where they are to be assigned.");
  TORCH_CHECK_VALUE(assign || !returns_evicted,
                    "returns_evicted is true, but assign is not: only a call that assigns rows "
                    "returns what leaves.");
  TORCH_CHECK_VALUE(!assign || !initialize,
                    "initialize and assign are both true, but at most one of them may be.");
  TORCH_CHECK_VALUE(
      !assign || !expected_present,
      "expected_present is given and assign is true, but a call takes one of them only.");
  if (expected_present) {
    check_dtype(*expected_present, "expected_present", at::kBool);
    check_device(*expected_present, "expected_present", group.device());
    check_length(*expected_present, "expected_present", n);
    TORCH_CHECK_VALUE(expected_present->is_contiguous(), "expected_present must be contiguous.");
  }
  // For other threads, growth and insertion are one call.
  const HoldToGrow hold(*owner);
  owner->make_room(batch, ids, offsets, given_ids.first_bags());
  at::Tensor slots = at::empty_like(ids);
  at::Tensor found = at::empty({n}, ids.options().dtype(at::kBool));
  at::Tensor writer;
  const bool deterministic = group.deterministic();
  if (group.device().is_cuda() && assign && !deterministic) writer = at::empty_like(found);
  const int64_t max_evicted = returns_evicted ? n : 0;
  at::Tensor evicted_ids = at::empty({max_evicted}, ids.options());
  at::Tensor evicted_rows =
      at::empty({max_evicted, group.shape().widest}, ids.options().dtype(group.matrix_dtype()));
  at::Tensor evicted_scores = at::empty({max_evicted}, ids.options());
  at::Tensor number = at::zeros({returns_evicted ? 1 : 0}, ids.options());
  const bool several = group.num_tables() > 1;
  at::Tensor evicted_tables = at::empty({several ? max_evicted : 0}, ids.options().dtype(at::kInt));
  hash_table::Placement placement{
      initialize ? group.initial_rows() : hash_table::NewRows::kUntouched,
      hash_table::RefuseLower::kAll,
      given_rows,
      {}};
  if (expected_present) placement.expected_present = expected_present->const_data_ptr<bool>();
  placement.admissions = group.admission().get();
  placement.moving = group.frame_moves();
  placement.scores = group.shape().scores;
  placement.remembers = group.remembers_evicted();
  placement.restores = group.restores_counts();
  placement.simulates = group.simulates();
  placement.ordered = deterministic;
  if (returns_evicted) {
    placement.evicted_entries = {evicted_ids.data_ptr<int64_t>(),
                                 matrix_of(evicted_rows, group.matrix_type()),
                                 reinterpret_cast<uint64_t*>(evicted_scores.data_ptr<int64_t>()),
                                 reinterpret_cast<uint64_t*>(number.data_ptr<int64_t>()),
                                 several ? evicted_tables.data_ptr<int32_t>() : nullptr};
  }
  int64_t* out = slots.data_ptr<int64_t>();
  bool* found_out = found.data_ptr<bool>();
#ifdef TORCHREC_HKV_CUDA
  bool* writes = writer.defined() ? writer.data_ptr<bool>() : nullptr;
#endif
  const at::Tensor scratch = insert_scratch(group, ids, placement, given_scores != nullptr);
  const CountedCall call(group.clock(), std::nullopt);
  group.order().run(assign ? kWriteAll : call.use(/*inserts=*/true), [&] {
    HKV_ON_DEVICE(
        group.device(),
        hash_table::cpu::find_or_insert(group.views(), batch, call.context(given_scores),
                                        group.aging(), placement, out, found_out, threads),
        hash_table::cuda::find_or_insert(group.views(), group.only_view_now(), batch, call.clock(),
                                         call.tick(), group.aging(), given_scores, placement, out,
                                         found_out, writes, scratch.data_ptr(), stream));
    keep_last_scores(group, slots, given_scores);
    if (assign) write(group, slots, given_rows, /*add=*/false, writer);
  });
  if (expected_present) slots.masked_fill_(slots.eq(hash_table::kSkipped), hash_table::kNoSlot);
  if (returns_evicted) evicted_scores = scores_of_tables(group, evicted_scores, evicted_tables);
  return {slots, found, evicted_ids, evicted_rows, evicted_scores, number, evicted_tables};
}

// Returns (rows, whether each id has a slot).
std::tuple<at::Tensor, at::Tensor> gather_rows(int64_t handle, const at::Tensor& ids,
                                               const at::Tensor& slots,
                                               const std::optional<at::Tensor>& offsets,
                                               int64_t batch_size) {
  const std::shared_ptr<TableGroup> owner = TableGroup::from_handle(handle);
  const TableGroup& group = *owner;
  check_slots(group, slots, hash_table::kNoSlot);
  const GivenIds given_ids(group, ids, offsets, batch_size);
  const hash_table::Batch& batch = given_ids.batch;
  const int64_t n = slots.numel();
  check_length(ids, "ids", n);
  at::Tensor found = at::empty({n}, slots.options().dtype(at::kBool));
  at::Tensor rows =
      at::empty({n, group.shape().widest}, slots.options().dtype(group.matrix_dtype()));
  const RowMatrix to = matrix_of(rows, group.matrix_type());
  const int64_t* at = slots.const_data_ptr<int64_t>();
  bool* found_out = found.data_ptr<bool>();
  HKV_ON_GROUP(group, kReadRows,
               hash_table::cpu::gather_rows(group.views(), batch, at, to, found_out, threads),
               hash_table::cuda::gather_rows(group.views(), group.only_table(), batch, at, to,
                                             found_out, stream));
  return {rows, found};
}

void write_rows(at::Tensor counters, int64_t handle, const at::Tensor& slots,
                const at::Tensor& rows, bool add) {
  const std::shared_ptr<TableGroup> owner = TableGroup::from_handle(handle);
  const TableGroup& group = *owner;
  check_device(counters, "counters", group.device());
  check_slots(group, slots, hash_table::kNoSlot);
  const at::Tensor given_tensor = check_rows(group, rows, slots.numel());
  const RowMatrix from = matrix_of(given_tensor, group.matrix_type());
  group.order().run(kWriteRows, [&] { write(group, slots, from, add, at::Tensor()); });
}

// Touches ids that are in their tables, like a hit. Returns the slots of all ids.
at::Tensor touch(at::Tensor counters, int64_t handle, const at::Tensor& ids,
                 const std::optional<at::Tensor>& scores, const std::optional<at::Tensor>& offsets,
                 int64_t batch_size) {
  const std::shared_ptr<TableGroup> owner = TableGroup::from_handle(handle);
  const TableGroup& group = *owner;
  check_device(counters, "counters", group.device());
  const GivenIds given_ids(group, ids, offsets, batch_size);
  const hash_table::Batch& batch = given_ids.batch;
  const at::Tensor keys = check_scores(group, scores, ids.numel(), offsets, given_ids.first_bags());
  const uint64_t* given = data_of(keys);
  at::Tensor slots = at::empty_like(ids);
  int64_t* out = slots.data_ptr<int64_t>();
  const CountedCall call(group.clock(), std::nullopt);
  const hash_table::CallContext context = call.context(given);
  group.order().run(call.use(/*inserts=*/false), [&] {
    HKV_ON_DEVICE(
        group.device(), hash_table::cpu::age(group.views(), group.aging(), context, threads);
        hash_table::cpu::find(group.views(), batch, out, threads);
        hash_table::cpu::touch_slots(group.views(), batch, out, context, threads),
        hash_table::cuda::tick(call.clock(), call.tick(), stream);
        hash_table::cuda::age(group.views(), group.aging(), context, stream);
        hash_table::cuda::find(group.views(), group.only_view(), batch, out, stream);
        hash_table::cuda::touch_slots(group.views(), group.only_table(), batch, out, context,
                                      stream));
    keep_last_scores(group, slots, given);
  });
  return slots;
}

void erase_slots(at::Tensor counters, int64_t handle, const at::Tensor& slots) {
  const std::shared_ptr<TableGroup> owner = TableGroup::from_handle(handle);
  const TableGroup& group = *owner;
  check_device(counters, "counters", group.device());
  check_slots(group, slots, hash_table::kNoSlot);
  owner->note_removal();
  const int64_t* at = slots.const_data_ptr<int64_t>();
  const int64_t n = slots.numel();
  const auto tables = static_cast<int32_t>(group.num_tables());
  HKV_ON_GROUP(
      group, kWriteIndex, hash_table::cpu::erase_slots(group.views(), tables, at, n, threads),
      hash_table::cuda::erase_slots(group.views(), group.only_table(), tables, at, n, stream));
}

// Returns whether each current slot of the given tables, one table after the other, has a selected
// entry. Scores are the bits of unsigned numbers.
at::Tensor select_slots(const at::Tensor& counters, int64_t handle, at::IntArrayRef tables,
                        int64_t score_at_least, int64_t score_at_most, int64_t touched_before) {
  const std::shared_ptr<TableGroup> owner = TableGroup::from_handle(handle);
  const TableGroup& group = *owner;
  check_device(counters, "counters", group.device());
  int64_t before = -1;
  for (const int64_t table : tables) {
    TORCH_CHECK_VALUE(table > before && table < group.num_tables(),
                      "tables must be ascending numbers from 0 to ", group.num_tables() - 1,
                      ", but are ", tables, ".");
    before = table;
  }
  return group.order().run(kReadIndex, [&] {  // the tables don't grow in between
    std::vector<int64_t> starts(group.num_tables(), -1);
    int64_t total = 0;
    [[maybe_unused]] int64_t most = 0;
    for (const int64_t table : tables) {
      starts[table] = total;
      total += group.present_slots(table);
      most = std::max(most, group.present_slots(table));
    }
    at::Tensor chosen = at::empty({total}, counters.options().dtype(at::kBool));
    const at::Tensor begin = at::tensor(starts, at::kLong).to(group.device());
    const hash_table::Selection selection{begin.const_data_ptr<int64_t>(),
                                          static_cast<uint64_t>(score_at_least),
                                          static_cast<uint64_t>(score_at_most), touched_before};
    bool* out = chosen.data_ptr<bool>();
    const auto num_tables = static_cast<int32_t>(group.num_tables());
    HKV_ON_DEVICE(
        group.device(),
        hash_table::cpu::select_slots(group.views(), num_tables, selection, out, threads),
        hash_table::cuda::select_slots(group.views(), num_tables, most, selection, out, stream));
    return chosen;
  });
}

// Returns (ids, rows, scores, states) of slots, which must not be -1.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> export_slots(int64_t handle,
                                                                        const at::Tensor& slots) {
  const std::shared_ptr<TableGroup> owner = TableGroup::from_handle(handle);
  const TableGroup& group = *owner;
  check_slots(group, slots, 0);
  const int64_t n = slots.numel();
  at::Tensor ids = at::empty_like(slots);
  at::Tensor scores = at::empty_like(slots);
  at::Tensor rows =
      at::empty({n, group.shape().widest}, slots.options().dtype(group.matrix_dtype()));
  at::Tensor states = at::empty({n, group.widest_state()}, slots.options().dtype(at::kFloat));
  const hash_table::ExportedEntries out{ids.data_ptr<int64_t>(),
                                        matrix_of(rows, group.matrix_type()),
                                        reinterpret_cast<uint64_t*>(scores.data_ptr<int64_t>()),
                                        matrix_of(states, RowType::kFloat32)};
  const int64_t* at = slots.const_data_ptr<int64_t>();
  const auto tables = static_cast<int32_t>(group.num_tables());
  HKV_ON_GROUP(group, kReadAll,
               hash_table::cpu::export_slots(group.views(), tables, at, n, out, threads),
               hash_table::cuda::export_slots(group.views(), tables, at, n, out, stream));
  return {ids, rows, scores_of_slots(group, scores, slots), states};
}

void add_table_ops(torch::Library& m) {
  m.impl("insert", &insert);
  m.impl("gather_rows", &gather_rows);
  m.impl("write_rows", &write_rows);
  m.impl("touch", &touch);
  m.impl("erase_slots", &erase_slots);
  m.impl("select_slots", &select_slots);
  m.impl("export_slots", &export_slots);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchrec_hkv, m) {
  m.def(
      "insert(Tensor(a!) counters, int group, Tensor ids, Tensor? scores, Tensor? rows, "
      "Tensor? expected_present, bool initialize, bool assign, bool returns_evicted, Tensor? "
      "offsets=None, "
      "int batch_size=1) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "gather_rows(int group, Tensor ids, Tensor slots, Tensor? offsets=None, int batch_size=1) "
      "-> (Tensor, Tensor)");
  m.def("write_rows(Tensor(a!) counters, int group, Tensor slots, Tensor rows, bool add) -> ()");
  m.def(
      "touch(Tensor(a!) counters, int group, Tensor ids, Tensor? scores, Tensor? offsets=None, "
      "int batch_size=1) -> Tensor");
  m.def("erase_slots(Tensor(a!) counters, int group, Tensor slots) -> ()");
  m.def(
      "select_slots(Tensor counters, int group, int[] tables, int score_at_least, "
      "int score_at_most, int touched_before) -> Tensor");
  m.def("export_slots(int group, Tensor slots) -> (Tensor, Tensor, Tensor, Tensor)");
}

HKV_REGISTER_ON_DEVICES(add_table_ops)

}  // namespace torchrec_hkv::bindings
