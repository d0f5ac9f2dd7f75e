#include "tensor_train/cpu/tile.h"

#include <cstring>

#include "common/parallel.h"
#include "tensor_train/cpu/index.h"

namespace torchrec_hkv::tensor_train::cpu {

void widen(RowType type, const char* core, int64_t offset, int64_t n, float* out) {
  if (type == RowType::kFloat32) {
    std::memcpy(out, reinterpret_cast<const float*>(core) + offset, n * sizeof(float));
    return;
  }
  const uint16_t* const from = reinterpret_cast<const uint16_t*>(core) + offset;
  for (int64_t i = 0; i < n; ++i) out[i] = from_bfloat16(from[i]);
}

Step last_step(const TableCpu& table, const float* products) {
  Step step{};
  const bool from_products = table.cores == 4;
  step.head_type = from_products ? RowType::kFloat32 : table.type;
  step.heads = from_products ? reinterpret_cast<const char*>(products) : table.core[0];
  step.head_q = table.head_q();
  step.head_r = table.head_r();
  step.middle_type = table.type;
  step.middles = table.has_middle() ? table.core[table.middle_core()] : nullptr;
  step.middle_q = table.middle_q();
  step.middle_r = table.last_r();
  return step;
}

Step first_step(const TableCpu& table) {
  return {table.type, table.core[0], table.q[0], table.r[1],
          table.type, table.core[1], table.q[1], table.r[2]};
}

PrefixTile::PrefixTile(const Step& step, bool backward)
    : step_(step), width_(step.width()), head_padded_(padded(step.head_r)), backward_(backward) {
  const int64_t rows = step.tile_prefixes() * step.head_q;
  products_.resize(rows * width_);
  if (backward) gradients_.resize(rows * width_);
  if (step.middles == nullptr) return;
  heads_.resize(rows * step.head_r);
  slice_.resize(step.head_r * width_);
  if (!backward) return;
  transposed_.resize(width_ * head_padded_);
  head_gradients_.resize(rows * head_padded_);
  middle_gradient_.resize(step.head_r * width_);
}

void PrefixTile::load_middle(int64_t middle) {
  if (middle == middle_) return;
  middle_ = middle;
  const int32_t r = step_.middle_r;
  for (int64_t row = 0; row < step_.head_r; ++row) {
    for (int32_t c = 0; c < step_.middle_q; ++c) {
      widen(step_.middle_type, step_.middles,
            middle * step_.middle_size() + (row * step_.middle_q + c) * r, r,
            slice_.data() + row * width_ + c * padded(r));
    }
  }
  if (!backward_) return;
  for (int64_t row = 0; row < step_.head_r; ++row) {
    for (int64_t column = 0; column < width_; ++column) {
      transposed_[column * head_padded_ + row] = slice_[row * width_ + column];
    }
  }
}

void PrefixTile::load(const int64_t* heads, int64_t count, int64_t middle) {
  count_ = count;
  const int64_t rows = count * step_.head_q;
  if (backward_) std::fill_n(gradients_.begin(), rows * width_, 0.0f);
  if (step_.middles == nullptr) {
    for (int64_t i = 0; i < count; ++i) {
      for (int32_t c = 0; c < step_.head_q; ++c) {
        widen(step_.head_type, step_.heads,
              heads[i] * step_.head_size() + static_cast<int64_t>(c) * step_.head_r, step_.head_r,
              products_.data() + (i * step_.head_q + c) * width_);
      }
    }
    return;
  }
  load_middle(middle);
  for (int64_t i = 0; i < count; ++i) {
    widen(step_.head_type, step_.heads, heads[i] * step_.head_size(), step_.head_size(),
          heads_.data() + i * step_.head_size());
  }
  gemm(rows, width_, step_.head_r, {heads_.data(), step_.head_r, 1}, slice_.data(), width_,
       products_.data(), width_, /*add=*/false);
}

void PrefixTile::finish(const int64_t* heads, float* head_gradients) {
  const int64_t rows = count_ * step_.head_q;
  const float* from = gradients_.data();
  int64_t stride = width_;
  if (step_.middles != nullptr) {
    gemm(step_.head_r, width_, rows, {heads_.data(), 1, step_.head_r}, gradients_.data(), width_,
         middle_gradient_.data(), width_, /*add=*/true);
    gemm(rows, head_padded_, width_, {gradients_.data(), width_, 1}, transposed_.data(),
         head_padded_, head_gradients_.data(), head_padded_, /*add=*/false);
    from = head_gradients_.data();
    stride = head_padded_;
  }
  for (int64_t i = 0; i < count_; ++i) {
    for (int32_t c = 0; c < step_.head_q; ++c) {
      float* const to =
          head_gradients + heads[i] * step_.head_size() + static_cast<int64_t>(c) * step_.head_r;
      const float* const row = from + (i * step_.head_q + c) * stride;
      for (int32_t k = 0; k < step_.head_r; ++k) to[k] += row[k];
    }
  }
}

void PrefixTile::add_middle(float* middle_gradient) {
  if (step_.middles == nullptr) return;
  const int32_t r = step_.middle_r;
  for (int64_t row = 0; row < step_.head_r; ++row) {
    for (int32_t c = 0; c < step_.middle_q; ++c) {
      const float* const from = middle_gradient_.data() + row * width_ + c * padded(r);
      float* const to = middle_gradient + (row * step_.middle_q + c) * r;
      for (int32_t k = 0; k < r; ++k) to[k] += from[k];
    }
  }
  std::fill(middle_gradient_.begin(), middle_gradient_.end(), 0.0f);
}

HeadPairs head_pairs(const TableCpu& table, const std::vector<int64_t>& heads) {
  HeadPairs pairs;
  const int64_t firsts = table.p[0], seconds = table.p[1];
  const auto key = [&](int64_t head) { return head % seconds * firsts + head / seconds; };
  std::vector<int64_t> keys(heads.size());
  std::transform(heads.begin(), heads.end(), keys.begin(), key);
  std::sort(keys.begin(), keys.end());
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
  for (const int64_t pair : keys) {
    pairs.firsts.push_back(pair % firsts);
    pairs.seconds.push_back(pair / firsts);
  }
  pairs.numbers.reserve(heads.size());
  for (const int64_t head : heads) {
    pairs.numbers.push_back(std::lower_bound(keys.begin(), keys.end(), key(head)) - keys.begin());
  }
  return pairs;
}

ZeroedFloats pair_products(const TableCpu& table, const HeadPairs& pairs, int threads) {
  const Step step = first_step(table);
  const int64_t size = step.product_size();
  ZeroedFloats products(static_cast<int64_t>(pairs.firsts.size()) * size);
  const std::vector<Tile> tiles = tiles_of(pairs.seconds, step.tile_prefixes());
  parallel_for(static_cast<int64_t>(tiles.size()), 1, threads, [&](int64_t begin, int64_t end) {
    PrefixTile tile(step, /*backward=*/false);
    for (int64_t t = begin; t < end; ++t) {
      const auto [first, last] = tiles[t];
      tile.load(&pairs.firsts[first], last - first, pairs.seconds[first]);
      for (int64_t i = first; i < last; ++i) {
        float* to = products.data() + i * size;
        const float* from = tile.product(i - first);
        for (int32_t c = 0; c < step.head_q * step.middle_q; ++c) {
          to = std::copy_n(from, step.middle_r, to);
          from += padded(step.middle_r);
        }
      }
    }
  });
  return products;
}

}  // namespace torchrec_hkv::tensor_train::cpu
