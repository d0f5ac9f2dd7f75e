// The threads of the CPU kernels: those of the host program if it sets them (run_on), else a small
// pool of std::thread. A child process made by fork can use it: the child gets its own pool.
#pragma once

#include <cstdint>
#include <functional>

namespace torchrec_hkv {

// Calls body(begin, end) over disjoint ranges that cover [0, n), on at most `threads` threads
// including the caller. Ranges have at least `grain` elements, except the last one. Returns when
// all ranges are done. Rethrows an exception of a body.
void parallel_for(int64_t n, int64_t grain, int threads,
                  const std::function<void(int64_t, int64_t)>& body);

// Runs work() on up to `threads` threads at once, including the caller, and returns when all have
// ended.
using Runner = void (*)(int threads, const std::function<void()>& work);

// Makes parallel_for run on the threads of `runner`, in this process but not in its children. Two
// sets of threads on the same cores slow each other down: idle OpenMP threads spin for
// milliseconds.
void run_on(Runner runner);

}  // namespace torchrec_hkv
