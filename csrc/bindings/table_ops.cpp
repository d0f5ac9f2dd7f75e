// Dispatcher ops of a single table (a group of one table and one feature). Slots are counted from
// the table's first. Fakes are in torchrec_hkv/hash_table/ops.py.
#include <torch/library.h>

#include <tuple>

#include "bindings/batch.h"
#include "bindings/checks.h"
#include "bindings/on_device.h"
#include "bindings/table_group.h"
#include "hash_table/kernels.h"

namespace torchrec_hkv::bindings {
namespace {

using hash_table::TableView;

std::shared_ptr<TableGroup> one_table(int64_t handle) {
  std::shared_ptr<TableGroup> group = TableGroup::from_handle(handle);
  TORCH_CHECK_VALUE(group->num_tables() == 1 && group->num_features() == 1,
                    "this operation takes a group of one table and one feature, but the group has ",
                    group->num_tables(), " and ", group->num_features(), ".");
  return group;
}

void check_slots(const TableGroup& group, const at::Tensor& slots) {
  check_dtype(slots, "slots", at::kLong);
  check_vector(slots, "slots");
  check_device(slots, "slots", group.device());
  TORCH_CHECK_VALUE(slots.is_contiguous(), "slots must be contiguous.");
  if (group.device().is_cuda() || slots.numel() == 0) return;  // looking would wait for the device
  const int64_t highest = slots.max().item<int64_t>(), lowest = slots.min().item<int64_t>();
  const int64_t end = group.present_slots(0);
  TORCH_CHECK_VALUE(lowest >= -1 && highest < end, "slots must be from -1 to ", end - 1,
                    ", but go from ", lowest, " to ", highest, ".");
}

const uint64_t* score_pointer(const TableGroup& group, const std::optional<at::Tensor>& scores,
                              int64_t n) {
  if (!scores) {
    TORCH_CHECK_VALUE(!group.needs_scores(), "scores must be given under eviction 'customized'.");
    return nullptr;
  }
  TORCH_CHECK_VALUE(takes_scores(group.view(0).eviction),
                    "scores must not be given under an eviction policy that makes its own.");
  check_dtype(*scores, "scores", at::kLong);
  check_device(*scores, "scores", group.device());
  check_length(*scores, "scores", n);
  TORCH_CHECK_VALUE(scores->is_contiguous(), "scores must be contiguous.");
  return reinterpret_cast<const uint64_t*>(scores->const_data_ptr<int64_t>());
}

const char* row_pointer(const TableGroup& group, const at::Tensor& rows, int64_t n) {
  check_dtype(rows, "rows", group.row_dtype(0));
  check_device(rows, "rows", group.device());
  TORCH_CHECK_VALUE(rows.dim() == 2 && rows.size(0) == n && rows.size(1) == group.total_dim(),
                    "rows must have shape [", n, ", ", group.total_dim(), "], but have ",
                    rows.sizes(), ".");
  TORCH_CHECK_VALUE(rows.is_contiguous(), "rows must be contiguous.");
  return static_cast<const char*>(rows.const_data_ptr());
}

// Writes rows to slots. `writer` (CUDA, bool, by position): whose row is written of several for one
// slot; without it the first to come. In the turn of a call that writes rows.
void write(const TableGroup& group, const at::Tensor& slots, const char* rows, bool add,
           [[maybe_unused]] const at::Tensor& writer) {
  const int64_t n = slots.numel();
  const int64_t* at = slots.const_data_ptr<int64_t>();
#ifdef TORCHREC_HKV_CUDA
  at::Tensor claims;
  uint32_t* bits = nullptr;
  if (group.device().is_cuda() && !add && !writer.defined()) {
    claims = at::zeros({(group.num_slots() + 31) / 32}, slots.options().dtype(at::kInt));
    bits = reinterpret_cast<uint32_t*>(claims.data_ptr<int32_t>());
  }
  const bool* chosen = writer.defined() ? writer.const_data_ptr<bool>() : nullptr;
#endif
  HKV_ON_DEVICE(
      group.device(), hash_table::cpu::write_rows(group.view(0), at, rows, n, add, threads),
      hash_table::cuda::write_rows(group.view(0), at, rows, n, add, chosen, bits, stream));
}

// (slots, found, ids, rows and scores of what left or was refused, their number). With rows and
// `assign`, each id's row becomes one that came with it. believed: see Placement; ids that are
// passed over have slot -1.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> insert(
    at::Tensor counters, int64_t handle, const at::Tensor& ids,
    const std::optional<at::Tensor>& scores, const std::optional<at::Tensor>& rows,
    const std::optional<at::Tensor>& believed, bool initialize, bool assign, bool leavers) {
  const std::shared_ptr<TableGroup> owner = one_table(handle);
  const TableGroup& group = *owner;
  check_device(counters, "counters", group.device());
  const hash_table::Batch batch = make_batch(group, ids);
  const int64_t n = ids.numel();
  const uint64_t* given_scores = score_pointer(group, scores, n);
  const char* given_rows = rows ? row_pointer(group, *rows, n) : nullptr;
  TORCH_CHECK_VALUE(rows || !assign, "rows must be given where they are to be assigned.");
  TORCH_CHECK_VALUE(assign || !leavers, "what leaves is given back only where rows are assigned.");
  TORCH_CHECK_VALUE(!assign || !initialize, "a new row is either initialised or assigned.");
  TORCH_CHECK_VALUE(!assign || !believed, "rows are not assigned where ids are only believed.");
  if (believed) {
    check_dtype(*believed, "believed", at::kBool);
    check_device(*believed, "believed", group.device());
    check_length(*believed, "believed", n);
    TORCH_CHECK_VALUE(believed->is_contiguous(), "believed must be contiguous.");
  }
  owner->make_room(batch, ids, std::nullopt, {});
  at::Tensor slots = at::empty_like(ids);
  at::Tensor found = at::empty({n}, ids.options().dtype(at::kBool));
  at::Tensor writer;
  if (group.device().is_cuda() && assign) writer = at::empty_like(found);
  const int64_t room = leavers ? n : 0;
  at::Tensor left_ids = at::empty({room}, ids.options());
  at::Tensor left_rows =
      at::empty({room, group.total_dim()}, ids.options().dtype(group.row_dtype(0)));
  at::Tensor left_scores = at::empty({room}, ids.options());
  at::Tensor number = at::zeros({leavers ? 1 : 0}, ids.options());
  hash_table::Placement placement{
      initialize ? group.initial_rows() : hash_table::NewRows::kUntouched,
      /*refuse_lower=*/true,
      given_rows,
      {}};
  if (believed) placement.believed = believed->const_data_ptr<bool>();
  placement.admissions = group.admission().get();
  placement.frames = group.has_frames();
  placement.remembers = group.remembers_evicted();
  if (leavers) {
    placement.leavers = {left_ids.data_ptr<int64_t>(), static_cast<char*>(left_rows.data_ptr()),
                         reinterpret_cast<uint64_t*>(left_scores.data_ptr<int64_t>()),
                         reinterpret_cast<uint64_t*>(number.data_ptr<int64_t>())};
  }
  int64_t* out = slots.data_ptr<int64_t>();
  bool* there = found.data_ptr<bool>();
#ifdef TORCHREC_HKV_CUDA
  bool* writes = writer.defined() ? writer.data_ptr<bool>() : nullptr;
#endif
  const at::Tensor scratch = insert_scratch(group, ids);
  const CountedCall call(group.clock(), std::nullopt);
  group.order().run(assign ? kWriteAll : call.use(/*inserts=*/true), [&] {
    HKV_ON_DEVICE(
        group.device(),
        hash_table::cpu::find_or_insert(group.views(), batch, call.visit(given_scores),
                                        group.aging(), placement, out, there, threads),
        hash_table::cuda::find_or_insert(group.views(), group.only_view_now(), batch, call.clock(),
                                         call.tick(), group.aging(), given_scores, placement, out,
                                         there, writes, scratch.data_ptr(), stream));
    if (assign) write(group, slots, given_rows, /*add=*/false, writer);
  });
  if (believed) slots.masked_fill_(slots.eq(hash_table::kPassedOver), hash_table::kNoSlot);
  return {slots, found, left_ids, left_rows, left_scores, number};
}

at::Tensor gather(const TableGroup& group, const hash_table::RowStore& store, at::ScalarType dtype,
                  const int64_t* ids, const at::Tensor& slots, bool* found) {
  at::Tensor out = at::empty({slots.numel(), store.width}, slots.options().dtype(dtype));
  const int64_t* at = slots.const_data_ptr<int64_t>();
  char* to = static_cast<char*>(out.data_ptr());
  HKV_ON_DEVICE(
      group.device(),
      hash_table::cpu::gather(group.view(0), store, ids, at, slots.numel(), to, found, threads),
      hash_table::cuda::gather(group.view(0), store, ids, at, slots.numel(), to, found, stream));
  return out;
}

// (rows, whether there is a slot)
std::tuple<at::Tensor, at::Tensor> gather_rows(int64_t handle, const at::Tensor& ids,
                                               const at::Tensor& slots) {
  const std::shared_ptr<TableGroup> group = one_table(handle);
  check_slots(*group, slots);
  make_batch(*group, ids);
  check_length(ids, "ids", slots.numel());
  at::Tensor found = at::empty({slots.numel()}, slots.options().dtype(at::kBool));
  at::Tensor rows = group->order().run(kReadRows, [&] {
    return gather(*group, group->view(0).rows, group->row_dtype(0), ids.const_data_ptr<int64_t>(),
                  slots, found.data_ptr<bool>());
  });
  return {rows, found};
}

void write_rows(at::Tensor counters, int64_t handle, const at::Tensor& slots,
                const at::Tensor& rows, bool add) {
  const std::shared_ptr<TableGroup> owner = one_table(handle);
  const TableGroup& group = *owner;
  check_device(counters, "counters", group.device());
  check_slots(group, slots);
  const char* from = row_pointer(group, rows, slots.numel());
  group.order().run(kWriteRows, [&] { write(group, slots, from, add, at::Tensor()); });
}

// Touches the ids that are there, as a hit does; returns their slots.
at::Tensor touch(at::Tensor counters, int64_t handle, const at::Tensor& ids,
                 const std::optional<at::Tensor>& scores) {
  const std::shared_ptr<TableGroup> owner = one_table(handle);
  const TableGroup& group = *owner;
  check_device(counters, "counters", group.device());
  const hash_table::Batch batch = make_batch(group, ids);
  const int64_t n = ids.numel();
  const uint64_t* given = score_pointer(group, scores, n);
  at::Tensor slots = at::empty_like(ids);
  int64_t* out = slots.data_ptr<int64_t>();
  const CountedCall call(group.clock(), std::nullopt);
  const hash_table::Visit visit = call.visit(given);
  HKV_ON_GROUP(group, call.use(/*inserts=*/false),
               hash_table::cpu::age(group.views(), group.aging(), visit, threads);
               hash_table::cpu::find(group.views(), batch, out, threads);
               hash_table::cpu::touch_slots(group.view(0), out, n, visit, threads),
               hash_table::cuda::tick(call.clock(), call.tick(), stream);
               hash_table::cuda::age(group.views(), group.aging(), visit, stream);
               hash_table::cuda::find(group.views(), group.only_view(), batch, out, stream);
               hash_table::cuda::touch_slots(group.view(0), out, n, visit, stream));
  return slots;
}

void erase_slots(at::Tensor counters, int64_t handle, const at::Tensor& slots) {
  const std::shared_ptr<TableGroup> owner = one_table(handle);
  const TableGroup& group = *owner;
  check_device(counters, "counters", group.device());
  check_slots(group, slots);
  const int64_t* at = slots.const_data_ptr<int64_t>();
  HKV_ON_GROUP(group, kWriteIndex,
               hash_table::cpu::erase_slots(group.view(0), at, slots.numel(), threads),
               hash_table::cuda::erase_slots(group.view(0), at, slots.numel(), stream));
}

// (ids, rows, scores, states) of slots, none of them -1.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> export_slots(int64_t handle,
                                                                        const at::Tensor& slots) {
  const std::shared_ptr<TableGroup> group = one_table(handle);
  check_slots(*group, slots);
  const TableView& view = group->view(0);
  return group->order().run(kReadAll, [&] {
    return std::make_tuple(group->ids(0).index_select(0, slots),
                           gather(*group, view.rows, group->row_dtype(0), nullptr, slots, nullptr),
                           group->scores(0).index_select(0, slots),
                           gather(*group, view.states, at::kFloat, nullptr, slots, nullptr));
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchrec_hkv, m) {
  m.def(
      "insert(Tensor(a!) counters, int group, Tensor ids, Tensor? scores, Tensor? rows, "
      "Tensor? believed, bool initialize, bool assign, bool leavers) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def("gather_rows(int group, Tensor ids, Tensor slots) -> (Tensor, Tensor)");
  m.def("write_rows(Tensor(a!) counters, int group, Tensor slots, Tensor rows, bool add) -> ()");
  m.def("touch(Tensor(a!) counters, int group, Tensor ids, Tensor? scores) -> Tensor");
  m.def("erase_slots(Tensor(a!) counters, int group, Tensor slots) -> ()");
  m.def("export_slots(int group, Tensor slots) -> (Tensor, Tensor, Tensor, Tensor)");
}

#define HKV_REGISTER(m)                \
  m.impl("insert", &insert);           \
  m.impl("gather_rows", &gather_rows); \
  m.impl("write_rows", &write_rows);   \
  m.impl("touch", &touch);             \
  m.impl("erase_slots", &erase_slots); \
  m.impl("export_slots", &export_slots);

TORCH_LIBRARY_IMPL(torchrec_hkv, CPU, m){HKV_REGISTER(m)}
#ifdef TORCHREC_HKV_CUDA
TORCH_LIBRARY_IMPL(torchrec_hkv, CUDA, m) {
  HKV_REGISTER(m)
}
#endif

}  // namespace torchrec_hkv::bindings
