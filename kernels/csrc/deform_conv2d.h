// Deformable convolution: where a sample falls, what it is worth, and how that changes with its position.
#pragma once

#include <cmath>

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

// Weights of the four corners of a cell: top left, top right, bottom left, bottom right.
template <typename T>
struct Corners {
  T top_left, top_right, bottom_left, bottom_right;
};

template <typename T>
GRADPARITY_DEVICE Corners<T> corner_weights(T y, T x) {
  return {(1 - y) * (1 - x), (1 - y) * x, y * (1 - x), y * x};
}

template <typename T>
GRADPARITY_DEVICE T weighted(const Corners<T>& weight, const Corners<T>& value) {
  return weight.top_left * value.top_left + weight.top_right * value.top_right +
      weight.bottom_left * value.bottom_left + weight.bottom_right * value.bottom_right;
}

// Derivatives of `weighted` by the position, for corner values that may be sums over channels.
template <typename T>
GRADPARITY_DEVICE T slope_y(T x, const Corners<T>& value) {
  return (1 - x) * (value.bottom_left - value.top_left) + x * (value.bottom_right - value.top_right);
}

template <typename T>
GRADPARITY_DEVICE T slope_x(T y, const Corners<T>& value) {
  return (1 - y) * (value.top_right - value.top_left) + y * (value.bottom_right - value.bottom_left);
}

// The second derivative by both positions; the others vanish within a cell.
template <typename T>
GRADPARITY_DEVICE T mixed_slope(const Corners<T>& value) {
  return value.top_left - value.top_right - value.bottom_left + value.bottom_right;
}

}  // namespace gradparity
