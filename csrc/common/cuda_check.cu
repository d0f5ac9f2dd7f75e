#include <stdexcept>
#include <string>

#include "common/cuda_check.h"

namespace torchrec_hkv {

void cuda_failed(cudaError_t status, const char* call, const char* file, int line) {
  throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(status) + " in " + call +
                           " (" + file + ":" + std::to_string(line) + ")");
}

}  // namespace torchrec_hkv
