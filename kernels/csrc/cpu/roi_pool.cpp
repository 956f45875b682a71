// RoIPool on the CPU: the largest pixel of each bin; given which it is, the operator and its transpose are linear.

#include <torch/library.h>

#include <tuple>

#include "roi_bins.h"

namespace gradparity {
namespace {

using namespace roi;

std::tuple<Tensor, Tensor> roi_pool(
    const Tensor& input, const Tensor& rois, IntArrayRef output_size, double spatial_scale) {
  const Sizes s = checked_sizes("input", input.sizes(), rois, output_size, false);
  check_like_rois("input", input, rois);
  const Tensor images = input.contiguous(), boxes = rois.contiguous();
  Tensor out = empty_output(s.output(), input), argmax = at::empty(s.output(), input.options().dtype(at::kLong));
  GRADPARITY_DISPATCH(input.scalar_type(), "roi_pool", [&] {
    const auto scale = checked_scale<wide_t<scalar_t>>(spatial_scale);
    const scalar_t *roi = boxes.const_data_ptr<scalar_t>(), *pixels = images.const_data_ptr<scalar_t>();
    const std::vector<int64_t> image = batch_indices(s, roi);
    scalar_t* output = out.mutable_data_ptr<scalar_t>();
    int64_t* chosen = argmax.mutable_data_ptr<int64_t>();
    for_outputs(s, [&](int64_t begin, int64_t end) {
      PixelBox box;
      for (int64_t i = begin; i < end; i++) {
        const int64_t k = i / s.channels, c = i % s.channels;
        if (i == begin || c == 0) {
          box.fill(s, scale, true, roi + k * 5);
        }
        const scalar_t* plane = pixels + s.plane(image[k], c, 0);
        std::fill_n(output + i * s.bins(), s.bins(), static_cast<scalar_t>(0.0f));
        std::fill_n(chosen + i * s.bins(), s.bins(), int64_t(-1));
        for_bins(s, box, [&](int64_t bin, const PixelRange& rows, const PixelRange& columns) {
          int64_t best = rows.begin * s.width + columns.begin;
          scalar_t largest = plane[best];
          for (int64_t y = rows.begin; y < rows.end; y++) {
            for (int64_t at = y * s.width + columns.begin; at < y * s.width + columns.end; at++) {
              // NaN is larger than every number, and of equal ones the first stays.
              if (plane[at] > largest || (std::isnan(plane[at]) && !std::isnan(largest))) {
                largest = plane[at];
                best = at;
              }
            }
          }
          output[i * s.bins() + bin] = largest;
          chosen[i * s.bins() + bin] = best;
        });
      }
    });
  });
  return {out, argmax};
}

// The sizes of a call with argmax, which has the output's shape.
Sizes checked_choice(const char* name, IntArrayRef input, const Tensor& rois, const Tensor& argmax) {
  TORCH_CHECK_VALUE(
      argmax.dim() == 4, "argmax must have 4 dimensions (K, C, rows, columns), got shape ", argmax.sizes());
  const Sizes s = checked_sizes(name, input, rois, argmax.sizes().slice(2), false);
  check_choice("argmax", argmax, s.output());
  return s;
}

void check_pixel(const Sizes& s, int64_t pixel) {
  TORCH_CHECK_VALUE(
      pixel >= -1 && pixel < s.pixels(), "argmax must hold pixels from 0 to ", s.pixels() - 1, ", or -1, got ", pixel);
}

Tensor roi_pool_gather(const Tensor& input, const Tensor& rois, const Tensor& argmax) {
  const Sizes s = checked_choice("input", input.sizes(), rois, argmax);
  check_like_rois("input", input, rois);
  const Tensor images = input.contiguous(), boxes = rois.contiguous(), choice = argmax.contiguous();
  Tensor out = empty_output(s.output(), input);
  GRADPARITY_DISPATCH(input.scalar_type(), "roi_pool_gather", [&] {
    const scalar_t* pixels = images.const_data_ptr<scalar_t>();
    const std::vector<int64_t> image = batch_indices(s, boxes.const_data_ptr<scalar_t>());
    const int64_t* chosen = choice.const_data_ptr<int64_t>();
    scalar_t* output = out.mutable_data_ptr<scalar_t>();
    for_outputs(s, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin * s.bins(); i < end * s.bins(); i++) {
        const int64_t plane = i / s.bins();
        check_pixel(s, chosen[i]);
        output[i] = chosen[i] < 0
            ? static_cast<scalar_t>(0.0f)
            : pixels[s.plane(image[plane / s.channels], plane % s.channels, 0) + chosen[i]];
      }
    });
  });
  return out;
}

Tensor roi_pool_scatter(const Tensor& grad, const Tensor& rois, const Tensor& argmax, IntArrayRef input_size) {
  const Sizes s = checked_choice("input_size", input_size, rois, argmax);
  check_like_rois("grad", grad, rois);
  check_shape("grad", grad, s.output());
  const Tensor grads = grad.contiguous(), boxes = rois.contiguous(), choice = argmax.contiguous();
  Tensor out;
  GRADPARITY_DISPATCH(grad.scalar_type(), "roi_pool_scatter", [&] {
    using T = wide_t<scalar_t>;
    const std::vector<int64_t> image = batch_indices(s, boxes.const_data_ptr<scalar_t>());
    const scalar_t* source = grads.const_data_ptr<scalar_t>();
    const int64_t* chosen = choice.const_data_ptr<int64_t>();
    Tensor sums = zero_sums<scalar_t>(input_size, grad);
    T* target = sums.mutable_data_ptr<T>();
    for_channels(s, [&](int64_t begin, int64_t end) {
      for (int64_t k = 0; k < s.boxes; k++) {
        for (int64_t c = begin; c < end; c++) {
          T* plane = target + s.plane(image[k], c, 0);
          const int64_t first = (k * s.channels + c) * s.bins();
          for (int64_t i = first; i < first + s.bins(); i++) {
            check_pixel(s, chosen[i]);
            if (chosen[i] >= 0) {
              plane[chosen[i]] += static_cast<T>(source[i]);
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
  m.impl("roi_pool", &roi_pool);
  m.impl("roi_pool_gather", &roi_pool_gather);
  m.impl("roi_pool_scatter", &roi_pool_scatter);
}

}  // namespace gradparity
