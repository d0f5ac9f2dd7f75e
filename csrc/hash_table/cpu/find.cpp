#include "hash_table/cpu/find.h"

#include <algorithm>
#include <atomic>

#include "common/parallel.h"
#include "common/select.h"
#include "common/stream.h"
#include "hash_table/cpu/bucket.h"
#include "hash_table/kernels.h"

namespace torchrec_hkv::hash_table::cpu {
namespace {

// An id goes through four steps, each kAhead ids behind the one before, so that what a step reads
// has arrived in the cache when it is the id's turn. Whether an id is there, and in which bucket,
// is not to be foreseen: no step branches on it. What an id has no use for reads and writes `idle`.
constexpr int kAhead = 12;
constexpr int kInFlight = 64;  // a power of two, at least 3 * kAhead + 1

struct InFlight {
  BucketChoice choice;
  uint32_t bucket;  // the one that may hold it
  uint64_t mask;    // the digest's matches there
};

template <bool kTouch, bool kListed>
class Finder {
 public:
  // Of the ids at positions [begin, end), all of one table; of positions[begin] to
  // positions[end - 1], if kListed, whose ids come with given[begin] and so on where the table
  // keeps scores.
  Finder(const TableView& table, const int64_t* ids, const int64_t* positions,
         const uint64_t* given, int64_t begin, int64_t end, const Visit& visit, bool shared,
         int64_t* slots, bool* found_at)
      : table_(table),
        ids_(ids),
        positions_(positions),
        given_(given),
        begin_(begin),
        end_(end),
        visit_(visit),
        shared_(shared),
        slots_(slots),
        found_at_(found_at),
        now_(kTouch ? visit.now() : 0) {}

  // Returns how many it found.
  int64_t run() {
    int64_t at = begin_;
    const int64_t filled = std::min(end_, begin_ + 3 * kAhead);
    for (; at < filled; ++at) steps<true>(at);
    for (; at < end_; ++at) steps<false>(at);
    for (; at < end_ + 3 * kAhead; ++at) steps<true>(at);
    return found_;
  }

 private:
  // kEnds: near an end of the range, where not every step has an id.
  template <bool kEnds>
  void steps(int64_t at) {
    const auto has = [&](int64_t position) {
      return !kEnds || (position >= begin_ && position < end_);
    };
    if (has(at)) choose(at);
    if (has(at - kAhead)) look_in_first(at - kAhead);
    if (has(at - 2 * kAhead)) look_in_bucket(at - 2 * kAhead);
    if (has(at - 3 * kAhead)) finish(at - 3 * kAhead);
  }

  int64_t position(int64_t at) const { return kListed ? positions_[at] : at; }

  InFlight& flying(int64_t at) { return flying_[static_cast<uint64_t>(at) % kInFlight]; }

  void choose(int64_t at) {
    InFlight& it = flying(at);
    it.choice = choose_buckets(ids_[position(at)], table_.num_buckets);
    prefetch_line(table_, it.choice.first);
  }

  // Without a match there it can only be in its second bucket.
  void look_in_first(int64_t at) {
    InFlight& it = flying(at);
    const uint64_t mask = match_digests(digest_line(table_, it.choice.first), it.choice.digest);
    const bool maybe = mask != 0;
    it.bucket = static_cast<uint32_t>(select(maybe, it.choice.first, it.choice.second));
    const int64_t slot = first_slot_of(table_, it.choice.first) + lowest_bit(mask);
    const auto* const second = reinterpret_cast<const char*>(digest_line(table_, it.choice.second));
    __builtin_prefetch(select(maybe, bytes(&table_.ids[slot]), second));
    if (kTouch) {
      __builtin_prefetch(select(maybe, bytes(&table_.last_steps[slot]), second + kLineBytes), 1);
    } else {
      __builtin_prefetch(select(maybe, bytes(&table_.ids[slot]), second + kLineBytes));
    }
  }

