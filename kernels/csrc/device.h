// What the arithmetic needs to compile for every device, and the types that it runs in.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>

#if defined(__CUDACC__) || defined(__HIPCC__)
#define GRADPARITY_DEVICE __host__ __device__ __forceinline__
#else
#define GRADPARITY_DEVICE inline
#endif

namespace gradparity {

// The type that a tensor's arithmetic runs in: 16-bit types compute and accumulate in float32.
template <typename scalar_t>
struct Wide {
  using type = scalar_t;
};
template <>
struct Wide<c10::Half> {
  using type = float;
};
template <>
struct Wide<c10::BFloat16> {
  using type = float;
};
template <typename scalar_t>
using wide_t = typename Wide<scalar_t>::type;

}  // namespace gradparity
