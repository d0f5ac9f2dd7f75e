// Decides which calls of a group run at the same time in several host threads. Calls that read a
// part of the group run together; a call that writes it runs alone. A thread can also hold a group
// over several calls. `kUnchanged` keeps all threads from changing the group, so that a save sees
// one state. `kExclusive` makes all other threads wait, so that several calls appear as one.
#pragma once

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>
#include <unordered_map>

namespace torchrec_hkv::runtime {

enum class Access : int {
  kNone,
  kFollow,  // waits for earlier readers and writers; later calls do not wait for it
  kRead,
  kWrite,
};

// Access of a call to the parts of a group.
struct AccessSet {
  Access index;   // digests, ids, steps, scores, clock, counters
  Access rows;    // rows and states without a pin
  Access pinned;  // rows and states with a pin, which insertions do not touch

  std::array<Access, 3> parts() const { return {index, rows, pinned}; }
};

constexpr AccessSet kHostOnly{Access::kNone, Access::kNone,
                              Access::kNone};  // ordered on the host only
constexpr AccessSet kReadIndex{Access::kRead, Access::kNone, Access::kNone};
constexpr AccessSet kWriteIndex{Access::kWrite, Access::kNone, Access::kNone};
constexpr AccessSet kReadRows{Access::kNone, Access::kRead, Access::kRead};
constexpr AccessSet kWriteRows{Access::kNone, Access::kWrite, Access::kWrite};
constexpr AccessSet kReadPinned{Access::kNone, Access::kNone, Access::kRead};
constexpr AccessSet kWritePinned{Access::kNone, Access::kNone, Access::kWrite};
constexpr AccessSet kReadAll{Access::kRead, Access::kRead, Access::kRead};
constexpr AccessSet kWriteAll{Access::kWrite, Access::kWrite, Access::kWrite};

enum class Hold : int {
  kUnchanged,
  kExclusive,
};

class CallLock {
 public:
  // A call, from construction to destruction. Waits for conflicting calls and holds. Throws if this
  // thread holds the group unchanged and the call would change it.
  class Call {
   public:
    Call(CallLock& lock, const AccessSet& use);
    ~Call();
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    CallLock& lock_;
    const std::array<Access, 3> parts_;
  };

  // Waits until no other thread conflicts. A thread may hold a group several times, and must
  // release it as often. Throws for kExclusive if the thread holds the group only unchanged.
  void hold(Hold kind);
  // Called by the thread that called hold(). Throws if it has no such hold.
  void release(Hold kind);

 private:
  using ThreadId = std::thread::id;

  bool may_begin(const std::array<Access, 3>& parts, ThreadId thread) const;
  bool others_hold_unchanged(ThreadId thread) const;
  // Waits for `ready`. Later readers of a part wait behind those that wait to write it.
  template <typename Ready>
  void wait(std::unique_lock<std::mutex>& lock, const std::array<Access, 3>& parts, Ready&& ready);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::array<int64_t, 3> readers_{};
  std::array<bool, 3> written_{};
  std::array<int64_t, 3> waiting_writers_{};
  std::unordered_map<ThreadId, int64_t> unchanged_;  // number of kUnchanged holds by thread
  ThreadId exclusive_thread_{};                      // the thread that holds it alone
  int64_t exclusive_depth_ = 0;
};

}  // namespace torchrec_hkv::runtime
