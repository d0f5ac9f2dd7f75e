#include "hash_table/cpu/find.h"

#include <algorithm>
#include <atomic>

#include "common/parallel.h"
#include "common/select.h"
#include "common/stream.h"
#include "hash_table/cpu/bucket.h"
#include "hash_table/cpu/repeats.h"
#include "hash_table/cpu/work_partition.h"
#include "hash_table/kernels.h"

namespace torchrec_hkv::hash_table::cpu {
namespace {

// A software pipeline: an id goes through four steps, each kAhead ids behind the previous one, so
// that the data of a step is in the cache by then. Whether an id is found, and in which bucket, is
// unpredictable, so no step branches on it. Accesses that an id does not need go to `idle`.
constexpr int kAhead = 8;
constexpr int kInFlight = 64;  // a power of two, at least 3 * kAhead + 1

struct PipelineEntry {
  BucketChoice choice;
  uint32_t bucket;  // the bucket that may hold it
  uint64_t mask;    // matches of the digest in it
};

// What a find changes of the entries that it finds.
enum class Touch {
  kNothing,
  kStep,   // the last step
  kCount,  // CountedSteps
  kScore,  // the last step and another score
};

Touch touch_of(const TableView& table) {
  if (table.counted.enabled()) return Touch::kCount;
  return table.scores != nullptr ? Touch::kScore : Touch::kStep;
}
constexpr bool touches_scores(Touch touch) {
  return touch == Touch::kCount || touch == Touch::kScore;
}

// Scores of a table that no other thread touches at the same time. With CountedSteps, they include
// the last steps.
template <Touch kTouch>
class ScoreUpdater {
 public:
  ScoreUpdater(const TableView& table, const CallContext& context)
      : counted_(table.counted),
        scores_(table.scores),
        policy_(table.eviction),
        context_(context),
        distance_(kTouch == Touch::kCount ? context.now() - table.counted.begin() : 0) {}

  // Does nothing if `present` is false, without a branch.
  void touch(int64_t slot, bool present, uint64_t given) {
    if constexpr (kTouch == Touch::kCount) {
      uint32_t* const word = select(present, counted_.words + slot, &idle_word_);
      if (CountedSteps::fits_word(*word, given)) [[likely]] {
        *word = CountedSteps::word_after_lookup(*word, distance_, given);
      } else if (present) {
        counted_.add_lookup(slot, context_.now(), given);
      } else {
        idle_word_ = 0;
      }
    } else if constexpr (kTouch == Touch::kScore) {
      uint64_t* const score = select(present, scores_ + slot, &idle_);
      *score = next_score(policy_, *score, context_.now(), context_.epoch(), given);
    }
  }

 private:
  const CountedSteps counted_;
  uint64_t* const scores_;
  const Eviction policy_;
  const CallContext& context_;
  const uint32_t distance_;
  uint64_t idle_ = 0;
  uint32_t idle_word_ = 0;
};

template <Touch kTouch, bool kListed>
class IdFinder {
 public:
  // Finds the ids at positions [begin, end), all of one table. If kListed: those at
  // positions[begin] to positions[end - 1], with the given scores given[begin] and so on if the
  // table keeps scores.
  IdFinder(const TableView& table, const int64_t* ids, const int64_t* positions,
           const uint64_t* given, int64_t begin, int64_t end, const CallContext& context,
           bool shared, int64_t* slots, bool* found_at)
      : table_(table),
        ids_(ids),
        positions_(positions),
        given_(given),
        begin_(begin),
        end_(end),
        context_(context),
        shared_(shared),
        slots_(slots),
        found_at_(found_at),
        now_(kTouch != Touch::kNothing ? context.now() : 0),
        scores_(table, context) {}

  // Returns the number of ids that it found.
  int64_t run() {
    int64_t at = begin_;
    const int64_t filled = std::min(end_, begin_ + 3 * kAhead);
    for (; at < filled; ++at) steps<true>(at);
    for (; at < end_; ++at) steps<false>(at);
    for (; at < end_ + 3 * kAhead; ++at) steps<true>(at);
    return found_;
  }

 private:
  // kEnds: near an end of the range, where some steps have no id.
  template <bool kEnds>
  void steps(int64_t at) {
    const auto has = [&](int64_t position) {
      return !kEnds || (position >= begin_ && position < end_);
    };
    if (has(at)) choose(at);
    if (has(at - kAhead)) probe_first(at - kAhead);
    if (has(at - 2 * kAhead)) probe_bucket(at - 2 * kAhead);
    if (has(at - 3 * kAhead)) finish(at - 3 * kAhead);
  }

  int64_t position(int64_t at) const { return kListed ? positions_[at] : at; }

