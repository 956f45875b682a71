// RoIAlign on the CPU: mean and largest sample, and the derivatives of both by the image and by the boxes.

#include <torch/library.h>

#include <optional>
#include <tuple>

#include "roi_samples.h"

namespace gradparity {
namespace {

using namespace roi;

// What is optional in a call, checked and contiguous.
struct Extras {
  Tensor winner, first, second;

  Extras(
      const Sizes& s, const Tensor& rois, const std::optional<Tensor>& winner_, const std::optional<Tensor>& first_,
      const std::optional<Tensor>& second_) {
    if (winner_) {
      check_choice("winner", *winner_, s.output());
      winner = winner_->contiguous();
    }
    TORCH_CHECK_VALUE(first_ || !second_, "second_direction must not be given without direction");
    first = checked_direction("direction", first_, rois);
    second = checked_direction("second_direction", second_, rois);
  }

  static Tensor checked_direction(const char* name, const std::optional<Tensor>& value, const Tensor& rois) {
    if (!value) {
      return Tensor();
    }
    check_like_rois(name, *value, rois);
    check_shape(name, *value, rois.sizes());
    return value->contiguous();
  }
  const int64_t* winners() const {
    return winner.defined() ? winner.const_data_ptr<int64_t>() : nullptr;
  }
  template <typename scalar_t>
  Directions<scalar_t> along() const {
    return {
        first.defined() ? first.const_data_ptr<scalar_t>() : nullptr,
        second.defined() ? second.const_data_ptr<scalar_t>() : nullptr};
  }
};

Tensor roi_align(
    const Tensor& input, const Tensor& rois, const std::optional<Tensor>& winner,
    const std::optional<Tensor>& direction, const std::optional<Tensor>& second_direction, IntArrayRef output_size,
    double spatial_scale, int64_t sampling_ratio, bool aligned) {
  const Sizes s = checked_sizes("input", input.sizes(), rois, output_size, false);
  check_like_rois("input", input, rois);
  const Sampling sampling{spatial_scale, sampling_ratio, aligned};
  check_sampling(sampling);
  const Extras extras(s, rois, winner, direction, second_direction);
  const Tensor images = input.contiguous(), boxes = rois.contiguous();
  Tensor out = empty_output(s.output(), input);
  GRADPARITY_DISPATCH(input.scalar_type(), "roi_align", [&] {
    using T = wide_t<scalar_t>;
    checked_scale<T>(spatial_scale);
    const auto along = extras.along<scalar_t>();
    const scalar_t* roi = boxes.const_data_ptr<scalar_t>();
    const auto run = [&](auto order) {
      pool<order.value, T>(
          s, sampling, images.const_data_ptr<scalar_t>(), roi, batch_indices(s, roi), extras.winners(), along,
          out.mutable_data_ptr<scalar_t>());
    };
    along.order() == 0       ? run(std::integral_constant<int, 0>())
        : along.order() == 1 ? run(std::integral_constant<int, 1>())
                             : run(std::integral_constant<int, 2>());
  });
  return out;
}

Tensor roi_align_backward(
    const Tensor& grad, const Tensor& rois, const std::optional<Tensor>& winner,
    const std::optional<Tensor>& direction, const std::optional<Tensor>& second_direction, IntArrayRef input_size,
    IntArrayRef output_size, double spatial_scale, int64_t sampling_ratio, bool aligned) {
  const Sizes s = checked_sizes("input_size", input_size, rois, output_size, false);
  check_like_rois("grad", grad, rois);
  check_shape("grad", grad, s.output());
  const Sampling sampling{spatial_scale, sampling_ratio, aligned};
  check_sampling(sampling);
  const Extras extras(s, rois, winner, direction, second_direction);
  const Tensor grads = grad.contiguous(), boxes = rois.contiguous();
  Tensor out;
  GRADPARITY_DISPATCH(grad.scalar_type(), "roi_align_backward", [&] {
    using T = wide_t<scalar_t>;
    checked_scale<T>(spatial_scale);
    const auto along = extras.along<scalar_t>();
    const scalar_t* roi = boxes.const_data_ptr<scalar_t>();
    const std::vector<int64_t> image = batch_indices(s, roi);
    Tensor sums = zero_sums<scalar_t>(input_size, grad);
    const auto run = [&](auto order) {
      scatter<order.value, T>(
          s, sampling, grads.const_data_ptr<scalar_t>(), roi, image, extras.winners(), along,
          sums.mutable_data_ptr<T>());
    };
    along.order() == 0       ? run(std::integral_constant<int, 0>())
        : along.order() == 1 ? run(std::integral_constant<int, 1>())
                             : run(std::integral_constant<int, 2>());
    out = sums.to(grad.scalar_type());
  });
  return out;
}

// Of one box and channel: adds the gradient by x1, y1, x2, y2 to `sums`.
template <typename T, typename scalar_t>
void add_box_gradient(
    const Sizes& s, const Box<T>& box, const scalar_t* plane, const scalar_t* grad, const int64_t* winner,
    bool is_second_order, std::array<T, 4>& sums) {
  for_bins(s, box, winner, [&](int64_t bin, const BinSamples<T>& of, T divisor) {
    const T share = static_cast<T>(grad[bin]) / divisor;
    for (const auto* y = of.y_begin; y != of.y_end; y++) {
      for (const auto* x = of.x_begin; x != of.x_end; x++) {
        // A clamped sample has slope 0, whatever its pixels hold.
        const Corners<T> value = corners(plane, s.width, *y, *x);
        T by_y = 0, by_x = 0;
        if (!is_second_order) {
          by_y = y->moves ? share * slope_y(x->high_weight, value) : T(0);
          by_x = x->moves ? share * slope_x(y->high_weight, value) : T(0);
        } else if (y->moves && x->moves) {
          const T mixed = share * mixed_slope(value);
          by_y = mixed * x->along[0];
          by_x = mixed * y->along[0];
        }
        sums[0] += by_x * x->by_start;
        sums[1] += by_y * y->by_start;
        sums[2] += by_x * x->by_end;
        sums[3] += by_y * y->by_end;
      }
    }
  });
}

Tensor roi_align_rois_backward(
    const Tensor& grad, const Tensor& input, const Tensor& rois, const std::optional<Tensor>& winner,
    const std::optional<Tensor>& direction, IntArrayRef output_size, double spatial_scale, int64_t sampling_ratio,
    bool aligned) {
  const Sizes s = checked_sizes("input", input.sizes(), rois, output_size, false);
  check_like_rois("input", input, rois);
  check_like_rois("grad", grad, rois);
  check_shape("grad", grad, s.output());
  const Sampling sampling{spatial_scale, sampling_ratio, aligned};
  check_sampling(sampling);
  const Extras extras(s, rois, winner, direction, std::nullopt);
  const Tensor grads = grad.contiguous(), images = input.contiguous(), boxes = rois.contiguous();
  Tensor out = at::zeros({s.boxes, 5}, rois.options().memory_format(c10::MemoryFormat::Contiguous));
  GRADPARITY_DISPATCH(grad.scalar_type(), "roi_align_rois_backward", [&] {
    using T = wide_t<scalar_t>;
    checked_scale<T>(spatial_scale);
    const auto along = extras.along<scalar_t>();
    const scalar_t *roi = boxes.const_data_ptr<scalar_t>(), *pixels = images.const_data_ptr<scalar_t>();
    const scalar_t* source = grads.const_data_ptr<scalar_t>();
    const std::vector<int64_t> image = batch_indices(s, roi);
    scalar_t* result = out.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, s.boxes, 1, [&](int64_t begin, int64_t end) {
      Box<T> box;
      for (int64_t k = begin; k < end; k++) {
        box.fill(s, sampling, roi, k, along);
        std::array<T, 4> total{};
        for (int64_t c = 0; c < s.channels; c++) {
          const int64_t first = (k * s.channels + c) * s.bins();
          std::array<T, 4> sums{};
          add_box_gradient(
              s, box, pixels + s.plane(image[k], c, 0), source + first,
              extras.winners() == nullptr ? nullptr : extras.winners() + first, along.order() == 1, sums);
          for (int64_t i = 0; i < 4; i++) {
            total[i] += sums[i];
          }
        }
        for (int64_t i = 0; i < 4; i++) {
          result[k * 5 + 1 + i] = static_cast<scalar_t>(total[i]);
        }
      }
    });
  });
  return out;
}

// The largest so far. NaN is larger than every number, and of equal ones the first stays.
template <typename T>
struct Largest {
  T value = 0;
  int64_t number = -1;
  bool found = false;