  void look_in_bucket(int64_t at) {
    InFlight& it = flying(at);
    it.mask = match_digests(digest_line(table_, it.bucket), it.choice.digest);
    const bool maybe = it.mask != 0;
    const int64_t slot = first_slot_of(table_, it.bucket) + lowest_bit(it.mask);
    __builtin_prefetch(select(maybe, bytes(&table_.ids[slot]), bytes(&idle_id_)));
    if (kTouch) {
      __builtin_prefetch(select(maybe, bytes(&table_.last_steps[slot]), bytes(&idle_step_)), 1);
      if (table_.scores != nullptr) {
        __builtin_prefetch(select(maybe, bytes(&table_.scores[slot]), bytes(&idle_id_)), 1);
      }
    }
  }

  void finish(int64_t nth) {
    const InFlight& it = flying(nth);
    const int64_t at = position(nth);
    const int64_t id = ids_[at];
    const bool maybe = it.mask != 0;
    int64_t slot = first_slot_of(table_, it.bucket) + lowest_bit(it.mask);
    const bool same = *select(maybe, &table_.ids[slot], &idle_id_) == id;
    bool there = maybe & same;
    if (maybe & !same) [[unlikely]] {  // another id's digest
      slot = find_slot(table_, id, it.choice);
      there = slot != kNoSlot;
    }
    slots_[at] = static_cast<int64_t>(select(there, table_.first_slot + slot, kNoSlot));
    if (kTouch) {
      if (found_at_ != nullptr) found_at_[at] = there;
      if (table_.scores != nullptr) {
        if (there) touch(table_, slot, visit_, kListed ? given_[nth] : visit_.given(at), shared_);
      } else {
        touch_step(select(there, &table_.last_steps[slot], &idle_step_));
      }
    }
    found_ += there;
  }

  // Written only where that changes it: threads may touch one slot at once.
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
  const Visit& visit_;
  const bool shared_;  // other threads touch slots of this table at the same time
  int64_t* const slots_;
  bool* const found_at_;
  const uint32_t now_;
  int64_t found_ = 0;
  int64_t idle_id_ = 0;
  uint32_t idle_step_ = 0;
  InFlight flying_[kInFlight];
};

// Which positions of a range have the id of an earlier one, as far as a small table of ids that
// came last remembers it.
class Repeats {
 public:
  static constexpr int64_t kMost = 4096;  // positions at a time

  // Of positions from `first` on.
  Repeats(const int64_t* ids, int64_t first) : all_ids_(ids) { forget(first); }

  // From now on, of positions from `first` on.
  void forget(int64_t first) {
    ids_ = all_ids_ + first;
    first_ = first;
    std::fill_n(firsts_, 1 << kBits, 0u);
  }

  // Lists those of positions [begin, end), at most kMost, that repeat none. Returns how many.
  int64_t list(int64_t begin, int64_t end) {
    int64_t n = 0;
    uint32_t idle;
    for (int64_t at = begin; at < end; ++at) {
      const auto own = static_cast<uint32_t>(at - first_);
      uint32_t& entry = firsts_[static_cast<uint64_t>(ids_[own]) * 0x9e3779b97f4a7c15ull >> kShift];
      const uint32_t first = entry;
      const bool repeats = (ids_[first] == ids_[own]) & (first != own);  // no branch, as in Finder
      // Written only where that changes it: the next of a hot id need not wait for what this
      // writes.
      *select(repeats, &idle, &entry) = own;
      origins_[at - begin] = static_cast<uint32_t>(select(repeats, first, own));
      listed_[n] = at;
      n += !repeats;
    }
    return n;
  }
  const int64_t* listed() const { return listed_; }
  // The position that the i-th of them repeats, or itself.
  int64_t origin(int64_t i) const { return first_ + origins_[i]; }

  // What each of n listed ids comes with: the sum over its positions before `end`, or what came
  // last. list() must have been called once, for positions from the first to `end`.
  const uint64_t* given(int64_t end, int64_t n, bool sums, const Visit& visit) {
    // By position, then by number.
    for (int64_t i = 0; i < n; ++i) given_[listed_[i] - first_] = 0;
    for (int64_t at = first_; at < end; ++at) {
      uint64_t& total = given_[origins_[at - first_]];
      const uint64_t more = visit.given(at);
      total = sums ? std::min(total + more, kMostCounts) : more;
    }
    for (int64_t i = 0; i < n; ++i) given_[i] = given_[listed_[i] - first_];
    return given_;
  }

 private:
  static constexpr int kBits = 12, kShift = 64 - kBits;