  PipelineEntry& entry_at(int64_t at) { return pipeline_[static_cast<uint64_t>(at) % kInFlight]; }

  [[gnu::always_inline]] void choose(int64_t at) {
    PipelineEntry& it = entry_at(at);
    it.choice = buckets_of(table_, ids_[position(at)]);
    prefetch_line(table_, it.choice.first);
  }

  // Without a match in the first bucket, the id can only be in the second.
  [[gnu::always_inline]] void probe_first(int64_t at) {
    PipelineEntry& it = entry_at(at);
    const uint64_t mask = match_digests(digest_line(table_, it.choice.first), it.choice.digest);
    const bool maybe = mask != 0;
    it.bucket = static_cast<uint32_t>(select(maybe, it.choice.first, it.choice.second));
    const int64_t slot = first_slot_of(table_, it.choice.first) + lowest_bit(mask);
    const auto* const second = reinterpret_cast<const char*>(digest_line(table_, it.choice.second));
    __builtin_prefetch(select(maybe, bytes(&table_.ids[slot]), second));
    __builtin_prefetch(select(maybe, bytes(&table_.ids[slot]), second + kLineBytes));
    if (kTouch != Touch::kNothing) prefetch_touched(slot, maybe);
  }

  [[gnu::always_inline]] void probe_bucket(int64_t at) {
    PipelineEntry& it = entry_at(at);
    it.mask = match_digests(digest_line(table_, it.bucket), it.choice.digest);
    const bool maybe = it.mask != 0;
    const int64_t slot = first_slot_of(table_, it.bucket) + lowest_bit(it.mask);
    __builtin_prefetch(select(maybe, bytes(&table_.ids[slot]), bytes(&idle_id_)));
    if (kTouch != Touch::kNothing) prefetch_touched(slot, maybe);
  }

  // Prefetches what finish() writes. If other threads touch the table too, most of it has been
  // prefetched already.
  [[gnu::always_inline]] void prefetch_touched(int64_t slot, bool maybe) {
    const uint32_t* const steps =
        kTouch == Touch::kCount ? table_.counted.words : table_.last_steps.get();
    const char* const step = select(maybe, bytes(&steps[slot]), bytes(&idle_step_));
    if (shared_ && kTouch != Touch::kCount) {
      __builtin_prefetch(step);
    } else {
      prefetch_to_write(step);
    }
    if (kTouch != Touch::kScore) return;
    prefetch_to_write(select(maybe, bytes(&table_.scores[slot]), bytes(&idle_id_)));
  }

  [[gnu::always_inline]] void finish(int64_t nth) {
    const PipelineEntry& it = entry_at(nth);
    const int64_t at = position(nth);
    const int64_t id = ids_[at];
    const bool maybe = it.mask != 0;
    int64_t slot = first_slot_of(table_, it.bucket) + lowest_bit(it.mask);
    const bool same = *select(maybe, &table_.ids[slot], &idle_id_) == id;
    bool present = maybe & same;
    if (maybe & !same) [[unlikely]] {  // another id's digest
      slot = find_slot(table_, id, it.choice);
      present = slot != kNoSlot;
    }
    slots_[at] = static_cast<int64_t>(select(present, table_.first_slot + slot, kNoSlot));
    found_ += present;
    if (kTouch != Touch::kNothing) {
      if (found_at_ != nullptr) found_at_[at] = present;
      if (shared_ && touches_scores(kTouch)) {
        if (present) touch(table_, slot, context_, given(nth, at));
      } else {
        if (kTouch != Touch::kCount) {
          touch_step(select(present, &table_.last_steps[slot], &idle_step_));
        }
        if (touches_scores(kTouch)) scores_.touch(slot, present, given(nth, at));
      }
    }
  }

  uint64_t given(int64_t nth, int64_t at) const {
    return kListed && given_ != nullptr ? given_[nth] : context_.given(at);
  }

  // Stores only a changed value, because several threads may touch the slot.
  void touch_step(uint32_t* step) {
    const bool done = std::atomic_ref<uint32_t>(*step).load(std::memory_order_relaxed) == now_;
    std::atomic_ref<uint32_t>(*select(done, &idle_step_, step))
        .store(now_, std::memory_order_relaxed);
  }

  static const char* bytes(const void* of) { return static_cast<const char*>(of); }

  static int64_t lowest_bit(uint64_t mask) { return __builtin_ctzll(mask | uint64_t{1} << 63); }

