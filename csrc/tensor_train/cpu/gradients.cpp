#include <algorithm>
#include <utility>
#include <vector>

#include "common/parallel.h"
#include "tensor_train/cpu/gemm.h"
#include "tensor_train/cpu/index.h"
#include "tensor_train/cpu/kernels.h"
#include "tensor_train/cpu/tile.h"

namespace torchrec_hkv::tensor_train::cpu {
namespace {

// Number of ids of one prefix whose gradients are contracted together.
constexpr int64_t kTogether = 8;
// Number of gradients of one id that are summed in single precision.
constexpr int64_t kBlock = 64;

// Slices of the first and last core get gradients from many middle slices. Each part of the work
// has its own sums for them, which are added at the end in the order of the parts. The number of
// parts depends on the work only, not on the threads, so the result is bit-reproducible.
int64_t number_of_parts(int64_t work, int64_t private_floats) {
  constexpr int64_t kMostParts = 16, kMostFloats = int64_t{1} << 26;
  const int64_t floats = std::max<int64_t>(private_floats, 1);
  return std::clamp<int64_t>(std::min(work / (8 * floats), kMostFloats / floats), 1, kMostParts);
}

std::vector<uint8_t> group_begins(const Step& step, const std::vector<int64_t>& middles) {
  std::vector<uint8_t> begins(middles.size(), 1);
  if (step.middles == nullptr) return begins;  // without a middle, each prefix is a group
  for (size_t i = 1; i < middles.size(); ++i) begins[i] = middles[i] != middles[i - 1];
  return begins;
}

// Adds the sums of the parts, in order, to out[slice] for touched slices. Sets the parts to zero
// and keeps their memory.
void add_parts(std::vector<ZeroedFloats> parts, const uint8_t* touched, int64_t slices,
               int64_t rows, int64_t row, int64_t row_stride, float* out, int threads) {
  const int64_t grain = std::max<int64_t>(1, 16384 / (rows * row));
  parallel_for(slices, grain, threads, [&](int64_t begin, int64_t end) {
    for (int64_t slice = begin; slice < end; ++slice) {
      if (!touched[slice]) continue;
      for (const ZeroedFloats& part : parts) {
        for (int64_t i = 0; i < rows; ++i) {
          float* const from = part.data() + (slice * rows + i) * row_stride;
          float* const to = out + (slice * rows + i) * row;
          for (int64_t k = 0; k < row; ++k) to[k] += from[k];
          std::fill_n(from, row_stride, 0.0f);
        }
      }
    }
  });
  for (ZeroedFloats& part : parts) part.keep();
}

std::vector<ZeroedFloats> zeros(int64_t parts, int64_t size) {
  std::vector<ZeroedFloats> all;
  for (int64_t part = 0; part < parts; ++part) all.emplace_back(size);
  return all;
}

// The backward of one step. fill(part, tile, first prefix, last prefix) adds the gradients of the
// products to the tile. head_out: [head_count][head_size]; middle_out: gradient of the middle core.
template <typename Fill>
void step_backward(const Step& step, const std::vector<int64_t>& heads,
                   const std::vector<int64_t>& middles, const std::vector<int64_t>& bounds,
                   int64_t head_count, float* head_out, float* middle_out, int threads,
                   const Fill& fill) {
  const auto parts = static_cast<int64_t>(bounds.size()) - 1;
  std::vector<ZeroedFloats> of_heads = zeros(parts, head_count * step.head_size());
  parallel_for(parts, 1, threads, [&](int64_t begin, int64_t end) {
    PrefixTile tile(step, /*backward=*/true);
    for (int64_t part = begin; part < end; ++part) {
      for (int64_t first = bounds[part], last; first < bounds[part + 1]; first = last) {
        last = first + 1;
        while (last < bounds[part + 1] && last < first + step.tile_prefixes() &&
               middles[last] == middles[first]) {
          ++last;
        }
        tile.load(&heads[first], last - first, middles[first]);
        fill(part, tile, first, last);
        tile.finish(&heads[first], of_heads[part].data());
        if (last == bounds[part + 1] || middles[last] != middles[first]) {
          tile.add_middle(middle_out + middles[first] * step.middle_size());
        }
      }
    }
  });
  std::vector<uint8_t> touched(head_count, 0);
  for (const int64_t head : heads) touched[head] = 1;
  add_parts(std::move(of_heads), touched.data(), head_count, 1, step.head_size(), step.head_size(),
            head_out, threads);
}

// Adds the gradients of distinct ids to the gradients of their prefix and of their last slices.
class IdGradients {
 public:
  IdGradients(const TableCpu& table, const BatchCpu& batch, const Places& places,
              const int64_t* order, const float* grad)
      : table_(table),
        batch_(batch),
        places_(places),
        order_(order),
        grad_(grad),
        columns_(table.head_q() * table.middle_q()),
        q_(table.last_q()),
        r_padded_(padded(table.last_r())),
        sum_(table.dim()),
        total_(table.dim()),
        sums_(kTogether * table.dim()),
        slices_(kTogether * q_ * r_padded_) {}

