// A bilinear cell: the weights of its four corners, and how the value changes with the position.
#pragma once

#include "device.h"

namespace gradparity {

// Weights or values of the four corners of a cell: top left, top right, bottom left, bottom right.
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
