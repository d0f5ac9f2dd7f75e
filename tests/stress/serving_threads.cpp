// Readers of a read-only table, and one writer that makes a version after another: each reader must
// see every row of one version. For ThreadSanitizer; see test_serving_threads.py.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "serving/kernels_cpu.h"

using namespace torchrec_hkv::serving;

namespace {

constexpr int kDim = 16, kIds = 3000, kVersions = 60, kReaders = 3;
constexpr IndexGeometry kGeometry{1, 480};

// Rows of a version: the base has version 0; every second id is changed, every tenth erased.
struct Version {
  std::vector<Bucket> buckets = std::vector<Bucket>(kGeometry.block_buckets);
  std::vector<float> rows;
  std::shared_ptr<const Version> base;
  Table table{};
};

int64_t id_of(int64_t k) { return k * 0x9e3779b97f4a7c1 - 7; }

std::shared_ptr<const Version> make(int number, const std::shared_ptr<const Version>& base) {
  auto made = std::make_shared<Version>();
  const int64_t step = base == nullptr ? 1 : 2, n = kIds / step;
  std::vector<int64_t> ids(n), order(n);
  std::unique_ptr<bool[]> erased(new bool[n]());
  for (int64_t k = 0; k < n; ++k) {
    ids[k] = id_of(k * step);
    erased[k] = base != nullptr && k % 5 == 0;
  }
  int64_t at = 0;
  const cpu::BlockPlacement placement{
      ids.data(), n, kGeometry, 0, 1, 0, erased.get(), made->buckets.data(), order.data()};
  if (cpu::place(placement, &at, 1) != cpu::PlaceStatus::kYes) std::abort();
  made->rows.assign(n * kDim, static_cast<float>(number));
  const Layer layer{made->buckets.data(), kGeometry, reinterpret_cast<char*>(made->rows.data())};
  if (base == nullptr) {
    made->table.format = RowFormat::kFloat32;
    made->table.dim = kDim;
    made->table.row_bytes = 4 * kDim;
    made->table.unit = 1.0f;
    made->table.initial_rows = torchrec_hkv::uniform_rows(0, -1.0f, -1.0f);
    made->table.base = layer;
  } else {
    made->table = base->table;
    made->table.changes = layer;
    made->base = base;
  }
  return made;
}

// Which version is served, as the registry of open tables keeps it.
class Served {
 public:
  void set(std::shared_ptr<const Version> version) {
    const std::lock_guard<std::mutex> guard(mutex_);
    version_ = std::move(version);
  }
  std::shared_ptr<const Version> get() {
    const std::lock_guard<std::mutex> guard(mutex_);
    return version_;
  }

 private:
  std::mutex mutex_;
  std::shared_ptr<const Version> version_;
};

}  // namespace

int main() {
  const auto base = make(0, nullptr);
  Served served;
  served.set(base);
  std::atomic<bool> ended{false}, wrong{false};
  std::atomic<int64_t> calls{0};
  int64_t unknown = 0;  // all readers count here
  std::vector<std::thread> readers;
  for (int reader = 0; reader < kReaders; ++reader) {
    readers.emplace_back([&] {
      std::vector<int64_t> ids(kIds);
      for (int64_t k = 0; k < kIds; ++k) ids[k] = id_of(k);
      std::vector<float> out(kIds * kDim);
      while (!ended) {
        const auto version = served.get();
        Feature feature{};
        feature.table = &version->table;
        feature.ids = ids.data();
        feature.bags = kIds;
        feature.type = torchrec_hkv::RowType::kFloat32;
        feature.out = reinterpret_cast<char*>(out.data());
        feature.stride = 4 * kDim;
        feature.unknown = &unknown;
        cpu::look_up(feature, 1);
        const bool changed = version->base != nullptr;
        const float number = out[2 * kDim];
        for (int64_t k = 0; k < kIds; ++k) {
          float want = 0.0f;
          if (changed && k % 2 == 0) want = k / 2 % 5 == 0 ? -1.0f : number;
          for (int c = 0; c < kDim; ++c) {
            if (out[k * kDim + c] != want) wrong = true;
          }
        }
        ++calls;
      }
    });
  }
  for (int number = 1; number <= kVersions; ++number) {
    served.set(make(number, base));
    std::this_thread::yield();
  }
  while (calls < 2 * kReaders) std::this_thread::yield();
  ended = true;
  for (std::thread& reader : readers) reader.join();
  std::printf("%lld calls, %lld unknown%s\n", static_cast<long long>(calls.load()),
              static_cast<long long>(unknown), wrong ? ", WRONG" : "");
  return wrong || unknown % (kIds / 10) != 0;
}
