// A small pool of threads for the CPU kernels. Plain std::thread, so that thread sanitizers see it;
// safe to use in a child made by fork, which gets a pool of its own.
#pragma once

#include <cstdint>
#include <functional>

namespace torchrec_hkv {

// Calls body(begin, end) over disjoint ranges that cover [0, n), on at most `threads` threads, the
// caller among them. Ranges hold at least `grain` elements (the last one may hold fewer). Returns
// when all are done; an exception of a body is thrown again here.
void parallel_for(int64_t n, int64_t grain, int threads,
                  const std::function<void(int64_t, int64_t)>& body);

}  // namespace torchrec_hkv
