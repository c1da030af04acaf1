// What DeepSpeed's operators for CPUs use of torch/extension.h, which is all of torch. Found first by tests/compile.sh.

#pragma once

#include <ATen/core/Tensor.h>
#ifdef HAS_BINDINGS
#include <ATen/ops/empty_like.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#endif

namespace torch {
using namespace at;
constexpr auto kFloat32 = at::kFloat;
}  // namespace torch
