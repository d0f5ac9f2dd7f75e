#include <algorithm>

#include "common/cuda_check.h"
#include "hash_table/cuda/exchange.cuh"
#include "hash_table/cuda/frames.cuh"
#include "hash_table/cuda/insert/insert.cuh"
#include "hash_table/early_writes.h"

namespace torchrec_hkv::hash_table::cuda {
namespace {

constexpr size_t kMostParts = 8192;  // four bytes each
constexpr int64_t kIdsAnEntry = 8;

// Lets the kernel below end.
__global__ void end_kernel(uint32_t* stop, uint32_t turn) { store_l2(stop, turn); }

// A warp writes 32 rows between two looks at the word that ends it. All parts of the list have
// their first entries written before others.
__global__ void __launch_bounds__(kThreads)
    write_kernel(const TableView* __restrict__ tables, const LeavingList list, const uint32_t* stop,
                 uint32_t turn) {
  const uint32_t warps = gridDim.x * (kThreads / kWarp);
  const uint32_t turns = (list.room + kWarp - 1) / kWarp * list.parts;
  const uint32_t lane = threadIdx.x % kWarp;
  for (uint32_t at = (blockIdx.x * kThreads + threadIdx.x) / kWarp; at < turns; at += warps) {
    const uint32_t part = at % list.parts, begin = at / list.parts * kWarp;
    const uint32_t number = list.numbers[part];
    if (number <= begin) continue;
    const uint32_t ended = __shfl_sync(kAllLanes, lane == 0 ? load_l2(stop) : 0, 0);
    if (static_cast<int32_t>(ended - turn) >= 0) return;
    const TableView* mine = tables;
    int64_t frame = kNoFrame, slot = kNoSlot;
    if (begin + lane < number) {
      const uint64_t entry = list.slots[static_cast<size_t>(part) * list.room + begin + lane];
      mine = &tables[entry >> kListedSlotBits];
      const auto listed = static_cast<int64_t>(entry & kListedSlots);
      const Frames& frames = mine->frames;
      const Frames::Home home = frames.home_of(listed);
      const uint64_t tags = frames.load_tags(home.set);
      const int place = frames.place_of(tags, home.number);
      // A set may be listed twice, and what was listed first have left.
      if (place >= 0 && (frames.tag_at(tags, place) & kTagDirty)) {
        slot = listed;
        frame = frames.frame_at(home.set, place);
      }
    }
    const bool goes = slot != kNoSlot;
    count_warp(mine, kWrittenHome, goes);
    exchange_rows</*kPaced=*/true>(mine, goes, frame, slot, kNoSlot);
    __syncwarp();
    if (goes) {
      const Frames& frames = mine->frames;
      const unsigned long long dirty =
          static_cast<unsigned long long>(kTagDirty)
          << static_cast<int>(frame % frames.frames_of_set) * frames.bits;
      atomicAnd(&frames.tags[frame / frames.frames_of_set], ~dirty);
    }
  }
}

}  // namespace

size_t leaving_list_bytes(int64_t num_ids) {
  return kMostParts * sizeof(uint32_t) +
         static_cast<size_t>(num_ids / kIdsAnEntry) * sizeof(uint64_t);
}

LeavingList leaving_list(void* memory, int64_t num_ids, unsigned blocks) {
  const int64_t parts = int64_t{blocks} * (kThreads / kWarp);
  if (parts > static_cast<int64_t>(kMostParts)) return {};
  auto* const numbers = static_cast<uint32_t*>(memory);
  return {reinterpret_cast<uint64_t*>(numbers + kMostParts), numbers, static_cast<uint32_t>(parts),
          static_cast<uint32_t>(num_ids / kIdsAnEntry / parts)};
}

EarlyWrites::EarlyWrites(uint32_t* stop) : stop_(stop) {
  int least = 0, greatest = 0;
  HKV_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  // Its few blocks get their places beside kernels that have more than fit.
  HKV_CUDA_CHECK(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest));
  HKV_CUDA_CHECK(cudaEventCreateWithFlags(&listed_, cudaEventDisableTiming));
  HKV_CUDA_CHECK(cudaEventCreateWithFlags(&written_, cudaEventDisableTiming));
}

// At exit the driver may be gone. What is under way goes on; who frees the tables' memory waits.
EarlyWrites::~EarlyWrites() {
  (void)cudaEventDestroy(listed_);
  (void)cudaEventDestroy(written_);
  (void)cudaStreamDestroy(stream_);
  (void)cudaGetLastError();
}

void EarlyWrites::end(cudaStream_t stream) {
  if (!begun_) return;
  end_kernel<<<1, 1, 0, stream>>>(stop_, turn_);
  HKV_CUDA_CHECK_LAUNCH();
  HKV_CUDA_CHECK(cudaStreamWaitEvent(stream, written_, 0));
  begun_ = false;
}

void EarlyWrites::begin(const TableView* tables, const LeavingList& list, cudaStream_t stream) {
  // Blocks on three eighths of the multiprocessors have the link nearly busy, paced as they are.
  const unsigned blocks = std::max(processors() * 3 / 8, 1u);
  HKV_CUDA_CHECK(cudaEventRecord(listed_, stream));
  HKV_CUDA_CHECK(cudaStreamWaitEvent(stream_, listed_, 0));
  ++turn_;
  write_kernel<<<blocks, kThreads, 0, stream_>>>(tables, list, stop_, turn_);
  HKV_CUDA_CHECK_LAUNCH();
  HKV_CUDA_CHECK(cudaEventRecord(written_, stream_));
  begun_ = true;
}

}  // namespace torchrec_hkv::hash_table::cuda
