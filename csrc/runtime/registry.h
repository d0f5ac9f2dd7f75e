// Living objects by number, for operators, whose schemas take numbers but no objects of ours.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>

namespace torchrec_hkv::runtime {

// Objects of one class. A number is never used twice. Threads may call it at the same time.
template <typename Object>
class Registry {
 public:
  // The class's own, which is never destroyed: objects may outlive static ones.
  static Registry& instance() {
    static auto* const only = new Registry;
    return *only;
  }

  int64_t add(const std::shared_ptr<Object>& object) {
    const std::lock_guard<std::mutex> lock(mutex_);
    objects_[next_] = object;
    return next_++;
  }
  // Null: none that lives has the number.
  std::shared_ptr<Object> find(int64_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = objects_.find(number);
    return found == objects_.end() ? nullptr : found->second.lock();
  }
  // To be called by the destructor of an object; 0, which no object has, removes none.
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
