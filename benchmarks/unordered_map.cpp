// The comparison for benchmarks/hash_table_cpu.py: std::unordered_map from id to row. A hash
// assigns ids to threads, and each thread has its own map and slab of rows. New ids get the same
// initial rows as in a HashTable.
#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <new>
#include <thread>
#include <unordered_map>
#include <vector>

#include "common/hashing.h"
#include "common/initial_rows_cpu.h"

namespace {

constexpr size_t kHugePage = size_t{1} << 21;

// The part of one thread.
struct Part {
  std::unordered_map<int64_t, float*> rows;
  float* slab = nullptr;
  int64_t used = 0;
  std::vector<float*> free;  // free rows, of erased ids
};

struct Maps {
  std::vector<Part> parts;
  int64_t dim;
  int64_t slab_rows;
  torchrec_hkv::InitialRows init;

  Maps(int threads, int64_t entries, int64_t most, int64_t dim, uint64_t seed, float low,
       float high)
      : parts(threads), dim(dim), init(torchrec_hkv::uniform_rows(seed, low, high)) {
    slab_rows = most / threads + most / (16 * threads) + 1024;  // parts are nearly equal
    for (Part& part : parts) {
      part.rows.reserve(entries / threads);
      const size_t bytes =
          (slab_rows * dim * sizeof(float) + kHugePage - 1) / kHugePage * kHugePage;
      part.slab = static_cast<float*>(std::aligned_alloc(kHugePage, bytes));
      if (part.slab == nullptr) throw std::bad_alloc();
      madvise(part.slab, bytes, MADV_HUGEPAGE);
    }
  }

  ~Maps() {
    for (Part& part : parts) std::free(part.slab);
  }

  int part_of(int64_t id) const {
    return static_cast<int>(
        ((static_cast<uint64_t>(id) * 0x9e3779b97f4a7c15ull >> 32) * parts.size()) >> 32);
  }

  template <typename Look>
  void run(const Look& look) {
    std::vector<std::thread> others;
    for (size_t t = 1; t < parts.size(); ++t) others.emplace_back([&, t] { look(t); });
    look(0);
    for (std::thread& other : others) other.join();
  }

  bool find_or_insert(const int64_t* ids, int64_t n, const float** out) {
    std::vector<char> full(parts.size(), 0);
    run([&](int t) {
      Part& part = parts[t];
      for (int64_t i = 0; i < n; ++i) {
        if (part_of(ids[i]) != t) continue;
        const auto [at, is_new] = part.rows.try_emplace(ids[i], nullptr);
        if (is_new) {
          if (!part.free.empty()) {
            at->second = part.free.back();
            part.free.pop_back();
          } else if (part.used < slab_rows) {
            at->second = part.slab + part.used++ * dim;
          } else {
            full[t] = 1;
            return;
          }
          torchrec_hkv::initial_row(init, ids[i], 0, static_cast<int32_t>(dim), at->second);
        }
        out[i] = at->second;
      }
    });
    for (const char is_full : full) {
      if (is_full) return false;
    }
    return true;
  }

  void find(const int64_t* ids, int64_t n, const float** out) {
    run([&](int t) {
      const Part& part = parts[t];
      for (int64_t i = 0; i < n; ++i) {
        if (part_of(ids[i]) != t) continue;
        const auto at = part.rows.find(ids[i]);
        out[i] = at == part.rows.end() ? nullptr : at->second;
      }
    });
  }

  void erase(const int64_t* ids, int64_t n) {
    run([&](int t) {
      Part& part = parts[t];
      for (int64_t i = 0; i < n; ++i) {
        if (part_of(ids[i]) != t) continue;
        const auto at = part.rows.find(ids[i]);
        if (at == part.rows.end()) continue;
        part.free.push_back(at->second);
        part.rows.erase(at);
      }
    });
  }
};

}  // namespace

extern "C" {

// entries: number of entries for which buckets are allocated. most: largest number of rows.
void* maps_make(int threads, int64_t entries, int64_t most, int64_t dim, uint64_t seed, float low,
                float high) {
  return new Maps(threads, entries, most, dim, seed, low, high);
}

void maps_delete(void* maps) { delete static_cast<Maps*>(maps); }

int64_t maps_size(const void* maps) {
  int64_t size = 0;
  for (const Part& part : static_cast<const Maps*>(maps)->parts) size += part.rows.size();
  return size;
}

// out[i]: the row of ids[i], or null if it is missing. find_or_insert returns 0 if a slab is full.
int maps_find_or_insert(void* maps, const int64_t* ids, int64_t n, const float** out) {
  return static_cast<Maps*>(maps)->find_or_insert(ids, n, out);
}

void maps_find(void* maps, const int64_t* ids, int64_t n, const float** out) {
  static_cast<Maps*>(maps)->find(ids, n, out);
}

void maps_erase(void* maps, const int64_t* ids, int64_t n) {
  static_cast<Maps*>(maps)->erase(ids, n);
}

}  // extern "C"
