#include "tables.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <sstream>
#include <stdexcept>
#include <vector>

namespace {

// A line of the metadata: fields between tabs.
std::vector<std::string> fields_of(const std::string& line) {
  std::vector<std::string> fields;
  std::stringstream text(line);
  for (std::string field; std::getline(text, field, '\t');) fields.push_back(field);
  return fields;
}

int64_t format_number(const std::string& name) {
  const std::vector<std::string> formats = {"fp32", "fp16", "bf16", "int8", "int4"};
  for (size_t k = 0; k < formats.size(); ++k) {
    if (formats[k] == name) return static_cast<int64_t>(k);
  }
  throw std::runtime_error("unknown row format " + name);
}

int64_t row_bytes(int64_t format, int64_t dim) {
  const int64_t bytes = format == 0   ? 4 * dim
                        : format == 3 ? 4 + dim
                        : format == 4 ? 4 + (dim + 1) / 2
                                      : 2 * dim;
  return (bytes + 3) / 4 * 4;
}

}  // namespace

Tables::Tables(const std::string& folder, const std::string& metadata) {
  std::vector<at::Tensor> index, rows, none, default_rows;
  std::vector<int64_t> dims, formats, seeds;
  std::vector<double> units, ranges;
  std::vector<std::string> distributions;
  const at::Tensor no_ids = at::empty({0}, at::kLong);
  std::stringstream lines(metadata);
  for (std::string line; std::getline(lines, line);) {
    const std::vector<std::string> its = fields_of(line);
    if (its.size() < 14) throw std::runtime_error("the package's list of tables is damaged");
    const int64_t entries = std::stoll(its[2]), blocks = std::stoll(its[3]);
    const int64_t buckets = std::stoll(its[4]), dim = std::stoll(its[5]);
    const int64_t format = format_number(its[6]), row = row_bytes(format, dim);
    const int64_t index_bytes = blocks * buckets * 64;
    const int64_t rows_at = (index_bytes + 4095) / 4096 * 4096;
    const at::Tensor file =
        at::from_file(folder + "/" + its[1], /*shared=*/false, rows_at + entries * row, at::kByte);
    index.push_back(file.narrow(0, 0, index_bytes).view(at::kLong).view({blocks, buckets, 8}));
    rows.push_back(file.narrow(0, rows_at, entries * row).view({entries, row}));
    none.push_back(no_ids);
    dims.push_back(dim);
    formats.push_back(format);
    units.push_back(std::stod(its[7]));
    seeds.push_back(std::stoll(its[8]));
    distributions.push_back(its[9]);
    for (size_t k = 10; k < 14; ++k) ranges.push_back(std::stod(its[k]));
    at::Tensor default_row = at::empty({static_cast<int64_t>(its.size()) - 14}, at::kFloat);
    for (size_t k = 14; k < its.size(); ++k) default_row[k - 14] = std::stof(its[k]);
    default_rows.push_back(default_row);
  }
  counters_ = at::zeros({static_cast<int64_t>(dims.size()), 2}, at::kLong);
  const c10::OperatorHandle open =
      c10::Dispatcher::singleton().findSchemaOrThrow("torchrec_hkv::serving_open", "");
  std::vector<c10::IValue> stack = {index,
                                    rows,
                                    none,
                                    none,
                                    none,
                                    none,
                                    none,
                                    none,
                                    default_rows,
                                    dims,
                                    formats,
                                    units,
                                    seeds,
                                    distributions,
                                    ranges,
                                    counters_,
                                    std::vector<int64_t>(),
                                    std::vector<int64_t>(),
                                    std::vector<at::Tensor>()};
  open.callBoxed(stack);
  number_ = stack.at(0).toInt();
}

Tables::~Tables() {
  std::vector<c10::IValue> stack = {number_};
  c10::Dispatcher::singleton()
      .findSchemaOrThrow("torchrec_hkv::serving_close", "")
      .callBoxed(stack);
}