  // product, gradient: product and gradient of the prefix, [columns][padded(last_r)].
  void add(const Directory& directory, int64_t prefix, const float* product, float* gradient,
           float* last_gradients) {
    const int64_t stride = kTogether * q_;
    const int64_t end = directory.prefixes[prefix + 1];
    for (int64_t u = directory.prefixes[prefix]; u < end; u += kTogether) {
      const int64_t together = std::min(kTogether, end - u);
      for (int64_t j = 0; j < together; ++j) {
        sum_up(directory.starts[u + j], directory.starts[u + j + 1]);
        for (int32_t c = 0; c < columns_; ++c) {
          std::copy_n(sum_.data() + c * q_, q_, sums_.data() + c * stride + j * q_);
        }
        load_slice(directory.lasts[u + j], slices_.data() + j * q_ * r_padded_);
      }
      gemm(columns_, r_padded_, together * q_, {sums_.data(), stride, 1}, slices_.data(), r_padded_,
           gradient, r_padded_, /*add=*/true);
      for (int64_t j = 0; j < together; ++j) {
        gemm(q_, r_padded_, columns_, {sums_.data() + j * q_, 1, stride}, product, r_padded_,
             last_gradients + directory.lasts[u + j] * q_ * r_padded_, r_padded_, /*add=*/true);
      }
    }
  }

 private:
  // Computes the gradient of a row that occurs at places [begin, end) of the order. Because an id
  // may occur in every bag, many gradients are summed in blocks, whose sums are added in double
  // precision; single precision would lose digits.
  void sum_up(int64_t begin, int64_t end) {
    if (end - begin <= kBlock) return sum_block(begin, end);
    std::fill(total_.begin(), total_.end(), 0.0);
    for (int64_t block = begin; block < end; block += kBlock) {
      sum_block(block, std::min(block + kBlock, end));
      for (size_t c = 0; c < sum_.size(); ++c) total_[c] += sum_[c];
    }
    for (size_t c = 0; c < sum_.size(); ++c) sum_[c] = static_cast<float>(total_[c]);
  }

  void sum_block(int64_t begin, int64_t end) {
    const auto dim = static_cast<int64_t>(sum_.size());
    std::fill(sum_.begin(), sum_.end(), 0.0f);
    for (int64_t at = begin; at < end; ++at) {
      const int64_t i = order_[at];
      const float factor = factor_of(batch_, places_, i);
      const float* const from = grad_ + target_of(batch_, places_, i);
      float* const to = sum_.data();
      for (int64_t c = 0; c < dim; ++c) to[c] += factor * from[c];
    }
  }

  void load_slice(int64_t last, float* out) const {
    const int32_t core = table_.last_core(), r = table_.last_r();
    for (int32_t i = 0; i < q_; ++i) {
      widen(table_.type, table_.core[core], last * table_.slice(core) + static_cast<int64_t>(i) * r,
            r, out + static_cast<int64_t>(i) * r_padded_);
    }
  }

