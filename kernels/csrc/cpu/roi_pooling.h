// What every RoI operator on the CPU shares: the checks of a call, and how work is split.
#pragma once

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "../device.h"
#include "checks.h"

#define GRADPARITY_DISPATCH(type, name, ...) \
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, type, name, __VA_ARGS__)

namespace gradparity::roi {

using at::IntArrayRef;
using at::Tensor;

// The sizes of a call. `channels` are those of the result, of which a position-sensitive operator reads
// bins_y * bins_x from the input for each.
struct Sizes {
  int64_t images, channels, height, width, boxes, bins_y, bins_x;
  bool position_sensitive;

  int64_t bins() const {
    return bins_y * bins_x;
  }
  int64_t pixels() const {
    return height * width;
  }
  int64_t input_channels() const {
    return position_sensitive ? channels * bins() : channels;
  }
  std::array<int64_t, 4> input() const {
    return {images, input_channels(), height, width};
  }
  std::array<int64_t, 4> output() const {
    return {boxes, channels, bins_y, bins_x};
  }
  // Where a bin of a channel reads an image that starts at 0.
  int64_t plane(int64_t image, int64_t channel, int64_t bin) const {
    return (image * input_channels() + (position_sensitive ? channel * bins() + bin : channel)) * pixels();
  }
};

// Calls body(begin, end) in parallel for ranges of (box, channel), whose results are different memory.
template <typename Body>
void for_outputs(const Sizes& s, const Body& body) {
  at::parallel_for(0, s.boxes * s.channels, std::max<int64_t>(1, 4096 / s.bins()), body);
}

// Calls body(begin, end) in parallel for ranges of channels. A thread adds box after box to channels of its own: no two
// of them write to one place, and the order of a sum is always the same.
template <typename Body>
void for_channels(const Sizes& s, const Body& body) {
  at::parallel_for(0, s.channels, std::max<int64_t>(1, 4096 / std::max<int64_t>(1, s.bins() * s.boxes)), body);
}

inline void check_like_rois(const char* name, const Tensor& value, const Tensor& rois) {
  check_tensor(name, value);
  TORCH_CHECK_TYPE(
      value.scalar_type() == rois.scalar_type(), name, " must have boxes' dtype ", rois.scalar_type(), ", got ",
      value.scalar_type());
  TORCH_CHECK_VALUE(
      value.device() == rois.device(), name, " must be on boxes' device ", rois.device(), ", got ", value.device());
}

inline void check_shape(const char* name, const Tensor& value, IntArrayRef expected) {
  TORCH_CHECK_VALUE(value.sizes() == expected, name, " must have shape ", expected, ", got ", value.sizes());
}

// Raises unless these sizes and boxes fit together. `input` is that of the input tensor, or was given as input_size.
inline Sizes checked_sizes(
    const char* input_name, IntArrayRef input, const Tensor& rois, IntArrayRef output_size, bool position_sensitive) {
  check_tensor("boxes", rois);
  TORCH_CHECK_VALUE(
      rois.dim() == 2 && rois.size(1) == 5, "boxes must have shape (K, 5): batch index, x1, y1, x2, y2; got ",
      rois.sizes());
  TORCH_CHECK_VALUE(
      input.size() == 4, input_name, " must have 4 dimensions (N, C, H, W), got shape ", input);
  TORCH_CHECK_VALUE(
      input[0] >= 0 && input[1] > 0 && input[2] > 0 && input[3] > 0, input_name,
      " must have C, H and W of at least 1, got shape ", input);
  TORCH_CHECK_VALUE(
      output_size.size() == 2 && output_size[0] > 0 && output_size[1] > 0 &&
          std::max(output_size[0], output_size[1]) < (int64_t(1) << 31) &&
          output_size[0] * output_size[1] < (int64_t(1) << 31),
      "output_size must be 2 values of at least 1 whose product is below 2**31, got ", output_size);
  Sizes s{input[0], input[1], input[2], input[3], rois.size(0), output_size[0], output_size[1], position_sensitive};
  if (position_sensitive) {
    TORCH_CHECK_VALUE(
        s.channels % s.bins() == 0, input_name, "'s channels must be a multiple of output_size's ", s.bins(),
        " bins, got ", s.channels);
    s.channels /= s.bins();
  }
  check_countable(input_name, input);
  check_countable("output_size", s.output());
  return s;
}

// spatial_scale as the boxes' arithmetic has it.
template <typename T>
T checked_scale(double spatial_scale) {
  const T scale = static_cast<T>(spatial_scale);
  TORCH_CHECK_VALUE(
      std::isfinite(scale) && scale > 0, "spatial_scale must be positive and finite",
      sizeof(T) == 4 ? " in float32" : "", ", got ", spatial_scale);
  return scale;
}

// Of each box.
template <typename scalar_t>
std::vector<int64_t> batch_indices(const Sizes& s, const scalar_t* rois) {
  std::vector<int64_t> indices(s.boxes);
  for (int64_t k = 0; k < s.boxes; k++) {
    const double index = static_cast<double>(rois[k * 5]);
    TORCH_CHECK_VALUE(
        index >= 0 && index < static_cast<double>(s.images) && index == std::floor(index),
        "boxes must hold batch indices that are integers from 0 to ", s.images - 1, ", got ", index);
    indices[k] = static_cast<int64_t>(index);
  }
  return indices;
}

// An int64 tensor of the output's shape that names a pixel or a sample for each bin.
inline void check_choice(const char* name, const Tensor& value, IntArrayRef expected) {
  TORCH_CHECK_TYPE(
      value.layout() == at::kStrided && value.scalar_type() == at::kLong && value.device().is_cpu(), name,
      " must be a strided int64 tensor on the CPU, got layout ", value.layout(), ", ", value.scalar_type(), " on ",
      value.device());
  check_shape(name, value, expected);
}

// Zeros to add to, in the type of the sums.
template <typename scalar_t>
Tensor zero_sums(IntArrayRef sizes, const Tensor& like) {
  const auto type = c10::CppTypeToScalarType<wide_t<scalar_t>>::value;
  return at::zeros(sizes, like.options().dtype(type).memory_format(c10::MemoryFormat::Contiguous));
}

inline Tensor empty_output(IntArrayRef sizes, const Tensor& like) {
  return at::empty(sizes, like.options().memory_format(c10::MemoryFormat::Contiguous));
}

}  // namespace gradparity::roi
