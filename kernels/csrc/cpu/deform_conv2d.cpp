// Deformable convolution on the CPU, and its backward: columns of samples, then one matrix product per group.

#include <torch/library.h>

#include <tuple>

#include "deform_conv2d_tiles.h"

namespace gradparity {
namespace {

using namespace deform;

template <typename scalar_t, typename T = wide_t<scalar_t>>
GRADPARITY_CLONES void position_gradient_row(
    const Problem& p, const TapRow<scalar_t>& taps, const std::vector<Segment>& segments, int64_t tap,
    int64_t first_pixel, int64_t pixels, const T* image, const T* grad_columns, scalar_t* grad_y, scalar_t* grad_x,
    scalar_t* grad_mask) {
  const int64_t below = p.padded_width() * p.channels;
  for (int64_t column = 0; column < p.columns; column++) {
    const Sample<T> sample = locate(p, taps, column);
    T tl = 0, tr = 0, bl = 0, br = 0;  // each corner's values, paired with the gradient over the channels
    if (sample.at >= 0) {
      for (const Segment& s : segments) {
        const T* grad = grad_columns + column_at(p, s, pixels, first_pixel + column, tap);
        const T* top = image + sample.at + s.channel;
        const T* bottom = top + below;
        const int64_t right = p.channels;
#pragma omp simd reduction(+ : tl, tr, bl, br)
        for (int64_t c = 0; c < s.channels; c++) {
          tl += grad[c] * top[c];
          tr += grad[c] * top[c + right];
          bl += grad[c] * bottom[c];
          br += grad[c] * bottom[c + right];
        }
      }
    }
    const Corners<T> paired{tl, tr, bl, br};
    if (grad_y != nullptr) {
      grad_y[column] = static_cast<scalar_t>(sample.mask * slope_y(sample.x, paired));
      grad_x[column] = static_cast<scalar_t>(sample.mask * slope_x(sample.y, paired));
    }
    if (grad_mask != nullptr) {
      grad_mask[column] = static_cast<scalar_t>(weighted(corner_weights(sample.y, sample.x), paired));
    }
  }
}

// Adds the gradients of the channels from `begin` to `end` only, which no other thread touches.
template <typename scalar_t, typename T = wide_t<scalar_t>>
GRADPARITY_CLONES void scatter_row(
    const Problem& p, const TapRow<scalar_t>& taps, const std::vector<Segment>& segments, int64_t tap,
    int64_t first_pixel, int64_t pixels, const T* grad_columns, T* grad_image, int64_t begin, int64_t end) {
  const int64_t below = p.padded_width() * p.channels;
  for (int64_t column = 0; column < p.columns; column++) {
    const Sample<T> sample = locate(p, taps, column);
    if (sample.at < 0) {
      continue;
    }
    const Corners<T> w = corner_weights(sample.y, sample.x);
    for (const Segment& s : segments) {
      const int64_t from = std::max(begin - s.channel, int64_t(0));
      const int64_t to = std::min(end - s.channel, s.channels);
      const T* grad = grad_columns + column_at(p, s, pixels, first_pixel + column, tap);
      T* top_left = grad_image + sample.at + s.channel;
      T* top_right = top_left + p.channels;
      T* bottom_left = top_left + below;
      T* bottom_right = bottom_left + p.channels;
      // The four runs are different pixels, so they never overlap.
#pragma omp simd
      for (int64_t c = from; c < to; c++) {
        const T weighed = sample.mask * grad[c];
        top_left[c] += w.top_left * weighed;
        top_right[c] += w.top_right * weighed;
        bottom_left[c] += w.bottom_left * weighed;
        bottom_right[c] += w.bottom_right * weighed;
      }
    }
  }
}

Tensor deform_conv2d(
    const Tensor& input, const Tensor& offset, const Tensor& weight, const std::optional<Tensor>& mask,
    const std::optional<Tensor>& bias, IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, bool closed) {
  const Problem p = checked(input, offset, weight, mask, bias, stride, padding, dilation, closed);
  Tensor out = at::empty(
      {p.images, p.outputs, p.rows, p.columns}, input.options().memory_format(c10::MemoryFormat::Contiguous));
  if (p.images == 0) {
    return out;
  }
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, input.scalar_type(), "deform_conv2d", [&] {
        Work<scalar_t> work(p, input, offset, mask);
        const Tensor kernel = work.kernel_matrix(weight);
        const Tensor shift = bias ? bias->to(work.wide.dtype()).view({p.groups, -1, 1}) : Tensor();
        for (int64_t n = 0; n < p.images; n++) {
          work.load_image(n);
          const Tensor image = out.select(0, n).view({p.groups, p.outputs / p.groups, p.rows * p.columns});
          work.for_tiles([&](int64_t row, int64_t rows) {
            const Tensor columns = work.tile_columns(rows);
            work.fill_columns(n, row, rows, columns);
            const Tensor product = work.product(rows);
            multiply(product, kernel, columns.transpose(1, 2));
            if (shift.defined()) {
              product.add_(shift);
            }
            image.narrow(2, row * p.columns, rows * p.columns).copy_(product);
          });
        }
      });
  return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> deform_conv2d_backward(
    const Tensor& grad, const Tensor& input, const Tensor& offset, const Tensor& weight,
    const std::optional<Tensor>& mask, IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, bool closed,
    const c10::List<bool>& needs) {
  check_needs(needs, 4);
  const Problem p = checked(input, offset, weight, mask, std::nullopt, stride, padding, dilation, closed);
  check_grad(p, grad, input);
  const bool need_mask = needs[3] && mask.has_value();
  Tensor grad_input = result(needs[0], input.sizes(), input);
  Tensor grad_offset = result(needs[1], offset.sizes(), input);
  Tensor grad_weight = result(needs[2], weight.sizes(), input);
  Tensor grad_mask = need_mask ? result(true, mask->sizes(), input) : result(false, {}, input);
  const bool need_columns = needs[0] || needs[1] || need_mask;
  if (p.images == 0 && needs[2]) {
    grad_weight.zero_();
  }
  if (p.images == 0 || (!need_columns && !needs[2])) {
    return {grad_input, grad_offset, grad_weight, grad_mask};
  }

  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, input.scalar_type(), "deform_conv2d_backward", [&] {
        using T = wide_t<scalar_t>;
        Work<scalar_t> work(p, input, offset, mask);
        const Tensor kernel = work.kernel_matrix(weight);
        Tensor grad_kernel = needs[2] ? at::zeros(kernel.sizes(), work.wide) : Tensor();
        Tensor grad_padded = needs[0] ? work.padded_zeros() : Tensor();
        scalar_t* offset_out = needs[1] ? grad_offset.mutable_data_ptr<scalar_t>() : nullptr;
        scalar_t* mask_out = need_mask ? grad_mask.mutable_data_ptr<scalar_t>() : nullptr;
        const T* image = work.padded.template const_data_ptr<T>();
        const int64_t pixels = p.rows * p.columns;

        for (int64_t n = 0; n < p.images; n++) {
          if (needs[1] || needs[2] || need_mask) {
            work.load_image(n);
          }
          if (needs[0] && n > 0) {
            grad_padded.zero_();
          }
          const Tensor grad_image = work.output_matrix(grad, n);
          work.for_tiles([&](int64_t first_row, int64_t rows) {
            const int64_t tile = rows * p.columns;
            const Tensor grad_out = grad_image.narrow(2, first_row * p.columns, tile);
            if (needs[2]) {
              const Tensor columns = work.tile_columns(rows);
              work.fill_columns(n, first_row, rows, columns);
              multiply(grad_kernel, grad_out, columns, /*add=*/true);
            }
            if (!need_columns) {
              return;
            }
            const Tensor columns = work.tile_columns(rows);
            multiply(columns, grad_out.transpose(1, 2), kernel);
            const T* grad_columns = columns.template const_data_ptr<T>();
            if (offset_out != nullptr || mask_out != nullptr) {
              work.for_tap_rows(first_row, rows, [&](int64_t og, int64_t tap, int64_t row) {
                const auto taps = tap_row(p, work.offsets_of(n), work.masks_of(n), og, tap, row);
                const int64_t at = ((n * p.offset_groups + og) * p.taps() + tap) * pixels + row * p.columns;
                const int64_t at_y = at + ((n * p.offset_groups + og) * p.taps() + tap) * pixels;
                position_gradient_row<scalar_t>(
                    p, taps, work.segments[og], tap, (row - first_row) * p.columns, tile, image, grad_columns,
                    offset_out == nullptr ? nullptr : offset_out + at_y,
                    offset_out == nullptr ? nullptr : offset_out + at_y + pixels,
                    mask_out == nullptr ? nullptr : mask_out + at);
              });
            }
            if (needs[0]) {
              T* target = grad_padded.template mutable_data_ptr<T>();
              const int64_t grain = std::max<int64_t>(1, kGrain / (tile * p.taps()));
              at::parallel_for(0, p.channels, grain, [&](int64_t begin, int64_t end) {
                for (int64_t og = 0; og < p.offset_groups; og++) {
                  for (int64_t tap = 0; tap < p.taps(); tap++) {
                    for (int64_t row = first_row; row < first_row + rows; row++) {
                      const auto taps = tap_row(p, work.offsets_of(n), work.masks_of(n), og, tap, row);
                      scatter_row<scalar_t>(
                          p, taps, work.segments[og], tap, (row - first_row) * p.columns, tile, grad_columns, target,
                          begin, end);
                    }
                  }
                }
              });
            }
          });
          if (needs[0]) {
            grad_input.select(0, n).copy_(work.inner(grad_padded).permute({2, 0, 1}));
          }
        }
        if (needs[2]) {
          work.copy_kernel(grad_kernel, grad_weight);
        }
      });
  return {grad_input, grad_offset, grad_weight, grad_mask};
}

}  // namespace

TORCH_LIBRARY_IMPL(gradparity, CPU, m) {
  m.impl("deform_conv2d", &deform_conv2d);
  m.impl("deform_conv2d_backward", &deform_conv2d_backward);
}

}  // namespace gradparity
