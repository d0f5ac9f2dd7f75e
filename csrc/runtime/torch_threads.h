// Runs the CPU kernels on torch's threads.
#pragma once

namespace torchrec_hkv::runtime {

// Called once, when the extension is loaded.
void use_torch_threads();

}  // namespace torchrec_hkv::runtime
