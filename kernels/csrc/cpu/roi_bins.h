// The bins of RoIPool and PSRoIPool on the CPU, worked out once per box.
#pragma once

#include "../roi_pool.h"
#include "roi_pooling.h"

namespace gradparity::roi {

struct PixelBox {
  std::vector<PixelRange> rows, columns;

  template <typename scalar_t, typename T = wide_t<scalar_t>>
  void fill(const Sizes& s, T spatial_scale, bool last_included, const scalar_t* roi) {
    const auto axis = [&](int64_t low, int64_t high) {
      return pixel_axis(static_cast<T>(roi[low]), static_cast<T>(roi[high]), spatial_scale, last_included);
    };
    const PixelAxis y = axis(2, 4), x = axis(1, 3);
    rows.clear();
    columns.clear();
    for (int64_t bin = 0; bin < s.bins_y; bin++) {
      rows.push_back(bin_pixels(y, bin, s.bins_y, s.height));
    }
    for (int64_t bin = 0; bin < s.bins_x; bin++) {
      columns.push_back(bin_pixels(x, bin, s.bins_x, s.width));
    }
  }
};

// Calls body(bin, rows, columns) for every bin that has pixels.
template <typename Body>
void for_bins(const Sizes& s, const PixelBox& box, const Body& body) {
  for (int64_t by = 0; by < s.bins_y; by++) {
    for (int64_t bx = 0; bx < s.bins_x; bx++) {
      if (box.rows[by].count() > 0 && box.columns[bx].count() > 0) {
        body(by * s.bins_x + bx, box.rows[by], box.columns[bx]);
      }
    }
  }
}

}  // namespace gradparity::roi
