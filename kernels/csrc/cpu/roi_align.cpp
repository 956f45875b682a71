// RoIAlign on the CPU. A box's samples form a grid, so positions are worked out per axis, once per box.

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "../roi_align.h"

namespace gradparity {
namespace {

using at::IntArrayRef;
using at::Tensor;

struct Problem {
  int64_t images, channels, height, width, boxes, bins_y, bins_x;
  double spatial_scale;
  int64_t sampling_ratio;
  bool aligned;
};

Problem checked(
    IntArrayRef input, const Tensor& rois, IntArrayRef output_size, double spatial_scale, int64_t sampling_ratio,
    bool aligned) {
  TORCH_CHECK_VALUE(
      input.size() == 4 && input[0] >= 0 && input[1] > 0 && input[2] > 0 && input[3] > 0,
      "input must have 4 dimensions (N, C, H, W), with C, H and W of at least 1, got shape ", input);
  TORCH_CHECK_VALUE(
      rois.dim() == 2 && rois.size(1) == 5, "boxes must have shape (K, 5): batch index, x1, y1, x2, y2; got ",
      rois.sizes());
  TORCH_CHECK_VALUE(
      output_size.size() == 2 && output_size[0] > 0 && output_size[1] > 0 &&
          std::max(output_size[0], output_size[1]) < (int64_t(1) << 31),
      "output_size must be 2 values of at least 1 and below 2**31, got ", output_size);
  // A bin costs its square.
  TORCH_CHECK_VALUE(sampling_ratio <= 1024, "sampling_ratio must be at most 1024, got ", sampling_ratio);
  TORCH_CHECK_VALUE(
      std::isfinite(spatial_scale) && spatial_scale > 0, "spatial_scale must be positive and finite, got ",
      spatial_scale);
  return {input[0],       input[1],       input[2],      input[3],       rois.size(0),
          output_size[0], output_size[1], spatial_scale, sampling_ratio, aligned};
}

void check_same(const char* name, const Tensor& value, const Tensor& other) {
  TORCH_CHECK_TYPE(
      value.scalar_type() == other.scalar_type() && value.device() == other.device(), name,
      " must have the dtype and device of boxes, ", other.scalar_type(), " on ", other.device(), ", got ",
      value.scalar_type(), " on ", value.device());
}

template <typename scalar_t>
std::vector<int64_t> batch_indices(const Problem& p, const scalar_t* rois) {
  std::vector<int64_t> indices(p.boxes);
  for (int64_t k = 0; k < p.boxes; k++) {
    const double index = static_cast<double>(rois[k * 5]);
    TORCH_CHECK_VALUE(
        index >= 0 && index < static_cast<double>(p.images) && index == std::floor(index),
        "boxes must hold batch indices that are integers from 0 to ", p.images - 1, ", got ", index);
    indices[k] = static_cast<int64_t>(index);
  }
  return indices;
}

// The samples of each bin along one axis that lie in the image, as pixels with weights.
template <typename T>
struct Axis {
  std::vector<Between<T>> samples;
  std::vector<int64_t> ends;  // of each bin in `samples`

  void fill(const BoxAxis<T>& box, int64_t bins, int64_t length) {
    samples.clear();
    ends.clear();
    for (int64_t bin = 0; bin < bins; bin++) {
      const SampleRange range = samples_near_image(box, bin, length);
      for (int64_t i = 0; i < range.count; i++) {
        const T position = sample_position(box, bin, range.first + static_cast<double>(i));
        if (sample_counts(position, length)) {
          samples.push_back(between(position, length));
        }
      }
      ends.push_back(static_cast<int64_t>(samples.size()));
    }
  }
  const Between<T>* begin(int64_t bin) const {
    return samples.data() + (bin == 0 ? 0 : ends[bin - 1]);
  }
  const Between<T>* end(int64_t bin) const {
    return samples.data() + ends[bin];
  }
};

template <typename T>
struct Box {
  Axis<T> y, x;
  T count;  // of samples in a bin, those outside included; 0 where the mean makes no sense