  const TableCpu& table_;
  const BatchCpu& batch_;
  const Places& places_;
  const int64_t* order_;
  const float* grad_;
  const int32_t columns_;
  const int32_t q_;
  const int32_t r_padded_;
  std::vector<float> sum_;     // [columns][q]
  std::vector<double> total_;  // the same shape
  std::vector<float> sums_;    // [columns][kTogether * q]
  std::vector<float> slices_;  // [kTogether * q][padded(r)], the padding stays zero
};

void mark(const std::vector<int64_t>& slices, uint8_t* touched) {
  if (touched == nullptr) return;
  for (const int64_t slice : slices) touched[slice] = 1;
}

void mark_touched(const TableCpu& table, const Directory& directory, const HeadPairs& pairs,
                  uint8_t* const* touched) {
  mark(table.cores == 4 ? pairs.firsts : directory.heads, touched[0]);
  if (table.cores == 4) mark(pairs.seconds, touched[1]);
  if (table.has_middle()) mark(directory.middles, touched[table.middle_core()]);
  mark(directory.lasts, touched[table.last_core()]);
}

// For four cores: computes the gradients of the first two cores from those of their products.
void pairs_backward(const TableCpu& table, const HeadPairs& pairs, const float* of_products,
                    float* const* out, int threads) {
  const Step step = first_step(table);
  const auto count = static_cast<int64_t>(pairs.firsts.size());
  const std::vector<int64_t> costs(count, 1);
  const int64_t parts =
      number_of_parts(count * step.head_q * step.middle_size(), table.p[0] * step.head_size());
  const std::vector<int64_t> bounds = split_evenly(costs, group_begins(step, pairs.seconds), parts);
  step_backward(step, pairs.firsts, pairs.seconds, bounds, table.p[0], out[0], out[1], threads,
                [&](int64_t, PrefixTile& tile, int64_t first, int64_t last) {
                  for (int64_t i = first; i < last; ++i) {
                    const float* from = of_products + i * step.product_size();
                    float* to = tile.gradient(i - first);
                    for (int32_t c = 0; c < step.head_q * step.middle_q; ++c) {
                      std::copy_n(from, step.middle_r, to);
                      from += step.middle_r;
                      to += padded(step.middle_r);
                    }
                  }
                });
}

void table_gradients(const TableCpu& table, const BatchCpu& batch, const Places& places,
                     const int64_t* order, int64_t begin, int64_t end, const float* grad,
                     float* const* out, uint8_t* const* touched, int threads) {
  const Directory directory = directory_of(table, batch, order, begin, end);
  HeadPairs pairs;
  ZeroedFloats products(0);
  if (table.cores == 4) {
    pairs = head_pairs(table, directory.heads);
    products = pair_products(table, pairs, threads);
  }
  if (touched != nullptr) mark_touched(table, directory, pairs, touched);
  const std::vector<int64_t>& heads = table.cores == 4 ? pairs.numbers : directory.heads;
  const int64_t head_count =
      table.cores == 4 ? static_cast<int64_t>(pairs.firsts.size()) : table.p[0];
  const Step step = last_step(table, products.data());

  // A prefix costs its product and two gradients; an id costs its part of two gradients and the
  // sums.
  const int64_t prefix_cost = step.middles == nullptr ? 0 : 3 * step.head_q * step.middle_size();
  const int64_t id_cost = 2 * static_cast<int64_t>(table.dim()) * table.last_r();
  std::vector<int64_t> costs(heads.size());
  int64_t work = 0;
  for (size_t i = 0; i < heads.size(); ++i) {
    costs[i] = prefix_cost + id_cost * (directory.prefixes[i + 1] - directory.prefixes[i]);
    work += costs[i];
  }
  const int32_t q = table.last_q(), r = table.last_r();
  const int64_t last_floats = table.lasts() * q * padded(r);
  const int64_t parts = number_of_parts(work, head_count * step.head_size() + last_floats);
  const std::vector<int64_t> bounds =
      split_evenly(costs, group_begins(step, directory.middles), parts);
  std::vector<ZeroedFloats> of_lasts = zeros(static_cast<int64_t>(bounds.size()) - 1, last_floats);

  ZeroedFloats of_products(table.cores == 4 ? head_count * step.head_size() : 0);
  float* const head_out = table.cores == 4 ? of_products.data() : out[0];
  float* const middle_out = table.has_middle() ? out[table.middle_core()] : nullptr;
  step_backward(step, heads, directory.middles, bounds, head_count, head_out, middle_out, threads,
                [&](int64_t part, PrefixTile& tile, int64_t first, int64_t last) {
                  IdGradients ids(table, batch, places, order, grad);
                  for (int64_t i = first; i < last; ++i) {
                    ids.add(directory, i, tile.product(i - first), tile.gradient(i - first),
                            of_lasts[part].data());
                  }
                });
  std::vector<uint8_t> touched_lasts(table.lasts(), 0);
  mark(directory.lasts, touched_lasts.data());
  add_parts(std::move(of_lasts), touched_lasts.data(), table.lasts(), q, r, padded(r),
            out[table.last_core()], threads);
  if (table.cores == 4) pairs_backward(table, pairs, of_products.data(), out, threads);
  products.clear_and_keep();
  of_products.clear_and_keep();
}

}  // namespace

void gradients(const TableCpu* tables, const BatchCpu& batch, const int64_t* order,
               const float* grad, const CoreGradients& out, int threads) {
  const Places places = places_of(tables, batch);
  for (int32_t t = 0; t < batch.tables; ++t) {
    const int64_t begin = places.table_starts[t], end = places.table_starts[t + 1];
    if (begin == end) continue;
    table_gradients(tables[t], batch, places, order, begin, end, grad, out.cores + t * kMaxCores,
                    out.touched == nullptr ? nullptr : out.touched + t * kMaxCores, threads);
  }
}

}  // namespace torchrec_hkv::tensor_train::cpu
