#include "tensor_train/cpu/index.h"

#include <algorithm>
#include <array>
#include <utility>

#include "tensor_train/cpu/kernels.h"

namespace torchrec_hkv::tensor_train::cpu {
namespace {

struct IndexEntry {
  uint64_t key;
  int64_t position;
};

// id = (head * middles + middle) * lasts + last.
uint64_t key_of(const TableCpu& table, int64_t id) {
  const int64_t prefix = id / table.lasts();
  const int64_t head = prefix / table.middles();
  const int64_t middle = prefix % table.middles();
  return static_cast<uint64_t>((middle * table.heads() + head) * table.lasts() +
                               id % table.lasts());
}

// A stable sort, least significant digit first.
void radix_sort(std::vector<IndexEntry>& entries, std::vector<IndexEntry>& scratch) {
  constexpr int kBits = 11;
  constexpr uint64_t kBuckets = uint64_t{1} << kBits;
  uint64_t all = 0;
  for (const IndexEntry& entry : entries) all |= entry.key;
  scratch.resize(entries.size());
  for (int shift = 0; shift < 64 && all >> shift != 0; shift += kBits) {
    std::array<int64_t, kBuckets> starts{};
    for (const IndexEntry& entry : entries) ++starts[entry.key >> shift & (kBuckets - 1)];
    int64_t sum = 0;
    for (int64_t& start : starts) sum += std::exchange(start, sum);
    for (const IndexEntry& entry : entries) {
      scratch[starts[entry.key >> shift & (kBuckets - 1)]++] = entry;
    }
    entries.swap(scratch);
  }
}

void sort_entries(std::vector<IndexEntry>& entries, std::vector<IndexEntry>& scratch) {
  if (entries.size() > 512) return radix_sort(entries, scratch);
  std::sort(entries.begin(), entries.end(), [](const IndexEntry& a, const IndexEntry& b) {
    return a.key != b.key ? a.key < b.key : a.position < b.position;
  });
}

}  // namespace

int64_t first_bad_id(const TableCpu* tables, const BatchCpu& batch) {
  for (int32_t f = 0; f < batch.features; ++f) {
    const int64_t rows = tables[batch.feature_tables[f]].rows;
    const int64_t end = batch.offsets[(f + 1) * batch.batch_size];
    for (int64_t i = batch.offsets[f * batch.batch_size]; i < end; ++i) {
      if (batch.ids[i] < 0 || batch.ids[i] >= rows) return i;
    }
  }
  return -1;
}

void sort_ids(const TableCpu* tables, const BatchCpu& batch, int64_t* order) {
  std::vector<IndexEntry> entries, scratch;
  for (int32_t t = 0; t < batch.tables; ++t) {
    entries.clear();
    for (int32_t f = 0; f < batch.features; ++f) {
      if (batch.feature_tables[f] != t) continue;
      const int64_t end = batch.offsets[(f + 1) * batch.batch_size];
      for (int64_t i = batch.offsets[f * batch.batch_size]; i < end; ++i) {
        entries.push_back({key_of(tables[t], batch.ids[i]), i});
      }
    }
    sort_entries(entries, scratch);
    for (const IndexEntry& entry : entries) *order++ = entry.position;
  }
}

BatchPositions places_of(const TableCpu* tables, const BatchCpu& batch) {
  BatchPositions places;
  places.bags.resize(batch.n());
  places.table_starts.assign(batch.tables + 1, 0);
  places.columns.resize(batch.features);
  places.stride = 0;
  for (int32_t f = 0; f < batch.features; ++f) {
    const int32_t table = batch.feature_tables[f];
    places.columns[f] = places.stride;
    places.stride += tables[table].dim();
    const int64_t first = f * batch.batch_size, last = first + batch.batch_size;
    places.table_starts[table + 1] += batch.offsets[last] - batch.offsets[first];
    for (int64_t bag = first; bag < last; ++bag) {
      std::fill(places.bags.begin() + batch.offsets[bag],
                places.bags.begin() + batch.offsets[bag + 1], bag);
    }
  }
  if (!batch.pooled) places.stride = tables[0].dim();
  for (int32_t t = 0; t < batch.tables; ++t) places.table_starts[t + 1] += places.table_starts[t];
  return places;
}

Directory directory_of(const TableCpu& table, const BatchCpu& batch, const int64_t* order,
                       int64_t begin, int64_t end) {
  Directory directory;
  int64_t id = -1, prefix = -1;
  for (int64_t at = begin; at < end; ++at) {
    const int64_t next = batch.ids[order[at]];
    if (next == id) continue;
    id = next;
    const int64_t entry_prefix = id / table.lasts();
    if (entry_prefix != prefix) {
      prefix = entry_prefix;
      directory.prefixes.push_back(directory.ids());
      directory.heads.push_back(prefix / table.middles());
      directory.middles.push_back(prefix % table.middles());
    }
    directory.starts.push_back(at);
    directory.lasts.push_back(id % table.lasts());
  }
  directory.starts.push_back(end);
  directory.prefixes.push_back(directory.ids());
  return directory;
}

std::vector<PrefixRange> prefix_ranges_of(const std::vector<int64_t>& middles, int64_t most) {
  std::vector<PrefixRange> tiles;
  const auto prefixes = static_cast<int64_t>(middles.size());
  for (int64_t begin = 0; begin < prefixes;) {
    int64_t end = begin + 1;
    while (end < prefixes && end < begin + most && middles[end] == middles[begin]) ++end;
    tiles.push_back({begin, end});
    begin = end;
  }
  return tiles;
}

std::vector<int64_t> split_evenly(const std::vector<int64_t>& costs,
                                  const std::vector<uint8_t>& may_begin, int64_t parts) {
  int64_t total = 0;
  for (const int64_t cost : costs) total += cost;
  const auto size = static_cast<int64_t>(costs.size());
  std::vector<int64_t> bounds{0};
  int64_t sum = 0;
  for (int64_t i = 0; i < size; ++i) {
    // The next part begins once the previous parts have their share of the cost.
    if (i > bounds.back() && may_begin[i] && static_cast<int64_t>(bounds.size()) < parts &&
        sum >= total / parts * static_cast<int64_t>(bounds.size())) {
      bounds.push_back(i);
    }
    sum += costs[i];
  }
  if (size > 0) bounds.push_back(size);
  return bounds;
}

}  // namespace torchrec_hkv::tensor_train::cpu