  template <typename scalar_t>
  void fill(const Problem& p, const scalar_t* roi) {
    const auto axis = [&](int64_t low, int64_t high, int64_t bins) {
      return box_axis(
          static_cast<T>(roi[low]), static_cast<T>(roi[high]), bins, static_cast<T>(p.spatial_scale), p.sampling_ratio,
          p.aligned);
    };
    const BoxAxis<T> rows = axis(2, 4, p.bins_y), columns = axis(1, 3, p.bins_x);
    count = rows.grid * columns.grid;
    if (!count_is_usable(count)) {
      count = T(0);
      return;
    }
    y.fill(rows, p.bins_y, p.height);
    x.fill(columns, p.bins_x, p.width);
  }
};

Tensor roi_align(
    const Tensor& input, const Tensor& rois, IntArrayRef output_size, double spatial_scale, int64_t sampling_ratio,
    bool aligned) {
  const Problem p = checked(input.sizes(), rois, output_size, spatial_scale, sampling_ratio, aligned);
  check_same("input", input, rois);
  const Tensor images = input.contiguous(), boxes = rois.contiguous();
  Tensor out = at::empty(
      {p.boxes, p.channels, p.bins_y, p.bins_x}, input.options().memory_format(c10::MemoryFormat::Contiguous));
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, input.scalar_type(), "roi_align", [&] {
    using T = wide_t<scalar_t>;
    const scalar_t* roi = boxes.const_data_ptr<scalar_t>();
    const std::vector<int64_t> image = batch_indices(p, roi);
    const scalar_t* pixels = images.const_data_ptr<scalar_t>();
    scalar_t* result = out.mutable_data_ptr<scalar_t>();
    const int64_t bins = p.bins_y * p.bins_x;
    const int64_t grain = std::max<int64_t>(1, 4096 / bins);
    at::parallel_for(0, p.boxes * p.channels, grain, [&](int64_t begin, int64_t end) {
      Box<T> box;
      for (int64_t i = begin; i < end; i++) {
        const int64_t k = i / p.channels, c = i % p.channels;
        if (i == begin || c == 0) {
          box.fill(p, roi + k * 5);
        }
        scalar_t* target = result + i * bins;
        if (box.count == T(0)) {
          std::fill_n(target, bins, static_cast<scalar_t>(T(0)));
          continue;
        }
        const scalar_t* plane = pixels + (image[k] * p.channels + c) * p.height * p.width;
        for (int64_t by = 0; by < p.bins_y; by++) {
          for (int64_t bx = 0; bx < p.bins_x; bx++) {
            T sum = 0;
            for (const auto* y = box.y.begin(by); y != box.y.end(by); y++) {
              const scalar_t* low = plane + y->low * p.width;
              const scalar_t* high = plane + y->high * p.width;
              for (const auto* x = box.x.begin(bx); x != box.x.end(bx); x++) {
                sum += y->low_weight * x->low_weight * static_cast<T>(low[x->low]) +
                    y->low_weight * x->high_weight * static_cast<T>(low[x->high]) +
                    y->high_weight * x->low_weight * static_cast<T>(high[x->low]) +
                    y->high_weight * x->high_weight * static_cast<T>(high[x->high]);
              }
            }
            target[by * p.bins_x + bx] = static_cast<scalar_t>(sum / box.count);
          }
        }
      }
    });
  });
  return out;
}

Tensor roi_align_backward(
    const Tensor& grad, const Tensor& rois, IntArrayRef input_size, IntArrayRef output_size, double spatial_scale,
    int64_t sampling_ratio, bool aligned) {
  const Problem p = checked(input_size, rois, output_size, spatial_scale, sampling_ratio, aligned);
  check_same("grad", grad, rois);
  const std::array<int64_t, 4> expected{p.boxes, p.channels, p.bins_y, p.bins_x};
  TORCH_CHECK_VALUE(
      grad.sizes() == IntArrayRef(expected), "grad must have shape ", IntArrayRef(expected), ", got ", grad.sizes());
  const Tensor grads = grad.contiguous(), boxes = rois.contiguous();
  Tensor out;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, grad.scalar_type(), "roi_align_backward", [&] {
    using T = wide_t<scalar_t>;
    const scalar_t* roi = boxes.const_data_ptr<scalar_t>();
    const std::vector<int64_t> image = batch_indices(p, roi);
    const scalar_t* source = grads.const_data_ptr<scalar_t>();
    const auto options = grad.options().memory_format(c10::MemoryFormat::Contiguous);
    Tensor sums = at::zeros(input_size, options.dtype(c10::CppTypeToScalarType<T>::value));
    T* pixels = sums.mutable_data_ptr<T>();
    const int64_t bins = p.bins_y * p.bins_x;
    const int64_t grain = std::max<int64_t>(1, 4096 / std::max<int64_t>(1, bins * p.boxes));
    // Every thread has channels of its own, in which it adds box after box: no two of them write to one place,
    // and the order of a sum is always the same.
    at::parallel_for(0, p.channels, grain, [&](int64_t begin, int64_t end) {
      Box<T> box;
      for (int64_t k = 0; k < p.boxes; k++) {
        box.fill(p, roi + k * 5);
        if (box.count == T(0)) {
          continue;
        }
        for (int64_t c = begin; c < end; c++) {
          T* plane = pixels + (image[k] * p.channels + c) * p.height * p.width;
          const scalar_t* from = source + (k * p.channels + c) * bins;
          for (int64_t by = 0; by < p.bins_y; by++) {
            for (int64_t bx = 0; bx < p.bins_x; bx++) {
              const T share = static_cast<T>(from[by * p.bins_x + bx]) / box.count;
              for (const auto* y = box.y.begin(by); y != box.y.end(by); y++) {
                T* low = plane + y->low * p.width;
                T* high = plane + y->high * p.width;
                for (const auto* x = box.x.begin(bx); x != box.x.end(bx); x++) {
                  low[x->low] += y->low_weight * x->low_weight * share;
                  low[x->high] += y->low_weight * x->high_weight * share;
                  high[x->low] += y->high_weight * x->low_weight * share;
                  high[x->high] += y->high_weight * x->high_weight * share;
                }
              }
            }
          }
        }
      }
    });
    out = sums.to(grad.scalar_type());
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(gradparity, CPU, m) {
  m.impl("roi_align", &roi_align);
  m.impl("roi_align_backward", &roi_align_backward);
}

}  // namespace gradparity
