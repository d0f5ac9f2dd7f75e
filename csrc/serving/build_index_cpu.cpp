// Builds the index of a read-only table, block by block.
#include <algorithm>
#include <atomic>
#include <vector>

#include "common/parallel_beside.h"
#include "serving/find_cpu.h"
#include "serving/kernels_cpu.h"

namespace torchrec_hkv::serving::cpu {
namespace {

// A block of a few thousand buckets at a load factor of 0.93 needs far fewer moves for an id.
constexpr int kMaxMoves = 20000;
constexpr int32_t kFree = -1;

// Places the ids of one block at a time, by their indices in `members`.
class BlockBuilder {
 public:
  explicit BlockBuilder(const BlockPlacement& placement)
      : placement_(placement),
        buckets_(placement.geometry.block_buckets),
        entries_(buckets_ * kBucketIds),
        counts_(buckets_),
        spilled_(buckets_) {}

  // Begins with the next block.
  void begin_block(const int64_t* members, int64_t n) {
    members_ = members;
    n_ = n;
    random_ = 1;
    ids_.resize(n);
    choices_.resize(n);
    for (int64_t i = 0; i < n; ++i) {
      ids_[i] = placement_.ids[members[i]];
      const CandidateBuckets choice =
          choose_in_block(mix_of_id(ids_[i]), static_cast<uint32_t>(buckets_));
      choices_[i] = {static_cast<uint32_t>(choice.first), static_cast<uint32_t>(choice.second)};
    }
    std::fill(counts_.begin(), counts_.end(), 0);
  }

  // Returns kYes, or kFull with the index of the id in *at.
  PlaceStatus place(int64_t* at) {
    // Ids whose first bucket is full are placed last, so that the fewest ids are in their second
    // bucket.
    waiting_.clear();
    for (int64_t i = 0; i < n_; ++i) {
      if (!try_put(choices_[i].first, static_cast<int32_t>(i))) {
        waiting_.push_back(static_cast<int32_t>(i));
      }
    }
    for (const int32_t i : waiting_) {
      if (!place_by_cuckoo(i)) return *at = members_[i], PlaceStatus::kFull;
    }
    return PlaceStatus::kYes;
  }

  // Whether an id occurs twice. Both are in one of the same two buckets.
  bool find_repeated(int64_t* at) const {
    for (int64_t i = 0; i < n_; ++i) {
      for (const uint32_t bucket : {choices_[i].first, choices_[i].second}) {
        for (int k = 0; k < counts_[bucket]; ++k) {
          const int32_t other = entries_[bucket * kBucketIds + k];
          if (other != i && ids_[other] == ids_[i]) return *at = members_[i], true;
        }
      }
    }
    return false;
  }

  // Like find_repeated above, in written buckets.
  bool find_repeated(const Bucket* written, int64_t* at) const {
    for (int64_t i = 0; i < n_; ++i) {
      const auto [first, second] = choices_[i];
      const uint32_t found = matches(written[first], ids_[i]) | matches(written[second], ids_[i])
                                                                    << kBucketIds;
      // If a block has one bucket, both buckets are the same.
      const uint32_t matched = first == second ? found & ((1u << kBucketIds) - 1) : found;
      if ((matched & (matched - 1)) != 0) return *at = members_[i], true;
    }
    return false;
  }

  void write(Bucket* out, int64_t first_row, int64_t* order) {
    std::fill(spilled_.begin(), spilled_.end(), 0);
    for (int64_t bucket = 0; bucket < buckets_; ++bucket) {
      for (int k = 0; k < counts_[bucket]; ++k) {
        const uint32_t first = choices_[entries_[bucket * kBucketIds + k]].first;
        if (first != bucket) spilled_[first] = 1;
      }
    }
    int64_t row = 0;
    for (int64_t bucket = 0; bucket < buckets_; ++bucket) {
      Bucket& to = out[bucket];
      uint64_t header = static_cast<uint64_t>(first_row + row) |
                        static_cast<uint64_t>(counts_[bucket]) << kCountShift |
                        static_cast<uint64_t>(spilled_[bucket]) << kSpilledShift;
      for (int k = 0; k < kBucketIds; ++k) {
        to.ids[k] = 0;
        if (k >= counts_[bucket]) continue;
        const int32_t i = entries_[bucket * kBucketIds + k];
        const int64_t member = members_[i];
        to.ids[k] = ids_[i];
        if (placement_.erased != nullptr && placement_.erased[member]) {
          header |= uint64_t{1} << (kErasedShift + k);
        }
        order[row++] = member;
      }
      to.header = header;
    }
  }

