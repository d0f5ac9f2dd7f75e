#include <bit>

#include "hash_table/cuda/update/scratch.cuh"
#include "hash_table/cuda/workspace.h"

namespace torchrec_hkv::hash_table::cuda {
namespace {

int bits_for(int64_t number) {
  int bits = 1;
  while ((int64_t{1} << bits) < number) ++bits;
  return bits;
}

size_t half_bytes(const UpdateSize& size) {
  const PairFormat format = size.format();
  return aligned(size.num_ids * format.key_bytes()) + aligned(size.num_ids * format.value_bytes());
}

Pairs lay_out_half(const UpdateSize& size, char* base) {
  const PairFormat format = size.format();
  WorkspaceAllocator workspace(base);
  void* const keys = workspace.take<char>(size.num_ids * format.key_bytes());
  return Pairs{keys, workspace.take<char>(size.num_ids * format.value_bytes()), format};
}

UnitLists units_of(const UpdateSize& size) {
  UnitLists units{};
  units.classes = size.row_classes;
  units.capacity = static_cast<uint32_t>((size.num_ids + 31) / 32);
  return units;
}

// A segment longer than kLongest has at most one piece for each kLongest of its positions.
size_t max_long_segments(const UpdateSize& size) {
  static_assert(kPieceSize >= 2 * kLongest);
  return size.num_ids / kLongest + 1;
}

struct ListLayout {
  LongSegment* segments;
  uint32_t* segment_of;
  float* sums;
  uint32_t* units;
  size_t bytes;
};

ListLayout lay_out_lists(const UpdateSize& size, char* base) {
  ListLayout lists{};
  WorkspaceAllocator workspace(base);
  const size_t most = max_long_segments(size);
  lists.segments = workspace.take<LongSegment>(most);
  lists.segment_of = workspace.take<uint32_t>(most);
  lists.sums = workspace.take<float>(most * size.widest);
  const UnitLists units = units_of(size);
  if (units.any()) {
    lists.units = workspace.take<uint32_t>(std::popcount(units.classes) * size_t{units.capacity});
  }
  lists.bytes = workspace.used();
  return lists;
}

}  // namespace

int UpdateSize::key_bits() const { return bits_for(num_slots + 1); }

PairFormat UpdateSize::format() const {
  return PairFormat::of(key_bits(), bits_for(positions() ? num_ids : num_bags));
}

size_t UpdateScratch::lay_out(const UpdateSize& size, char* base) {
  *this = UpdateScratch{};
  WorkspaceAllocator workspace(base);
  constexpr size_t kCounts = 64;  // including alignment
  orders = size.orders;
  const size_t number = kCounts + (orders ? 2 * kBagBins : 0);
  auto* const counts = workspace.take<uint32_t>(number);
  words = counts;
  word_bytes = number * sizeof(uint32_t);
  long_segments.number = counts;
  long_segments.pieces = counts + 1;
  long_segments.number_many = counts + 3;
  long_segments.capacity = static_cast<uint32_t>(max_long_segments(size));
  long_segments.widest = size.widest;
  unique = counts + 2;
  longest_feature = counts + 4;
  hot_slots = counts + 5;
  number_short = counts + 8 + kRowClasses;
  bag_bins = counts + kCounts;
  bad_bag = reinterpret_cast<int64_t*>(counts + 6);
  units = units_of(size);
  units.number = counts + 8;
  static_assert(8 + kRowClasses < kCounts);
  if (size.positions()) bags = workspace.take<uint32_t>(size.num_ids);

  const size_t half = half_bytes(size);
  const size_t list_bytes = lay_out_lists(size, nullptr).bytes;
  const size_t middle_bytes = max(size.cub_sort_bytes, list_bytes > half ? list_bytes - half : 0);

  char* const first = workspace.take<char>(half);
  middle = workspace.take<char>(middle_bytes);
  char* const second = workspace.take<char>(half);
  char* const ordered = orders ? workspace.take<char>(half) : nullptr;
  if (base == nullptr) return workspace.used();

  pairs = SortedPairs{lay_out_half(size, first), lay_out_half(size, second)};
  if (orders) short_pairs = lay_out_half(size, ordered);
  cub_sort = middle;
  return workspace.used();
}

void UpdateScratch::begin_lists(const UpdateSize& size) {
  // The middle and the half without the sorted pairs are free; this half is before or after the
  // middle.
  char* const other = static_cast<char*>(pairs.other.keys);
  const ListLayout lists = lay_out_lists(size, other < middle ? other : middle);
  long_segments.segments = lists.segments;
  long_segments.segment_of = lists.segment_of;
  long_segments.sums = lists.sums;
  units.lists = lists.units;
  if (!orders) short_pairs = pairs.pairs;
}

}  // namespace torchrec_hkv::hash_table::cuda
