// Deformable convolution on the CPU: what a call is about, and the tiles that every kernel works through.
//
// An image is held channels last with a border of zeros, so that a sample's four corners are four runs of
// channels that always exist. Work goes tile by tile (some output rows of one image), which bounds the memory
// and fixes the order of every sum, whatever the number of threads.
#pragma once

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/baddbmm_cpu_dispatch.h>
#include <ATen/ops/bmm_cpu_dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <array>
#include <optional>
#include <vector>

#include "../deform_conv2d.h"
#include "checks.h"
#include "clones.h"

#ifdef __linux__
// Of the MKL within torch, where there is one.
extern "C" int MKL_Set_Num_Threads_Local(int) __attribute__((weak));
#endif

namespace gradparity::deform {

using at::IntArrayRef;
using at::Tensor;

constexpr int64_t kTileElements = int64_t(1) << 20;  // of a tile's columns
constexpr int64_t kGrain = int64_t(1) << 14;         // elements of columns that are worth a thread

// Consecutive channels of one offset group within one weight group.
struct Segment {
  int64_t channel, channels, group;
};

struct Problem {
  int64_t images, channels, height, width;
  int64_t outputs, kernel_height, kernel_width, groups, offset_groups;
  int64_t rows, columns;  // of the output
  int64_t stride_y, stride_x, pad_y, pad_x, dilation_y, dilation_x;
  bool closed;

  int64_t taps() const {
    return kernel_height * kernel_width;
  }
  int64_t group_channels() const {
    return channels / groups;
  }
  int64_t padded_width() const {
    return width + 2;
  }
  int64_t rows_per_tile() const {
    return std::min(rows, std::max<int64_t>(1, kTileElements / std::max<int64_t>(1, columns * taps() * channels)));
  }
  // For loops over (offset group, tap, output row).
  int64_t grain() const {
    return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, columns * (channels / offset_groups)));
  }
  std::vector<std::vector<Segment>> segments() const {
    std::vector<std::vector<Segment>> all(offset_groups);
    const int64_t run = channels / offset_groups;
    for (int64_t og = 0; og < offset_groups; og++) {
      for (int64_t c = og * run; c < (og + 1) * run;) {
        const int64_t group = c / group_channels();
        const int64_t end = std::min((og + 1) * run, (group + 1) * group_channels());
        all[og].push_back({c, end - c, group});
        c = end;
      }
    }
    return all;
  }
};

inline std::array<int64_t, 2> checked_pair(const char* name, IntArrayRef value, int64_t least) {
  TORCH_CHECK_VALUE(value.size() == 2, name, " must have 2 values, got ", value);
  for (const int64_t v : value) {
    TORCH_CHECK_VALUE(
        v >= least && v < (int64_t(1) << 31), name, " must be at least ", least, " and below 2**31, got ", value);
  }
  return {value[0], value[1]};
}

inline void check_like(const char* name, const Tensor& value, const Tensor& input, int64_t dimensions) {
  check_tensor(name, value);
  TORCH_CHECK_TYPE(
      value.scalar_type() == input.scalar_type(), name, " must have input's dtype ", input.scalar_type(), ", got ",
      value.scalar_type());
  TORCH_CHECK_VALUE(
      value.device() == input.device(), name, " must be on input's device ", input.device(), ", got ", value.device());
  TORCH_CHECK_VALUE(
      value.dim() == dimensions, name, " must have ", dimensions, " dimensions, got shape ", value.sizes());
}

