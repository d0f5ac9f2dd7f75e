#include "bindings/replay_module.h"

#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings/lookups.h"
#include "hash_table/miniatures.h"
#include "replay/id_counts.h"
#include "replay/text.h"
#include "replay/windows.h"
#include "runtime/checks.h"
#include "runtime/sampled_aging.h"

namespace py = pybind11;

namespace torchrec_hkv::bindings {
using namespace runtime;
namespace {

const int64_t* numbers(const at::Tensor& tensor, const char* name) {
  check_dtype(tensor, name, at::kLong);
  check_vector(tensor, name);
  TORCH_CHECK_VALUE(tensor.is_cpu() && tensor.is_contiguous(), name,
                    " must be contiguous on the CPU.");
  return tensor.const_data_ptr<int64_t>();
}

// The ends of the steps in a log of n ids. Checks them.
const int64_t* checked_ends(const at::Tensor& ends, const char* name, int64_t n) {
  const int64_t* const end = numbers(ends, name);
  for (int64_t s = 0, begin = 0; s < ends.numel(); begin = end[s++]) {
    TORCH_CHECK_VALUE(begin <= end[s] && end[s] <= n, name, " must rise up to ", n, ", but have ",
                      end[s], " behind ", begin, ".");
  }
  return end;
}

// The index of a table that stores a sample, and the half-life of the whole table.
using Aged = std::pair<int64_t, SampledAging*>;

// Steps with all ids of the log, not only a sample.
struct WholeSteps {
  const int64_t* ids = nullptr;
  const int64_t* ends = nullptr;

