// Ops that build the index of a read-only table.
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <tuple>

#include "runtime/checks.h"
#include "serving/kernels_cpu.h"

namespace torchrec_hkv::bindings {
using namespace runtime;
namespace {

std::tuple<at::Tensor, at::Tensor> serving_place(const at::Tensor& ids,
                                                 const std::optional<at::Tensor>& erased,
                                                 int64_t blocks, int64_t block_buckets,
                                                 int64_t first_block, int64_t num_blocks,
                                                 int64_t first_row) {
  check_dtype(ids, "ids", at::kLong);
  check_vector(ids, "ids");
  if (erased) {
    check_dtype(*erased, "erased", at::kBool);
    check_length(*erased, "erased", ids.numel());
  }
  TORCH_CHECK_VALUE(blocks >= 1 && blocks < int64_t{1} << 31 && block_buckets >= 1 &&
                        block_buckets < int64_t{1} << 31 && first_block >= 0 && num_blocks >= 0 &&
                        first_block + num_blocks <= blocks && first_row >= 0,
                    "blocks ", first_block, " to ", first_block + num_blocks, " of ", blocks,
                    " with ", block_buckets, " buckets from row ", first_row,
                    " on are no part of a table.");
  const at::Tensor in = ids.contiguous(), gone = erased ? erased->contiguous() : at::Tensor();
  const int64_t words = num_blocks * block_buckets * 8;
  // Aligned to a cache line, as the index of a table must be.
  at::Tensor buckets = at::empty({words}, ids.options());
  at::Tensor order = at::empty({ids.numel()}, ids.options());
  serving::cpu::BlockPlacement placement{};
  placement.ids = in.const_data_ptr<int64_t>();
  placement.n = in.numel();
  placement.geometry = {static_cast<uint32_t>(blocks), static_cast<uint32_t>(block_buckets)};
  placement.first_block = static_cast<uint32_t>(first_block);
  placement.blocks = static_cast<uint32_t>(num_blocks);
  placement.first_row = first_row;
  placement.erased = erased ? gone.const_data_ptr<bool>() : nullptr;
  placement.buckets = reinterpret_cast<serving::Bucket*>(buckets.data_ptr<int64_t>());
  placement.order = order.data_ptr<int64_t>();
  int64_t at = 0;
  const serving::cpu::PlaceStatus placed =
      serving::cpu::place(placement, &at, at::get_num_threads());
  const int64_t id = in.numel() == 0 ? 0 : placement.ids[at];
  TORCH_CHECK_VALUE(placed != serving::cpu::PlaceStatus::kRepeatedId, "id ", id,
                    " occurs twice, but each id must occur once.");
  TORCH_CHECK_VALUE(placed != serving::cpu::PlaceStatus::kForeignId, "id ", id,
                    " is not of these blocks.");
  TORCH_CHECK_VALUE(placed != serving::cpu::PlaceStatus::kFull, "id ", id,
                    " finds no place: ", "the table is too full.");
  return {buckets.view({num_blocks, block_buckets, 8}), order};
}

at::Tensor serving_blocks(const at::Tensor& ids, int64_t blocks) {
  check_dtype(ids, "ids", at::kLong);
  const at::Tensor in = ids.contiguous();
  at::Tensor out = at::empty_like(in);
  const serving::IndexGeometry geometry{static_cast<uint32_t>(blocks), 1};
  for (int64_t i = 0; i < in.numel(); ++i) {
    out.data_ptr<int64_t>()[i] =
        serving::block_of_mix(serving::mix_of_id(in.const_data_ptr<int64_t>()[i]), geometry);
  }
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchrec_hkv, m) {
  m.def(
      "serving_place(Tensor ids, Tensor? erased, int blocks, int block_buckets, int first_block, "
      "int num_blocks, int first_row) -> (Tensor, Tensor)");
  m.def("serving_blocks(Tensor ids, int blocks) -> Tensor");
}

TORCH_LIBRARY_IMPL(torchrec_hkv, CPU, m) {
  m.impl("serving_place", &serving_place);
  m.impl("serving_blocks", &serving_blocks);
}

}  // namespace torchrec_hkv::bindings
