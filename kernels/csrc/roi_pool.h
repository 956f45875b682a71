// RoIPool and PSRoIPool: which pixels belong to a bin along one axis.
#pragma once

#include <cmath>

#include "device.h"

namespace gradparity {

// A box along one axis in whole pixels; `length` is 0, so that every bin is empty, for one that is not finite.
struct PixelAxis {
  int64_t start, length;
};

// Half away from zero, and no further than 2**30, so that products with a bin's number fit.
template <typename T>
GRADPARITY_DEVICE int64_t rounded_coordinate(T coordinate) {
  const T limit = static_cast<T>(int64_t(1) << 30), value = std::round(coordinate);
  return static_cast<int64_t>(value > limit ? limit : value < -limit ? -limit : value);
}

// `last_included`: whether the pixel at the box's end belongs to it.
template <typename T>
GRADPARITY_DEVICE PixelAxis pixel_axis(T low, T high, T spatial_scale, bool last_included) {
  const T from = low * spatial_scale, to = high * spatial_scale;
  if (!std::isfinite(from) || !std::isfinite(to)) {
    return {0, 0};
  }
  const int64_t start = rounded_coordinate(from);
  const int64_t length = rounded_coordinate(to) - start + (last_included ? 1 : 0);
  return {start, length > 1 ? length : 1};
}

// The pixels from `begin` to before `end` of an image of `size` pixels.
struct PixelRange {
  int64_t begin, end;

  GRADPARITY_DEVICE int64_t count() const {
    return end > begin ? end - begin : 0;
  }
};

GRADPARITY_DEVICE PixelRange bin_pixels(const PixelAxis& box, int64_t bin, int64_t bins, int64_t size) {
  const auto clip = [size](int64_t pixel) { return pixel < 0 ? int64_t(0) : pixel > size ? size : pixel; };
  if (box.length == 0) {
    return {0, 0};
  }
  const int64_t begin = bin * box.length / bins, end = ((bin + 1) * box.length + bins - 1) / bins;
  return {clip(box.start + begin), clip(box.start + end)};
}

}  // namespace gradparity
