#include "runtime/table_memory.h"

#include "hash_table/table_view.h"
#include "runtime/growing_host_memory.h"

namespace torchrec_hkv::runtime {
namespace {

// Number of slots at full capacity if their rows are in host memory then, otherwise 0.
int64_t max_on_host(const TableLayout& layout) {
  const int64_t slots = layout.geometry.num_slots();
  return slots > layout.hbm_slots ? slots : 0;
}

int64_t sets_of(const TableLayout& layout) {
  if (max_on_host(layout) == 0 || layout.hbm_slots == 0) return 0;
  const hash_table::Geometry& geometry = layout.geometry;
  return layout.hbm_slots /
         hash_table::frames_of_set(geometry.num_slots(), geometry.bucket_slots, layout.hbm_slots);
}

// Addresses of a table's arrays on a CPU.
std::shared_ptr<HostAddresses> addresses_of(const TableLayout& layout, at::Device device) {
  if (!device.is_cpu()) return nullptr;
  constexpr int64_t kArrays = 13;  // upper bound on the number of arrays
  const int64_t bytes = memory_of(layout, layout.geometry.num_buckets, device).host;
  return std::make_shared<HostAddresses>(HostAddresses::bytes_for(bytes, kArrays));
}

// Creates one array. addresses: addresses of the table's arrays, on a CPU. In HBM, arrays of tables
// that never grow use PyTorch's allocator.
SlotArray make_array(const TableLayout& layout, at::Device device,
                     const std::shared_ptr<HostAddresses>& addresses, at::ScalarType dtype,
                     std::vector<int64_t> row, int64_t most, bool on_host = false) {
  int64_t bytes = most * static_cast<int64_t>(at::elementSize(dtype));
  for (const int64_t size : row) bytes *= size;
  if (addresses != nullptr) {
    return SlotArray(dtype, std::move(row), most,
                     std::make_shared<GrowingHostMemory>(addresses, bytes));
  }
  if (on_host || layout.geometry.doublings > 0) {
    const MemoryLocation place = on_host ? MemoryLocation::kShared : MemoryLocation::kDevice;
    return SlotArray(dtype, std::move(row), most, make_growing_memory(place, bytes, device));
  }
  std::vector<int64_t> shape{most};
  shape.insert(shape.end(), row.begin(), row.end());
  return SlotArray(at::empty(shape, at::dtype(dtype).device(device)));
}

}  // namespace

SlotArray::SlotArray(at::ScalarType dtype, std::vector<int64_t> row, int64_t most,
                     std::shared_ptr<GrowingMemory> memory)
    : dtype_(dtype), row_(std::move(row)), most_(most), memory_(std::move(memory)) {}

int64_t SlotArray::bytes_of(int64_t n) const {
  int64_t bytes = n * static_cast<int64_t>(at::elementSize(dtype_));
  for (const int64_t size : row_) bytes *= size;
  return bytes;
}

void SlotArray::back(int64_t n) {
  if (memory_ != nullptr) memory_->grow(bytes_of(n));
}

void SlotArray::resize(int64_t n) {
  if (memory_ == nullptr) return;
  std::vector<int64_t> shape{n};
  shape.insert(shape.end(), row_.begin(), row_.end());
  const at::Device device = memory_->device();
  const auto options = at::dtype(dtype_).device(device);
  if (bytes_of(n) == 0) {
    tensor = at::empty(shape, options);
    return;
  }
  // The tensor keeps the memory alive.
  tensor = at::from_blob(memory_->data(), shape, [memory = memory_](void*) {}, options, device);
}

char* SlotArray::data() const {
  return memory_ != nullptr ? memory_->data() : static_cast<char*>(tensor.data_ptr());
}

int64_t SlotArray::bytes() const {
  if (memory_ == nullptr) return tensor.numel() * tensor.element_size();
  // The host allocates whole pages, but only the bytes that a table may touch are counted.
  return memory_->device().is_cpu() ? bytes_of(tensor.size(0)) : memory_->bytes();
}

MemoryBytes memory_of(const TableLayout& layout, int64_t num_buckets, at::Device device) {
  hash_table::Geometry present = layout.geometry;
  present.num_buckets = num_buckets;
  const int64_t row_bytes =
      layout.row_width * static_cast<int64_t>(at::elementSize(layout.row_dtype));
  const int64_t state_bytes = layout.state_width * static_cast<int64_t>(sizeof(float));
  const int64_t index = hash_table::index_bytes(present, layout.scores, layout.packed);
  const int64_t slots = present.num_slots();
  if (device.is_cpu()) return {0, index + slots * (row_bytes + state_bytes)};
  const int64_t in_hbm = std::min(slots, layout.hbm_slots);
  const int64_t on_host = slots > layout.hbm_slots ? slots : 0;
  const bool states_separate = layout.all_states_in_hbm;
  const int64_t frames = sets_of(layout) * hash_table::kSetBytes;
  return {index + frames + in_hbm * row_bytes + (states_separate ? slots : in_hbm) * state_bytes,
          on_host * (row_bytes + (states_separate ? 0 : state_bytes))};
}

TableMemory::TableMemory(const TableLayout& layout, at::Device device)
    : TableMemory(layout, device, addresses_of(layout, device)) {}

TableMemory::TableMemory(const TableLayout& layout, at::Device device,
                         const std::shared_ptr<HostAddresses>& addresses)
    : digests(make_array(layout, device, addresses, at::kShort, {kBucketDigests},
                         layout.geometry.num_buckets)),
      ids(make_array(layout, device, addresses, at::kLong, {},
                     layout.packed ? 0 : layout.geometry.num_slots())),
      last_steps(make_array(layout, device, addresses, at::kInt, {},
                            layout.packed || layout.counted ? 0 : layout.geometry.num_slots())),
      entries(make_array(
          layout, device, addresses, at::kInt,
          {hash_table::sectors_of_bucket(layout.geometry.bucket_slots) * hash_table::kSectorWords},
          layout.packed ? layout.geometry.num_buckets : 0)),
      oldest(make_array(layout, device, addresses, at::kInt, {hash_table::kGroups},
                        layout.packed ? layout.geometry.num_buckets : 0)),
      scores(make_array(layout, device, addresses, at::kLong, {},
                        layout.scores && !layout.counted ? layout.geometry.num_slots() : 0)),
      words(make_array(layout, device, addresses, at::kInt, {},
                       layout.counted ? layout.geometry.num_slots() : 0)),
      high(make_array(layout, device, addresses, at::kShort, {},
                      layout.counted ? layout.geometry.num_slots() : 0)),
      upper(make_array(layout, device, addresses, at::kShort, {3},
                       layout.counted ? layout.geometry.num_slots() : 0)),
      window(std::make_unique<hash_table::StepWindow>()),
      states(make_array(layout, device, addresses, at::kFloat, {layout.state_width},
                        layout.all_states_in_hbm ? layout.geometry.num_slots() : layout.hbm_slots)),
      rows(make_array(layout, device, addresses, layout.row_dtype, {layout.row_width},
                      layout.hbm_slots)),
      rows_host(make_array(layout, device, addresses, layout.row_dtype, {layout.row_width},
                           max_on_host(layout), /*on_host=*/true)),
      states_host(make_array(layout, device, addresses, at::kFloat, {layout.state_width},
                             layout.all_states_in_hbm ? 0 : max_on_host(layout),
                             /*on_host=*/true)),
      tags(at::zeros({sets_of(layout)}, at::dtype(at::kLong).device(device))),
      crowded(at::zeros({sets_of(layout)}, at::dtype(at::kInt).device(device))),
      layout_(layout),
      device_(device) {
  if (layout.counted) {
    window->high = reinterpret_cast<uint16_t*>(high.data());
    window->upper = reinterpret_cast<hash_table::StepWindow::Upper*>(upper.data());
  }
  back(geometry().initial_buckets());
  resize(geometry().initial_buckets());
  clear();
}

void TableMemory::back(int64_t num_buckets) {
  const int64_t slots = num_buckets * geometry().bucket_slots;
  digests.back(num_buckets);
  ids.back(std::min(slots, ids.most()));
  last_steps.back(std::min(slots, last_steps.most()));
  entries.back(std::min(num_buckets, entries.most()));
  oldest.back(std::min(num_buckets, oldest.most()));
  scores.back(std::min(slots, scores.most()));
  words.back(std::min(slots, words.most()));
  high.back(std::min(slots, high.most()));
  upper.back(std::min(slots, upper.most()));
  rows.back(in_hbm(slots));
  states.back(states_in_hbm(slots));
  rows_host.back(on_host(slots));
  states_host.back(states_on_host(slots));
}

void TableMemory::resize(int64_t num_buckets) {
  const int64_t slots = num_buckets * geometry().bucket_slots;
  num_buckets_ = num_buckets;
  digests.resize(num_buckets);
  ids.resize(std::min(slots, ids.most()));
  last_steps.resize(std::min(slots, last_steps.most()));
  entries.resize(std::min(num_buckets, entries.most()));
  oldest.resize(std::min(num_buckets, oldest.most()));
  scores.resize(std::min(slots, scores.most()));
  words.resize(std::min(slots, words.most()));
  high.resize(std::min(slots, high.most()));
  upper.resize(std::min(slots, upper.most()));
  rows.resize(in_hbm(slots));
  states.resize(states_in_hbm(slots));
  rows_host.resize(on_host(slots));
  states_host.resize(states_on_host(slots));
}

void TableMemory::clear() {
  static_assert(kEmptyDigest == 0);
  unsplit_ = 0;
  if (device_.is_cpu()) {
    // Does not touch unused pages, which read as free slots. The last step of a free slot matters
    // on a GPU only.
    discard_host(digests.data(), digests.memory()->bytes());
  } else {
    digests.tensor.zero_();
    last_steps.tensor.fill_(static_cast<int32_t>(hash_table::kFreeStep));
    entries.tensor.fill_(static_cast<int32_t>(hash_table::kFreeStep));
    oldest.tensor.zero_();
  }
  if (geometry().bucket_slots < kBucketDigests) {
    digests.tensor.slice(1, geometry().bucket_slots).fill_(static_cast<int16_t>(kClosedDigest));
  }
  empty_frames(0);
}

void TableMemory::empty_frames(int64_t step) {
  tags.tensor.zero_();
  crowded.tensor.fill_(static_cast<int32_t>(static_cast<uint32_t>(step)));
}

int64_t TableMemory::hbm_bytes() const {
  if (device_.is_cpu()) return 0;
  return digests.bytes() + ids.bytes() + last_steps.bytes() + entries.bytes() + oldest.bytes() +
         scores.bytes() + rows.bytes() + states.bytes() + tags.bytes() + crowded.bytes();
}

int64_t TableMemory::host_bytes() const {
  const int64_t host = rows_host.bytes() + states_host.bytes();
  if (device_.is_cuda()) return host;
  return host + digests.bytes() + ids.bytes() + last_steps.bytes() + scores.bytes() +
         words.bytes() + high.bytes() + upper.bytes() + rows.bytes() + states.bytes();
}

}  // namespace torchrec_hkv::runtime
