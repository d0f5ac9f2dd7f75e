// Threads for CPU kernels that run beside other threads of this library.
#pragma once

#include <cstdint>
#include <functional>

namespace torchrec_hkv {

// As parallel_for, on threads of this library's own, which sleep between calls, whatever run_on()
// says. For work beside other threads of this library, such as those that read files: threads of
// OpenMP would take the cores from them while they spin.
void parallel_for_beside(int64_t n, int64_t grain, int threads,
                         const std::function<void(int64_t, int64_t)>& body);

}  // namespace torchrec_hkv
