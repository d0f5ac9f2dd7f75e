#include "bindings/planner_module.h"

#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "planner/packing.h"
#include "planner/patterns.h"
#include "runtime/checks.h"

namespace py = pybind11;

namespace torchrec_hkv::bindings {
namespace {

using planner::PackEffort;
using planner::Parts;
using planner::ShardNeed;
using planner::ShardPlacement;
using planner::Spread;
using planner::TableOptions;

// Free memory of ranks.
class RankMemory {
 public:
  RankMemory(const std::vector<int64_t>& hbm, const std::vector<int64_t>& host, int per_host)
      : per_host_(per_host) {
    TORCH_CHECK_VALUE(!hbm.empty() && hbm.size() == host.size(), "hbm has ", hbm.size(),
                      " ranks and host ", host.size(),
                      ", but both must have the same, at least 1.");
    TORCH_CHECK_VALUE(per_host >= 1, "per_host is ", per_host, ", but must be at least 1.");
    for (size_t r = 0; r < hbm.size(); ++r) free_memory_.push_back({hbm[r], host[r]});
  }

  std::optional<ShardPlacement> pack(const std::vector<const Parts*>& options, bool fast) const {
    return pack(options, fast ? PackEffort::kThorough : PackEffort::kFits);
  }
  bool fits(const std::vector<const Parts*>& options) const {
    return pack(options, false).has_value();
  }
  std::optional<double> fastest(const std::vector<const Parts*>& options) const {
    const std::optional<ShardPlacement> placement = pack(options, PackEffort::kQuick);
    if (!placement) return std::nullopt;
    return planner::slowest(options, *placement, free_memory_.size());
  }

  // (missing bytes of HBM, missing bytes of host memory, options on ranks that lack memory).
  std::tuple<int64_t, int64_t, std::vector<size_t>> missing(
      const std::vector<const Parts*>& options) const {
    check(options);
    std::vector<planner::FreeMemory> remaining = free_memory_;
    const ShardPlacement placement = planner::pack_overfull(options, remaining);
    std::vector<size_t> found;
    for (size_t at = 0; at < options.size(); ++at) {
      const auto lacks_memory = [&](int r) {
        return remaining[r].hbm < 0 || remaining[r].host < 0;
      };
      const std::vector<int>& ranks = placement[at];
      if (std::any_of(ranks.begin(), ranks.end(), lacks_memory)) found.push_back(at);
    }
    int64_t hbm = 0, host = 0;
    for (const planner::FreeMemory& rank_memory : remaining) {
      hbm -= std::min<int64_t>(rank_memory.hbm, 0);
      host -= std::min<int64_t>(rank_memory.host, 0);
    }
    return {hbm, host, std::move(found)};
  }

  // The first pattern that fits, as the index of an option per table.
  std::optional<std::vector<int>> fitting(const std::vector<const TableOptions*>& tables) const {
    std::optional<std::vector<int>> found;
    std::vector<const Parts*> options(tables.size());
    planner::find_pattern(tables, free_memory_, per_host_, [&](const std::vector<int>& chosen) {
      for (size_t at = 0; at < tables.size(); ++at) options[at] = &tables[at]->at(chosen[at]);
      if (fits(options)) found = chosen;
      return found.has_value();
    });
    return found;
  }
  std::vector<std::vector<int>> patterns(const std::vector<const TableOptions*>& tables) const {
    std::vector<std::vector<int>> found;
    planner::find_pattern(tables, free_memory_, per_host_, [&](const std::vector<int>& chosen) {
      found.push_back(chosen);
      return false;
    });
    return found;
  }

 private:
  std::optional<ShardPlacement> pack(const std::vector<const Parts*>& options,
                                     PackEffort effort) const {
    check(options);
    return planner::pack(options, free_memory_, per_host_, effort);
  }

  void check(const std::vector<const Parts*>& options) const {
    for (const Parts* parts : options) {
      TORCH_CHECK_VALUE(parts != nullptr, "an option is None.");
      TORCH_CHECK_VALUE(
          parts->spread != Spread::kAllRanks || parts->needs.size() == free_memory_.size(),
          "an option for all ranks has ", parts->needs.size(), " shards, but there are ",
          free_memory_.size(), " ranks.");
    }
  }

  std::vector<planner::FreeMemory> free_memory_;
  int per_host_;
};

TableOptions make_choices(const std::vector<std::shared_ptr<Parts>>& options) {
  TORCH_CHECK_VALUE(!options.empty(), "a table has no options, but must have at least one.");
  return TableOptions({options.begin(), options.end()});
}

Parts make_parts(const std::vector<std::tuple<int64_t, int64_t, double>>& needs, Spread spread) {
  std::vector<ShardNeed> made;
  for (const auto& [hbm, host, time] : needs) made.push_back({hbm, host, time});
  return Parts(std::move(made), spread);
}

}  // namespace

void define_planner(py::module_& m) {
  py::enum_<Spread>(m, "PlannerSpread")
      .value("ANY_RANK", Spread::kAnyRank)
      .value("ALL_RANKS", Spread::kAllRanks)
      .value("HOST_RANKS", Spread::kHostRanks)
      .value("ONE_HOST", Spread::kOneHost);
  py::class_<Parts, std::shared_ptr<Parts>>(m, "PlannerShardNeeds")
      .def(py::init(&make_parts), py::arg("needs"), py::arg("spread"))
      .def("fits_where", &Parts::fits_where, py::arg("other"))
      .def("__len__", [](const Parts& parts) { return parts.needs.size(); })
      .def_readonly("spread", &Parts::spread)
      .def_readonly("hbm", &Parts::hbm)
      .def_readonly("host", &Parts::host)
      .def_readonly("max_hbm", &Parts::max_hbm)
      .def_readonly("max_bytes", &Parts::max_bytes)
      .def_readonly("time", &Parts::time);
  py::class_<TableOptions>(m, "PlannerChoices").def(py::init(&make_choices), py::arg("options"));
  py::class_<RankMemory>(m, "PlannerFreeMemory")
      .def(py::init<const std::vector<int64_t>&, const std::vector<int64_t>&, int>(),
           py::arg("hbm"), py::arg("host"), py::arg("per_host"))
      .def("pack",
           py::overload_cast<const std::vector<const Parts*>&, bool>(&RankMemory::pack, py::const_),
           py::arg("options"), py::arg("fast"))
      .def("fits", &RankMemory::fits, py::arg("options"))
      .def("missing", &RankMemory::missing, py::arg("options"))
      .def("fitting", &RankMemory::fitting, py::arg("tables"))
      .def("patterns", &RankMemory::patterns, py::arg("tables"))
      .def("fastest", &RankMemory::fastest, py::arg("options"));
}

}  // namespace torchrec_hkv::bindings
