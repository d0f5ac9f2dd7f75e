#include "tensor_train/cpu/zeroed_buffer.h"

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <new>
#include <vector>

namespace torchrec_hkv::tensor_train::cpu {
namespace {

constexpr int64_t kFloatBytes = sizeof(float);
constexpr int64_t kMaxKeptBytes = int64_t{1} << 28;

struct Block {
  float* data;
  int64_t capacity;
};

// The blocks that no call uses, the oldest first. A thread that does not get the lock at once
// allocates or frees memory instead of waiting. Otherwise a child process would wait forever if
// another thread of its parent held the lock during the fork.
class KeptBlocks {
 public:
  // Returns the smallest block of at least this size, or one without data.
  Block take(int64_t size) {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock) return {nullptr, 0};
    auto best = blocks_.end();
    for (auto it = blocks_.begin(); it != blocks_.end(); ++it) {
      if (it->capacity < size) continue;
      if (best == blocks_.end() || it->capacity < best->capacity) best = it;
    }
    if (best == blocks_.end()) return {nullptr, 0};
    const Block block = *best;
    blocks_.erase(best);
    bytes_ -= block.capacity * kFloatBytes;
    return block;
  }

  // Returns whether the block is kept.
  bool keep(Block block) {
    const int64_t bytes = block.capacity * kFloatBytes;
    if (bytes > kMaxKeptBytes) return false;
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock) return false;
    while (bytes_ + bytes > kMaxKeptBytes) {
      std::free(blocks_.front().data);
      bytes_ -= blocks_.front().capacity * kFloatBytes;
      blocks_.erase(blocks_.begin());
    }
    blocks_.push_back(block);
    bytes_ += bytes;
    return true;
  }

 private:
  std::mutex mutex_;
  std::vector<Block> blocks_;
  int64_t bytes_ = 0;
};

KeptBlocks& kept_blocks() {
  static auto& blocks = *new KeptBlocks;  // never destroyed: threads may outlive static objects
  return blocks;
}

}  // namespace

ZeroedBuffer::ZeroedBuffer(int64_t size) : size_(size) {
  const Block block = kept_blocks().take(std::max<int64_t>(size, 1));
  data_ = block.data;
  capacity_ = block.capacity;
  if (data_ != nullptr) return;
  capacity_ = std::max<int64_t>(size, 1);
  data_ = static_cast<float*>(std::calloc(capacity_, sizeof(float)));
  if (data_ == nullptr) throw std::bad_alloc();
}

ZeroedBuffer::~ZeroedBuffer() { std::free(data_); }

void ZeroedBuffer::keep() {
  if (data_ != nullptr && kept_blocks().keep({data_, capacity_})) data_ = nullptr;
}

void ZeroedBuffer::clear_and_keep() {
  if (data_ != nullptr) std::fill_n(data_, size_, 0.0f);
  keep();
}

}  // namespace torchrec_hkv::tensor_train::cpu
