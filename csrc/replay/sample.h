// Sampling of ids by their hash, for replays of logs (torchrec_hkv/replay/sample.py). CPU only.
#pragma once

#include <cstdint>

namespace torchrec_hkv::replay {

// A bijection of 64 bits. Its constants differ from those of mix64, so that the ids of a sample
// still spread over all buckets of a table. Samples depend on it.
inline int64_t mixed(int64_t id) {
  constexpr uint64_t kFirst = 0xa0761d6478bd642full, kSecond = 0xdcad802cd17066e9ull;
  const auto product = [](int64_t x, uint64_t by) {
    return static_cast<int64_t>(static_cast<uint64_t>(x) * by);
  };
  int64_t bits = product(id, kFirst);
  bits ^= bits >> 32;
  bits = product(bits, kSecond);
  bits ^= bits >> 29;
  return product(bits, kFirst);
}

// The number of groups of sampled ids.
constexpr int kGroups = 128;
inline int group_of(int64_t bits) { return static_cast<int>(bits >> 24) & (kGroups - 1); }

struct Taken {
  int64_t counted;    // ids of the larger sample
  int64_t sampled;    // ids of the smaller one
  int64_t low, high;  // of all ids; not set without any
};

// Takes the ids whose hash is at most max_counted, and of these the ones whose hash is at most
// max_sampled. Writes their hashes to `bits`, their ascending positions to `at`, and the ascending
// indices of the smaller sample in these to `sampled`. All three have room for n numbers.
Taken take(const int64_t* ids, int64_t n, int64_t max_counted, int64_t max_sampled, int64_t* bits,
           int64_t* at, int64_t* sampled);

}  // namespace torchrec_hkv::replay
