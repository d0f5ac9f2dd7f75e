// Dispatcher ops of the ids of a sync of replicas on CPUs. Fakes are in
// torchrec_hkv/hash_table/fake_ops.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <numeric>
#include <tuple>
#include <vector>

#include "hash_table/sync_kernels.h"
#include "runtime/checks.h"

namespace torchrec_hkv::bindings {
using namespace runtime;
namespace {

void check_ids(const at::Tensor& ids, const char* name) {
  check_dtype(ids, name, at::kLong);
  check_device(ids, name, at::kCPU);
  check_vector(ids, name);
  TORCH_CHECK_VALUE(ids.is_contiguous(), name, " must be contiguous.");
}

// Merges the ids of several replicas, each of which gives three kinds, one after the other: touched
// ids that are new to it, other touched ids, and ids that left it. Returns distinct ids that some
// replica touched, in the order of first occurrence; of each, whether some replica that touched or
// lost it had it before; distinct ids that left and that none touched; of each id that replica
// `own` touched, its index in the first. sizes: numbers of ids, [replicas][3].
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> merge_ids(const at::Tensor& ids,
                                                                     at::IntArrayRef sizes,
                                                                     int64_t own) {
  check_ids(ids, "ids");
  const int64_t n = ids.numel(), replicas = static_cast<int64_t>(sizes.size()) / 3;
  TORCH_CHECK_VALUE(n < UINT32_MAX, "there are ", n, " ids, but must be less than 2^32 - 1.");
  TORCH_CHECK_VALUE(sizes.size() % 3 == 0, "sizes has ", sizes.size(),
                    " elements, but must have three of each replica.");
  TORCH_CHECK_VALUE(std::all_of(sizes.begin(), sizes.end(), [](int64_t m) { return m >= 0; }) &&
                        std::accumulate(sizes.begin(), sizes.end(), int64_t{0}) == n,
                    "sizes are ", sizes, ", but must not be negative, and add up to the ", n,
                    " ids.");
  TORCH_CHECK_VALUE(own >= 0 && own < replicas, "own is ", own, ", but must be one of ", replicas,
                    " replicas.");
  at::Tensor distinct = at::empty_like(ids), places = at::empty_like(ids);
  const auto all = hash_table::cpu::distinct_ids(
      ids.const_data_ptr<int64_t>(), n, distinct.data_ptr<int64_t>(), places.data_ptr<int64_t>());
  at::Tensor known = at::zeros({all}, ids.options().dtype(at::kBool));
  auto* const is_known = known.data_ptr<bool>();
  std::vector<uint8_t> touched(all);
  const int64_t* at = places.const_data_ptr<int64_t>();
  bool any_left = false;
  int64_t own_begin = 0, own_number = 0, begin = 0;
  for (int64_t replica = 0; replica < replicas; ++replica) {
    const at::IntArrayRef of = sizes.slice(replica * 3, 3);
    const int64_t number = of[0] + of[1];
    if (replica == own) own_begin = begin, own_number = number;
    for (int64_t i = 0; i < number; ++i) touched[at[i]] = 1;
    for (int64_t i = of[0]; i < number + of[2]; ++i) is_known[at[i]] = true;
    any_left |= of[2] > 0;
    at += number + of[2];
    begin += number + of[2];
  }
  at::Tensor mine = places.narrow(0, own_begin, own_number);
  const auto first = [&](const at::Tensor& of, int64_t number) {
    return of.narrow(0, 0, number).clone();
  };
  if (!any_left) return {first(distinct, all), known, at::empty({0}, ids.options()), mine.clone()};
  // Those that are touched come first in their order, then the others.
  at::Tensor left = at::empty_like(distinct);
  auto *const ids_of = distinct.data_ptr<int64_t>(), *const left_of = left.data_ptr<int64_t>();
  std::vector<int64_t> moved(all);
  int64_t kept = 0, gone = 0;
  for (int64_t i = 0; i < all; ++i) {
    if (touched[i] == 0) {
      left_of[gone++] = ids_of[i];
      continue;
    }
    ids_of[kept] = ids_of[i];
    is_known[kept] = is_known[i];
    moved[i] = kept++;
  }
  at::Tensor own_places = at::empty({own_number}, ids.options());
  const auto* const from = mine.const_data_ptr<int64_t>();
  auto* const to = own_places.data_ptr<int64_t>();
  for (int64_t i = 0; i < own_number; ++i) to[i] = moved[from[i]];
  return {first(distinct, kept), first(known, kept), first(left, gone), own_places};
}

// Of n merged ids, from the indices, slots and number of new ones of those that this replica
// touched: whether each is touched here, whether it is new here, its slot or -1 if it is not
// touched here, and the indices of those that are not.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> place_own(const at::Tensor& places,
                                                                     const at::Tensor& slots,
                                                                     int64_t num_new, int64_t n) {
  check_ids(places, "places");
  check_ids(slots, "slots");
  const int64_t own = places.numel();
  check_length(slots, "slots", own);
  TORCH_CHECK_VALUE(num_new >= 0 && num_new <= own && own <= n, "there are ", num_new,
                    " new ids among ", own, " of ", n, ", but each must be part of the next.");
  const auto marks = at::dtype(at::kBool);
  at::Tensor touched = at::zeros({n}, marks), is_new = at::zeros({n}, marks);
  at::Tensor all_slots = at::empty({n}, slots.options()), others = at::empty_like(all_slots);
  auto *const is_touched = touched.data_ptr<bool>(), *const new_of = is_new.data_ptr<bool>();
  auto *const slot_of = all_slots.data_ptr<int64_t>(), *const other = others.data_ptr<int64_t>();
  const auto *const at = places.const_data_ptr<int64_t>(), *const from =
                                                               slots.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < own; ++i) {
    TORCH_CHECK_VALUE(at[i] >= 0 && at[i] < n, "places has ", at[i], ", but must be below ", n,
                      ".");
    is_touched[at[i]] = true;
    slot_of[at[i]] = from[i];
  }
  for (int64_t i = 0; i < num_new; ++i) new_of[at[i]] = true;
  int64_t number = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (is_touched[i]) continue;
    slot_of[i] = hash_table::kNoSlot;
    other[number++] = i;
  }
  return {touched, is_new, all_slots, others.narrow(0, 0, number).clone()};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torchrec_hkv, m) {
  m.def("merge_ids(Tensor ids, int[] sizes, int own) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "place_own(Tensor places, Tensor slots, int num_new, int n) "
      "-> (Tensor, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(torchrec_hkv, CPU, m) {
  m.impl("merge_ids", &merge_ids);
  m.impl("place_own", &place_own);
}

}  // namespace torchrec_hkv::bindings
