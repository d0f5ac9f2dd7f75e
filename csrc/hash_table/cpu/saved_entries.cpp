// Checks entries of files, on the CPU.
#include "common/hashing.h"
#include "common/parallel.h"
#include "hash_table/cpu/bucket.h"
#include "hash_table/kernels.h"
#include "hash_table/saved_kernels.h"

namespace torchrec_hkv::hash_table::cpu {
namespace {

bool is_misplaced(int64_t id, int64_t slot, uint32_t num_buckets, int32_t bucket_slots,
                  int64_t owner_begin, int64_t owner_end) {
  const BucketChoice choice = choose_buckets(id, num_buckets);
  const int64_t bucket = slot < 0 ? -1 : bucket_of_slot(slot, bucket_slots);
  const int64_t owner = owner_bucket(id);
  return (bucket != choice.first && bucket != choice.second) || owner < owner_begin ||
         owner >= owner_end;
}

}  // namespace

void find_misplaced(const int64_t* ids, const int64_t* slots, int64_t n, uint32_t num_buckets,
                    int32_t bucket_slots, int64_t owner_begin, int64_t owner_end, bool* misplaced,
                    int threads) {
  parallel_for(n, 4096, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      misplaced[i] =
          is_misplaced(ids[i], slots[i], num_buckets, bucket_slots, owner_begin, owner_end);
    }
  });
}

bool are_placed(const int64_t* ids, const int64_t* slots, int64_t n, uint32_t num_buckets,
                int32_t bucket_slots, int64_t owner_begin, int64_t owner_end) {
  bool wrong = false;
  for (int64_t i = 0; i < n; ++i) {
    wrong |= is_misplaced(ids[i], slots[i], num_buckets, bucket_slots, owner_begin, owner_end);
    wrong |= i > 0 && slots[i] <= slots[i - 1];
  }
  return !wrong;
}

std::optional<int64_t> add_ids(IdSet& set, const int64_t* ids, int64_t n, int bits, uint64_t part) {
  constexpr int64_t kPrefetched = 16;
  const auto mask = static_cast<uint64_t>(set.capacity - 1);
  const auto hash_at = [&](int64_t i) { return mix64(static_cast<uint64_t>(ids[i])); };
  for (int64_t i = 0; i < n && set.size <= set.max_size(); ++i) {
    if (i + kPrefetched < n) __builtin_prefetch(&set.ids[hash_at(i + kPrefetched) & mask], 1);
    const uint64_t hash = hash_at(i);
    if (bits > 0 && hash >> (64 - bits) != part) continue;
    const int64_t id = ids[i];
    auto index = static_cast<int64_t>(hash & mask);
    if (id == 0) {
      index = set.capacity;
      if (set.ids[index] != 0) return id;
    }
    while (set.ids[index] != 0 && set.ids[index] != id) {
      index = static_cast<int64_t>((index + 1) & mask);
    }
    if (set.ids[index] == id && id != 0) return id;
    set.ids[index] = id == 0 ? 1 : id;
    ++set.size;
  }
  return std::nullopt;
}

}  // namespace torchrec_hkv::hash_table::cpu
