// The samples of RoIAlign and PSRoIAlign on the CPU. They form a grid, so that they are worked out per axis, once per
// box; the mean over them and its transpose.
#pragma once

#include "../roi_align.h"
#include "roi_pooling.h"

namespace gradparity::roi {

struct Sampling {
  double spatial_scale;
  int64_t sampling_ratio;
  bool aligned;
};

inline void check_sampling(const Sampling& sampling) {
  // A bin costs its square.
  TORCH_CHECK_VALUE(
      sampling.sampling_ratio <= 1024, "sampling_ratio must be at most 1024, got ", sampling.sampling_ratio);
}

// Directions (K, 5) that derivatives are taken in as the boxes move; null where there is none.
template <typename scalar_t>
struct Directions {
  const scalar_t* first = nullptr;
  const scalar_t* second = nullptr;

  int order() const {
    return second != nullptr ? 2 : first != nullptr ? 1 : 0;
  }
};

// The samples of each bin along one axis that lie in the image. They are consecutive ones.
template <typename T>
struct Axis {
  std::vector<Sample<T>> samples;
  std::vector<int64_t> ends;   // of each bin in `samples`
  std::vector<double> firsts;  // the number of each bin's first sample in the image
  double grid;

  void fill(const BoxAxis<T>& box, int64_t length, T spatial_scale) {
    samples.clear();
    ends.clear();
    firsts.clear();
    grid = static_cast<double>(box.grid);
    for (int64_t bin = 0; bin < box.bins; bin++) {
      const SampleRange range = samples_near_image(box, bin, length);
      const size_t before = samples.size();
      firsts.push_back(0);
      for (int64_t i = 0; i < range.count; i++) {
        const double number = range.first + static_cast<double>(i);
        const T position = sample_position(box, bin, number);
        if (sample_counts(position, length)) {
          if (samples.size() == before) {
            firsts.back() = number;
          }
          samples.push_back(clamped_sample(position, length));
          set_motion(samples.back(), box, bin, number, spatial_scale);
        }
      }
      ends.push_back(static_cast<int64_t>(samples.size()));
    }
  }
  // Positions are linear in the box's ends, and so is what they move by.
  void move(int number, T start, T end) {
    for (auto& sample : samples) {
      sample.along[number] = sample.by_start * start + sample.by_end * end;
    }
  }
  const Sample<T>* begin(int64_t bin) const {
    return samples.data() + (bin == 0 ? 0 : ends[bin - 1]);
  }
  const Sample<T>* end(int64_t bin) const {
    return samples.data() + ends[bin];
  }
};

// The samples of one bin: all of them, or the one that is the winner, none if that is -1.
template <typename T>
struct BinSamples {
  const Sample<T>*y_begin, *y_end, *x_begin, *x_end;
};

template <typename T>
struct Box {
  Axis<T> y, x;
  T count;  // of samples in a bin, those outside included; 0 where the mean makes no sense