inline Problem checked(
    const Tensor& input, const Tensor& offset, const Tensor& weight, const std::optional<Tensor>& mask,
    const std::optional<Tensor>& bias, IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, bool closed) {
  check_tensor("input", input);
  TORCH_CHECK_VALUE(input.dim() == 4, "input must have 4 dimensions (N, C, H, W), got shape ", input.sizes());
  check_like("offset", offset, input, 4);
  check_like("weight", weight, input, 4);
  const auto s = checked_pair("stride", stride, 1);
  const auto p = checked_pair("padding", padding, 0);
  const auto d = checked_pair("dilation", dilation, 1);

  Problem problem{};
  problem.images = input.size(0);
  problem.channels = input.size(1);
  problem.height = input.size(2);
  problem.width = input.size(3);
  problem.outputs = weight.size(0);
  problem.kernel_height = weight.size(2);
  problem.kernel_width = weight.size(3);
  problem.stride_y = s[0], problem.stride_x = s[1];
  problem.pad_y = p[0], problem.pad_x = p[1];
  problem.dilation_y = d[0], problem.dilation_x = d[1];
  problem.closed = closed;
  TORCH_CHECK_VALUE(
      problem.channels > 0 && problem.height > 0 && problem.width > 0,
      "input must have C, H and W of at least 1, got shape ", input.sizes());
  TORCH_CHECK_VALUE(weight.numel() > 0, "weight must not have an empty dimension, got shape ", weight.sizes());
  TORCH_CHECK_VALUE(
      std::max(problem.kernel_height, problem.kernel_width) < (int64_t(1) << 31),
      "weight's kernel must be below 2**31, got shape ", weight.sizes());
  TORCH_CHECK_VALUE(
      problem.channels % weight.size(1) == 0, "weight's dimension 1 (C/groups) must divide the ", problem.channels,
      " channels of input, got ", weight.size(1));
  problem.groups = problem.channels / weight.size(1);
  TORCH_CHECK_VALUE(
      problem.outputs % problem.groups == 0, "weight's dimension 0 (O) must be a multiple of the ", problem.groups,
      " groups, got ", problem.outputs);

  const auto output_length = [](int64_t length, int64_t pad, int64_t dilation, int64_t kernel, int64_t stride) {
    return (length + 2 * pad - dilation * (kernel - 1) - 1) / stride + 1;
  };
  problem.rows = output_length(problem.height, p[0], d[0], problem.kernel_height, s[0]);
  problem.columns = output_length(problem.width, p[1], d[1], problem.kernel_width, s[1]);
  TORCH_CHECK_VALUE(
      problem.height + 2 * problem.pad_y > problem.dilation_y * (problem.kernel_height - 1) &&
          problem.width + 2 * problem.pad_x > problem.dilation_x * (problem.kernel_width - 1),
      "input of ", problem.height, " x ", problem.width, " is too small for weight's kernel, padding and dilation");

  const int64_t channels = offset.size(1), taps = problem.taps();
  TORCH_CHECK_VALUE(
      channels > 0 && channels % 2 == 0 && channels / 2 % taps == 0 && problem.channels % (channels / 2 / taps) == 0,
      "offset's dimension 1 must be 2*OG*kh*kw with OG a divisor of the ", problem.channels, " channels of input, got ",
      channels);
  problem.offset_groups = channels / 2 / taps;
  const auto check_shape = [&](const char* name, const Tensor& value, int64_t expected_channels) {
    const std::array<int64_t, 4> expected{problem.images, expected_channels, problem.rows, problem.columns};
    TORCH_CHECK_VALUE(
        value.sizes() == IntArrayRef(expected), name, " must have shape ", IntArrayRef(expected), ", got ",
        value.sizes());
  };
  check_shape("offset", offset, channels);
  if (mask) {
    check_like("mask", *mask, input, 4);
    check_shape("mask", *mask, problem.offset_groups * taps);
  }
  if (bias) {
    check_like("bias", *bias, input, 1);
    TORCH_CHECK_VALUE(
        bias->size(0) == problem.outputs, "bias must have weight's ", problem.outputs, " output channels, got shape ",
        bias->sizes());
  }
  // Even for no images, whose offset and mask may have any size.
  const std::array<int64_t, 4> output{problem.images, problem.outputs, problem.rows, problem.columns};
  check_countable("the output", output);
  const std::array<int64_t, 3> samples{problem.columns, taps, problem.channels};
  check_countable("a row of the output", samples);
  return problem;
}

