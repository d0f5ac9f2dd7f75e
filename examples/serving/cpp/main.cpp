// Serves a model from C++: no Python, no TorchRec.
//
//     cmake -S examples/serving/cpp -B build/serving -DCMAKE_BUILD_TYPE=Release
//         -DCMAKE_PREFIX_PATH=$(python -c "import torch; print(torch.utils.cmake_prefix_path)")
//     cmake --build build/serving
//     build/serving/serve MODEL INPUTS OUTPUTS
//
// INPUTS is a list of tensors written by torch.save: the arguments of the model's forward, in
// order. Ids of several features are `values`, int64 [n], `lengths`, int64 [features, samples],
// and, if the model takes weights, `weights`, float32 [n]. OUTPUTS is a tuple for torch.load.
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/serialize.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <iostream>
#include <iterator>
#include <vector>

#include "tables.h"

namespace {

std::vector<at::Tensor> read_tensors(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(path + " can't be read");
  const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
  std::vector<at::Tensor> tensors;
  for (const c10::IValue& value : torch::pickle_load(bytes).toList()) {
    tensors.push_back(value.toTensor());
  }
  return tensors;
}

void write_tensors(const std::string& path, const std::vector<at::Tensor>& tensors) {
  // A tuple, which Python's torch.load can read.
  const std::vector<c10::IValue> values(tensors.begin(), tensors.end());
  const std::vector<char> bytes = torch::pickle_save(c10::ivalue::Tuple::create(values));
  std::ofstream file(path, std::ios::binary);
  if (!file.write(bytes.data(), bytes.size())) throw std::runtime_error(path + " can't be written");
}

void serve(const std::string& folder, const std::string& inputs, const std::string& outputs) {
  const c10::InferenceMode mode;
  torch::inductor::AOTIModelPackageLoader program(folder + "/package.pt2");
  const Tables tables(folder, program.get_metadata().at("torchrec_hkv.tables"));
  std::vector<at::Tensor> arguments = read_tensors(inputs);
  arguments.insert(arguments.begin(), tables.handle());

  constexpr int kCalls = 100;
  std::vector<at::Tensor> results;
  std::vector<double> times;
  for (int call = 0; call < kCalls; ++call) {
    const auto began = std::chrono::steady_clock::now();
    results = program.run(arguments);
    times.push_back(
        std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - began)
            .count());
  }
  write_tensors(outputs, results);
  std::nth_element(times.begin(), times.begin() + kCalls / 2, times.end());
  const at::Tensor counts = tables.counters().sum(0);
  std::cout << times[kCalls / 2] << " us a call; of " << counts[0].item<int64_t>() / kCalls
            << " ids " << counts[1].item<int64_t>() / kCalls << " unknown\n";
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "usage: serve MODEL INPUTS OUTPUTS\n";
    return 2;
  }
  try {
    serve(argv[1], argv[2], argv[3]);
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