  template <typename scalar_t>
  void fill(
      const Sizes& s, const Sampling& sampling, const scalar_t* rois, int64_t k, const Directions<scalar_t>& along) {
    const T scale = static_cast<T>(sampling.spatial_scale);
    const auto axis = [&](int64_t low, int64_t high, int64_t bins) {
      return box_axis(
          static_cast<T>(rois[k * 5 + low]), static_cast<T>(rois[k * 5 + high]), bins, scale, sampling.sampling_ratio,
          sampling.aligned);
    };
    const BoxAxis<T> rows = axis(2, 4, s.bins_y), columns = axis(1, 3, s.bins_x);
    count = rows.grid * columns.grid;
    if (!count_is_usable(count)) {
      count = T(0);
      return;
    }
    y.fill(rows, s.height, scale);
    x.fill(columns, s.width, scale);
    int number = 0;
    for (const scalar_t* direction : {along.first, along.second}) {
      if (direction != nullptr) {
        const scalar_t* d = direction + k * 5;
        y.move(number, static_cast<T>(d[2]), static_cast<T>(d[4]));
        x.move(number, static_cast<T>(d[1]), static_cast<T>(d[3]));
      }
      number++;
    }
  }
  BinSamples<T> all_of(int64_t by, int64_t bx) const {
    return {y.begin(by), y.end(by), x.begin(bx), x.end(bx)};
  }
  BinSamples<T> winner_of(int64_t by, int64_t bx, int64_t winner) const {
    const int64_t columns = count == T(0) ? 0 : x.end(bx) - x.begin(bx);
    const int64_t available = columns == 0 ? 0 : (y.end(by) - y.begin(by)) * columns;
    TORCH_CHECK_VALUE(
        winner >= -1 && winner < available, "winner must hold the number of one of a bin's ", available,
        " samples in the image, or -1, got ", winner);
    if (winner < 0) {
      return {nullptr, nullptr, nullptr, nullptr};
    }
    const Sample<T>*row = y.begin(by) + winner / columns, *column = x.begin(bx) + winner % columns;
    return {row, row + 1, column, column + 1};
  }
};

template <typename T, typename scalar_t>
Corners<T> corners(const scalar_t* plane, int64_t width, const Sample<T>& y, const Sample<T>& x) {
  const scalar_t *low = plane + y.low * width, *high = plane + y.high * width;
  return {
      static_cast<T>(low[x.low]), static_cast<T>(low[x.high]), static_cast<T>(high[x.low]),
      static_cast<T>(high[x.high])};
}

// Calls body(by, bx, samples, divisor) for every bin of a box and channel: all samples and their number without
// `winner`, which points to the bins' winners.
template <typename T, typename Body>
void for_bins(const Sizes& s, const Box<T>& box, const int64_t* winner, const Body& body) {
  for (int64_t by = 0; by < s.bins_y; by++) {
    for (int64_t bx = 0; bx < s.bins_x; bx++) {
      const int64_t bin = by * s.bins_x + bx;
      if (winner != nullptr) {
        body(bin, box.winner_of(by, bx, winner[bin]), T(1));
      } else if (box.count != T(0)) {
        body(bin, box.all_of(by, bx), box.count);
      }
    }
  }
}

template <int order, typename T, typename scalar_t>
void pool(
    const Sizes& s, const Sampling& sampling, const scalar_t* images, const scalar_t* rois,
    const std::vector<int64_t>& image, const int64_t* winner, const Directions<scalar_t>& along, scalar_t* output) {
  for_outputs(s, [&](int64_t begin, int64_t end) {
    Box<T> box;
    for (int64_t i = begin; i < end; i++) {
      const int64_t k = i / s.channels, c = i % s.channels;
      if (i == begin || c == 0) {
        box.fill(s, sampling, rois, k, along);
      }
      scalar_t* target = output + i * s.bins();
      std::fill_n(target, s.bins(), static_cast<scalar_t>(T(0)));
      const int64_t* winners = winner == nullptr ? nullptr : winner + i * s.bins();
      for_bins(s, box, winners, [&](int64_t bin, const BinSamples<T>& of, T divisor) {
        const scalar_t* plane = images + s.plane(image[k], c, bin);
        T sum = 0;
        for (const auto* y = of.y_begin; y != of.y_end; y++) {
          for (const auto* x = of.x_begin; x != of.x_end; x++) {
            sum += weighted(pixel_weights<order>(*y, *x), corners(plane, s.width, *y, *x));
          }
        }
        target[bin] = static_cast<scalar_t>(sum / divisor);
      });
    }
  });
}

template <int order, typename T, typename scalar_t>
void scatter(
    const Sizes& s, const Sampling& sampling, const scalar_t* grad, const scalar_t* rois,
    const std::vector<int64_t>& image, const int64_t* winner, const Directions<scalar_t>& along, T* sums) {
  for_channels(s, [&](int64_t begin, int64_t end) {
    Box<T> box;
    for (int64_t k = 0; k < s.boxes; k++) {
      box.fill(s, sampling, rois, k, along);
      for (int64_t c = begin; c < end; c++) {
        const int64_t first = (k * s.channels + c) * s.bins();
        const int64_t* winners = winner == nullptr ? nullptr : winner + first;
        for_bins(s, box, winners, [&](int64_t bin, const BinSamples<T>& of, T divisor) {
          T* plane = sums + s.plane(image[k], c, bin);
          const T share = static_cast<T>(grad[first + bin]) / divisor;
          for (const auto* y = of.y_begin; y != of.y_end; y++) {
            T *low = plane + y->low * s.width, *high = plane + y->high * s.width;
            for (const auto* x = of.x_begin; x != of.x_end; x++) {
              const Corners<T> w = pixel_weights<order>(*y, *x);
              low[x->low] += w.top_left * share;
              low[x->high] += w.top_right * share;
              high[x->low] += w.bottom_left * share;
              high[x->high] += w.bottom_right * share;
            }
          }
        });
      }
    }
  });
}

}  // namespace gradparity::roi