  // Returns the ids of a step whose miniature_hash() is below `sampled`.
  const std::vector<int64_t>& select(int64_t begin, int64_t end, uint64_t sampled) {
    selected.resize(static_cast<size_t>(end - begin) + 1);
    size_t count = 0;
    if (sampled != 0) {
      for (int64_t i = begin; i < end; ++i) {
        selected[count] = ids[i];
        count += hash_table::miniature_hash(ids[i]) >> 32 < sampled;
      }
    }
    selected.resize(count);
    return selected;
  }
  std::vector<int64_t> selected;
};

// Runs one training lookup for each step. Each table of the group looks up all ids of the step.
// epochs: the epoch of each step, for policies with epochs. aging: requires all_ids and all_ends,
// the same steps with all ids of the log. Returns slots, int64 [tables, n], and whether each id was
// in the table when its step began, bool [tables, n].
std::pair<at::Tensor, at::Tensor> replay_steps(int64_t handle, const at::Tensor& ids,
                                               const at::Tensor& ends,
                                               const std::optional<at::Tensor>& epochs,
                                               const std::vector<Aged>& aging,
                                               const std::optional<at::Tensor>& all_ids,
                                               const std::optional<at::Tensor>& all_ends) {
  const std::shared_ptr<TableGroup> owner = TableGroup::from_handle(handle);
  TableGroup& group = *owner;
  TORCH_CHECK_VALUE(group.device().is_cpu() && group.num_features() == group.num_tables(),
                    "a replay needs a group on the CPU with one feature for each table.");
  const int64_t tables = group.num_tables(), steps = ends.numel(), n = ids.numel();
  const int64_t* const from = numbers(ids, "ids");
  const int64_t* const end = checked_ends(ends, "ends", n);
  const int64_t* epoch = nullptr;
  if (epochs) {
    check_length(*epochs, "epochs", steps);
    epoch = numbers(*epochs, "epochs");
  }
  WholeSteps whole;
  uint64_t max_sampled = 0;
  if (!aging.empty()) {
    TORCH_CHECK_VALUE(all_ids && all_ends, "tables that age need all ids of the log.");
    check_length(*all_ends, "all_ends", steps);
    whole.ids = numbers(*all_ids, "all_ids");
    whole.ends = checked_ends(*all_ends, "all_ends", all_ids->numel());
    for (const Aged& aged : aging) max_sampled = std::max(max_sampled, aged.second->sampled());
  }
  const at::Tensor slots = at::empty({tables, n}, at::kLong);
  const at::Tensor found = at::empty({tables, n}, at::kBool);
  const BagLayout layout(group, 1, c10::nullopt);
  const at::Tensor offsets = at::empty({tables + 1}, at::kLong);
  at::Tensor present = at::empty({0}, at::kBool), repeated = at::empty({0}, at::kLong);
  for (int64_t s = 0, begin = 0, all_begin = 0; s < steps; begin = end[s++]) {
    const int64_t count = end[s] - begin;
    if (epoch != nullptr && (s == 0 || epoch[s] != epoch[s - 1])) {
      group.order().run(kWriteIndex, [&] { group.clock().set_epoch(epoch[s]); });
    }
    group.order().run(kWriteIndex, [&] {
      for (const Aged& aged : aging) aged.second->begin_call_of(group, aged.first);
    });
    if (present.numel() < tables * count) {
      present = at::empty({tables * count}, at::kBool);
      repeated = at::empty({tables * count}, at::kLong);
    }
    for (int64_t t = 0; t <= tables; ++t) offsets.data_ptr<int64_t>()[t] = t * count;
    const at::Tensor looked_up = repeated.narrow(0, 0, tables * count);
    for (int64_t t = 0; t < tables; ++t) {
      std::copy_n(from + begin, count, looked_up.data_ptr<int64_t>() + t * count);
    }
    const hash_table::Batch batch = make_batch(group, looked_up, offsets, layout);
    const at::Tensor placed = insert_missing(group, looked_up, offsets, layout, batch, nullptr,
                                             c10::nullopt, present.data_ptr<bool>());
    for (int64_t t = 0; t < tables; ++t) {
      std::copy_n(placed.const_data_ptr<int64_t>() + t * count, count,
                  slots.data_ptr<int64_t>() + t * n + begin);
      std::copy_n(present.const_data_ptr<bool>() + t * count, count,
                  found.data_ptr<bool>() + t * n + begin);
    }
    if (aging.empty()) continue;
    const auto& sampled = whole.select(all_begin, whole.ends[s], max_sampled);
    for (const Aged& aged : aging) {
      const bool evicts = group.view(aged.first).counters[hash_table::kEvicted] != 0;
      aged.second->end_call(sampled.data(), static_cast<int64_t>(sampled.size()),
                            whole.ends[s] - all_begin, evicts);
    }
    all_begin = whole.ends[s];
  }
  return {slots, found};
}

// The windows of a log (replay/windows.h). All of them count the same ids.
class Windows {
 public:
  // Both lists have (lookups, cells) of each window. Windows of `within` end at the end of each
  // part of the log; windows of `over` may span parts.
  Windows(const std::vector<std::pair<int64_t, int64_t>>& within,
          const std::vector<std::pair<int64_t, int64_t>>& over) {
    for (const auto& [length, cells] : within) add(length, cells, true);
    for (const auto& [length, cells] : over) add(length, cells, false);
  }

  // Counts the ids of a part. Returns, for each window length, the numbers of occupied cells of the
  // windows that ended, int64 [windows].
  std::vector<at::Tensor> see(const at::Tensor& bits, const at::Tensor& at,
                              const at::Tensor& sampled, int64_t length) {
    check_length(at, "at", bits.numel());
    const replay::SelectedIds ids{
        numbers(bits, "bits"), numbers(at, "at"), numbers(sampled, "sampled"),
        bits.numel(),          sampled.numel(),   length};
    for (int64_t i = 0; i < sampled.numel(); ++i) {
      TORCH_CHECK_VALUE(ids.sampled[i] >= 0 && ids.sampled[i] < bits.numel(), "sampled has ",
                        ids.sampled[i], ", but must have numbers below ", bits.numel(), ".");
    }
    return of_each([&](replay::Window& window, auto* occupied) { window.see(ids, occupied); });
  }
  // Ends all open windows.
  std::vector<at::Tensor> close() {
    return of_each([](replay::Window& window, auto* occupied) { window.close(occupied); });
  }
  std::vector<int64_t> numbers_of_windows() const {
    std::vector<int64_t> all;
    for (const replay::Window& window : windows_) all.push_back(window.number());
    return all;
  }
  // int64 [windows, groups].
  at::Tensor of_groups() const {
    at::Tensor all = at::empty({static_cast<int64_t>(windows_.size()), replay::kGroups}, at::kLong);
    int64_t* to = all.data_ptr<int64_t>();
    for (const replay::Window& window : windows_) {
      to = std::copy(window.of_groups().begin(), window.of_groups().end(), to);
    }
    return all;
  }

