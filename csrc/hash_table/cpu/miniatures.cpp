#include "hash_table/cpu/miniatures.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <span>
#include <vector>

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "common/initial_rows_avx512.h"
#include "common/parallel.h"
#include "hash_table/cpu/lowest_aged.h"
#include "hash_table/miniature_use.h"

namespace torchrec_hkv::hash_table::cpu {
namespace {

// A set of one miniature during a call.
class MiniatureSet {
 public:
  MiniatureSet(const Miniatures& miniatures, int k, uint32_t set, const Ranking& ranking,
               const ShortRanks& short_ranks, uint32_t now)
      : tags_(miniatures.set_of(k, set)),
        counts_(tags_ + kMiniatureWays),
        last_steps_(counts_ + kMiniatureWays),
        ways_(static_cast<int32_t>(miniatures.size.ways)),
        ranking_(ranking),
        short_ranks_(short_ranks),
        now_(now) {}

  // Counts a hit. Called first, for all ids.
  void look_up(const SampledId& it) {
    const uint64_t at = match_steps(tags_, ways_, it.tag);
    if (at == 0) return;
    ++hits;
    count(__builtin_ctzll(at), it.given);
  }
  // Places a missing id. Called after look_up, for all ids.
  void place_missing(const SampledId& it) {
    if (const uint64_t at = match_steps(tags_, ways_, it.tag); at != 0) {
      const int p = __builtin_ctzll(at);
      if (inserted_ >> p & 1) count(p, it.given);
      return;
    }
    int p = -1;
    if (const uint64_t free = match_steps(tags_, ways_, 0); free != 0) {
      p = __builtin_ctzll(free);
    } else if ((p = lowest()) >= 0) {
      ++evicted;
    } else {
      p = inserted_with_higher_tag(it.tag);
    }
    if (p < 0) return;
    tags_[p] = it.tag;
    counts_[p] = it.given;
    last_steps_[p] = now_;
    inserted_ |= uint64_t{1} << p;
  }

  uint64_t hits = 0, evicted = 0;

 private:
  void count(int p, uint32_t given) {
    const uint64_t sum = uint64_t{counts_[p]} + given;
    counts_[p] = static_cast<uint32_t>(std::min<uint64_t>(sum, 0xffffffffu));
    last_steps_[p] = now_;
  }

  // The entry that a new id replaces, or -1.
  int lowest() const {
    const LowestRank lowest = ranking_.half_life == 0 ? oldest() : lowest_ranked();
    if (lowest.rank.score > ranking_.replaced_by_new(1, now_)) return -1;
    int best = -1;
    for (uint64_t remaining = lowest.positions; remaining != 0; remaining &= remaining - 1) {
      const int p = __builtin_ctzll(remaining);
      if (best < 0 || tags_[p] < tags_[best]) best = p;
    }
    return best;
  }

  LowestRank lowest_ranked() const {
    return lowest_aged(ranking_, short_ranks_, counts_, last_steps_, ways_, now_);
  }

  // As lowest_ranked, for a half-life of 0, with which counts do not matter.
  LowestRank oldest() const {
    const uint32_t step = lowest_step(last_steps_, ways_);
    if (step >= now_) return kAllPinned;
    return LowestRank{match_steps(last_steps_, ways_, step), {ranking_.of(1, step), step}};
  }

  // The entry with the highest tag of those that this call inserted, if that is above `tag`; else
  // -1.
  int inserted_with_higher_tag(uint32_t tag) const {
    int highest = -1;
    for (uint64_t remaining = inserted_; remaining != 0; remaining &= remaining - 1) {
      const int p = __builtin_ctzll(remaining);
      if (tags_[p] > (highest < 0 ? tag : tags_[highest])) highest = p;
    }
    return highest;
  }

