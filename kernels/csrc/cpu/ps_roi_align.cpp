// PSRoIAlign on the CPU: RoIAlign's mean, of other channels.

#include <torch/library.h>

#include "roi_samples.h"

namespace gradparity {
namespace {

using namespace roi;

Tensor ps_roi_align(
    const Tensor& input, const Tensor& rois, IntArrayRef output_size, double spatial_scale, int64_t sampling_ratio) {
  const Sizes s = checked_sizes("input", input.sizes(), rois, output_size, true);
  check_like_rois("input", input, rois);
  const Sampling sampling{spatial_scale, sampling_ratio, true};
  check_sampling(sampling);
  const Tensor images = input.contiguous(), boxes = rois.contiguous();
  Tensor out = empty_output(s.output(), input);
  GRADPARITY_DISPATCH(input.scalar_type(), "ps_roi_align", [&] {
    using T = wide_t<scalar_t>;
    checked_scale<T>(spatial_scale);
    const scalar_t* roi = boxes.const_data_ptr<scalar_t>();
    pool<0, T, scalar_t>(
        s, sampling, images.const_data_ptr<scalar_t>(), roi, batch_indices(s, roi), nullptr, {},
        out.mutable_data_ptr<scalar_t>());
  });
  return out;
}

Tensor ps_roi_align_backward(
    const Tensor& grad, const Tensor& rois, IntArrayRef input_size, IntArrayRef output_size, double spatial_scale,
    int64_t sampling_ratio) {
  const Sizes s = checked_sizes("input_size", input_size, rois, output_size, true);
  check_like_rois("grad", grad, rois);
  check_shape("grad", grad, s.output());
  const Sampling sampling{spatial_scale, sampling_ratio, true};
  check_sampling(sampling);
  const Tensor grads = grad.contiguous(), boxes = rois.contiguous();
  Tensor out;
  GRADPARITY_DISPATCH(grad.scalar_type(), "ps_roi_align_backward", [&] {
    using T = wide_t<scalar_t>;
    checked_scale<T>(spatial_scale);
    const scalar_t* roi = boxes.const_data_ptr<scalar_t>();
    const std::vector<int64_t> image = batch_indices(s, roi);
    Tensor sums = zero_sums<scalar_t>(input_size, grad);
    scatter<0, T, scalar_t>(
        s, sampling, grads.const_data_ptr<scalar_t>(), roi, image, nullptr, {}, sums.mutable_data_ptr<T>());
    out = sums.to(grad.scalar_type());
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(gradparity, CPU, m) {
  m.impl("ps_roi_align", &ps_roi_align);
  m.impl("ps_roi_align_backward", &ps_roi_align_backward);
}

}  // namespace gradparity
