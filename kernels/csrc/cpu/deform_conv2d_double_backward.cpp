// Second order of deformable convolution on the CPU, analytically, over all inputs at once.
//
// With grad_columns = weight^T . grad and the sampled columns, the pairing of the gradients with their cotangents is
//   L = <grad, weight . tangent + grad_grad_weight . columns>,
// where `tangent` is how the columns change along the cotangents of input, offset and mask,
//   tangent = mask * B(gg_input) + (mask * (gg_y * dB/dy + gg_x * dB/dx) + gg_mask * B)(input).
// So a corner of weight w has the coefficients
//   direct = mask * w   and   moved = mask * (gg_y * dw/dy + gg_x * dw/dx) + gg_mask * w,
// and L's gradients are sums of these over channels, taps and pixels. Of the second derivatives of B within a cell
// only the mixed one, d2B/dydx, is not zero.

#include <torch/library.h>

#include <tuple>

#include "deform_conv2d_tiles.h"

namespace gradparity {
namespace {

using namespace deform;

using OptionalTensor = std::optional<Tensor>;

// Cotangents of one tap of one offset group along one output row; null where absent.
template <typename scalar_t>
struct CotangentRow {
  const scalar_t* y;
  const scalar_t* x;
  const scalar_t* mask;
};

template <typename T>
struct Cotangent {
  T y, x, mask;
};

template <typename scalar_t, typename T = wide_t<scalar_t>>
inline Cotangent<T> at_column(const CotangentRow<scalar_t>& row, int64_t column) {
  return {
      row.y == nullptr ? T(0) : static_cast<T>(row.y[column]), row.x == nullptr ? T(0) : static_cast<T>(row.x[column]),
      row.mask == nullptr ? T(0) : static_cast<T>(row.mask[column])};
}

template <typename T>
inline Corners<T> direct_weights(const Sample<T>& s) {
  const Corners<T> w = corner_weights(s.y, s.x);
  return {s.mask * w.top_left, s.mask * w.top_right, s.mask * w.bottom_left, s.mask * w.bottom_right};
}

template <typename T>
inline Corners<T> moved_weights(const Sample<T>& s, const Cotangent<T>& along) {
  const Corners<T> w = corner_weights(s.y, s.x);
  const T y = s.mask * along.y, x = s.mask * along.x;
  return {
      along.mask * w.top_left - y * (1 - s.x) - x * (1 - s.y), along.mask * w.top_right - y * s.x + x * (1 - s.y),
      along.mask * w.bottom_left + y * (1 - s.x) - x * s.y, along.mask * w.bottom_right + y * s.x + x * s.y};
}

// Fills `tangent`; `cotangent_image` may be null.
template <typename scalar_t, typename T = wide_t<scalar_t>>
GRADPARITY_CLONES void tangent_row(
    const Problem& p, const TapRow<scalar_t>& taps, const CotangentRow<scalar_t>& cotangents,
    const std::vector<Segment>& segments, int64_t tap, int64_t first_pixel, int64_t pixels, const T* image,
    const T* cotangent_image, T* tangent) {
  const int64_t below = p.padded_width() * p.channels, right = p.channels;
  for (int64_t column = 0; column < p.columns; column++) {
    const Sample<T> sample = locate(p, taps, column);
    const Corners<T> direct = direct_weights(sample);
    const Corners<T> moved = moved_weights(sample, at_column(cotangents, column));
    for (const Segment& s : segments) {
      T* out = tangent + column_at(p, s, pixels, first_pixel + column, tap);
      if (sample.at < 0) {
        std::fill_n(out, s.channels, T(0));
        continue;
      }
      const T* top = image + sample.at + s.channel;
      const T* bottom = top + below;
#pragma omp simd
      for (int64_t c = 0; c < s.channels; c++) {
        out[c] = moved.top_left * top[c] + moved.top_right * top[c + right] + moved.bottom_left * bottom[c] +
            moved.bottom_right * bottom[c + right];
      }
      if (cotangent_image == nullptr) {
        continue;
      }
      const T* other_top = cotangent_image + sample.at + s.channel;
      const T* other_bottom = other_top + below;
#pragma omp simd
      for (int64_t c = 0; c < s.channels; c++) {
        out[c] += direct.top_left * other_top[c] + direct.top_right * other_top[c + right] +
            direct.bottom_left * other_bottom[c] + direct.bottom_right * other_bottom[c + right];
      }
    }
  }
}

// The corners' values of an image, paired with the gradient of the columns over the channels.
template <typename T>
inline void pair_corners(const T* grad, const T* top, int64_t right, int64_t below, int64_t channels, Corners<T>& sum) {
  const T* bottom = top + below;
  T tl = 0, tr = 0, bl = 0, br = 0;
#pragma omp simd reduction(+ : tl, tr, bl, br)
  for (int64_t c = 0; c < channels; c++) {
    tl += grad[c] * top[c];
    tr += grad[c] * top[c + right];
    bl += grad[c] * bottom[c];
    br += grad[c] * bottom[c + right];
  }
  sum.top_left += tl;
  sum.top_right += tr;
  sum.bottom_left += bl;
  sum.bottom_right += br;
}

// Where the gradients of offset and mask go; `grad_columns`, `cotangent_columns` and `cotangent_image` may be null.
template <typename scalar_t, typename T = wide_t<scalar_t>>
GRADPARITY_CLONES void second_position_gradient_row(
    const Problem& p, const TapRow<scalar_t>& taps, const CotangentRow<scalar_t>& cotangents,
    const std::vector<Segment>& segments, int64_t tap, int64_t first_pixel, int64_t pixels, const T* image,
    const T* cotangent_image, const T* grad_columns, const T* cotangent_columns, scalar_t* grad_y, scalar_t* grad_x,
    scalar_t* grad_mask) {
  const int64_t below = p.padded_width() * p.channels, right = p.channels;
  for (int64_t column = 0; column < p.columns; column++) {
    const Sample<T> sample = locate(p, taps, column);
    const Cotangent<T> along = at_column(cotangents, column);
    Corners<T> direct{0, 0, 0, 0}, moved{0, 0, 0, 0};
    if (sample.at >= 0) {
      for (const Segment& s : segments) {
        const int64_t from = column_at(p, s, pixels, first_pixel + column, tap), to = sample.at + s.channel;
        if (cotangent_columns != nullptr) {
          pair_corners(cotangent_columns + from, image + to, right, below, s.channels, direct);
        }
        if (grad_columns != nullptr) {
          pair_corners(grad_columns + from, image + to, right, below, s.channels, moved);
          if (cotangent_image != nullptr) {
            pair_corners(grad_columns + from, cotangent_image + to, right, below, s.channels, direct);
          }
        }
      }
    }
    const T dy = slope_y(sample.x, moved), dx = slope_x(sample.y, moved), dydx = mixed_slope(moved);
    if (grad_y != nullptr) {
      grad_y[column] =
          static_cast<scalar_t>(sample.mask * (slope_y(sample.x, direct) + along.x * dydx) + along.mask * dy);
      grad_x[column] =
          static_cast<scalar_t>(sample.mask * (slope_x(sample.y, direct) + along.y * dydx) + along.mask * dx);
    }
    if (grad_mask != nullptr) {
      grad_mask[column] = static_cast<scalar_t>(
          weighted(corner_weights(sample.y, sample.x), direct) + (along.y * dy + along.x * dx));
    }
  }
}

// Adds weights * grad to the four corners, of the channels from `begin` to `end` only.
template <typename T>
inline void scatter_corners(
    const Corners<T>& weights, const T* grad, T* top_left, int64_t right, int64_t below, int64_t begin, int64_t end) {
  T* top_right = top_left + right;
  T* bottom_left = top_left + below;
  T* bottom_right = bottom_left + right;
  // The four runs are different pixels, so they never overlap.
#pragma omp simd
  for (int64_t c = begin; c < end; c++) {
    top_left[c] += weights.top_left * grad[c];
    top_right[c] += weights.top_right * grad[c];
    bottom_left[c] += weights.bottom_left * grad[c];
    bottom_right[c] += weights.bottom_right * grad[c];
  }
}

template <typename scalar_t, typename T = wide_t<scalar_t>>
GRADPARITY_CLONES void second_scatter_row(
    const Problem& p, const TapRow<scalar_t>& taps, const CotangentRow<scalar_t>& cotangents,
    const std::vector<Segment>& segments, int64_t tap, int64_t first_pixel, int64_t pixels, const T* grad_columns,
    const T* cotangent_columns, T* grad_image, int64_t begin, int64_t end) {
  const int64_t below = p.padded_width() * p.channels, right = p.channels;
  for (int64_t column = 0; column < p.columns; column++) {
    const Sample<T> sample = locate(p, taps, column);
    if (sample.at < 0) {
      continue;
    }
    const Corners<T> direct = direct_weights(sample);
    const Corners<T> moved = moved_weights(sample, at_column(cotangents, column));
    for (const Segment& s : segments) {
      const int64_t first = std::max(begin - s.channel, int64_t(0)), last = std::min(end - s.channel, s.channels);
      const int64_t from = column_at(p, s, pixels, first_pixel + column, tap);
      T* target = grad_image + sample.at + s.channel;
      if (cotangent_columns != nullptr) {
        scatter_corners(direct, cotangent_columns + from, target, right, below, first, last);
      }
      if (grad_columns != nullptr) {
        scatter_corners(moved, grad_columns + from, target, right, below, first, last);
      }
    }
  }
}

void check_cotangent(const char* name, const OptionalTensor& cotangent, const Tensor& of) {
  if (cotangent) {
    check_sizes(name, *cotangent, of, of.sizes());
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> deform_conv2d_double_backward(
    const OptionalTensor& grad_grad_input, const OptionalTensor& grad_grad_offset,
    const OptionalTensor& grad_grad_weight, const OptionalTensor& grad_grad_mask, const OptionalTensor& grad,
    const Tensor& input, const Tensor& offset, const Tensor& weight, const OptionalTensor& mask, IntArrayRef stride,
    IntArrayRef padding, IntArrayRef dilation, bool closed, const c10::List<bool>& needs) {
  check_needs(needs, 5);
  const Problem p = checked(input, offset, weight, mask, std::nullopt, stride, padding, dilation, closed);
  check_cotangent("grad_grad_input", grad_grad_input, input);
  check_cotangent("grad_grad_offset", grad_grad_offset, offset);
  check_cotangent("grad_grad_weight", grad_grad_weight, weight);
  TORCH_CHECK_VALUE(mask || !grad_grad_mask, "grad_grad_mask must be absent when mask is");
  if (mask) {
    check_cotangent("grad_grad_mask", grad_grad_mask, *mask);
  }
  const bool need_input = needs[1], need_offset = needs[2], need_weight = needs[3];
  const bool need_mask = needs[4] && mask.has_value();
  const bool need_position = need_offset || need_mask;
  const bool need_values = need_input || need_weight || need_position;
  TORCH_CHECK_VALUE(grad || !need_values, "grad must be given for every result but the first");
  if (grad) {
    check_grad(p, *grad, input);
  }

  const std::array<int64_t, 4> output_sizes{p.images, p.outputs, p.rows, p.columns};
  Tensor grad_grad = result(needs[0], output_sizes, input);
  Tensor grad_input = result(need_input, input.sizes(), input);
  Tensor grad_offset = result(need_offset, offset.sizes(), input);
  Tensor grad_weight = result(need_weight, weight.sizes(), input);
  Tensor grad_mask = need_mask ? result(true, mask->sizes(), input) : result(false, {}, input);
  const auto results = [&] { return std::make_tuple(grad_grad, grad_input, grad_offset, grad_weight, grad_mask); };
  if (p.images == 0 && need_weight) {
    grad_weight.zero_();
  }
  if (p.images == 0 || (!needs[0] && !need_values)) {
    return results();
  }
  const bool moves = grad_grad_input || grad_grad_offset || grad_grad_mask;
  const bool need_tangent = moves && (needs[0] || need_weight);
  const bool need_columns = grad_grad_weight && needs[0];
  const bool need_grad_columns = moves && (need_input || need_position);
  const bool need_cotangent_columns = grad_grad_weight && (need_input || need_position);

  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, input.scalar_type(), "deform_conv2d_double_backward", [&] {
        using T = wide_t<scalar_t>;
        Work<scalar_t> work(p, input, offset, mask);
        const Tensor kernel = work.kernel_matrix(weight);
        const Tensor cotangent_kernel = grad_grad_weight ? work.kernel_matrix(*grad_grad_weight) : Tensor();
        Tensor grad_kernel = need_weight ? at::zeros(kernel.sizes(), work.wide) : Tensor();
        Tensor grad_padded = need_input ? work.padded_zeros() : Tensor();
        Tensor cotangent_padded = grad_grad_input ? work.padded_zeros() : Tensor();
        const Tensor grad_room = need_grad_columns ? work.buffer() : Tensor();
        const Tensor cotangent_room = need_cotangent_columns ? work.buffer() : Tensor();
        const Tensor cotangent_offset = grad_grad_offset ? grad_grad_offset->contiguous() : Tensor();
        const Tensor cotangent_mask = grad_grad_mask ? grad_grad_mask->contiguous() : Tensor();

        const auto data = [](const Tensor& tensor) {
          return tensor.defined() ? tensor.template const_data_ptr<T>() : nullptr;
        };
        const auto own_data = [](const Tensor& tensor) {
          return tensor.defined() ? tensor.template const_data_ptr<scalar_t>() : nullptr;
        };
        const T* image = data(work.padded);
        const T* cotangent_image = data(cotangent_padded);
        const scalar_t* offset_in = own_data(cotangent_offset);
        const scalar_t* mask_in = own_data(cotangent_mask);
        scalar_t* offset_out = need_offset ? grad_offset.mutable_data_ptr<scalar_t>() : nullptr;
        scalar_t* mask_out = need_mask ? grad_mask.mutable_data_ptr<scalar_t>() : nullptr;
        const int64_t pixels = p.rows * p.columns;

        for (int64_t n = 0; n < p.images; n++) {
          work.load_image(n);
          if (grad_grad_input) {
            work.load(*grad_grad_input, n, cotangent_padded);
          }
          if (need_input && n > 0) {
            grad_padded.zero_();
          }
          const Tensor grad_matrix = need_values ? work.output_matrix(*grad, n) : Tensor();
          // Where the row of a tap starts in a mask-like tensor; in an offset-like one, y's starts at twice the tap.
          const auto tap_at = [&](int64_t og, int64_t tap) { return (n * p.offset_groups + og) * p.taps() + tap; };
          const auto cotangents_of = [&](int64_t og, int64_t tap, int64_t row) {
            const int64_t at = tap_at(og, tap), start = row * p.columns;
            const scalar_t* y = offset_in == nullptr ? nullptr : offset_in + 2 * at * pixels + start;
            return CotangentRow<scalar_t>{
                y, y == nullptr ? nullptr : y + pixels, mask_in == nullptr ? nullptr : mask_in + at * pixels + start};
          };
          work.for_tiles([&](int64_t first_row, int64_t rows) {
            const int64_t tile = rows * p.columns;
            const Tensor grad_out = need_values ? grad_matrix.narrow(2, first_row * p.columns, tile) : Tensor();
            const auto taps_of = [&](int64_t og, int64_t tap, int64_t row) {
              return tap_row(p, work.offsets_of(n), work.masks_of(n), og, tap, row);
            };
            const Tensor columns = work.tile_columns(rows);
            Tensor product;
            if (need_tangent) {
              T* tangent = columns.template mutable_data_ptr<T>();
              work.for_tap_rows(first_row, rows, [&](int64_t og, int64_t tap, int64_t row) {
                tangent_row<scalar_t>(
                    p, taps_of(og, tap, row), cotangents_of(og, tap, row), work.segments[og], tap,
                    (row - first_row) * p.columns, tile, image, cotangent_image, tangent);
              });
              if (need_weight) {
                multiply(grad_kernel, grad_out, columns, /*add=*/true);
              }
              if (needs[0]) {
                product = work.product(rows);
                multiply(product, kernel, columns.transpose(1, 2));
              }
            }
            if (need_columns) {
              work.fill_columns(n, first_row, rows, columns);
              const bool add = product.defined();
              product = add ? product : work.product(rows);
              multiply(product, cotangent_kernel, columns.transpose(1, 2), add);
            }
            if (needs[0]) {
              const Tensor target = grad_grad.select(0, n)
                                        .view({p.groups, p.outputs / p.groups, pixels})
                                        .narrow(2, first_row * p.columns, tile);
              product.defined() ? target.copy_(product) : target.zero_();
            }
            if (!need_input && !need_position) {
              return;
            }
            Tensor grad_columns, cotangent_columns;
            if (need_grad_columns) {
              grad_columns = work.tile_of(grad_room, rows);
              multiply(grad_columns, grad_out.transpose(1, 2), kernel);
            }
            if (need_cotangent_columns) {
              cotangent_columns = work.tile_of(cotangent_room, rows);
              multiply(cotangent_columns, grad_out.transpose(1, 2), cotangent_kernel);
            }
            if (need_position) {
              work.for_tap_rows(first_row, rows, [&](int64_t og, int64_t tap, int64_t row) {
                const int64_t at = tap_at(og, tap), start = row * p.columns;
                scalar_t* y = need_offset ? offset_out + 2 * at * pixels + start : nullptr;
                second_position_gradient_row<scalar_t>(
                    p, taps_of(og, tap, row), cotangents_of(og, tap, row), work.segments[og], tap,
                    (row - first_row) * p.columns, tile, image, cotangent_image, data(grad_columns),
                    data(cotangent_columns), y, need_offset ? y + pixels : nullptr,
                    need_mask ? mask_out + at * pixels + start : nullptr);
              });
            }
            if (need_input) {
              T* target = grad_padded.template mutable_data_ptr<T>();
              const int64_t grain = std::max<int64_t>(1, kGrain / (tile * p.taps()));
              at::parallel_for(0, p.channels, grain, [&](int64_t begin, int64_t end) {
                for (int64_t og = 0; og < p.offset_groups; og++) {
                  for (int64_t tap = 0; tap < p.taps(); tap++) {
                    for (int64_t row = first_row; row < first_row + rows; row++) {
                      second_scatter_row<scalar_t>(
                          p, taps_of(og, tap, row), cotangents_of(og, tap, row), work.segments[og], tap,
                          (row - first_row) * p.columns, tile, data(grad_columns), data(cotangent_columns), target,
                          begin, end);
                    }
                  }
                }
              });
            }
          });
          if (need_input) {
            grad_input.select(0, n).copy_(work.inner(grad_padded).permute({2, 0, 1}));
          }
        }
        if (need_weight) {
          work.copy_kernel(grad_kernel, grad_weight);
        }
      });
  return results();
}

}  // namespace

TORCH_LIBRARY_IMPL(gradparity, CPU, m) {
  m.impl("deform_conv2d_double_backward", &deform_conv2d_double_backward);
}

}  // namespace gradparity
