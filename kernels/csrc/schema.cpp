// The operators' names and arguments, for every device. Autograd and fake tensors are registered in Python.
#include <ATen/core/stack.h>
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
  // Without winner the mean of a bin's samples, with it the sample that it names, as roi_align_max numbers them.
  // With one direction (K, 5) the derivative along it as the boxes move, with two the second derivative.
  m.def(
      "roi_align(Tensor input, Tensor rois, Tensor? winner, Tensor? direction, Tensor? second_direction, "
      "SymInt[2] output_size, float spatial_scale, int sampling_ratio, bool aligned) -> Tensor");
  // The transpose of roi_align, which is linear in its input.
  m.def(
      "roi_align_backward(Tensor grad, Tensor rois, Tensor? winner, Tensor? direction, Tensor? second_direction, "
      "SymInt[4] input_size, SymInt[2] output_size, float spatial_scale, int sampling_ratio, bool aligned) -> Tensor");
  // The gradient of <grad, roi_align> by rois.
  m.def(
      "roi_align_rois_backward(Tensor grad, Tensor input, Tensor rois, Tensor? winner, Tensor? direction, "
      "SymInt[2] output_size, float spatial_scale, int sampling_ratio, bool aligned) -> Tensor");
  // The winner is the number, in row-major order, of the largest among the bin's samples in the image; -1 where
  // none of these is.
  m.def(
      "roi_align_max(Tensor input, Tensor rois, SymInt[2] output_size, float spatial_scale, int sampling_ratio, "
      "bool aligned) -> (Tensor output, Tensor winner)");
  // argmax is y*W + x of the largest pixel, -1 for an empty bin.
  m.def(
      "roi_pool(Tensor input, Tensor rois, SymInt[2] output_size, float spatial_scale) -> "
      "(Tensor output, Tensor argmax)");
  m.def("roi_pool_gather(Tensor input, Tensor rois, Tensor argmax) -> Tensor");
  m.def("roi_pool_scatter(Tensor grad, Tensor rois, Tensor argmax, SymInt[4] input_size) -> Tensor");
  m.def(
      "ps_roi_align(Tensor input, Tensor rois, SymInt[2] output_size, float spatial_scale, int sampling_ratio) -> "
      "Tensor");
  m.def(
      "ps_roi_align_backward(Tensor grad, Tensor rois, SymInt[4] input_size, SymInt[2] output_size, "
      "float spatial_scale, int sampling_ratio) -> Tensor");
  m.def("ps_roi_pool(Tensor input, Tensor rois, SymInt[2] output_size, float spatial_scale) -> Tensor");
  m.def(
      "ps_roi_pool_backward(Tensor grad, Tensor rois, SymInt[4] input_size, SymInt[2] output_size, "
      "float spatial_scale) -> Tensor");
}

namespace {

// Stands where an operator has no kernel, and names the argument that there is none for.
void refuse(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto values = torch::jit::last(*stack, arguments.size());
  for (size_t i = 0; i < arguments.size(); i++) {
    if (values[i].isTensor() && values[i].toTensor().defined()) {
      const at::Tensor& value = values[i].toTensor();
      const auto kind = c10::legacyExtractDispatchKey(value.key_set());
      TORCH_CHECK_VALUE(
          value.is_cpu() || value.is_meta(), arguments[i].name(), " must be on the CPU, got ", value.device());
      TORCH_CHECK_TYPE(
          kind == c10::DispatchKey::CPU || kind == c10::DispatchKey::Meta, arguments[i].name(),
          " must be a strided tensor, got one of ", kind);
    }
  }
  TORCH_CHECK(false, op.schema().name(), " has no kernel for these tensors");
}

void refuse_all(torch::Library& m) {
  for (const char* name :
       {"deform_conv2d", "deform_conv2d_backward", "deform_conv2d_double_backward", "roi_align", "roi_align_backward",
        "roi_align_rois_backward", "roi_align_max", "roi_pool", "roi_pool_gather", "roi_pool_scatter", "ps_roi_align",
        "ps_roi_align_backward", "ps_roi_pool", "ps_roi_pool_backward"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&refuse>());
  }
}

}  // namespace

// Every backend but nested tensors.
TORCH_LIBRARY_IMPL(gradparity, CompositeExplicitAutograd, m) {
  refuse_all(m);
}
TORCH_LIBRARY_IMPL(gradparity, NestedTensorCPU, m) {
  refuse_all(m);
}