  void consider(T candidate, int64_t candidates_number) {
    if (!found || candidate > value || (std::isnan(candidate) && !std::isnan(value))) {
      value = candidate;
      number = candidates_number;
      found = true;
    }
  }
};

// How many of a bin's samples in the image come before its first one outside, in row-major order; -1 if there is none.
// Those in the image are consecutive along either axis.
template <typename T>
int64_t before_first_outside(const Box<T>& box, int64_t by, int64_t bx) {
  const int64_t rows = box.y.end(by) - box.y.begin(by), columns = box.x.end(bx) - box.x.begin(bx);
  if (rows == 0 || columns == 0 || box.y.firsts[by] > 0 || box.x.firsts[bx] > 0) {
    return 0;
  }
  if (static_cast<double>(columns) < box.x.grid) {
    return columns;
  }
  return static_cast<double>(rows) < box.y.grid ? rows * columns : -1;
}

std::tuple<Tensor, Tensor> roi_align_max(
    const Tensor& input, const Tensor& rois, IntArrayRef output_size, double spatial_scale, int64_t sampling_ratio,
    bool aligned) {
  const Sizes s = checked_sizes("input", input.sizes(), rois, output_size, false);
  check_like_rois("input", input, rois);
  const Sampling sampling{spatial_scale, sampling_ratio, aligned};
  check_sampling(sampling);
  const Tensor images = input.contiguous(), boxes = rois.contiguous();
  Tensor out = empty_output(s.output(), input), winner = at::empty(s.output(), input.options().dtype(at::kLong));
  GRADPARITY_DISPATCH(input.scalar_type(), "roi_align_max", [&] {
    using T = wide_t<scalar_t>;
    checked_scale<T>(spatial_scale);
    const scalar_t *roi = boxes.const_data_ptr<scalar_t>(), *pixels = images.const_data_ptr<scalar_t>();
    const std::vector<int64_t> image = batch_indices(s, roi);
    scalar_t* output = out.mutable_data_ptr<scalar_t>();
    int64_t* winners = winner.mutable_data_ptr<int64_t>();
    for_outputs(s, [&](int64_t begin, int64_t end) {
      Box<T> box;
      for (int64_t i = begin; i < end; i++) {
        const int64_t k = i / s.channels, c = i % s.channels;
        if (i == begin || c == 0) {
          box.fill(s, sampling, roi, k, {});
        }
        std::fill_n(output + i * s.bins(), s.bins(), static_cast<scalar_t>(T(0)));
        std::fill_n(winners + i * s.bins(), s.bins(), int64_t(-1));
        for_bins(s, box, nullptr, [&](int64_t bin, const BinSamples<T>& of, T) {
          const scalar_t* plane = pixels + s.plane(image[k], c, bin);
          const int64_t outside = before_first_outside(box, bin / s.bins_x, bin % s.bins_x);
          Largest<T> largest;
          int64_t number = 0;
          for (const auto* y = of.y_begin; y != of.y_end; y++) {
            for (const auto* x = of.x_begin; x != of.x_end; x++, number++) {
              if (number == outside) {
                largest.consider(T(0), -1);
              }
              largest.consider(weighted(pixel_weights<0>(*y, *x), corners(plane, s.width, *y, *x)), number);
            }
          }
          if (number == outside) {
            largest.consider(T(0), -1);
          }
          output[i * s.bins() + bin] = static_cast<scalar_t>(largest.value);
          winners[i * s.bins() + bin] = largest.number;
        });
      }
    });
  });
  return {out, winner};
}

}  // namespace

TORCH_LIBRARY_IMPL(gradparity, CPU, m) {
  m.impl("roi_align", &roi_align);
  m.impl("roi_align_backward", &roi_align_backward);
  m.impl("roi_align_rois_backward", &roi_align_rois_backward);
  m.impl("roi_align_max", &roi_align_max);
}

}  // namespace gradparity