inline void check_sizes(const char* name, const Tensor& value, const Tensor& input, IntArrayRef expected) {
  check_like(name, value, input, static_cast<int64_t>(expected.size()));
  TORCH_CHECK_VALUE(value.sizes() == expected, name, " must have shape ", expected, ", got ", value.sizes());
}

// Of which gradients are needed.
inline void check_needs(const c10::List<bool>& needs, size_t count) {
  TORCH_CHECK_VALUE(needs.size() == count, "needs must have ", count, " values, got ", needs.size());
}

inline void check_grad(const Problem& p, const Tensor& grad, const Tensor& input) {
  const std::array<int64_t, 4> expected{p.images, p.outputs, p.rows, p.columns};
  check_sizes("grad", grad, input, expected);
}

// A result of these sizes, or an empty one where it isn't needed.
inline Tensor result(bool needed, IntArrayRef sizes, const Tensor& like) {
  const std::array<int64_t, 1> nothing{0};
  return at::empty(
      needed ? sizes : IntArrayRef(nothing), like.options().memory_format(c10::MemoryFormat::Contiguous));
}

// Where a sample's top left corner starts in the padded image, -1 for a sample that doesn't contribute.
template <typename T>
struct Sample {
  int64_t at;
  T y, x, mask;  // y and x within the cell
};

// One tap of one offset group along one output row.
template <typename scalar_t>
struct TapRow {
  const scalar_t* offset_y;
  const scalar_t* offset_x;
  const scalar_t* mask;  // null without
  int64_t base_y, base_x;
};

template <typename scalar_t>
inline TapRow<scalar_t> tap_row(
    const Problem& p, const scalar_t* offset, const scalar_t* mask, int64_t og, int64_t tap, int64_t row) {
  const int64_t pixels = p.rows * p.columns, number = og * p.taps() + tap, start = row * p.columns;
  const scalar_t* y = offset + 2 * number * pixels + start;
  return {
      y,
      y + pixels,
      mask == nullptr ? nullptr : mask + number * pixels + start,
      row * p.stride_y - p.pad_y + (tap / p.kernel_width) * p.dilation_y,
      (tap % p.kernel_width) * p.dilation_x - p.pad_x};
}

template <typename scalar_t, typename T = wide_t<scalar_t>>
inline Sample<T> locate(const Problem& p, const TapRow<scalar_t>& taps, int64_t column) {
  const T y = sample_coordinate(taps.base_y, taps.offset_y[column]);
  const T x = sample_coordinate(taps.base_x + column * p.stride_x, taps.offset_x[column]);
  if (!(contributes(y, p.height, p.closed) && contributes(x, p.width, p.closed))) {
    return {-1, T(0), T(0), T(0)};
  }
  const Cell<T> row = cell_of(y), col = cell_of(x);
  const int64_t at = ((row.low + 1) * p.padded_width() + col.low + 1) * p.channels;
  return {at, row.fraction, col.fraction, taps.mask == nullptr ? T(1) : static_cast<T>(taps.mask[column])};
}

// A tile's columns and their gradient are laid out as (group, output pixel, tap, channel of the group).
inline int64_t column_at(const Problem& p, const Segment& s, int64_t pixels, int64_t pixel, int64_t tap) {
  const int64_t width = p.group_channels();
  return ((s.group * pixels + pixel) * p.taps() + tap) * width + s.channel - s.group * width;
}

template <typename scalar_t, typename T = wide_t<scalar_t>>
GRADPARITY_CLONES void sample_row(
    const Problem& p, const TapRow<scalar_t>& taps, const std::vector<Segment>& segments, int64_t tap,
    int64_t first_pixel, int64_t pixels, const T* image, T* columns) {
  const int64_t below = p.padded_width() * p.channels;
  for (int64_t column = 0; column < p.columns; column++) {
    const Sample<T> sample = locate(p, taps, column);
    const Corners<T> w = corner_weights(sample.y, sample.x);
    for (const Segment& s : segments) {
      T* out = columns + column_at(p, s, pixels, first_pixel + column, tap);
      if (sample.at < 0) {
        std::fill_n(out, s.channels, T(0));
        continue;
      }
      const T* top = image + sample.at + s.channel;
      const T* bottom = top + below;
      const int64_t right = p.channels;
#pragma omp simd
      for (int64_t c = 0; c < s.channels; c++) {
        out[c] = sample.mask *
            (w.top_left * top[c] + w.top_right * top[c + right] + w.bottom_left * bottom[c] +
             w.bottom_right * bottom[c + right]);
      }
    }
  }
}

