// Finds the changed slots of a table, on the CPU.
#include "hash_table/slot_changes.h"

#include <algorithm>
#include <cstring>

#include "common/parallel.h"
#include "hash_table/cpu/bucket.h"
#include "hash_table/sync_kernels.h"

namespace torchrec_hkv::hash_table::cpu {
namespace {

// Compares n slots of one bucket. No branches and no other data, so that the compiler vectorises
// it.
template <bool kMarked>
void compare_bucket(const uint16_t* __restrict__ digests, const uint32_t* __restrict__ last_steps,
                    const uint8_t* __restrict__ was, const uint8_t* __restrict__ marked, int64_t n,
                    uint32_t since, uint8_t moved, uint8_t* __restrict__ changes) {
  for (int64_t i = 0; i < n; ++i) {
    const auto occupied = static_cast<uint8_t>(digests[i] != kEmptyDigest);
    auto touched = static_cast<uint8_t>(last_steps[i] >= since);
    if (kMarked) touched |= marked[i];
    touched &= occupied;
    const auto differs = static_cast<uint8_t>((occupied ^ was[i]) | touched | (occupied & moved));
    const auto bits =
        static_cast<uint8_t>(occupied * kIsThere | was[i] * kWasThere | touched * kIsTouched);
    changes[i] = static_cast<uint8_t>(-differs & bits);
  }
}

}  // namespace

void slot_changes(const TableView& table, const SlotChanges& request, int threads) {
  const int64_t slots = table.bucket_slots, end_of_all = request.first + request.n;
  const int64_t first_bucket = request.first / slots;
  const int64_t buckets = request.n == 0 ? 0 : (end_of_all - 1) / slots + 1 - first_bucket;
  parallel_for(buckets, 256, threads, [&](int64_t begin, int64_t end) {
    for (int64_t bucket = first_bucket + begin; bucket < first_bucket + end; ++bucket) {
      const int64_t from = std::max(request.first, bucket * slots);
      const int64_t to = std::min(end_of_all, (bucket + 1) * slots);
      const int64_t at = from - request.first;
      const uint16_t* const digests =
          table.digests + bucket * kBucketDigests + (from - bucket * slots);
      const auto* const was = reinterpret_cast<const uint8_t*>(request.had_entry) + at;
      const auto* const marked = request.marked == nullptr
                                     ? nullptr
                                     : reinterpret_cast<const uint8_t*>(request.marked) + at;
      const auto compare = marked == nullptr ? compare_bucket<false> : compare_bucket<true>;
      uint32_t buffer[kBucketDigests];
      compare(digests, steps_of(table, from, to - from, buffer), was, marked, to - from,
              request.since, request.moved ? 1 : 0, request.changes + at);
    }
  });
}

void exchange_contents(const SlotContents& contents, const int64_t* slots, const int64_t* ids,
                       const bool* occupied, int64_t n, int64_t* previous) {
  for (int64_t i = 0; i < n; ++i) {
    previous[i] = contents.ids[slots[i]];
    contents.ids[slots[i]] = ids[i];
    contents.occupied[slots[i]] = occupied[i];
  }
}

int64_t count_changes(const uint8_t* changes, int64_t n) {
  return n - std::count(changes, changes + n, uint8_t{0});
}

void list_changes(const uint8_t* changes, int64_t n, int64_t first, int64_t* slots, uint8_t* bits) {
  const auto list = [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) {
      if (changes[i] == 0) continue;
      *slots++ = first + i;
      *bits++ = changes[i];
    }
  };
  // Few are not 0, so eight are tested at once.
  constexpr int64_t kWord = sizeof(uint64_t);
  const int64_t whole = n / kWord * kWord;
  for (int64_t i = 0; i < whole; i += kWord) {
    uint64_t word;
    std::memcpy(&word, changes + i, kWord);
    if (word != 0) list(i, i + kWord);
  }
  list(whole, n);
}

}  // namespace torchrec_hkv::hash_table::cpu
