#include <algorithm>

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

// Marks enough for few slots to share one, and yet, with what follows in chains, no more than the
// second half holds with keys and values of six bytes; as far as 32 bits number them.
Repeats repeats_of(const UpdateSize& size) {
  constexpr int64_t kMarksOfPosition = 22;
  Repeats repeats{};
  const int64_t most = std::min<int64_t>(kMarksOfPosition * size.num_ids, 0xffffffff);
  repeats.number = static_cast<uint32_t>(std::min(size.num_slots, most));
  repeats.exact = repeats.number == size.num_slots;
  return repeats;
}

// Where at most an eighth of the positions is repeated, chains know all of them: a batch of another
// kind goes by the batch order only if those before it were like that.
Chains chains_of(const UpdateSize& size) {
  Chains chains{};
  chains.most = static_cast<uint32_t>(std::max<int64_t>(size.num_ids / 8, 1));
  return chains;
}

struct RunLists {
  uint32_t* shorter;
  LongRun* longer;
  uint32_t* run_of;
  float* sums;
  size_t bytes;
};

RunLists place_runs(const UpdateSize& size, char* base) {
  RunLists lists{};
  Carver carver(base);
  if (size.batch_order) lists.shorter = carver.take<uint32_t>(size.num_ids);
  // A run longer than kLongest has at most a piece for each kLongest of its positions.
  static_assert(kPieceSize >= 2 * kLongest);
  const size_t most = size.num_ids / kLongest + 1;
  lists.longer = carver.take<LongRun>(most);
  lists.run_of = carver.take<uint32_t>(most);
  lists.sums = carver.take<float>(most * size.widest);
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
  bad_bag = reinterpret_cast<int64_t*>(counts + 6);
  runs.number = counts;
  runs.singles = counts + 1;
  long_runs.number = counts + 2;
  long_runs.pieces = counts + 3;
  ticket = counts + 5;
  long_runs.widest = size.widest;
  if (size.batch_order) {
    sorted = counts + 4;
    split = counts + 8;
    chains = chains_of(size);
    chains.heads = carver.take<uint32_t>(chains.most);
    word_bytes += aligned(chains.most * sizeof(uint32_t));
    repeated_positions = carver.take<uint32_t>((size.num_ids + 31) / 32);
  } else {
    longest_feature = counts + 4;
    hot_slots = counts + 8;
    before_hot = counts + 16;
    static_assert(16 + kMostRanges <= kCounts);
  }
  if (size.positions()) bags = carver.take<uint32_t>(size.num_ids);

  // What the sort takes besides the halves. It lies at the end of the middle, beside the marks.
  const auto place_sort = [&](char* at) {
    Carver of_sort(at);
    if (size.batch_order) {
      small_sort = SmallSort::of(size.num_ids, size.key_bits());
      small_sort.digits = reinterpret_cast<uint32_t*>(of_sort.take<char>(small_sort.digit_bytes()));
      split_order.states = of_sort.take<unsigned long long>(split_blocks(size.num_ids));
      split_order.ticket = of_sort.take<uint32_t>(1);
    } else {
      cub_sort = of_sort.take<char>(size.cub_sort_bytes);
    }
    return of_sort.used();
  };
  const size_t half = half_bytes(size);
  const size_t of_sort = place_sort(nullptr);
  const size_t of_runs = place_runs(size, nullptr).bytes;
  const size_t in_middle = std::max(of_sort, of_runs > half ? of_runs - half : 0);

  char* const first = carver.take<char>(half);
  middle = carver.take<char>(in_middle);
  repeats = repeats_of(size);
  const size_t of_repeats = size.batch_order ? aligned(repeats.words() * sizeof(uint32_t)) : 0;
  const size_t of_nexts = aligned(chains.most * sizeof(uint32_t));
  char* const second = carver.take<char>(std::max(half, of_repeats + of_nexts));
  if (base == nullptr) return carver.used();

  pairs = SortedPairs{place_half(size, first), place_half(size, second)};
  place_sort(second - of_sort);
  zeros = second - of_sort;
  zero_bytes = of_sort + of_repeats;
  repeats.marks = reinterpret_cast<uint32_t*>(second);
  chains.nexts = reinterpret_cast<uint32_t*>(second + of_repeats);
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

void Scratch::begin_runs(const UpdateSize& size) {
  // Free are the middle and the half that is not sorted: before it or behind it.
  char* const other = static_cast<char*>(pairs.other.keys);
  const RunLists lists = place_runs(size, std::min(other, middle));
  if (size.batch_order) {
    runs.longer = reinterpret_cast<Part*>(lists.shorter);
    runs.last = lists.shorter + (size.num_ids - 1);
  }
  long_runs.runs = lists.longer;
  long_runs.run_of = lists.run_of;
  long_runs.sums = lists.sums;
}

}  // namespace torchrec_hkv::hash_table::cuda