// While it lives, this thread calls a library for numbers alone: MKL uses one thread for what it asks, inside of a
// parallel region too, and neither autograd nor autocast, whose state the threads of a region don't share, looks on.
class PlainNumbers {
 public:
#ifdef __linux__
  PlainNumbers() : before_(MKL_Set_Num_Threads_Local == nullptr ? 0 : MKL_Set_Num_Threads_Local(1)) {}
  ~PlainNumbers() {
    if (MKL_Set_Num_Threads_Local != nullptr) {
      MKL_Set_Num_Threads_Local(before_);
    }
  }
  PlainNumbers(const PlainNumbers&) = delete;
  PlainNumbers& operator=(const PlainNumbers&) = delete;

 private:
  int before_;
#endif
  at::AutoDispatchBelowADInplaceOrView no_autograd_;
  c10::impl::ExcludeDispatchKeyGuard no_autocast_{c10::autocast_dispatch_keyset};
};

// out = a . b, or out += a . b, of matrices (groups, M, K) and (groups, K, N).
//
// A library splits a product, and with it the sums, by the number of threads. So it gets pieces that depend on the
// sizes alone, one thread for each.
inline void multiply(const Tensor& out, const Tensor& a, const Tensor& b, bool add = false) {
  RECORD_FUNCTION(add ? "gradparity::multiply_add" : "gradparity::multiply", c10::ArrayRef<c10::IValue>());
  constexpr int64_t kPieces = 16, kSmallest = 16, kManyGroups = 8;
  const int64_t groups = out.size(0), rows = out.size(1), columns = out.size(2);
  const int64_t dim = groups >= kManyGroups ? 0 : rows > columns ? 1 : 2;
  const int64_t size = out.size(dim);
  const int64_t least = dim == 0 ? 1 : kSmallest;
  const int64_t piece = std::max<int64_t>(1, (size + kPieces * least - 1) / (kPieces * least)) * least;
  const int64_t pieces = (size + piece - 1) / piece;
  std::vector<std::array<Tensor, 3>> parts(pieces);
  for (int64_t i = 0; i < pieces; i++) {
    const int64_t start = i * piece, length = std::min(piece, size - start);
    const auto cut = [&](const Tensor& matrix, bool does) { return does ? matrix.narrow(dim, start, length) : matrix; };
    parts[i] = {cut(out, true), cut(a, dim != 2), cut(b, dim != 1)};
  }
  const int64_t work = rows * columns * a.size(2) * groups / std::max<int64_t>(1, pieces);
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, work));
  at::parallel_for(0, pieces, grain, [&](int64_t begin, int64_t end) {
    const PlainNumbers plain;
    for (int64_t i = begin; i < end; i++) {
      auto& [target, left, right] = parts[i];
      if (add) {
        at::cpu::baddbmm_(target, left, right);
      } else {
        at::cpu::bmm_out(target, left, right);
      }
    }
  });
}

// The tensors of a call as the loops want them.
template <typename scalar_t>
struct Work {
  using T = wide_t<scalar_t>;

  Work(const Problem& problem, const Tensor& input, const Tensor& offset, const std::optional<Tensor>& mask)
      : p(problem),
        segments(problem.segments()),
        input(input),
        offset(offset.contiguous()),
        mask(mask ? mask->contiguous() : Tensor()),
        wide(input.options().dtype(c10::CppTypeToScalarType<T>::value).memory_format(c10::MemoryFormat::Contiguous)),
        padded(padded_zeros()),
        columns(buffer()) {}

  // Room for the columns of one tile.
  Tensor buffer() const {
    return at::empty({p.rows_per_tile() * p.columns * p.taps() * p.channels}, wide);
  }

