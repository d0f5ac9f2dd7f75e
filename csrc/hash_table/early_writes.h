// Rows that are likely to leave their frames next, written home before they have to.
//
// A row that leaves its frame while others come shares the link with them, which then takes half as
// long again. While a batch is pooled and updated, the link has nothing to do. So the call that
// moves rows lists, of each set that a row comes to, the one that would leave it next if that one
// is dirty; and a kernel on a stream of its own writes these home until the next call has rows to
// move. Their frames keep them and are clean, so that they leave without a copy.
//
// What is listed is neither pinned nor of the present call. So nobody writes it before rows move
// again, or a call does that writes rows by itself: both wait for what is under way.
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef TORCHREC_HKV_CUDA

#include <cuda_runtime.h>

#include "hash_table/table_view.h"

namespace torchrec_hkv::hash_table::cuda {

// Each warp of the kernel that lists has a part of its own, so that none waits for another.
struct LeavingList {
  uint64_t* slots = nullptr;    // [parts, room], the tables' indices above; null: none is wanted
  uint32_t* numbers = nullptr;  // [parts], of entries
  uint32_t parts = 0;
  uint32_t room = 0;  // of a part; what is more is not listed
};

// Bytes of a list for a batch, about one an id, and the list, where `blocks` blocks write it. The
// link does not get through more between calls.
size_t leaving_list_bytes(int64_t num_ids);
LeavingList leaving_list(void* memory, int64_t num_ids, unsigned blocks);

// Of one group. Calls take turns.
class EarlyWrites {
 public:
  // stop: a word of the current device's, zero.
  explicit EarlyWrites(uint32_t* stop);
  ~EarlyWrites();
  EarlyWrites(const EarlyWrites&) = delete;
  EarlyWrites& operator=(const EarlyWrites&) = delete;

  // What `stream` does next comes when nothing is being written any more, which is soon.
  void end(cudaStream_t stream);
  // After what `stream` has to do now, the list's rows are written home.
  void begin(const TableView* tables, const LeavingList& list, cudaStream_t stream);

  // Where they are written.
  cudaStream_t stream() const { return stream_; }
  // After all that has begun.
  cudaEvent_t written() const { return written_; }

 private:
  uint32_t* const stop_;
  uint32_t turn_ = 0;  // of what began last: the word ends all up to the turn that it has
  bool begun_ = false;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t listed_ = nullptr;
  cudaEvent_t written_ = nullptr;
};

}  // namespace torchrec_hkv::hash_table::cuda

#endif
