// PSRoIPool on the CPU: the mean of each bin's pixels, of a channel of its own.

#include <torch/library.h>

#include "roi_bins.h"

namespace gradparity {
namespace {

using namespace roi;

Tensor ps_roi_pool(const Tensor& input, const Tensor& rois, IntArrayRef output_size, double spatial_scale) {
  const Sizes s = checked_sizes("input", input.sizes(), rois, output_size, true);
  check_like_rois("input", input, rois);
  const Tensor images = input.contiguous(), boxes = rois.contiguous();
  Tensor out = empty_output(s.output(), input);
  GRADPARITY_DISPATCH(input.scalar_type(), "ps_roi_pool", [&] {
    using T = wide_t<scalar_t>;
    const T scale = checked_scale<T>(spatial_scale);
    const scalar_t *roi = boxes.const_data_ptr<scalar_t>(), *pixels = images.const_data_ptr<scalar_t>();
    const std::vector<int64_t> image = batch_indices(s, roi);
    scalar_t* output = out.mutable_data_ptr<scalar_t>();
    for_outputs(s, [&](int64_t begin, int64_t end) {
      PixelBox box;
      for (int64_t i = begin; i < end; i++) {
        const int64_t k = i / s.channels, c = i % s.channels;
        if (i == begin || c == 0) {
          box.fill(s, scale, false, roi + k * 5);
        }
        std::fill_n(output + i * s.bins(), s.bins(), static_cast<scalar_t>(T(0)));
        for_bins(s, box, [&](int64_t bin, const PixelRange& rows, const PixelRange& columns) {
          const scalar_t* plane = pixels + s.plane(image[k], c, bin);
          T sum = 0;
          for (int64_t y = rows.begin; y < rows.end; y++) {
            for (int64_t x = columns.begin; x < columns.end; x++) {
              sum += static_cast<T>(plane[y * s.width + x]);
            }
          }
          output[i * s.bins() + bin] = static_cast<scalar_t>(sum / static_cast<T>(rows.count() * columns.count()));
        });
      }
    });
  });
  return out;
}

Tensor ps_roi_pool_backward(
    const Tensor& grad, const Tensor& rois, IntArrayRef input_size, IntArrayRef output_size, double spatial_scale) {
  const Sizes s = checked_sizes("input_size", input_size, rois, output_size, true);
  check_like_rois("grad", grad, rois);
  check_shape("grad", grad, s.output());
  const Tensor grads = grad.contiguous(), boxes = rois.contiguous();
  Tensor out;
  GRADPARITY_DISPATCH(grad.scalar_type(), "ps_roi_pool_backward", [&] {
    using T = wide_t<scalar_t>;
    const T scale = checked_scale<T>(spatial_scale);
    const scalar_t *roi = boxes.const_data_ptr<scalar_t>(), *source = grads.const_data_ptr<scalar_t>();
    const std::vector<int64_t> image = batch_indices(s, roi);
    Tensor sums = zero_sums<scalar_t>(input_size, grad);
    T* target = sums.mutable_data_ptr<T>();
    for_channels(s, [&](int64_t begin, int64_t end) {
      PixelBox box;
      for (int64_t k = 0; k < s.boxes; k++) {
        box.fill(s, scale, false, roi + k * 5);
        for (int64_t c = begin; c < end; c++) {
          const scalar_t* from = source + (k * s.channels + c) * s.bins();
          for_bins(s, box, [&](int64_t bin, const PixelRange& rows, const PixelRange& columns) {
            T* plane = target + s.plane(image[k], c, bin);
            const T share = static_cast<T>(from[bin]) / static_cast<T>(rows.count() * columns.count());
            for (int64_t y = rows.begin; y < rows.end; y++) {
              for (int64_t x = columns.begin; x < columns.end; x++) {
                plane[y * s.width + x] += share;
              }
            }
          });
        }
      }
    });
    out = sums.to(grad.scalar_type());
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(gradparity, CPU, m) {
  m.impl("ps_roi_pool", &ps_roi_pool);
  m.impl("ps_roi_pool_backward", &ps_roi_pool_backward);
}

}  // namespace gradparity
