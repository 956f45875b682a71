// Deformable convolution: where a sample falls, what it is worth, and how that changes with its position.
#pragma once

#include <cmath>

#include "bilinear.h"
#include "device.h"

namespace gradparity {

// base + offset, rounded once to the tensor's own type.
template <typename scalar_t>
GRADPARITY_DEVICE wide_t<scalar_t> sample_coordinate(int64_t base, scalar_t offset) {
  using T = wide_t<scalar_t>;
  return static_cast<T>(static_cast<scalar_t>(static_cast<T>(base) + static_cast<T>(offset)));
}

// Whether a coordinate contributes along an axis of `length` pixels. False for NaN.
// At `length` itself both corners lie outside, so that the open end serves both boundaries.
template <typename T>
GRADPARITY_DEVICE bool contributes(T coordinate, int64_t length, bool closed) {
  const bool from_below = closed ? coordinate >= T(-1) : coordinate > T(-1);
  return from_below && coordinate < static_cast<T>(length);
}

// A sample inside its cell. `low` is the cell's first row or column, from -1 to length - 1.
template <typename T>
struct Cell {
  int64_t low;
  T fraction;
};

// Only for coordinates that contribute.
template <typename T>
GRADPARITY_DEVICE Cell<T> cell_of(T coordinate) {
  const T low = std::floor(coordinate);
  return {static_cast<int64_t>(low), coordinate - low};
}

}  // namespace gradparity
