#include <algorithm>
#include <vector>

#include "common/parallel.h"
#include "hash_table/apply_row_cpu.h"
#include "tensor_train/kernels_cpu.h"

namespace torchrec_hkv::tensor_train::cpu {
namespace {

// A core as what the updater of rows takes: a table whose rows are the core's slices.
hash_table::TableView view_of(char* core, RowType type, int64_t slices, int64_t slice_size,
                              float* state, int32_t state_size, int64_t* ids, int64_t* step,
                              uint64_t core_seed) {
  hash_table::TableView view{};
  view.ids = ids;
  view.rows = {core, nullptr, slices, static_cast<int32_t>(slice_size), type};
  view.states = {reinterpret_cast<char*>(state), nullptr, slices, state_size, RowType::kFloat32};
  view.optimizer_step = step;
  view.num_slots = slices;
  view.initial_rows.seed = core_seed;
  return view;
}

}  // namespace

void update_core(char* core, RowType type, int64_t slices, int64_t slice_size, float* state,
                 const float* grad, const uint8_t* touched, const OptimizerConfig& config,
                 float learning_rate, int64_t step, uint64_t core_seed, int threads) {
  std::vector<int64_t> numbers(slices);  // for the draws of stochastic rounding
  for (int64_t i = 0; i < slices; ++i) numbers[i] = i;
  const auto width = static_cast<int32_t>(slice_size);
  const hash_table::TableView view =
      view_of(core, type, slices, slice_size, state, state_width(config, width), numbers.data(),
              &step, core_seed);
  const int64_t grain = std::max<int64_t>(1, 16384 / slice_size);
  parallel_for(slices, grain, threads, [&](int64_t begin, int64_t end) {
    hash_table::cpu::RowUpdater updater(config, learning_rate, width);
    for (int64_t i = begin; i < end; ++i) {
      if (touched[i]) updater.update(view, i, grad + i * slice_size);
    }
  });
}

}  // namespace torchrec_hkv::tensor_train::cpu
