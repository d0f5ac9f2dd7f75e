// Live objects by number, for operators: their schemas take numbers, but not these objects.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>

namespace torchrec_hkv::runtime {

// Objects of one class. Numbers are never reused. Thread-safe.
template <typename Object>
class Registry {
 public:
  // The registry of the class. It is never destroyed, because objects may outlive static ones.
  static Registry& instance() {
    static auto* const only = new Registry;
    return *only;
  }

  int64_t add(const std::shared_ptr<Object>& object) {
    const std::lock_guard<std::mutex> lock(mutex_);
    objects_[next_] = object;
    return next_++;
  }
  // Null if no live object has the number.
  std::shared_ptr<Object> find(int64_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = objects_.find(number);
    return found == objects_.end() ? nullptr : found->second.lock();
  }
  // Called by an object's destructor. 0 removes nothing.
  void remove(int64_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    objects_.erase(number);
  }

 private:
  std::mutex mutex_;
  std::unordered_map<int64_t, std::weak_ptr<Object>> objects_;
  int64_t next_ = 1;
};

}  // namespace torchrec_hkv::runtime
