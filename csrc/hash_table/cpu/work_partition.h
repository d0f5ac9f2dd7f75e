// Divides the positions of a batch among threads, on the CPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cpu {

// The positions of one feature that a thread finds one after the other.
struct Span {
  int32_t table;
  int64_t begin, end;
};

// Divides a batch among threads. Whole tables go to one thread each as long as this balances the
// work: then no other thread writes to the table, additions to scores need not be atomic, and no
// line is in another processor's cache. The other tables are split into pieces.
class WorkPartition {
 public:
  struct WorkItem {
    const Span* begin;
    const Span* end;
    bool exclusive;  // whether no other thread touches their table
  };

  WorkPartition(const Batch& batch, int threads) {
    list(batch);
    if (threads <= 1) {
      items_.push_back({spans_.data(), spans_.data() + spans_.size(), true});
      return;
    }
    const int64_t fair = batch.num_ids / threads + kMin;
    std::vector<int64_t> loads(threads, 0);
    std::vector<TableSpans> split;
    for (const TableSpans& table : by_size()) {
      // Chooses the thread with the least work, as if each thread took the next share after it has
      // finished one.
      int64_t& load = *std::min_element(loads.begin(), loads.end());
      if (load + table.ids > fair) {
        split.push_back(table);
        continue;
      }
      load += table.ids;
      items_.push_back({table.begin, table.end, true});
    }
    split_tables(split, threads);
  }

  int64_t size() const { return static_cast<int64_t>(items_.size()); }
  const WorkItem& operator[](int64_t number) const { return items_[number]; }

 private:
  static constexpr int64_t kMin = 1024;  // positions of a piece

  // A table's spans.
  struct TableSpans {
    const Span* begin;
    const Span* end;
    int64_t ids;
  };

  // Lists spans by table.
  void list(const Batch& batch) {
    for (int32_t f = 0; f < batch.num_features; ++f) {
      const Span span{batch.feature_tables[f], batch.feature_start(f), batch.feature_start(f + 1)};
      if (span.begin < span.end) spans_.push_back(span);
    }
    std::stable_sort(spans_.begin(), spans_.end(),
                     [](const Span& a, const Span& b) { return a.table < b.table; });
  }

  // The tables, the largest first.
  std::vector<TableSpans> by_size() const {
    std::vector<TableSpans> all;
    for (const Span& span : spans_) {
      if (all.empty() || (all.back().end - 1)->table != span.table)
        all.push_back({&span, &span, 0});
      all.back().end = &span + 1;
      all.back().ids += span.end - span.begin;
    }
    std::stable_sort(all.begin(), all.end(),
                     [](const TableSpans& a, const TableSpans& b) { return a.ids > b.ids; });
    return all;
  }

  // Lists the first pieces of all tables, then the second ones, so that threads mostly work on
  // different tables.
  void split_tables(const std::vector<TableSpans>& split, int threads) {
    int64_t ids = 0;
    for (const TableSpans& table : split) ids += table.ids;
    const int64_t most = std::max(kMin, ids / (4 * threads) + 1);
    std::vector<std::pair<int64_t, Span>> chunks;
    for (const TableSpans& table : split) {
      int64_t number = 0;
      for (const Span* span = table.begin; span != table.end; ++span) {
        const int64_t n = span->end - span->begin, parts = (n + most - 1) / most;
        for (int64_t part = 0; part < parts; ++part) {
          chunks.push_back({number++,
                            {span->table, span->begin + n * part / parts,
                             span->begin + n * (part + 1) / parts}});
        }
      }
    }
    std::stable_sort(chunks.begin(), chunks.end(),
                     [](const auto& a, const auto& b) { return a.first < b.first; });
    for (const auto& chunk : chunks) chunks_.push_back(chunk.second);
    for (const Span& chunk : chunks_) items_.push_back({&chunk, &chunk + 1, false});
  }

  std::vector<Span> spans_, chunks_;
  std::vector<WorkItem> items_;
};

}  // namespace torchrec_hkv::hash_table::cpu
