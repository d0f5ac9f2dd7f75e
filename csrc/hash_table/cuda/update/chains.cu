// Rows of slots that stand at a few positions of the batch, where most stand at one: by chains of
// the positions split off, without a sort. Mostly there is nothing else then: what sorts the rest
// finds nothing to do.
#include "common/chain.cuh"
#include "hash_table/cuda/offsets.cuh"
#include "hash_table/cuda/update/row_updaters.cuh"
#include "hash_table/cuda/update/update.cuh"

namespace torchrec_hkv::hash_table::cuda {
namespace {

constexpr uint32_t kNoPlace = ~0u;
constexpr int kChainBlocks = 2;  // of a multiprocessor

// What its chain says of a place among the positions split off.
struct Peers {
  bool chained;     // the slot's row is updated by its chain: the same for all of its places
  bool first;       // of the slot's places
  uint32_t number;  // of the slot's places
  uint32_t next;    // of them, behind this one; or kNoPlace
};

__device__ __forceinline__ Peers peers_of(const Chains& chains, const Pairs& pairs, uint32_t place,
                                          uint64_t slot) {
  constexpr Peers kOthers{false, false, 0, kNoPlace};
  Peers peers{true, true, 0, kNoPlace};
  uint32_t* const head = chains.head_of(slot);
  const uint32_t begin = *head;
  uint32_t length = 0;
  for (uint32_t at = begin & ~Chains::kTooLong; at != 0;) {
    if (++length > Chains::kLongest) {
      *head = begin | Chains::kTooLong;
      return kOthers;
    }
    const uint32_t other = at - 1;
    at = chains.nexts[other];
    if (pairs.key(other) != slot) continue;
    if (++peers.number > Chains::kMostPositions) return kOthers;
    if (other < place) peers.first = false;
    if (other > place) peers.next = min(peers.next, other);
  }
  return peers;
}

// A tile looks at as many places as it has lanes, and updates the rows whose first ones are among
// them. Gradients are added up in the order of places, which is that of the batch. kAhead: rows
// that it reads at once, with the gradients of their first two positions.
template <typename Updater, typename Element, int kAhead>
__global__ void __launch_bounds__(kThreads, kChainBlocks)
    chain_kernel(const TableView* __restrict__ tables, const __grid_constant__ Update update,
                 const __grid_constant__ Scratch scratch) {
  using Gradient = typename Updater::Gradient;
  using Stored = typename Gradient::template Stored<Element>;
  constexpr uint32_t kLanes = Updater::kLanes;
  const Tile<kLanes> tile;
  wait_for_kernel_before();  // which counts the update, and refuses
  if (is_refused(update.batch)) return;
  const Chains& chains = scratch.chains;
  const Pairs& pairs = scratch.pairs.pairs;
  const uint32_t n = *scratch.split;
  if (n > chains.most) {
    if (blockIdx.x == 0 && threadIdx.x == 0) *scratch.sorted = n;
    return;
  }
  const auto first_chunk = static_cast<uint32_t>(tile.number()) * kLanes;
  if (first_chunk >= n) return;
  const float rate = *update.learning_rate;
  uint32_t table = ~0u;
  Updater updater(tables[0], update.optimizer, rate);
  int32_t dim = 0;
  for (uint32_t chunk = first_chunk; chunk < n; chunk += gridDim.x * kThreads) {
    const uint32_t place = chunk + tile.lane();
    Neighbour mine{};
    Share second{};
    Peers peers{false, false, 0, kNoPlace};
    if (place < n) {
      const Pair pair = pairs.load(place);
      const uint64_t slot = pairs.key_of(pair);
      peers = peers_of(chains, pairs, place, slot);
      if (!peers.chained) {
        *scratch.sorted = n;
      } else if (peers.first) {
        mine = neighbour_at(tables, update, scratch, slot, pairs.value_of(pair));
        if (peers.number > 1) second = share_of(update, scratch.bags, pairs.value(peers.next));
      }
    }
    unsigned left = tile.ballot(peers.chained && peers.first);
    const unsigned several = tile.ballot(peers.number > 1);
    const unsigned many = tile.ballot(peers.number > 2);
    while (left) {
      const uint32_t its_table = tile.of_lane(mine.table, __ffs(static_cast<int>(left)) - 1);
      if (its_table != table) {
        table = its_table;
        updater = Updater(tables[table], update.optimizer, rate);
        dim = tables[table].dim();
      }
      unsigned same = tile.ballot(mine.table == table) & left;  // rows of one table
      Stored gradient[kAhead], next_gradient[kAhead];
      typename Updater::Row row[kAhead];
      int64_t slot[kAhead];
      int source[kAhead];
      int number = 0;  // of rows
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        if (same == 0) break;
        number = k + 1;
        source[k] = __ffs(static_cast<int>(same)) - 1;
        same &= same - 1;
        left &= ~(1u << source[k]);
        slot[k] = tile.of_lane(mine.slot, source[k]);
        row[k] = updater.load(slot[k]);
        gradient[k] = Stored::load(update.grad, tile.of_lane(mine.gradient, source[k]), dim);
        if (several >> source[k] & 1) {
          next_gradient[k] =
              Stored::load(update.grad, tile.of_lane(second.gradient, source[k]), dim);
        }
      }
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        if (k >= number) break;
        Gradient sum = Gradient::zero();
        sum.template add<Element>(tile.of_lane(mine.scale, source[k]), gradient[k],
                                  update.grad.type);
        if (several >> source[k] & 1) {
          sum.template add<Element>(tile.of_lane(second.scale, source[k]), next_gradient[k],
                                    update.grad.type);
        }
        if (many >> source[k] & 1) {
          uint32_t next = tile.of_lane(peers.next, source[k]);
          const uint64_t its = pairs.key(next);
          while ((next = peers_of(chains, pairs, next, its).next) != kNoPlace) {
            const Share share = share_of(update, scratch.bags, pairs.value(next));
            sum.template add<Element>(share.scale, Stored::load(update.grad, share.gradient, dim),
                                      update.grad.type);
          }
        }
        updater.finish(slot[k], row[k], sum);
      }
    }
  }
}

}  // namespace

void update_chains(const TableView* tables, const Update& update, const Scratch& scratch,
                   const GroupShape& shape, cudaStream_t stream) {
  const auto launch = [&]<typename Updater, typename Element>() {
    const auto kernel = chain_kernel < Updater, Element, Updater::kColumnStates ? 1 : 2 > ;
    const int64_t threads = scratch.chains.most;
    launch_chained(kernel, resident_grid(kChainBlocks, threads), kThreads, stream, tables, update,
                   scratch);
  };
  choose_plain_updater(update.optimizer, shape, [&]<typename Updater>() {
    choose_element(update.grad.type,
                   [&]<typename Element>() { launch.template operator()<Updater, Element>(); });
  });
}

}  // namespace torchrec_hkv::hash_table::cuda
