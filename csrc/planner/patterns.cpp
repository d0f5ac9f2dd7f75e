#include "planner/patterns.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "planner/options_to_spread.h"
#include "planner/placement_state.h"

namespace torchrec_hkv::planner {
namespace {

// Shards take no more than a rank's memory divided by these numbers.
constexpr int64_t kParts[] = {1, 2, 4, 8, 16, 32};
// Number of steps from no table to all tables spread as far as possible.
constexpr size_t kSteps = 24;
// Number of times that tables are spread further.
constexpr int kMaxSpreads = 64;
// After a table is spread further, its largest shard takes at most this part of the previous one.
constexpr double kSmaller = 0.75;

int64_t bytes(const Parts& parts) { return added(parts.hbm, parts.host); }

class PatternFinder {
 public:
  PatternFinder(const std::vector<const TableOptions*>& tables,
                const std::vector<FreeMemory>& free_memory, int per_host,
                const std::function<bool(const std::vector<int>&)>& fits)
      : tables_(tables),
        free_memory_(free_memory),
        per_host_(per_host),
        fits_(fits),
        order_(tables.size()) {
    for (const FreeMemory& rank_memory : free_memory) {
      hbm_ = added(hbm_, rank_memory.hbm);
      host_ = added(host_, rank_memory.host);
      max_hbm_ = std::max(max_hbm_, rank_memory.hbm);
      max_host_ = std::max(max_host_, rank_memory.host);
    }
    std::iota(order_.begin(), order_.end(), 0);
    std::stable_sort(order_.begin(), order_.end(), [&](size_t a, size_t b) {
      return bytes(tables[a]->at(tables[a]->whole())) > bytes(tables[b]->at(tables[b]->whole()));
    });
  }

  bool run() {
    std::vector<bool> moved(tables_.size(), false);
    if (patterns(moved) || adapt(moved)) return true;
    if (host_ == 0) return false;
    std::vector<size_t> movable;  // the largest table first
    for (const size_t at : order_) {
      const TableOptions& table = *tables_[at];
      if (table.at(table.whole_in_host()).hbm < table.at(table.whole()).hbm) movable.push_back(at);
    }
    std::vector<std::vector<bool>> others;
    for (const bool largest_first : {true, false}) {
      auto [some, count] = as_needed(movable);
      if (0 < count && count < movable.size()) others.push_back(std::move(some));
      if (largest_first) std::reverse(movable.begin(), movable.end());
    }
    for (const size_t at : movable) moved[at] = true;
    others.push_back(moved);
    const auto fit = [&](const std::vector<bool>& some) { return patterns(some) || adapt(some); };
    return std::any_of(others.begin(), others.end(), fit);
  }

 private:
  // Moves tables to host memory until the others fit into HBM. Returns whether each table is moved,
  // and the number of moved tables.
  std::pair<std::vector<bool>, size_t> as_needed(const std::vector<size_t>& movable) const {
    std::vector<bool> moved(tables_.size(), false);
    size_t count = 0;
    int64_t hbm = 0, host = 0;
    for (const TableOptions* table : tables_) {
      hbm = added(hbm, table->at(table->whole()).hbm);
      host = added(host, table->at(table->whole()).host);
    }
    for (const size_t at : movable) {
      if (hbm <= hbm_) break;
      const Parts& before = tables_[at]->at(tables_[at]->whole());
      const Parts& after = tables_[at]->at(tables_[at]->whole_in_host());
      if (added(host, after.host - before.host) > host_) continue;
      hbm += after.hbm - before.hbm;
      host += after.host - before.host;
      moved[at] = true;
      ++count;
    }
    return {std::move(moved), count};
  }

  // Options whose shards each take at most a part of a rank's memory.
  std::vector<int> within(int64_t part, const std::vector<bool>& moved) const {
    const int64_t hbm = max_hbm_ / part, host = max_host_ / part;
    std::vector<int> chosen(tables_.size());
    for (size_t at = 0; at < tables_.size(); ++at) {
      const TableOptions& table = *tables_[at];
      if (moved[at]) {
        const Parts& whole = table.at(table.whole_in_host());
        const bool is_small = whole.max_hbm <= hbm && whole.max_host <= host;
        chosen[at] = is_small ? table.whole_in_host() : table.spread_in_host();
      } else {
        chosen[at] = table.within(hbm, host);
      }
    }
    return chosen;
  }

  // Tries patterns in which these tables are in host memory.
  bool patterns(const std::vector<bool>& moved) {
    for (const int64_t part : kParts) {
      if (offer(within(part, moved))) return true;
    }
    std::vector<int> chosen(tables_.size());
    for (size_t step = 0; step <= kSteps; ++step) {
      const size_t end = tables_.size() * step / kSteps;
      for (size_t place = 0; place < order_.size(); ++place) {
        const size_t at = order_[place];
        const TableOptions& table = *tables_[at];
        if (moved[at]) {
          chosen[at] = place < end ? table.spread_in_host() : table.whole_in_host();
        } else {
          chosen[at] = place < end ? table.spread() : table.whole();
        }
      }
      if (offer(chosen)) return true;
    }
    return false;
  }

