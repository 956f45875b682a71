// mmcv's own operators, compiled from its sources as one translation unit and registered with torch.
// torch::Library in place of mmcv's pybind module: no Python header is needed, and one library fits every Python.

#include "pytorch/deform_conv.cpp"
#include "pytorch/modulated_deform_conv.cpp"
#include "pytorch/roi_align.cpp"
#include "pytorch/roi_pool.cpp"

#include "pytorch/cpu/deform_conv.cpp"
#include "pytorch/cpu/modulated_deform_conv.cpp"
#include "pytorch/cpu/roi_align.cpp"

#include <torch/library.h>

#include <limits>
#include <type_traits>

namespace {

// torch's schemas know int64 and double only, mmcv's functions take int and float.
template <typename T>
using Widened = std::conditional_t<
    std::is_same_v<T, int>,
    int64_t,
    std::conditional_t<std::is_same_v<T, float>, double, T>>;

template <typename T>
T narrowed(Widened<T> value) {
  if constexpr (std::is_same_v<T, int>) {
    TORCH_CHECK(
        value >= std::numeric_limits<int>::min() && value <= std::numeric_limits<int>::max(),
        "mmcv takes 32-bit integers, got ", value);
  }
  return static_cast<T>(value);
}

template <auto function>
struct Bound;

template <typename... Args, void (*function)(Args...)>
struct Bound<function> {
  static void call(Widened<Args>... args) {
    function(narrowed<Args>(std::move(args))...);
  }
};

}  // namespace

TORCH_LIBRARY(gradparity_mmcv, m) {
  m.def(
      "deform_conv_forward(Tensor input, Tensor weight, Tensor offset, Tensor(a!) output, Tensor(b!) columns, "
      "Tensor(c!) ones, int kW, int kH, int dW, int dH, int padW, int padH, int dilationW, int dilationH, "
      "int group, int deformable_group, int im2col_step) -> ()",
      &Bound<&deform_conv_forward>::call);
  m.def(
      "deform_conv_backward_input(Tensor input, Tensor offset, Tensor gradOutput, Tensor(a!) gradInput, "
      "Tensor(b!) gradOffset, Tensor weight, Tensor(c!) columns, int kW, int kH, int dW, int dH, int padW, "
      "int padH, int dilationW, int dilationH, int group, int deformable_group, int im2col_step) -> ()",
      &Bound<&deform_conv_backward_input>::call);
  m.def(
      "deform_conv_backward_parameters(Tensor input, Tensor offset, Tensor gradOutput, Tensor(a!) gradWeight, "
      "Tensor(b!) columns, Tensor(c!) ones, int kW, int kH, int dW, int dH, int padW, int padH, int dilationW, "
      "int dilationH, int group, int deformable_group, float scale, int im2col_step) -> ()",
      &Bound<&deform_conv_backward_parameters>::call);
  m.def(
      "modulated_deform_conv_forward(Tensor input, Tensor weight, Tensor bias, Tensor(a!) ones, Tensor offset, "
      "Tensor mask, Tensor(b!) output, Tensor(c!) columns, int kernel_h, int kernel_w, int stride_h, int stride_w, "
      "int pad_h, int pad_w, int dilation_h, int dilation_w, int group, int deformable_group, bool with_bias) -> ()",
      &Bound<&modulated_deform_conv_forward>::call);
  m.def(
      "modulated_deform_conv_backward(Tensor input, Tensor weight, Tensor bias, Tensor(a!) ones, Tensor offset, "
      "Tensor mask, Tensor(b!) columns, Tensor(c!) grad_input, Tensor(d!) grad_weight, Tensor(e!) grad_bias, "
      "Tensor(f!) grad_offset, Tensor(g!) grad_mask, Tensor grad_output, int kernel_h, int kernel_w, int stride_h, "
      "int stride_w, int pad_h, int pad_w, int dilation_h, int dilation_w, int group, int deformable_group, "
      "bool with_bias) -> ()",
      &Bound<&modulated_deform_conv_backward>::call);
  m.def(
      "roi_align_forward(Tensor input, Tensor rois, Tensor(a!) output, Tensor(b!) argmax_y, Tensor(c!) argmax_x, "
      "int aligned_height, int aligned_width, float spatial_scale, int sampling_ratio, int pool_mode, "
      "bool aligned) -> ()",
      &Bound<&roi_align_forward>::call);
  m.def(
      "roi_align_backward(Tensor grad_output, Tensor rois, Tensor argmax_y, Tensor argmax_x, Tensor(a!) grad_input, "
      "int aligned_height, int aligned_width, float spatial_scale, int sampling_ratio, int pool_mode, "
      "bool aligned) -> ()",
      &Bound<&roi_align_backward>::call);
  m.def(
      "roi_pool_forward(Tensor input, Tensor rois, Tensor(a!) output, Tensor(b!) argmax, int pooled_height, "
      "int pooled_width, float spatial_scale) -> ()",
      &Bound<&roi_pool_forward>::call);
  m.def(
      "roi_pool_backward(Tensor grad_output, Tensor rois, Tensor argmax, Tensor(a!) grad_input, int pooled_height, "
      "int pooled_width, float spatial_scale) -> ()",
      &Bound<&roi_pool_backward>::call);
}
