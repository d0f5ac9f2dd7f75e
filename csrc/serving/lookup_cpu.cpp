// Lookups in read-only tables on the CPU.
#include <algorithm>
#include <vector>

#include "common/parallel.h"
#include "serving/find_cpu.h"
#include "serving/kernels_cpu.h"
#include "serving/pool_cpu.h"

namespace torchrec_hkv::serving::cpu {
namespace {

// Ids of a chunk: as many as their rows fit into the second-level cache besides the rows of the
// chunk that is read meanwhile.
constexpr int64_t kMaxFound = 64, kMinFound = 8, kBytesFound = 32768;
// In a bag with more ids, rows are prefetched while rows are read: this many bytes ahead.
constexpr int64_t kBytesAhead = 16384, kMinAhead = 2, kMaxAhead = 64;

// Processes whole bags in chunks, in three steps. While a chunk is read, the rows of the next chunk
// and the buckets of the chunk after it are fetched from memory.
class ChunkPipeline {
 public:
  ChunkPipeline(const Feature& feature, int64_t begin, int64_t end)
      : feature_(feature), table_(*feature.table), next_(begin), end_(end) {}

  // Processes all chunks; returns the number of unknown ids.
  int64_t run() {
    for (int64_t number = 0; number < 2 || chunks_[(number - 2) % 3].begin < end_; ++number) {
      prepare(chunks_[number % 3]);
      if (number >= 1) find(chunks_[(number - 1) % 3]);
      if (number >= 2) read(chunks_[(number - 2) % 3]);
    }
    return unknown_;
  }

 private:
  struct Chunk {
    int64_t begin, end;   // bags
    int64_t first, last;  // ids
    RowSearch search;
    std::vector<const char*> rows;
  };

  int64_t start_of(int64_t bag) const {
    return feature_.offsets == nullptr ? bag : feature_.offsets[bag];
  }

  void prepare(Chunk& chunk) {
    chunk.begin = chunk.end = next_;
    if (next_ == end_) return;
    chunk.first = start_of(next_);
    if (feature_.offsets == nullptr) {
      next_ = std::min(next_ + max_ids_, end_);
    } else {
      do ++next_;
      while (next_ < end_ && start_of(next_ + 1) - chunk.first <= max_ids_);
    }
    chunk.end = next_;
    chunk.last = start_of(next_);
    chunk.search.begin(table_, feature_.ids + chunk.first, chunk.last - chunk.first);
  }

  void find(Chunk& chunk) {
    if (chunk.begin == chunk.end) return;
    const int64_t n = chunk.last - chunk.first;
    if (static_cast<int64_t>(chunk.rows.size()) < n) chunk.rows.resize(n);
    unknown_ += chunk.search.finish(chunk.rows.data(), n <= max_ids_);
  }

  void read(const Chunk& chunk) {
    if (chunk.begin == chunk.end) return;
    const bool prefetched = chunk.last - chunk.first <= max_ids_;
    const int64_t ahead = std::clamp(kBytesAhead / table_.row_bytes, kMinAhead, kMaxAhead);
    const FoundRows found{chunk.rows.data(), chunk.first, chunk.last, prefetched ? 0 : ahead};
    if (feature_.offsets == nullptr) {
      write_rows(feature_, found);
    } else {
      pool(feature_, found, chunk.begin, chunk.end);
    }
  }

  const Feature& feature_;
  const Table& table_;
  const int64_t max_ids_ = std::clamp(kBytesFound / table_.row_bytes, kMinFound, kMaxFound);
  int64_t next_;
  const int64_t end_;
  int64_t unknown_ = 0;
  Chunk chunks_[3];
};

}  // namespace

void look_up(const Feature& feature, int threads) {
  const int64_t ids = feature.offsets == nullptr
                          ? feature.bags
                          : feature.offsets[feature.bags] - feature.offsets[0];
  // A thread pays off from some thousand ids on.
  const int64_t grain = ids == 0 ? feature.bags + 1 : 4096 * feature.bags / ids + 1;
  parallel_for(feature.bags, grain, threads, [&](int64_t begin, int64_t end) {
    const int64_t unknown = ChunkPipeline(feature, begin, end).run();
    if (unknown > 0) __atomic_fetch_add(feature.unknown, unknown, __ATOMIC_RELAXED);
  });
}

}  // namespace torchrec_hkv::serving::cpu