  Tensor padded_zeros() const {
    return at::zeros({p.height + 2, p.width + 2, p.channels}, wide);
  }
  // The image within a padded one, as (H, W, C).
  Tensor inner(const Tensor& image) const {
    return image.narrow(0, 1, p.height).narrow(1, 1, p.width);
  }
  void load_image(int64_t n) {
    load(input, n, padded);
  }
  void load(const Tensor& images, int64_t n, const Tensor& into) const {
    inner(into).copy_(images.select(0, n).permute({1, 2, 0}));
  }
  const scalar_t* offsets_of(int64_t n) const {
    return offset.template const_data_ptr<scalar_t>() + n * p.offset_groups * 2 * p.taps() * p.rows * p.columns;
  }
  const scalar_t* masks_of(int64_t n) const {
    const int64_t size = p.offset_groups * p.taps() * p.rows * p.columns;
    return mask.defined() ? mask.template const_data_ptr<scalar_t>() + n * size : nullptr;
  }
  Tensor tile_columns(int64_t rows) const {
    return tile_of(columns, rows);
  }
  Tensor tile_of(const Tensor& room, int64_t rows) const {
    // The front of the buffer, because a last tile with fewer rows packs its groups closer.
    return room.narrow(0, 0, rows * p.columns * p.taps() * p.channels)
        .view({p.groups, rows * p.columns, p.taps() * p.group_channels()});
  }
  // Room for a tile of the output.
  Tensor product(int64_t rows) const {
    return at::empty({p.groups, p.outputs / p.groups, rows * p.columns}, wide);
  }
  // (groups, O/groups, taps * C/groups) -> (O, C/groups, kh, kw).
  void copy_kernel(const Tensor& matrix, const Tensor& weight) const {
    weight.copy_(matrix.view({p.outputs, p.taps(), p.group_channels()}).transpose(1, 2).reshape(weight.sizes()));
  }
  // A (N, O, oh, ow) tensor's image as (groups, O/groups, pixels).
  Tensor output_matrix(const Tensor& outputs, int64_t n) const {
    return outputs.select(0, n).to(wide.dtype()).reshape({p.groups, p.outputs / p.groups, p.rows * p.columns});
  }
  // (O, C/groups, kh, kw) -> (groups, O/groups, taps * C/groups), the channel last.
  Tensor kernel_matrix(const Tensor& weight) const {
    return weight.to(wide.dtype()).flatten(2).transpose(1, 2).reshape(
        {p.groups, p.outputs / p.groups, p.taps() * p.group_channels()});
  }

  // Calls body(first row, rows) for every tile of an image.
  template <typename Body>
  void for_tiles(const Body& body) const {
    const int64_t step = p.rows_per_tile();
    for (int64_t row = 0; row < p.rows; row += step) {
      body(row, std::min(step, p.rows - row));
    }
  }

  // Calls body(offset group, tap, output row) in parallel.
  template <typename Body>
  void for_tap_rows(int64_t first_row, int64_t rows, const Body& body) const {
    at::parallel_for(0, p.offset_groups * p.taps() * rows, p.grain(), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        body(i / rows / p.taps(), i / rows % p.taps(), first_row + i % rows);
      }
    });
  }

  void fill_columns(int64_t n, int64_t first_row, int64_t rows, const Tensor& out) const {
    const T* image = padded.template const_data_ptr<T>();
    T* target = out.template mutable_data_ptr<T>();
    for_tap_rows(first_row, rows, [&](int64_t og, int64_t tap, int64_t row) {
      const auto taps = tap_row(p, offsets_of(n), masks_of(n), og, tap, row);
      sample_row<scalar_t>(
          p, taps, segments[og], tap, (row - first_row) * p.columns, rows * p.columns, image, target);
    });
  }

  Problem p;
  std::vector<std::vector<Segment>> segments;
  Tensor input, offset, mask;
  at::TensorOptions wide;
  Tensor padded, columns;
};

}  // namespace gradparity::deform
