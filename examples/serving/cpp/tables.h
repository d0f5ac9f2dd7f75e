// The tables of a served model.
#pragma once

#include <ATen/ATen.h>

#include <string>

// Read-only tables, mapped into memory, so that the processes of a machine share them.
class Tables {
 public:
  // Opens the tables that the metadata of a package lists.
  Tables(const std::string& folder, const std::string& metadata);
  ~Tables();
  Tables(const Tables&) = delete;
  Tables& operator=(const Tables&) = delete;

  // The first argument of the package's program.
  at::Tensor handle() const { return at::scalar_tensor(number_, at::kLong).view({1}); }
  // int64 [tables, 2]: number of looked-up ids, and of unknown ids.
  const at::Tensor& counters() const { return counters_; }

 private:
  int64_t number_ = 0;
  at::Tensor counters_;
};
