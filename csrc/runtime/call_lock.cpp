#include "runtime/call_lock.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace torchrec_hkv::runtime {
namespace {

constexpr std::array<Access, 3> kAllWritten{Access::kWrite, Access::kWrite, Access::kWrite};

// The access that a call needs to each part. A call that touches no part changes the host's
// knowledge of the index.
std::array<Access, 3> needs(const AccessSet& use) {
  std::array<Access, 3> parts = use.parts();
  const bool none =
      std::all_of(parts.begin(), parts.end(), [](Access part) { return part == Access::kNone; });
  if (none) parts[0] = Access::kWrite;
  return parts;
}

bool writes(const std::array<Access, 3>& parts) {
  return std::find(parts.begin(), parts.end(), Access::kWrite) != parts.end();
}

}  // namespace

bool CallLock::others_hold_unchanged(ThreadId thread) const {
  return unchanged_.size() > unchanged_.count(thread);
}

bool CallLock::may_begin(const std::array<Access, 3>& parts, ThreadId thread) const {
  if (exclusive_depth_ > 0 && exclusive_thread_ != thread) return false;
  if (writes(parts) && !unchanged_.empty()) {
    // This applies even if the thread also holds the group alone: a hold of the same thread may
    // forbid changes.
    return false;
  }
  const bool holds_group = exclusive_depth_ > 0 || !unchanged_.empty();
  for (size_t p = 0; p < parts.size(); ++p) {
    if (parts[p] == Access::kRead && (written_[p] || (waiting_writers_[p] > 0 && !holds_group))) {
      return false;
    }
    if (parts[p] == Access::kWrite && (written_[p] || readers_[p] > 0)) return false;
  }
  return true;
}

template <typename Ready>
void CallLock::wait(std::unique_lock<std::mutex>& lock, const std::array<Access, 3>& parts,
                    Ready&& ready) {
  if (ready()) return;
  for (size_t p = 0; p < parts.size(); ++p) waiting_writers_[p] += parts[p] == Access::kWrite;
  changed_.wait(lock, ready);
  for (size_t p = 0; p < parts.size(); ++p) waiting_writers_[p] -= parts[p] == Access::kWrite;
  changed_.notify_all();  // readers that waited for this call may continue with it
}

CallLock::Call::Call(CallLock& lock, const AccessSet& use) : lock_(lock), parts_(needs(use)) {
  const ThreadId thread = std::this_thread::get_id();
  std::unique_lock<std::mutex> locked(lock_.mutex_);
  TORCH_CHECK(!writes(parts_) || lock_.unchanged_.count(thread) == 0,
              "a table can't be changed by the thread that is saving or exporting it: change it "
              "afterwards.");
  lock_.wait(locked, parts_, [&] { return lock_.may_begin(parts_, thread); });
  for (size_t p = 0; p < parts_.size(); ++p) {
    lock_.readers_[p] += parts_[p] == Access::kRead;
    if (parts_[p] == Access::kWrite) lock_.written_[p] = true;
  }
}

CallLock::Call::~Call() {
  const std::lock_guard<std::mutex> locked(lock_.mutex_);
  for (size_t p = 0; p < parts_.size(); ++p) {
    lock_.readers_[p] -= parts_[p] == Access::kRead;
    if (parts_[p] == Access::kWrite) lock_.written_[p] = false;
  }
  lock_.changed_.notify_all();
}

void CallLock::hold(Hold kind) {
  const ThreadId thread = std::this_thread::get_id();
  std::unique_lock<std::mutex> locked(mutex_);
  const bool is_alone = exclusive_depth_ > 0 && exclusive_thread_ == thread;
  if (kind == Hold::kUnchanged) {
    // Waits until all writes have ended.
    constexpr std::array<Access, 3> all_read{Access::kRead, Access::kRead, Access::kRead};
    wait(locked, all_read, [&] { return may_begin(all_read, thread); });
    ++unchanged_[thread];
    return;
  }
  TORCH_CHECK(is_alone || unchanged_.count(thread) == 0,
              "a table can't be changed by the thread that is saving or exporting it: change it "
              "afterwards.");
  if (!is_alone) {
    wait(locked, kAllWritten,
         [&] { return !others_hold_unchanged(thread) && may_begin(kAllWritten, thread); });
  }
  exclusive_thread_ = thread;
  ++exclusive_depth_;
}

void CallLock::release(Hold kind) {
  const ThreadId thread = std::this_thread::get_id();
  {
    const std::lock_guard<std::mutex> locked(mutex_);
    if (kind == Hold::kUnchanged) {
      const auto hold_count = unchanged_.find(thread);
      TORCH_CHECK(hold_count != unchanged_.end(),
                  "this thread does not hold the tables unchanged.");
      if (--hold_count->second == 0) unchanged_.erase(hold_count);
    } else {
      TORCH_CHECK(exclusive_depth_ > 0 && exclusive_thread_ == thread,
                  "this thread does not hold the tables alone.");
      --exclusive_depth_;
    }
  }
  changed_.notify_all();
}

}  // namespace torchrec_hkv::runtime
