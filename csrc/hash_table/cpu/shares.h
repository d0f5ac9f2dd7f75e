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
class Shares {
 public:
  struct Share {
    const Span* begin;
    const Span* end;
    bool alone;  // whether no other thread touches their table
  };

  Shares(const Batch& batch, int threads) {
    list(batch);
    if (threads <= 1) {
      shares_.push_back({spans_.data(), spans_.data() + spans_.size(), true});
      return;
    }
    const int64_t fair = batch.num_ids / threads + kLeast;
    std::vector<int64_t> loads(threads, 0);
    std::vector<Whole> split;
    for (const Whole& whole : by_size()) {
      // Chooses the thread with the least work, as if each thread took the next share after it has
      // finished one.
      int64_t& load = *std::min_element(loads.begin(), loads.end());
      if (load + whole.ids > fair) {
        split.push_back(whole);
        continue;
      }
      load += whole.ids;
      shares_.push_back({whole.begin, whole.end, true});
    }
    cut(split, threads);
  }

  int64_t size() const { return static_cast<int64_t>(shares_.size()); }
  const Share& operator[](int64_t number) const { return shares_[number]; }

 private:
  static constexpr int64_t kLeast = 1024;  // positions of a piece

  // A table's spans.
  struct Whole {
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
  std::vector<Whole> by_size() const {
    std::vector<Whole> all;
    for (const Span& span : spans_) {
      if (all.empty() || (all.back().end - 1)->table != span.table)
        all.push_back({&span, &span, 0});
      all.back().end = &span + 1;
      all.back().ids += span.end - span.begin;
    }
    std::stable_sort(all.begin(), all.end(),
                     [](const Whole& a, const Whole& b) { return a.ids > b.ids; });
    return all;
  }

  // Lists the first pieces of all tables, then the second ones, so that threads mostly work on
  // different tables.
  void cut(const std::vector<Whole>& split, int threads) {
    int64_t ids = 0;
    for (const Whole& whole : split) ids += whole.ids;
    const int64_t most = std::max(kLeast, ids / (4 * threads) + 1);
    std::vector<std::pair<int64_t, Span>> pieces;
    for (const Whole& whole : split) {
      int64_t number = 0;
      for (const Span* span = whole.begin; span != whole.end; ++span) {
        const int64_t n = span->end - span->begin, parts = (n + most - 1) / most;
        for (int64_t part = 0; part < parts; ++part) {
          pieces.push_back({number++,
                            {span->table, span->begin + n * part / parts,
                             span->begin + n * (part + 1) / parts}});
        }
      }
    }
    std::stable_sort(pieces.begin(), pieces.end(),
                     [](const auto& a, const auto& b) { return a.first < b.first; });
    for (const auto& piece : pieces) pieces_.push_back(piece.second);
    for (const Span& piece : pieces_) shares_.push_back({&piece, &piece + 1, false});
  }

  std::vector<Span> spans_, pieces_;
  std::vector<Share> shares_;
};

}  // namespace torchrec_hkv::hash_table::cpu