  const TableView& table_;
  const int64_t* const ids_;
  const int64_t* const positions_;
  const uint64_t* const given_;
  const int64_t begin_, end_;
  const CallContext& context_;
  const bool shared_;  // other threads touch slots of this table at the same time
  int64_t* const slots_;
  bool* const found_at_;
  const uint32_t now_;
  int64_t found_ = 0;
  ScoreUpdater<kTouch> scores_;
  int64_t idle_id_ = 0;
  uint32_t idle_step_ = 0;
  PipelineEntry pipeline_[kInFlight];
};

// Finds the ids at positions [begin, end), all of one table, and returns the number of ids that it
// found. If many positions repeat others, as under a power law, each id is looked up once, which is
// faster even if all data is in the cache. Scores are also written once: the counts of positions
// with the same id are summed first.
template <Touch kTouch>
int64_t find_range(const TableView& table, const int64_t* ids, int64_t begin, int64_t end,
                   const CallContext& context, bool shared, int64_t* slots, bool* found_at) {
  constexpr int64_t kTrial = 512;
  // If false, all positions of an id store the same score.
  const bool counts =
      touches_scores(kTouch) && (sums_scores(table.eviction) || context.scores != nullptr);
  const bool summed = counts && shared;  // a single atomic addition for all positions of an id
  int64_t found = 0;
  if (end - begin > kTrial) {
    Repeats repeats(ids, begin);
    int64_t stop = begin + kTrial;
    for (bool many = true; many && begin < end;) {
      // Forgets earlier positions, so that counts are not added twice.
      if (summed) repeats.forget(begin);
      const int64_t n = repeats.list(begin, stop);
      const uint64_t* const given =
          summed ? repeats.given(stop, n, sums_scores(table.eviction), context) : nullptr;
      IdFinder<kTouch, true>(table, ids, repeats.listed(), given, 0, n, context, shared, slots,
                             found_at)
          .run();
      for (int64_t at = begin; at < stop; ++at) {
        const int64_t slot = slots[repeats.origin(at - begin)];
        slots[at] = slot;
        if (kTouch != Touch::kNothing && found_at != nullptr) found_at[at] = slot != kNoSlot;
        found += slot != kNoSlot;
      }
      if (counts && !summed) {
        ScoreUpdater<kTouch> scores(table, context);
        for (int64_t i = 0; i < stop - begin - n; ++i) {
          const int64_t at = repeats.repeated()[i], slot = slots[at];
          scores.touch(slot - table.first_slot, slot != kNoSlot, context.given(at));
        }
      }
      many = n * 4 < (stop - begin) * 3;
      begin = stop;
      stop = std::min(end, begin + Repeats::kMax);
    }
  }
  IdFinder<kTouch, false> rest(table, ids, nullptr, nullptr, begin, end, context, shared, slots,
                               found_at);
  return found + rest.run();
}

int64_t find_range(Touch touch, const TableView& table, const int64_t* ids, const Span& span,
                   const CallContext& context, bool shared, int64_t* slots, bool* found_at) {
  const auto find = touch == Touch::kNothing ? find_range<Touch::kNothing>
                    : touch == Touch::kStep  ? find_range<Touch::kStep>
                    : touch == Touch::kCount ? find_range<Touch::kCount>
                                             : find_range<Touch::kScore>;
  return find(table, ids, span.begin, span.end, context, shared, slots, found_at);
}

// Returns the number of missing ids.
template <bool kTouch>
int64_t find_all(const TableView* tables, const Batch& batch, const CallContext& context,
                 int64_t* slots, bool* found_at, int threads) {
  constexpr int64_t kMin = 1024;
  const WorkPartition work(batch, batch.num_ids > kMin ? threads : 1);
  std::atomic<int64_t> next = 0, missed = 0;
  const int64_t workers = std::min<int64_t>(threads, work.size());
  parallel_for(workers, 1, threads, [&](int64_t, int64_t) {
    for (int64_t s; (s = next.fetch_add(1, std::memory_order_relaxed)) < work.size();) {
      for (const Span* span = work[s].begin; span != work[s].end; ++span) {
        const TableView& table = tables[span->table];
        const Touch touch = kTouch ? touch_of(table) : Touch::kNothing;
        const int64_t found = find_range(touch, table, batch.ids, *span, context,
                                         !work[s].exclusive, slots, found_at);
        const int64_t missing = span->end - span->begin - found;
        missed.fetch_add(missing, std::memory_order_relaxed);
        if (kTouch) {
          count(table, kLookups, span->end - span->begin);
          count(table, kMisses, missing);
        }
      }
    }
  });
  return missed.load();
}

}  // namespace

void find(const TableView* tables, const Batch& batch, int64_t* slots, int threads) {
  find_all<false>(tables, batch, CallContext{}, slots, nullptr, threads);
}

int64_t find_and_touch(const TableView* tables, const Batch& batch, const CallContext& context,
                       int64_t* slots, bool* found, int threads) {
  return find_all<true>(tables, batch, context, slots, found, threads);
}

}  // namespace torchrec_hkv::hash_table::cpu