  const int64_t* const all_ids_;
  const int64_t* ids_;
  int64_t first_;
  uint32_t firsts_[1 << kBits];  // by a hash of the id, behind first_
  uint32_t origins_[kMost];
  int64_t listed_[kMost];
  uint64_t given_[kMost];
};

// Finds the ids at positions [begin, end), all of one table, and returns how many it found. Where
// many repeat others, as under a power law, each of these is looked for once: that takes less than
// looking again, even where all it reads is in the cache. Scores are written once, too: the counts
// of positions that share an id are added up before.
template <bool kTouch>
int64_t find_range(const TableView& table, const int64_t* ids, int64_t begin, int64_t end,
                   const Visit& visit, bool shared, int64_t* slots, bool* found_at) {
  constexpr int64_t kTrial = 512;
  const bool scored = kTouch && table.scores != nullptr;
  int64_t found = 0;
  if (end - begin > kTrial) {
    Repeats repeats(ids, begin);
    int64_t stop = begin + kTrial;
    for (bool many = true; many && begin < end;) {
      // An id that has been touched is not touched again: where it matters how often, what came
      // before is forgotten.
      if (scored) repeats.forget(begin);
      const int64_t n = repeats.list(begin, stop);
      const uint64_t* const given =
          scored ? repeats.given(stop, n, sums_scores(table.eviction), visit) : nullptr;
      Finder<kTouch, true>(table, ids, repeats.listed(), given, 0, n, visit, shared, slots,
                           found_at)
          .run();
      for (int64_t at = begin; at < stop; ++at) {
        const int64_t slot = slots[repeats.origin(at - begin)];
        slots[at] = slot;
        if (kTouch && found_at != nullptr) found_at[at] = slot != kNoSlot;
        found += slot != kNoSlot;
      }
      many = n * 4 < (stop - begin) * 3;
      begin = stop;
      stop = std::min(end, begin + Repeats::kMost);
    }
  }
  Finder<kTouch, false> rest(table, ids, nullptr, nullptr, begin, end, visit, shared, slots,
                             found_at);
  return found + rest.run();
}

template <bool kTouch>
void find_part(const TableView* tables, const Batch& batch, const Visit& visit, bool shared,
               int64_t* slots, bool* found_at, int64_t begin, int64_t end) {
  for (int32_t feature = batch.feature_of(begin); begin < end; ++feature) {
    const int64_t stop = std::min(end, batch.feature_start(feature + 1));
    if (stop <= begin) continue;
    const TableView& table = tables[batch.feature_tables[feature]];
    const int64_t found =
        find_range<kTouch>(table, batch.ids, begin, stop, visit, shared, slots, found_at);
    if (kTouch) {
      count(table, kLookups, stop - begin);
      count(table, kMisses, stop - begin - found);
    }
    begin = stop;
  }
}

// Threads take parts far from each other's, which are mostly of different tables: in one table they
// would write what the other one has in its cache.
template <bool kTouch>
void find_all(const TableView* tables, const Batch& batch, const Visit& visit, int64_t* slots,
              bool* found_at, int threads) {
  constexpr int64_t kLeast = 1024;
  const int64_t rounds = std::clamp<int64_t>(batch.num_ids / (kLeast * std::max(threads, 1)), 1, 4);
  const int64_t parts = rounds * std::max(threads, 1);
  const bool shared = batch.num_ids > kLeast && threads > 1;
  parallel_for(parts, 1, shared ? threads : 1, [&](int64_t first, int64_t last) {
    for (; first < last; ++first) {
      const int64_t part = first % threads * rounds + first / threads;
      const int64_t begin = batch.num_ids * part / parts;
      const int64_t end = batch.num_ids * (part + 1) / parts;
      if (begin < end) find_part<kTouch>(tables, batch, visit, shared, slots, found_at, begin, end);
    }
  });
}

}  // namespace

void find(const TableView* tables, const Batch& batch, int64_t* slots, int threads) {
  find_all<false>(tables, batch, Visit{}, slots, nullptr, threads);
}

void find_and_touch(const TableView* tables, const Batch& batch, const Visit& visit, int64_t* slots,
                    bool* found, int threads) {
  find_all<true>(tables, batch, visit, slots, found, threads);
}

}  // namespace torchrec_hkv::hash_table::cpu