  uint32_t* const tags_;
  uint32_t* const counts_;
  uint32_t* const last_steps_;
  const int32_t ways_;
  const Ranking& ranking_;
  const ShortRanks& short_ranks_;
  const uint32_t now_;
  uint64_t inserted_ = 0;  // entries that this call inserted
};

constexpr int64_t kHashed = 8;  // ids at a time

#ifdef HKV_AVX512
HKV_AVX512 uint32_t sampled_of_eight_avx512(const Miniatures& miniatures, const int64_t* ids) {
  WideLanes hashes;
  std::memcpy(&hashes, ids, sizeof(hashes));
  hashes ^= kMiniatureSeed;
  mix_wide_lanes(hashes);
  hashes >>= 32;
  return _mm512_cmplt_epu64_mask((__m512i)hashes,
                                 _mm512_set1_epi64(static_cast<int64_t>(miniatures.sampled)));
}
#endif

// Bit i: whether ids[i] is in the sample.
uint32_t sampled_of_eight(const Miniatures& miniatures, const int64_t* ids) {
#ifdef HKV_AVX512
  if (has_avx512()) return sampled_of_eight_avx512(miniatures, ids);
#endif
  uint32_t bits = 0;
  for (int i = 0; i < kHashed; ++i) {
    bits |= static_cast<uint32_t>(miniatures.is_sampled(miniature_hash(ids[i]))) << i;
  }
  return bits;
}

std::vector<SampledId> sample(const TableView* tables, const Batch& batch,
                              const CallContext& context, int threads) {
  std::vector<SampledId> all;
  std::mutex mutex;
  parallel_for(batch.num_ids, 4096, threads, [&](int64_t begin, int64_t end) {
    std::vector<SampledId> sampled_here;
    for (int32_t feature = batch.feature_of(begin); begin < end; ++feature) {
      const int64_t stop = std::min(end, batch.feature_start(feature + 1));
      const int32_t table = batch.feature_tables[feature];
      const Miniatures miniatures = tables[table].miniatures;
      int64_t at = begin;
      if (miniatures_enabled(tables[table])) {
        const auto try_sample = [&](int64_t at) {
          SampledId sampled;
          if (miniatures.sample(batch.ids[at], context.given(at), table, &sampled)) {
            sampled_here.push_back(sampled);
          }
        };
        for (; at + kHashed <= stop; at += kHashed) {
          for (uint32_t remaining = sampled_of_eight(miniatures, batch.ids + at); remaining;
               remaining &= remaining - 1)
            try_sample(at + __builtin_ctz(remaining));
        }
        for (; at < stop; ++at) try_sample(at);
      }
      begin = std::max(begin, stop);
    }
    const std::lock_guard<std::mutex> lock(mutex);
    all.insert(all.end(), sampled_here.begin(), sampled_here.end());
  });
  return all;
}

// Sampled ids by set.
class SampledSets {
 public:
  // A counting sort: there are few sets.
  explicit SampledSets(const std::vector<SampledId>& all) : ids_(all.size()) {
    uint32_t last = 0;
    for (const SampledId& it : all) last = std::max(last, it.where);
    std::vector<uint32_t> ends(size_t{last} + 1);
    for (const SampledId& it : all) ++ends[it.where];
    uint32_t total = 0;
    for (uint32_t& end : ends) {
      if (end != 0) starts_.push_back(total);
      total += end;
      end = total - end;
    }
    starts_.push_back(total);
    for (const SampledId& it : all) ids_[ends[it.where]++] = it;
  }

  int64_t size() const { return static_cast<int64_t>(starts_.size()) - 1; }
  std::span<const SampledId> operator[](int64_t i) const {
    return {ids_.data() + starts_[i], ids_.data() + starts_[i + 1]};
  }

 private:
  std::vector<SampledId> ids_;
  std::vector<uint32_t> starts_;
};

void add(uint64_t& total, uint64_t more) {
  if (more != 0) std::atomic_ref<uint64_t>(total).fetch_add(more, std::memory_order_relaxed);
}

// The table of the ids of a set.
int32_t table_of(std::span<const SampledId> ids) {
  return static_cast<int32_t>(ids[0].where / kMaxMiniatureSets);
}
uint32_t set_of(std::span<const SampledId> ids) { return ids[0].where % kMaxMiniatureSets; }

// Runs the miniatures of one table after the other, on one thread.
class Simulation {
 public:
  Simulation(const TableView* tables, uint32_t now) : tables_(tables), now_(now) {}
  ~Simulation() { finish_table(); }
  Simulation(const Simulation&) = delete;
  Simulation& operator=(const Simulation&) = delete;

  // Passes the ids of one set to the miniatures of their table. Meanwhile prefetches the set of the
  // following ids.
  void process(std::span<const SampledId> ids, std::span<const SampledId> following) {
    const Miniatures& next = tables_[table_of(following)].miniatures;
    if (table_ != &tables_[table_of(ids)]) begin_table(tables_[table_of(ids)]);
    lookups_ += ids.size();
    for (int k = 0; k < kMiniatures; ++k) {
      prefetch_bytes(next.set_of(k, set_of(following)), kMiniatureSetWords * sizeof(uint32_t));
      MiniatureSet set(table_->miniatures, k, set_of(ids), rankings_[k], short_ranks_[k], now_);
      for (const SampledId& it : ids) set.look_up(it);
      hits_[k] += set.hits;
      if (set.hits == ids.size()) continue;
      for (const SampledId& it : ids) set.place_missing(it);
      if (k == 0) evicted_ += set.evicted;
    }
  }

 private:
  void begin_table(const TableView& table) {
    finish_table();
    table_ = &table;
    for (int k = 0; k < kMiniatures; ++k) {
      rankings_[k] = table.aged->ranking_of(c_of_miniature(k));
      short_ranks_[k] = ShortRanks(rankings_[k], now_);
      hits_[k] = 0;
    }
    lookups_ = evicted_ = 0;
  }

  void finish_table() {
    if (table_ == nullptr) return;
    MiniatureCounters& counters = *table_->miniatures.counters;
    for (int k = 0; k < kMiniatures; ++k) add(counters.hits[k], hits_[k]);
    add(counters.lookups, lookups_);
    add(counters.evicted, evicted_);
  }

  const TableView* const tables_;
  const uint32_t now_;
  const TableView* table_ = nullptr;
  Ranking rankings_[kMiniatures];
  ShortRanks short_ranks_[kMiniatures];
  uint64_t hits_[kMiniatures];
  uint64_t lookups_ = 0, evicted_ = 0;
};

}  // namespace

void simulate(const TableView* tables, const Batch& batch, const CallContext& context,
              int threads) {
  const std::vector<SampledId> sampled = sample(tables, batch, context, threads);
  if (sampled.empty()) return;
  const SampledSets sets(sampled);
  parallel_for(sets.size(), 2, threads, [&](int64_t begin, int64_t end) {
    Simulation simulation(tables, context.now());
    for (int64_t i = begin; i < end; ++i) {
      simulation.process(sets[i], sets[std::min(i + 1, end - 1)]);
    }
  });
}

}  // namespace torchrec_hkv::hash_table::cpu
