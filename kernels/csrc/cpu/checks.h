// Checks of a call that every operator on the CPU makes.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/safe_numerics.h>

#include <algorithm>

namespace gradparity {

// A floating tensor that the loops can read.
inline void check_tensor(const char* name, const at::Tensor& value) {
  TORCH_CHECK_TYPE(value.layout() == at::kStrided, name, " must be a strided tensor, got layout ", value.layout());
  const auto type = value.scalar_type();
  TORCH_CHECK_TYPE(
      type == at::kDouble || type == at::kFloat || type == at::kHalf || type == at::kBFloat16, name,
      " must be float64, float32, float16 or bfloat16, got ", type);
}

// Sizes whose bytes can be counted, strides included.
inline void check_countable(const char* name, at::IntArrayRef sizes) {
  int64_t bytes = 8;
  bool overflows = false;
  for (const int64_t size : sizes) {
    overflows = overflows || c10::mul_overflows(bytes, std::max<int64_t>(size, 1), &bytes);
  }
  TORCH_CHECK_VALUE(!overflows, name, " asks for more memory than can be addressed, a tensor of shape ", sizes);
}

}  // namespace gradparity