 private:
  void add(int64_t length, int64_t cells, bool within_parts) {
    TORCH_CHECK_VALUE(length >= 0, "a window has ", length, " lookups, but must not be negative.");
    TORCH_CHECK_VALUE(cells >= 64 && (cells & (cells - 1)) == 0, "a window has ", cells,
                      " cells, but must have a power of two from 64 on.");
    windows_.emplace_back(length, cells, within_parts);
  }
  template <typename Function>
  std::vector<at::Tensor> of_each(const Function& function) {
    std::vector<at::Tensor> all;
    for (replay::Window& window : windows_) {
      std::vector<int64_t> occupied;
      function(window, &occupied);
      at::Tensor counts = at::empty({static_cast<int64_t>(occupied.size())}, at::kLong);
      std::copy(occupied.begin(), occupied.end(), counts.data_ptr<int64_t>());
      all.push_back(counts);
    }
    return all;
  }

  std::vector<replay::Window> windows_;
};

// Returns whether an earlier step had each id, bool [n].
at::Tensor count_steps(replay::IdCounts& counts, const at::Tensor& ids, const at::Tensor& ends) {
  const int64_t* const from = numbers(ids, "ids");
  const int64_t* const end = checked_ends(ends, "ends", ids.numel());
  at::Tensor found = at::empty({ids.numel()}, at::kBool);
  for (int64_t s = 0, begin = 0; s < ends.numel(); begin = end[s++]) {
    counts.count(from + begin, end[s] - begin, found.data_ptr<bool>() + begin);
  }
  return found;
}

std::pair<at::Tensor, at::Tensor> entries(const replay::IdCounts& counts) {
  at::Tensor ids = at::empty({counts.size()}, at::kLong), numbers = at::empty_like(ids);
  counts.entries(ids.data_ptr<int64_t>(), numbers.data_ptr<int64_t>());
  return {ids, numbers};
}

at::Tensor tensor_of(const std::vector<int64_t>& numbers) {
  at::Tensor made = at::empty({static_cast<int64_t>(numbers.size())}, at::kLong);
  std::copy(numbers.begin(), numbers.end(), made.data_ptr<int64_t>());
  return made;
}

// Parses a block of text (replay/text.h). columns: the field and kind of each column. Returns
// (number of lines; for each column its ids, and their lines if not every line has one; the fault
// or None). A fault is (line, its number of fields, column or -1, text).
py::tuple parse_text(std::string_view block, const std::string& separator, int64_t fields,
                     const std::vector<std::pair<int64_t, replay::TextKind>>& columns) {
  TORCH_CHECK_VALUE(!separator.empty(),
                    "the separator is empty, but must be one or more characters.");
  // The last line may lack a newline.
  const int64_t most = std::count(block.begin(), block.end(), '\n') + 1;
  std::vector<replay::TextColumn> parsed;
  std::vector<at::Tensor> values;
  for (const auto& [field, kind] : columns) {
    TORCH_CHECK_VALUE(field > (parsed.empty() ? -1 : parsed.back().field), "field ", field,
                      " must be above the one before, and not negative.");
    values.push_back(at::empty({most}, at::kLong));
    parsed.push_back({field, kind, values.back().data_ptr<int64_t>(), 0, {}});
  }
  replay::TextFault fault;
  int64_t lines;
  std::vector<std::pair<at::Tensor, std::optional<at::Tensor>>> ids;
  {
    const py::gil_scoped_release released;
    lines = replay::parse_text(block, separator, fields, &parsed, &fault);
    for (size_t c = 0; c < parsed.size(); ++c) {
      const bool is_full = parsed[c].count == lines;
      ids.emplace_back(values[c].narrow(0, 0, parsed[c].count),
                       is_full ? std::nullopt : std::make_optional(tensor_of(parsed[c].lines)));
    }
  }
  if (fault.line < 0) return py::make_tuple(lines, ids, py::none());
  const py::bytes text(fault.text.data(), fault.text.size());
  return py::make_tuple(lines, ids, py::make_tuple(fault.line, fault.fields, fault.column, text));
}

// Hashes texts that are in one buffer, uint8. Text i is at [bounds[i], bounds[i + 1]).
at::Tensor hash_texts(const at::Tensor& bytes, const at::Tensor& bounds) {
  check_dtype(bytes, "bytes", at::kByte);
  check_vector(bytes, "bytes");
  TORCH_CHECK_VALUE(bytes.is_cpu() && bytes.is_contiguous(),
                    "bytes must be contiguous on the CPU.");
  TORCH_CHECK_VALUE(bounds.numel() > 0, "bounds are empty, but must have a begin.");
  const int64_t* const bound = checked_ends(bounds, "bounds", bytes.numel());
  at::Tensor hashes = at::empty({bounds.numel() - 1}, at::kLong);
  const auto* const from = reinterpret_cast<const char*>(bytes.const_data_ptr<uint8_t>());
  for (int64_t i = 0; i < hashes.numel(); ++i) {
    const std::string_view text(from + bound[i], static_cast<size_t>(bound[i + 1] - bound[i]));
    hashes.data_ptr<int64_t>()[i] = replay::hash_of_text(text);
  }
  return hashes;
}

}  // namespace

void define_replay(py::module_& m) {
  using Released = py::call_guard<py::gil_scoped_release>;
  py::class_<SampledAging>(m, "SampledAging")
      .def(py::init<int64_t, std::optional<double>>(), py::arg("slots"), py::arg("c"))
      .def("begin_call", &SampledAging::begin_call)
      .def("end_call", py::overload_cast<const at::Tensor&, bool>(&SampledAging::end_call),
           py::arg("ids"), py::arg("evicts"), Released())
      .def_property_readonly("c", &SampledAging::c);
  m.def("replay_steps", &replay_steps, py::arg("group"), py::arg("ids"), py::arg("ends"),
        py::arg("epochs"), py::arg("aging"), py::arg("all_ids"), py::arg("all_ends"), Released());

  m.attr("REPLAY_GROUPS") = replay::kGroups;
  py::class_<Windows>(m, "ReplayWindows")
      .def(py::init<const std::vector<std::pair<int64_t, int64_t>>&,
                    const std::vector<std::pair<int64_t, int64_t>>&>(),
           py::arg("within"), py::arg("over"))
      .def("see", &Windows::see, py::arg("bits"), py::arg("at"), py::arg("sampled"),
           py::arg("length"), Released())
      .def("close", &Windows::close)
      .def_property_readonly("numbers", &Windows::numbers_of_windows)
      .def_property_readonly("of_groups", &Windows::of_groups);

  py::enum_<replay::TextKind>(m, "TextKind")
      .value("integer", replay::TextKind::kInteger)
      .value("hexadecimal", replay::TextKind::kHexadecimal)
      .value("text", replay::TextKind::kText);
  m.def("parse_text", &parse_text, py::arg("block"), py::arg("separator"), py::arg("fields"),
        py::arg("columns"));
  m.def("hash_texts", &hash_texts, py::arg("bytes"), py::arg("bounds"), Released());

  py::class_<replay::IdCounts>(m, "IdCounts")
      .def(py::init<int64_t>(), py::arg("max_bytes"))
      .def("count", &count_steps, py::arg("ids"), py::arg("ends"), Released())
      .def("entries", &entries)
      .def_property_readonly("size", &replay::IdCounts::size)
      .def_property_readonly("overflowed", &replay::IdCounts::overflowed);
}

}  // namespace torchrec_hkv::bindings
