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

hash_table::Visit make_visit(const TableGroup& group, int64_t step, int64_t epoch,
                             const uint64_t* scores) {
  TORCH_CHECK_VALUE(epoch >= 0 && epoch <= 0xffffffffll, "epoch is ", epoch,
                    ", but must be from 0 to 2^32 - 1.");
  hash_table::Visit visit = group.visit(step);
  visit.epoch = static_cast<uint32_t>(epoch);
  visit.scores = scores;
  return visit;
}

// (slots, found, ids, rows and scores of what left or was refused, their number)
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> insert(
    at::Tensor counters, int64_t handle, const at::Tensor& ids, int64_t step, int64_t epoch,
    const std::optional<at::Tensor>& scores, const std::optional<at::Tensor>& rows, bool initialize,
    bool leavers) {
  const std::shared_ptr<TableGroup> owner = one_table(handle);
  const TableGroup& group = *owner;
  check_device(counters, "counters", group.device());
  const hash_table::Batch batch = make_batch(group, ids, std::nullopt, 1);
  const int64_t n = ids.numel();
  const hash_table::Visit visit = make_visit(group, step, epoch, score_pointer(group, scores, n));
  const char* given_rows = rows ? row_pointer(group, *rows, n) : nullptr;
  TORCH_CHECK_VALUE(!leavers || rows, "rows must be given where what leaves is wanted.");
  owner->make_room(batch, ids, std::nullopt);
  at::Tensor slots = at::empty_like(ids);
  at::Tensor found = at::empty({n}, ids.options().dtype(at::kBool));
  const int64_t room = leavers ? n : 0;
  at::Tensor left_ids = at::empty({room}, ids.options());
  at::Tensor left_rows =
      at::empty({room, group.total_dim()}, ids.options().dtype(group.row_dtype(0)));
  at::Tensor left_scores = at::empty({room}, ids.options());
  at::Tensor number = at::zeros({leavers ? 1 : 0}, ids.options());
  hash_table::Placement placement{initialize, /*refuse_lower=*/true, {}};
  if (leavers) {
    placement.leavers = {left_ids.data_ptr<int64_t>(), static_cast<char*>(left_rows.data_ptr()),
                         reinterpret_cast<uint64_t*>(left_scores.data_ptr<int64_t>()),
                         reinterpret_cast<uint64_t*>(number.data_ptr<int64_t>()), given_rows};
  }
  int64_t* out = slots.data_ptr<int64_t>();
  bool* there = found.data_ptr<bool>();
  const at::Tensor scratch = insert_scratch(group, ids);
  HKV_ON_DEVICE(
      group.device(),
      hash_table::cpu::find_or_insert(group.views(), batch, visit, placement, out, there, threads),
      hash_table::cuda::find_or_insert(group.views(), group.only_view(), batch, visit, placement,
                                       out, there, scratch.data_ptr(), stream));
  return {slots, found, left_ids, left_rows, left_scores, number};
}

at::Tensor gather(const TableGroup& group, const hash_table::RowStore& store, at::ScalarType dtype,
                  const int64_t* ids, const at::Tensor& slots) {
  at::Tensor out = at::empty({slots.numel(), store.width}, slots.options().dtype(dtype));
  const int64_t* at = slots.const_data_ptr<int64_t>();
  char* to = static_cast<char*>(out.data_ptr());
  HKV_ON_DEVICE(group.device(),
                hash_table::cpu::gather(group.view(0), store, ids, at, slots.numel(), to, threads),
                hash_table::cuda::gather(group.view(0), store, ids, at, slots.numel(), to, stream));
  return out;
}

at::Tensor gather_rows(int64_t handle, const at::Tensor& ids, const at::Tensor& slots) {
  const std::shared_ptr<TableGroup> group = one_table(handle);
  check_slots(*group, slots);
  make_batch(*group, ids, std::nullopt, 1);
  check_length(ids, "ids", slots.numel());
  return gather(*group, group->view(0).rows, group->row_dtype(0), ids.const_data_ptr<int64_t>(),
                slots);
}

