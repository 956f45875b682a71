// RoIAlign: where a box's samples fall along one axis, between which pixels, and how they move with the box.
#pragma once

#include <cmath>

#include "bilinear.h"
#include "device.h"

namespace gradparity {

// A box along one axis, in pixels: `bins` bins of `bin_size`, each with `grid` samples.
// `grid` is a whole number in floating point, because a box of 1e30 pixels has more than an int holds. It is 0,
// so that nothing is sampled, for a box that is not finite. `widened` boxes have a size that their end doesn't change.
template <typename T>
struct BoxAxis {
  T start, bin_size, grid;
  int64_t bins;
  bool widened;
};

template <typename T>
GRADPARITY_DEVICE BoxAxis<T> box_axis(
    T low, T high, int64_t bins, T spatial_scale, int64_t sampling_ratio, bool aligned) {
  const T shift = aligned ? T(0.5) : T(0);
  const T start = low * spatial_scale - shift, end = high * spatial_scale - shift;
  if (!std::isfinite(start) || !std::isfinite(end)) {
    return {T(0), T(0), T(0), bins, false};
  }
  const bool widened = !aligned && end - start < T(1);
  const T bin_size = (widened ? T(1) : end - start) / static_cast<T>(bins);
  return {start, bin_size, sampling_ratio > 0 ? static_cast<T>(sampling_ratio) : std::ceil(bin_size), bins, widened};
}

template <typename T>
GRADPARITY_DEVICE T bin_start(const BoxAxis<T>& box, int64_t bin) {
  return box.start + static_cast<T>(bin) * box.bin_size;
}

// The samples of a bin that may lie within [-1, length]: `count` of them from number `first` on.
// The others lie outside and are never visited, so that huge boxes cost no more than the image.
struct SampleRange {
  double first;
  int64_t count;
};

template <typename T>
GRADPARITY_DEVICE SampleRange samples_near_image(const BoxAxis<T>& box, int64_t bin, int64_t length) {
  // float64 whatever the type, so that every kernel visits the same samples; one more on either side
  // makes up for rounding.
  const double start = static_cast<double>(bin_start(box, bin));
  const double grid = static_cast<double>(box.grid);
  const double step = static_cast<double>(box.bin_size / box.grid);
  if (!std::isfinite(start) || !std::isfinite(step)) {
    return {0, 0};
  }
  double lowest = 0, highest = grid;
  if (step != 0) {
    const double one = (-1 - start) / step - 0.5;
    const double other = (static_cast<double>(length) - start) / step - 0.5;
    lowest = std::floor(one < other ? one : other) - 1;
    highest = std::ceil(one < other ? other : one) + 1;
  }
  const double first = lowest > 0 ? lowest : 0;
  const double last = highest < grid - 1 ? highest : grid - 1;
  const double count = last - first + 1;
  return std::isfinite(first) && count > 0 ? SampleRange{first, static_cast<int64_t>(count)} : SampleRange{0, 0};
}

template <typename T>
GRADPARITY_DEVICE T sample_position(const BoxAxis<T>& box, int64_t bin, double number) {
  return bin_start(box, bin) + (static_cast<T>(number) + T(0.5)) * box.bin_size / box.grid;
}

// Closed on both sides; false for NaN.
template <typename T>
GRADPARITY_DEVICE bool sample_counts(T position, int64_t length) {
  return position >= T(-1) && position <= static_cast<T>(length);
}

// A sample along one axis: the two pixels around it and their weights; how far it moves, in pixels, with either end
// of the box, and along each direction of the box that a derivative is taken in. A clamped sample does not move.
template <typename T>
struct Sample {
  int64_t low, high;
  T low_weight, high_weight;
  T by_start, by_end;
  T along[2];
  bool moves;
};

// Only for positions that count. They are clamped into the image.
template <typename T>
GRADPARITY_DEVICE Sample<T> clamped_sample(T position, int64_t length) {
  const T clamped = position > T(0) ? position : T(0);
  if (clamped >= static_cast<T>(length - 1)) {
    return {length - 1, length - 1, T(1), T(0), T(0), T(0), {T(0), T(0)}, false};
  }
  const T low = std::floor(clamped);
  const T fraction = clamped - low;
  const int64_t pixel = static_cast<int64_t>(low);
  return {pixel, pixel + 1, 1 - fraction, fraction, T(0), T(0), {T(0), T(0)}, position >= T(0)};
}

// Makes the sample know how it moves.
template <typename T>
GRADPARITY_DEVICE void set_motion(
    Sample<T>& sample, const BoxAxis<T>& box, int64_t bin, double number, T spatial_scale) {
  if (!sample.moves) {
    return;
  }
  if (box.widened) {
    sample.by_start = spatial_scale;
    return;
  }
  // Both from their own end, because 1 - t would lose what is small.
  const T done = static_cast<T>(number) + T(0.5), bins = static_cast<T>(box.bins);
  sample.by_start =
      spatial_scale * ((static_cast<T>(box.bins - 1 - bin) + (box.grid - done) / box.grid) / bins);
  sample.by_end = spatial_scale * ((static_cast<T>(bin) + done / box.grid) / bins);
}

// The weights of a sample's four pixels (order 0), and their derivatives along one or two directions. A third
// derivative vanishes, because the value is linear in y and in x.
template <int order, typename T>
GRADPARITY_DEVICE Corners<T> pixel_weights(const Sample<T>& y, const Sample<T>& x) {
  if constexpr (order == 0) {
    return {
        y.low_weight * x.low_weight, y.low_weight * x.high_weight, y.high_weight * x.low_weight,
        y.high_weight * x.high_weight};
  } else if constexpr (order == 1) {
    const T dy = y.along[0], dx = x.along[0];
    return {
        -dy * x.low_weight - y.low_weight * dx, y.low_weight * dx - dy * x.high_weight,
        dy * x.low_weight - y.high_weight * dx, dy * x.high_weight + y.high_weight * dx};
  } else {
    const T mixed = y.along[0] * x.along[1] + y.along[1] * x.along[0];
    return {mixed, -mixed, -mixed, mixed};
  }
}

// Whether the mean over this many samples makes sense; if not, it is 0.
template <typename T>
GRADPARITY_DEVICE bool count_is_usable(T count) {
  return std::isfinite(count) && count != T(0);
}

}  // namespace gradparity
