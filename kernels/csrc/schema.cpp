// The operators' names and arguments, for every device. Autograd and fake tensors are registered in Python.
#include <torch/library.h>

TORCH_LIBRARY(gradparity, m) {
  m.def(
      "deform_conv2d(Tensor input, Tensor offset, Tensor weight, Tensor? mask, Tensor? bias, SymInt[2] stride, "
      "SymInt[2] padding, SymInt[2] dilation, bool closed) -> Tensor");
  // A gradient that isn't needed comes back empty.
  m.def(
      "deform_conv2d_backward(Tensor grad, Tensor input, Tensor offset, Tensor weight, Tensor? mask, "
      "SymInt[2] stride, SymInt[2] padding, SymInt[2] dilation, bool closed, bool[4] needs) -> "
      "(Tensor grad_input, Tensor grad_offset, Tensor grad_weight, Tensor grad_mask)");
  // Cotangents of the four gradients come first; one that is absent counts as zero. grad may be absent when only
  // the first result is needed, which does not depend on it: the derivative of deform_conv2d along the cotangents.
  m.def(
      "deform_conv2d_double_backward(Tensor? grad_grad_input, Tensor? grad_grad_offset, Tensor? grad_grad_weight, "
      "Tensor? grad_grad_mask, Tensor? grad, Tensor input, Tensor offset, Tensor weight, Tensor? mask, "
      "SymInt[2] stride, SymInt[2] padding, SymInt[2] dilation, bool closed, bool[5] needs) -> "
      "(Tensor grad_grad, Tensor grad_input, Tensor grad_offset, Tensor grad_weight, Tensor grad_mask)");
  m.def(
      "roi_align(Tensor input, Tensor rois, SymInt[2] output_size, float spatial_scale, int sampling_ratio, "
      "bool aligned) -> Tensor");
  m.def(
      "roi_align_backward(Tensor grad, Tensor rois, SymInt[4] input_size, SymInt[2] output_size, "
      "float spatial_scale, int sampling_ratio, bool aligned) -> Tensor");
}
