#include "planner/patterns.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "planner/sites.h"

namespace torchrec_hkv::planner {
namespace {

// Shards take no more than a rank's memory divided by these numbers.
constexpr int64_t kParts[] = {1, 2, 4, 8, 16, 32};
// Number of steps between no table and all tables spread as far as possible.
constexpr size_t kSteps = 24;

int64_t bytes(const Parts& parts) { return added(parts.hbm, parts.host); }

class Finder {
 public:
  Finder(const std::vector<const Choices*>& tables, const std::vector<Room>& rooms,
         const std::function<bool(const std::vector<int>&)>& fits)
      : tables_(tables), fits_(fits), order_(tables.size()) {
    for (const Room& room : rooms) {
      hbm_ = added(hbm_, room.hbm);
      host_ = added(host_, room.host);
      most_hbm_ = std::max(most_hbm_, room.hbm);
      most_host_ = std::max(most_host_, room.host);
    }
    std::iota(order_.begin(), order_.end(), 0);
    std::stable_sort(order_.begin(), order_.end(), [&](size_t a, size_t b) {
      return bytes(tables[a]->at(tables[a]->whole())) > bytes(tables[b]->at(tables[b]->whole()));
    });
  }

  bool run() {
    std::vector<bool> moved(tables_.size(), false);
    if (run(moved)) return true;
    if (host_ == 0) return false;
    std::vector<size_t> movable;  // the largest first
    for (const size_t at : order_) {
      const Choices& table = *tables_[at];
      if (table.at(table.whole_in_host()).hbm < table.at(table.whole()).hbm) movable.push_back(at);
    }
    for (const bool largest_first : {true, false}) {
      const auto [some, count] = as_needed(movable);
      if (0 < count && count < movable.size() && run(some)) return true;
      if (largest_first) std::reverse(movable.begin(), movable.end());
    }
    for (const size_t at : movable) moved[at] = true;
    return run(moved);
  }

 private:
  // Moves tables to host memory until the others fit into HBM. Returns whether each is moved, and
  // their number.
  std::pair<std::vector<bool>, size_t> as_needed(const std::vector<size_t>& movable) const {
    std::vector<bool> moved(tables_.size(), false);
    size_t count = 0;
    int64_t hbm = 0, host = 0;
    for (const Choices* table : tables_) {
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

  // Patterns in which these tables are in host memory.
  bool run(const std::vector<bool>& moved) {
    std::vector<int> chosen(tables_.size());
    for (const int64_t part : kParts) {
      const int64_t hbm = most_hbm_ / part, host = most_host_ / part;
      for (size_t at = 0; at < tables_.size(); ++at) {
        const Choices& table = *tables_[at];
        if (moved[at]) {
          const Parts& whole = table.at(table.whole_in_host());
          const bool is_small = whole.most_hbm <= hbm && whole.most_host <= host;
          chosen[at] = is_small ? table.whole_in_host() : table.spread_in_host();
        } else {
          chosen[at] = table.within(hbm, host);
        }
      }
      if (offer(chosen)) return true;
    }
    for (size_t step = 0; step <= kSteps; ++step) {
      const size_t end = tables_.size() * step / kSteps;
      for (size_t place = 0; place < order_.size(); ++place) {
        const size_t at = order_[place];
        const Choices& table = *tables_[at];
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

  const std::vector<const Choices*>& tables_;
  const std::function<bool(const std::vector<int>&)>& fits_;
  std::vector<size_t> order_;  // the largest table first
  std::vector<int> last_;
  int64_t hbm_ = 0, host_ = 0, most_hbm_ = 0, most_host_ = 0;  // of all ranks, of the largest one
};

}  // namespace

Choices::Choices(std::vector<std::shared_ptr<const Parts>> options) : options_(std::move(options)) {
  const auto least = [&](auto key) {
    const auto is_less = [&](const auto& a, const auto& b) { return key(*a) < key(*b); };
    return static_cast<int>(std::min_element(options_.begin(), options_.end(), is_less) -
                            options_.begin());
  };
  whole_ = least([](const Parts& parts) { return std::pair(bytes(parts), parts.most_bytes); });
  spread_ = least([](const Parts& parts) { return std::pair(parts.most_bytes, bytes(parts)); });
  whole_in_host_ = least([](const Parts& parts) { return std::pair(parts.hbm, parts.most_hbm); });
  spread_in_host_ = least([](const Parts& parts) { return std::pair(parts.most_hbm, parts.hbm); });
}

int Choices::within(int64_t hbm, int64_t host) const {
  int found = -1;
  for (int option = 0; option < static_cast<int>(options_.size()); ++option) {
    const Parts& parts = at(option);
    if (parts.most_hbm > hbm || parts.most_host > host) continue;
    if (found < 0 || std::pair(bytes(parts), parts.most_bytes) <
                         std::pair(bytes(at(found)), at(found).most_bytes)) {
      found = option;
    }
  }
  return found < 0 ? spread_ : found;
}

bool find_pattern(const std::vector<const Choices*>& tables, const std::vector<Room>& rooms,
                  const std::function<bool(const std::vector<int>&)>& fits) {
  return Finder(tables, rooms, fits).run();
}

}  // namespace torchrec_hkv::planner
