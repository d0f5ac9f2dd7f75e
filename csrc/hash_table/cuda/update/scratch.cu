#include <algorithm>
#include <bit>

#include "hash_table/cuda/update/scratch.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

size_t aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }

int bits_for(int64_t number) {
  int bits = 1;
  while ((int64_t{1} << bits) < number) ++bits;
  return bits;
}

// Hands out memory from `at` on, aligned to 256 bytes. Null at first, it counts.
class Carver {
 public:
  explicit Carver(char* base) : base_(base) {}
  template <typename T>
  T* take(size_t number) {
    char* const place = base_ == nullptr ? nullptr : base_ + used_;
    used_ += aligned(number * sizeof(T));
    return reinterpret_cast<T*>(place);
  }
  size_t used() const { return used_; }

 private:
  char* base_;
  size_t used_ = 0;
};

size_t half_bytes(const UpdateSize& size) {
  const PairFormat format = size.format();
  return aligned(size.num_ids * format.key_bytes()) + aligned(size.num_ids * format.value_bytes());
}

Pairs place_half(const UpdateSize& size, char* base) {
  const PairFormat format = size.format();
  Carver carver(base);
  void* const keys = carver.take<char>(size.num_ids * format.key_bytes());
  return Pairs{keys, carver.take<char>(size.num_ids * format.value_bytes()), format};
}

// Marks enough for few slots to share one, and yet no more than the second half holds with keys and
// values of six bytes; as far as 32 bits number them.
Repeats repeats_of(const UpdateSize& size) {
  constexpr int64_t kMarksOfPosition = 22;
  Repeats repeats{};
  const int64_t most = std::min<int64_t>(kMarksOfPosition * size.num_ids, 0xffffffff);
  repeats.number = static_cast<uint32_t>(std::min(size.num_slots, most));
  repeats.exact = repeats.number == size.num_slots;
  return repeats;
}

Units units_of(const UpdateSize& size) {
  Units units{};
  units.classes = size.row_classes;
  units.capacity = static_cast<uint32_t>((size.num_ids + 31) / 32);
  return units;
}

struct Lists {
  LongSegment* segments;
  uint32_t* segment_of;
  float* sums;
  uint32_t* units;
  size_t bytes;
};

Lists place_lists(const UpdateSize& size, char* base) {
  Lists lists{};
  Carver carver(base);
  // A segment longer than kLongest has at most a piece for each kLongest of its positions.
  static_assert(kPieceSize >= 2 * kLongest);
  const size_t most = size.num_ids / kLongest + 1;
  lists.segments = carver.take<LongSegment>(most);
  lists.segment_of = carver.take<uint32_t>(most);
  lists.sums = carver.take<float>(most * size.widest);
  const Units units = units_of(size);
  if (units.any()) {
    lists.units = carver.take<uint32_t>(std::popcount(units.classes) * size_t{units.capacity});
  }
  lists.bytes = carver.used();
  return lists;
}

}  // namespace

int UpdateSize::key_bits() const { return bits_for(num_slots + 1); }

PairFormat UpdateSize::format() const {
  return PairFormat::of(key_bits(), bits_for(positions() ? num_ids : num_bags));
}

size_t Scratch::place(const UpdateSize& size, char* base) {
  *this = Scratch{};
  Carver carver(base);
  constexpr size_t kCounts = 64;  // with what aligns them
  auto* const counts = carver.take<uint32_t>(kCounts);
  words = counts;
  word_bytes = kCounts * sizeof(uint32_t);
  long_segments.number = counts;
  long_segments.pieces = counts + 1;
  long_segments.widest = size.widest;
  repeated = counts + 2;
  unique = counts + 3;
  longest_feature = counts + 4;
  hot_slots = counts + 5;
  bad_bag = reinterpret_cast<int64_t*>(counts + 6);
  units = units_of(size);
  units.number = counts + 8;
  static_assert(8 + kRowClasses <= kCounts);
  if (size.positions()) bags = carver.take<uint32_t>(size.num_ids);

  // What the sort takes besides the halves. It lies at the end of the middle, beside the marks.
  const auto place_sort = [&](char* at) {
    Carver of_sort(at);
    if (size.sorts_some) {
      small_sort = SmallSort::of(size.num_ids, size.key_bits(), /*stays=*/true);
      small_sort.digits = reinterpret_cast<uint32_t*>(of_sort.take<char>(small_sort.digit_bytes()));
      block_order.states = of_sort.take<unsigned long long>(prepare_blocks(size.num_ids));
      block_order.ticket = of_sort.take<uint32_t>(1);
    } else {
      cub_sort = of_sort.take<char>(size.cub_sort_bytes);
    }
    return of_sort.used();
  };
  const size_t half = half_bytes(size);
  const size_t of_sort = place_sort(nullptr);
  const size_t of_lists = place_lists(size, nullptr).bytes;
  const size_t in_middle = std::max(of_sort, of_lists > half ? of_lists - half : 0);

  char* const first = carver.take<char>(half);
  middle = carver.take<char>(in_middle);
  repeats = repeats_of(size);
  const size_t of_repeats = size.sorts_some ? aligned(repeats.words() * sizeof(uint32_t)) : 0;
  char* const second = carver.take<char>(std::max(half, of_repeats));
  if (base == nullptr) return carver.used();

  pairs = SortedPairs{place_half(size, first), place_half(size, second)};
  place_sort(second - of_sort);
  zeros = second - of_sort;
  zero_bytes = of_sort + of_repeats;
  repeats.marks = reinterpret_cast<uint32_t*>(second);
  return carver.used();
}

void Scratch::mark_few(const UpdateSize& size) {
  constexpr int64_t kFewOfPosition = 4;
  if (repeats.exact) return;
  const size_t before = aligned(repeats.words() * sizeof(uint32_t));
  repeats.number =
      static_cast<uint32_t>(std::min<int64_t>(kFewOfPosition * size.num_ids, repeats.number));
  zero_bytes -= before - aligned(repeats.words() * sizeof(uint32_t));
}

void Scratch::begin_lists(const UpdateSize& size) {
  // Free are the middle and the half that is not sorted: before it or behind it.
  char* const other = static_cast<char*>(pairs.other.keys);
  const Lists lists = place_lists(size, std::min(other, middle));
  long_segments.segments = lists.segments;
  long_segments.segment_of = lists.segment_of;
  long_segments.sums = lists.sums;
  units.lists = lists.units;
}

}  // namespace torchrec_hkv::hash_table::cuda
