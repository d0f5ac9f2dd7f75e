// The threads of the CPU kernels: those that the host program has for such work, if it says how to
// use them (run_on), else a small pool of std::thread. Safe to use in a child made by fork of a
// process that has loaded this: it gets a pool of its own.
#pragma once

#include <cstdint>
#include <functional>

namespace torchrec_hkv {

// Calls body(begin, end) over disjoint ranges that cover [0, n), on at most `threads` threads, the
// caller among them. Ranges hold at least `grain` elements (the last one may hold fewer). Returns
// when all are done; an exception of a body is thrown again here.
void parallel_for(int64_t n, int64_t grain, int threads,
                  const std::function<void(int64_t, int64_t)>& body);

// Runs work() on up to `threads` threads at once, the caller among them, and returns when all have.
using Runner = void (*)(int threads, const std::function<void()>& work);

// From now on parallel_for runs on the threads of `runner`, in this process and no child of it. Two
// sets of threads on the same cores slow each other down: those of OpenMP go on for milliseconds,
// looking whether there is more to do.
void run_on(Runner runner);

}  // namespace torchrec_hkv