 private:
  struct CandidatePair {
    uint32_t first, second;
  };

  bool try_put(uint32_t bucket, int32_t i) {
    if (counts_[bucket] == kBucketIds) return false;
    entries_[bucket * kBucketIds + counts_[bucket]++] = i;
    return true;
  }

  uint32_t other(int32_t i, uint32_t bucket) const {
    return choices_[i].first == bucket ? choices_[i].second : choices_[i].first;
  }

  // Cuckoo hashing: an id whose other bucket has room is moved there; if there is none, any id is
  // moved.
  bool place_by_cuckoo(int32_t i) {
    uint32_t bucket = choices_[i].second;
    for (int moves = 0; moves < kMaxMoves; ++moves) {
      if (try_put(bucket, i)) return true;
      int32_t* const bucket_entries = &entries_[bucket * kBucketIds];
      for (int k = 0; k < kBucketIds; ++k) {
        if (try_put(other(bucket_entries[k], bucket), bucket_entries[k]))
          return bucket_entries[k] = i, true;
      }
      random_ = random_ * 6364136223846793005ull + 1442695040888963407ull;
      std::swap(i, bucket_entries[(random_ >> 33) % kBucketIds]);
      bucket = other(i, bucket);
    }
    return false;
  }

  const BlockPlacement& placement_;
  const int64_t buckets_;
  const int64_t* members_ = nullptr;
  int64_t n_ = 0;
  std::vector<int64_t> ids_;
  std::vector<CandidatePair> choices_;
  std::vector<int32_t> entries_, waiting_;
  std::vector<uint8_t> counts_, spilled_;
  uint64_t random_ = 1;
};

}  // namespace

PlaceStatus place(const BlockPlacement& placement, int64_t* at, int threads) {
  // The members of each block, in the given order, by a counting sort.
  std::vector<int64_t> starts(placement.blocks + 1, 0);
  for (int64_t i = 0; i < placement.n; ++i) {
    const uint32_t block =
        block_of_mix(mix_of_id(placement.ids[i]), placement.geometry) - placement.first_block;
    if (block >= placement.blocks) return *at = i, PlaceStatus::kForeignId;
    ++starts[block + 1];
  }
  for (uint32_t block = 0; block < placement.blocks; ++block) starts[block + 1] += starts[block];
  std::vector<int64_t> members(placement.n), ends(starts.begin(), starts.end() - 1);
  for (int64_t i = 0; i < placement.n; ++i) {
    const uint32_t block =
        block_of_mix(mix_of_id(placement.ids[i]), placement.geometry) - placement.first_block;
    members[ends[block]++] = i;
  }

  std::atomic<int> result{static_cast<int>(PlaceStatus::kYes)};
  std::atomic<int64_t> failed{0};
  parallel_for_beside(placement.blocks, 1, threads, [&](int64_t begin, int64_t end) {
    BlockBuilder block(placement);
    for (int64_t number = begin; number < end; ++number) {
      const int64_t first = starts[number], n = starts[number + 1] - first;
      int64_t id = 0;
      PlaceStatus placed = PlaceStatus::kFull;
      if (n <= int64_t{placement.geometry.block_buckets} * kBucketIds) {
        block.begin_block(members.data() + first, n);
        placed = block.place(&id);
        if (placed == PlaceStatus::kYes) {
          Bucket* const out = placement.buckets + number * placement.geometry.block_buckets;
          block.write(out, placement.first_row + first, placement.order + first);
          if (block.find_repeated(out, &id)) placed = PlaceStatus::kRepeatedId;
        } else if (block.find_repeated(&id)) {
          placed = PlaceStatus::kRepeatedId;
        }
      } else {
        id = members[first];
      }
      if (placed != PlaceStatus::kYes) {
        failed = id;
        result = static_cast<int>(placed);
      }
    }
  });
  *at = failed;
  return static_cast<PlaceStatus>(result.load());
}

}  // namespace torchrec_hkv::serving::cpu