void write_rows(at::Tensor counters, int64_t handle, const at::Tensor& slots,
                const at::Tensor& rows, bool add) {
  const std::shared_ptr<TableGroup> owner = one_table(handle);
  const TableGroup& group = *owner;
  check_device(counters, "counters", group.device());
  check_slots(group, slots);
  const int64_t n = slots.numel();
  const char* from = row_pointer(group, rows, n);
  const int64_t* at = slots.const_data_ptr<int64_t>();
  at::Tensor claims;
  if (group.device().is_cuda() && !add) {
    claims = at::zeros({(group.num_slots() + 31) / 32}, slots.options().dtype(at::kInt));
  }
#ifdef TORCHREC_HKV_CUDA
  auto* bits = claims.defined() ? reinterpret_cast<uint32_t*>(claims.data_ptr<int32_t>()) : nullptr;
#endif
  HKV_ON_DEVICE(group.device(),
                hash_table::cpu::write_rows(group.view(0), at, from, n, add, threads),
                hash_table::cuda::write_rows(group.view(0), at, from, n, add, bits, stream));
}

void touch_slots(at::Tensor counters, int64_t handle, const at::Tensor& slots, int64_t step,
                 int64_t epoch, const std::optional<at::Tensor>& scores) {
  const std::shared_ptr<TableGroup> owner = one_table(handle);
  const TableGroup& group = *owner;
  check_device(counters, "counters", group.device());
  check_slots(group, slots);
  const int64_t n = slots.numel();
  const hash_table::Visit visit = make_visit(group, step, epoch, score_pointer(group, scores, n));
  const int64_t* at = slots.const_data_ptr<int64_t>();
  HKV_ON_DEVICE(group.device(), hash_table::cpu::touch_slots(group.view(0), at, n, visit, threads),
                hash_table::cuda::touch_slots(group.view(0), at, n, visit, stream));
}

void erase_slots(at::Tensor counters, int64_t handle, const at::Tensor& slots) {
  const std::shared_ptr<TableGroup> owner = one_table(handle);
  const TableGroup& group = *owner;
  check_device(counters, "counters", group.device());
  check_slots(group, slots);
  const int64_t* at = slots.const_data_ptr<int64_t>();
  HKV_ON_DEVICE(group.device(),
                hash_table::cpu::erase_slots(group.view(0), at, slots.numel(), threads),
                hash_table::cuda::erase_slots(group.view(0), at, slots.numel(), stream));
}

// (ids, rows, scores, states) of slots, none of them -1.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> export_slots(int64_t handle,
                                                                        const at::Tensor& slots) {
  const std::shared_ptr<TableGroup> group = one_table(handle);
  check_slots(*group, slots);
  const TableView& view = group->view(0);
  return {group->ids(0).index_select(0, slots),
          gather(*group, view.rows, group->row_dtype(0), nullptr, slots),
          group->scores(0).index_select(0, slots),
          gather(*group, view.states, at::kFloat, nullptr, slots)};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchrec_hkv, m) {
  m.def(
      "insert(Tensor(a!) counters, int group, Tensor ids, int step, int epoch, Tensor? scores, "
      "Tensor? rows, bool initialize, bool leavers) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def("gather_rows(int group, Tensor ids, Tensor slots) -> Tensor");
  m.def("write_rows(Tensor(a!) counters, int group, Tensor slots, Tensor rows, bool add) -> ()");
  m.def(
      "touch_slots(Tensor(a!) counters, int group, Tensor slots, int step, int epoch, "
      "Tensor? scores) -> ()");
  m.def("erase_slots(Tensor(a!) counters, int group, Tensor slots) -> ()");
  m.def("export_slots(int group, Tensor slots) -> (Tensor, Tensor, Tensor, Tensor)");
}

#define HKV_REGISTER(m)                \
  m.impl("insert", &insert);           \
  m.impl("gather_rows", &gather_rows); \
  m.impl("write_rows", &write_rows);   \
  m.impl("touch_slots", &touch_slots); \
  m.impl("erase_slots", &erase_slots); \
  m.impl("export_slots", &export_slots);

TORCH_LIBRARY_IMPL(torchrec_hkv, CPU, m){HKV_REGISTER(m)}
#ifdef TORCHREC_HKV_CUDA
TORCH_LIBRARY_IMPL(torchrec_hkv, CUDA, m) {
  HKV_REGISTER(m)
}
#endif

}  // namespace torchrec_hkv::bindings