  // Spreads tables on ranks that lack memory, until all fit.
  bool adapt(const std::vector<bool>& moved) {
    std::vector<int> chosen = within(1, moved);
    int64_t hbm = 0, host = 0;
    for (size_t at = 0; at < tables_.size(); ++at) {
      hbm = added(hbm, of(at, chosen).hbm);
      host = added(host, of(at, chosen).host);
    }
    for (int step = 0; step < kMaxSpreads; ++step) {
      if (hbm > hbm_ || host > host_) return false;
      std::vector<const Parts*> options(tables_.size());
      for (size_t at = 0; at < tables_.size(); ++at) options[at] = &of(at, chosen);
      const std::vector<std::vector<size_t>> groups =
          options_to_spread(options, free_memory_, per_host_);
      if (groups.empty()) return offer(chosen);
      bool has_changed = false;
      for (const std::vector<size_t>& group : groups) {
        // A table may already have been spread because another rank lacked memory.
        const auto is_changed = [&](size_t at) { return &of(at, chosen) != options[at]; };
        if (std::any_of(group.begin(), group.end(), is_changed)) continue;
        const auto [table, option] = cheapest(group, chosen, moved, hbm_ - hbm, host_ - host);
        if (option < 0) return false;
        hbm += tables_[table]->at(option).hbm - of(table, chosen).hbm;
        host += tables_[table]->at(option).host - of(table, chosen).host;
        chosen[table] = option;
        has_changed = true;
      }
      if (!has_changed) return false;
    }
    return false;
  }

  const Parts& of(size_t at, const std::vector<int>& chosen) const {
    return tables_[at]->at(chosen[at]);
  }

  // The table of a group that costs the least additional memory, for each byte saved on a rank, if
  // it is spread further, and its option then. hbm, host: free memory of all ranks.
  std::pair<size_t, int> cheapest(const std::vector<size_t>& group, const std::vector<int>& chosen,
                                  const std::vector<bool>& moved, int64_t hbm, int64_t host) const {
    std::pair<size_t, int> best{0, -1};
    double least = 0;
    for (const size_t at : group) {
      const int option = tables_[at]->spread_further(chosen[at], moved[at]);
      if (option < 0) continue;
      const Parts &before = of(at, chosen), &after = tables_[at]->at(option);
      if (after.hbm - before.hbm > hbm || after.host - before.host > host) continue;
      const double price = static_cast<double>(bytes(after) - bytes(before)) /
                           static_cast<double>(before.max_bytes - after.max_bytes);
      if (best.second < 0 || price < least) {
        best = {at, option};
        least = price;
      }
    }
    return best;
  }

  bool offer(const std::vector<int>& chosen) {
    if (chosen == last_) return false;
    last_ = chosen;
    int64_t hbm = 0, host = 0;
    for (size_t at = 0; at < chosen.size(); ++at) {
      const Parts& parts = tables_[at]->at(chosen[at]);
      hbm = added(hbm, parts.hbm);
      host = added(host, parts.host);
    }
    return hbm <= hbm_ && host <= host_ && fits_(chosen);
  }

  const std::vector<const TableOptions*>& tables_;
  const std::vector<FreeMemory>& free_memory_;
  const int per_host_;
  const std::function<bool(const std::vector<int>&)>& fits_;
  std::vector<size_t> order_;  // the largest table first
  std::vector<int> last_;
  // Memory of all ranks together, and of the largest rank.
  int64_t hbm_ = 0, host_ = 0, max_hbm_ = 0, max_host_ = 0;
};

}  // namespace

TableOptions::TableOptions(std::vector<std::shared_ptr<const Parts>> options)
    : options_(std::move(options)) {
  const auto least = [&](auto key) {
    const auto is_less = [&](const auto& a, const auto& b) { return key(*a) < key(*b); };
    return static_cast<int>(std::min_element(options_.begin(), options_.end(), is_less) -
                            options_.begin());
  };
  whole_ = least([](const Parts& parts) { return std::pair(bytes(parts), parts.max_bytes); });
  spread_ = least([](const Parts& parts) { return std::pair(parts.max_bytes, bytes(parts)); });
  whole_in_host_ = least([](const Parts& parts) { return std::pair(parts.hbm, parts.max_hbm); });
  spread_in_host_ = least([](const Parts& parts) { return std::pair(parts.max_hbm, parts.hbm); });
}

int TableOptions::within(int64_t hbm, int64_t host) const {
  int found = -1;
  for (int option = 0; option < static_cast<int>(options_.size()); ++option) {
    const Parts& parts = at(option);
    if (parts.max_hbm > hbm || parts.max_host > host) continue;
    if (found < 0 || std::pair(bytes(parts), parts.max_bytes) <
                         std::pair(bytes(at(found)), at(found).max_bytes)) {
      found = option;
    }
  }
  return found < 0 ? spread_ : found;
}

int TableOptions::spread_further(int option, bool in_host) const {
  const Parts& current = at(option);
  const double most = kSmaller * static_cast<double>(current.max_bytes);
  int found = -1;
  for (int other = 0; other < static_cast<int>(options_.size()); ++other) {
    const Parts& parts = at(other);
    if (static_cast<double>(parts.max_bytes) > most || (in_host && parts.hbm > current.hbm))
      continue;
    if (found < 0 || std::pair(bytes(parts), parts.max_bytes) <
                         std::pair(bytes(at(found)), at(found).max_bytes)) {
      found = other;
    }
  }
  return found;
}

bool find_pattern(const std::vector<const TableOptions*>& tables,
                  const std::vector<FreeMemory>& free_memory, int per_host,
                  const std::function<bool(const std::vector<int>&)>& fits) {
  return PatternFinder(tables, free_memory, per_host, fits).run();
}

}  // namespace torchrec_hkv::planner
