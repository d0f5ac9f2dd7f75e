// The arrays of one table, for its current number of slots.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "hash_table/counted_steps.h"
#include "hash_table/geometry.h"
#include "runtime/growing_memory.h"
#include "runtime/tensor.h"

namespace torchrec_hkv::runtime {

class HostAddresses;

// An array by slot (or bucket). Its address stays the same when it grows.
class SlotArray {
 public:
  // An array of shape [n, row...], with n up to `most`. memory: null for memory of PyTorch's
  // allocator, which does not grow.
  SlotArray(at::ScalarType dtype, std::vector<int64_t> row, int64_t most,
            std::shared_ptr<GrowingMemory> memory);
  explicit SlotArray(at::Tensor whole) : tensor(std::move(whole)), most_(tensor.size(0)) {}

  // Backs n entries, at most `most`, without touching them. `tensor` does not change.
  void back(int64_t n);
  // Sets the number of entries of `tensor`; all of them must be backed.
  void resize(int64_t n);
  char* data() const;
  int64_t most() const { return most_; }
  // Bytes that the array takes.
  int64_t bytes() const;
  // The growing memory; null if the array does not grow.
  const std::shared_ptr<GrowingMemory>& memory() const { return memory_; }

  at::Tensor tensor;

 private:
  int64_t bytes_of(int64_t n) const;

  at::ScalarType dtype_ = at::kByte;
  std::vector<int64_t> row_;
  int64_t most_ = 0;
  std::shared_ptr<GrowingMemory> memory_;
};

// The parameters that determine a table's memory.
struct TableLayout {
  hash_table::Geometry geometry;
  int64_t row_width;  // elements of a stored row
  at::ScalarType row_dtype;
  int64_t state_width;
  bool scores;
  bool counted;       // last steps and counts share words (hash_table/counted_steps.h). CPU only
  int64_t hbm_slots;  // slots whose rows and states fit in HBM; if there are more slots, these are
                      // frames (hash_table/frames.h), or 0. CUDA only
  bool all_states_in_hbm;  // the states of all slots are in HBM, by slot
  bool packed;             // ids and last steps are packed (hash_table/packed_entries.h). CUDA only
};

struct MemoryBytes {
  int64_t hbm;
  int64_t host;

  MemoryBytes& operator+=(const MemoryBytes& other) {
    hbm += other.hbm;
    host += other.host;
    return *this;
  }
};

// Bytes of a table with this number of buckets, without rounding to whole pages.
MemoryBytes memory_of(const TableLayout& layout, int64_t num_buckets, at::Device device);

class TableMemory {
 public:
  // Creates an empty table of the initial size. On a CPU, pages are allocated when they are
  // touched. On a GPU, a table that grows has its own memory; other tables use PyTorch's allocator.
  TableMemory(const TableLayout& layout, at::Device device);

  const hash_table::Geometry& geometry() const { return layout_.geometry; }  // when it has grown
  int64_t num_buckets() const { return num_buckets_; }                       // at present
  int64_t num_slots() const { return num_buckets_ * geometry().bucket_slots; }
  int64_t full_slots() const { return geometry().num_slots(); }
  bool grows() const { return num_buckets_ < geometry().num_buckets || unsplit_ > 0; }
  // Number of buckets before the doubling that are not split yet (hash_table/grow.h). CPU only.
  int64_t unsplit() const { return unsplit_; }
  void set_unsplit(int64_t buckets) { unsplit_ = buckets; }
  // Number of slots before the doubling.
  int64_t split_slots() const { return num_slots() / 2; }

  // Backs memory for this number of buckets. On failure the table does not change.
  void back(int64_t num_buckets);
  // Sets the number of buckets, which must be backed. The caller fills them.
  void resize(int64_t num_buckets);
  // Frees all slots.
  void clear();

  int64_t hbm_bytes() const;
  int64_t host_bytes() const;

  // Whether the rows of the current slots are in host memory.
  bool rows_on_host() const { return rows_on_host(num_slots()); }
  bool rows_on_host(int64_t slots) const { return device_.is_cuda() && slots > layout_.hbm_slots; }
  int64_t num_sets() const { return tags.tensor.size(0); }
  int frames_of_set() const { return static_cast<int>(layout_.hbm_slots / num_sets()); }
  // Rows and states by slot, behind the frames if there are any.
  const SlotArray& backing_rows() const { return rows_on_host() ? rows_host : rows; }
  const SlotArray& backing_states() const {
    return rows_on_host() && states_move() ? states_host : states;
  }
  // Whether states are in the same memory as their rows, HBM or host memory.
  bool states_move() const { return !layout_.all_states_in_hbm; }
  // Frees all frames. step: the new value of `crowded` of each set.
  void empty_frames(int64_t step);

  SlotArray digests;  // int16 [num_buckets, 64]
  // If packed, `entries` has ids and last steps.
  SlotArray ids;         // int64 [num_slots]
  SlotArray last_steps;  // int32 [num_slots]; empty if counted
  SlotArray entries;     // int32 [num_buckets, words of its sectors], if packed
  SlotArray oldest;      // int32 [num_buckets, 4], if packed
  SlotArray scores;      // int64 [num_slots] or empty
  SlotArray words;       // int32 [num_slots], if counted
  SlotArray high;        // int16 [num_slots] or empty
  SlotArray upper;       // int16 [num_slots, 3] or empty
  // Refers to `high` and `upper`. Views hold its address, which does not change.
  std::unique_ptr<hash_table::StepWindow> window;
  SlotArray states;     // [slots or frames in HBM, width], or [num_slots, width]: all in HBM
  SlotArray rows;       // [slots or frames in HBM, dim]
  SlotArray rows_host;  // [num_slots, dim] if they don't fit in HBM, otherwise empty
  SlotArray states_host;
  SlotArray tags;     // int64 [sets of frames]
  SlotArray crowded;  // int32 [sets of frames]

 private:
  TableMemory(const TableLayout& layout, at::Device device,
              const std::shared_ptr<HostAddresses>& addresses);

  int64_t in_hbm(int64_t slots) const { return std::min(slots, layout_.hbm_slots); }
  int64_t states_in_hbm(int64_t slots) const { return states_move() ? in_hbm(slots) : slots; }
  int64_t on_host(int64_t slots) const { return rows_on_host(slots) ? slots : 0; }
  int64_t states_on_host(int64_t slots) const { return states_move() ? on_host(slots) : 0; }

  TableLayout layout_;
  at::Device device_;
  int64_t num_buckets_ = 0;
  int64_t unsplit_ = 0;
};

}  // namespace torchrec_hkv::runtime
