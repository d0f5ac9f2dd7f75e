// Products of heads and middle slices for a few prefixes at a time, and their gradients.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "tensor_train/cpu/gemm.h"
#include "tensor_train/cpu/tables.h"
#include "tensor_train/cpu/zeroed_memory.h"

namespace torchrec_hkv::tensor_train::cpu {

// Converts n elements of a core, from `offset` on, to floats.
void widen(RowType type, const char* core, int64_t offset, int64_t n, float* out);

// One multiplication by a core: prefix = head [head_q][head_r] x middle slice
// [head_r][middle_q][middle_r].
struct Step {
  RowType head_type;
  const char* heads;  // slices in the order of their numbers
  int32_t head_q;
  int32_t head_r;
  RowType middle_type;
  const char* middles;  // null without a middle: a prefix is its head
  int32_t middle_q;     // 1 without a middle
  int32_t middle_r;     // head_r without a middle

  int64_t head_size() const { return static_cast<int64_t>(head_q) * head_r; }
  int64_t middle_size() const { return static_cast<int64_t>(head_r) * middle_q * middle_r; }
  int64_t product_size() const { return static_cast<int64_t>(head_q) * middle_q * middle_r; }
  // Number of floats of a row of products, middle_q times the padded rank.
  int64_t width() const { return static_cast<int64_t>(middle_q) * padded(middle_r); }
  // Number of prefixes of a tile, such that their products stay in the cache.
  int64_t tile_prefixes() const { return std::clamp<int64_t>(65536 / (head_q * width()), 1, 16); }
};

// The step to the prefixes of a table, from its first core or, with four cores, from the products
// of the first two, given as floats.
Step last_step(const TableCpu& table, const float* products);
// The step from the first core to the products of the first two, for four cores.
Step first_step(const TableCpu& table);

// Buffers for one thread.
class PrefixTile {
 public:
  PrefixTile(const Step& step, bool backward);

  // Computes the products of `count` heads, at most tile_prefixes(), with one middle slice, and
  // zeroes the gradients of the products.
  void load(const int64_t* heads, int64_t count, int64_t middle);

  // The product of prefix i of the tile: [head_q * middle_q][padded(middle_r)], contiguous.
  const float* product(int64_t i) const { return products_.data() + i * step_.head_q * width_; }
  float* gradient(int64_t i) { return gradients_.data() + i * step_.head_q * width_; }

  // Computes gradients from those of the products: adds the heads' to head_gradients, by number,
  // and accumulates the middle slice's for add_middle.
  void finish(const int64_t* heads, float* head_gradients);
  // Adds the gradient that was accumulated since the last call to the gradient of a middle slice.
  void add_middle(float* middle_gradient);

 private:
  void load_middle(int64_t middle);

  const Step step_;
  const int64_t width_;
  const int32_t head_padded_;
  const bool backward_;
  int64_t count_ = 0;
  int64_t middle_ = -1;
  std::vector<float> heads_;            // [count * head_q][head_r]
  std::vector<float> slice_;            // [head_r][width]
  std::vector<float> transposed_;       // [width][padded(head_r)]
  std::vector<float> products_;         // [count * head_q][width]
  std::vector<float> gradients_;        // like products_
  std::vector<float> head_gradients_;   // [count * head_q][padded(head_r)]
  std::vector<float> middle_gradient_;  // [head_r][width]
};

// Distinct heads of four cores: pairs (i_1, i_2), sorted by (i_2, i_1).
struct HeadPairs {
  std::vector<int64_t> firsts;   // i_1 of each pair
  std::vector<int64_t> seconds;  // i_2 of each pair, not decreasing
  std::vector<int64_t> numbers;  // number of each prefix's pair
};
HeadPairs head_pairs(const TableCpu& table, const std::vector<int64_t>& heads);

// The products of pairs, [pairs][q_1 q_2][r_2].
ZeroedFloats pair_products(const TableCpu& table, const HeadPairs& pairs, int threads);

}  // namespace torchrec_hkv::tensor_train::cpu
