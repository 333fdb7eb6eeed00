// Fits a curve of kv/costs.py to measurements: the three coefficients, none negative, that bring what they predict
// closest to the times, in squares of the relative error. An instance does it again and again while it serves.
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

namespace memserve {

namespace {

namespace nb = nanobind;

constexpr int kColumns = 3, kRefits = 8, kSweepsMax = 30;
constexpr double kEpsilon = std::numeric_limits<double>::epsilon();
// Errors beyond this multiple of the median error weigh less in a fit.
constexpr double kFar = 1.5, kErrorMin = 0.005;
// So much must a further column bring: else rounding decides which of columns that are alike has the cost.
constexpr double kGainMin = 1e-9;

using Vector = std::array<double, kColumns>;

double dot(const Vector& a, const Vector& b) { return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]; }

// Rows times coefficients, near a target, as a triangle: the same squares but for `rest`.
struct Triangle {
  std::array<Vector, kColumns> columns{};
  Vector target{};
  double rest = 0;

  // Rotates one more row into it.
  void add_row(Vector row, double value) {
    for (int i = 0; i < kColumns; ++i) {
      const double length = std::hypot(columns[i][i], row[i]);
      if (length == 0) continue;
      const double cosine = columns[i][i] / length, sine = row[i] / length;
      const auto rotate = [&](double& held, double& added) {
        const double turned = cosine * held + sine * added;
        added = cosine * added - sine * held;
        held = turned;
      };
      for (int j = i; j < kColumns; ++j) rotate(columns[j][i], row[j]);
      rotate(target[i], value);
    }
    rest += value * value;
  }
};

struct Solution {
  Vector coefficients{};
  double loss;
};

// The shortest best coefficients of some columns, bit j of `subset` for column j: by singular values, which one-sided
// rotations find (Hestenes); those of `rank_min` and less times the largest are none.
Solution solve_subset(const Triangle& rows, unsigned subset, double rank_min) {
  std::array<Vector, kColumns> columns{}, turns{};  // columns = those of `rows`, times turns
  for (int j = 0; j < kColumns; ++j) {
    if (subset >> j & 1) columns[j] = rows.columns[j];
    turns[j][j] = 1;
  }
  bool turned = true;
  for (int sweep = 0; turned && sweep < kSweepsMax; ++sweep) {
    turned = false;
    for (int p = 0; p < kColumns; ++p) {
      for (int q = p + 1; q < kColumns; ++q) {
        const double a = dot(columns[p], columns[p]), b = dot(columns[q], columns[q]);
        const double both = dot(columns[p], columns[q]);
        if (std::abs(both) <= kEpsilon * std::sqrt(a * b)) continue;
        turned = true;
        const double zeta = (b - a) / (2 * both);
        const double tangent = std::copysign(1.0, zeta) / (std::abs(zeta) + std::sqrt(1 + zeta * zeta));
        const double cosine = 1 / std::sqrt(1 + tangent * tangent), sine = cosine * tangent;
        for (auto* of : {&columns, &turns}) {
          for (int i = 0; i < kColumns; ++i) {
            const double first = (*of)[p][i], second = (*of)[q][i];
            (*of)[p][i] = cosine * first - sine * second;
            (*of)[q][i] = sine * first + cosine * second;
          }
        }
      }
    }
  }
  double largest = 0;
  for (const Vector& column : columns) largest = std::max(largest, dot(column, column));
  Solution found{{}, rows.rest};
  Vector left = rows.target;
  for (int j = 0; j < kColumns; ++j) {
    const double square = dot(columns[j], columns[j]);
    if (square == 0 || square <= rank_min * rank_min * largest) continue;
    const double share = dot(columns[j], rows.target) / square;
    for (int i = 0; i < kColumns; ++i) {
      found.coefficients[i] += share * turns[j][i];
      left[i] -= share * columns[j][i];
    }
  }
  found.loss += dot(left, left);
  return found;
}

// The best solution uses some subset of the columns and is a plain least-squares solution there; three columns have
// seven. Where all columns together have positive coefficients, no subset comes closer.
Vector solve_not_negative(const Triangle& rows, double rank_min) {
  constexpr unsigned kAll = 7;
  const Solution all = solve_subset(rows, kAll, rank_min);
  if (*std::min_element(all.coefficients.begin(), all.coefficients.end()) > 0) return all.coefficients;
  Solution best{{}, rows.rest + dot(rows.target, rows.target)};
  for (const unsigned subset : {1u, 2u, 4u, 3u, 5u, 6u, kAll}) {
    const Solution found = solve_subset(rows, subset, rank_min);
    const bool is_positive = *std::min_element(found.coefficients.begin(), found.coefficients.end()) >= 0;
    if (is_positive && found.loss < best.loss * (1 - kGainMin)) best = found;
  }
  return best.coefficients;
}

double median_of(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2) return *middle;
  return (*std::max_element(values.begin(), middle) + *middle) / 2;
}

using Rows = nb::ndarray<const double, nb::shape<-1, kColumns>, nb::c_contig, nb::device::cpu>;
using Times = nb::ndarray<const double, nb::shape<-1>, nb::c_contig, nb::device::cpu>;

// Fitted repeatedly with less weight on outliers (Huber): one slow moment of the machine must not distort the curve.
std::tuple<double, double, double> fit_curve(const Rows& features, const Times& times_ns) {
  const std::size_t count = features.shape(0);
  if (times_ns.shape(0) != count) throw nb::value_error("as many times as rows");
  std::vector<Vector> relative(count);
  Vector largest{1e-300, 1e-300, 1e-300};
  for (std::size_t i = 0; i < count; ++i) {
    for (int j = 0; j < kColumns; ++j) {
      relative[i][j] = features(i, j) / times_ns(i);
      largest[j] = std::max(largest[j], std::abs(relative[i][j]));
    }
  }
  const double rank_min = kEpsilon * static_cast<double>(std::max<std::size_t>(count, kColumns));
  std::vector<double> weights(count, 1.0), errors(count);
  Vector coefficients{};
  for (int turn = 0; turn < kRefits; ++turn) {
    Triangle rows;
    for (std::size_t i = 0; i < count; ++i) {
      Vector row;
      for (int j = 0; j < kColumns; ++j) row[j] = relative[i][j] / largest[j] * weights[i];
      rows.add_row(row, weights[i]);
    }
    coefficients = solve_not_negative(rows, rank_min);
    for (int j = 0; j < kColumns; ++j) coefficients[j] /= largest[j];
    for (std::size_t i = 0; i < count; ++i) errors[i] = std::abs(dot(relative[i], coefficients) - 1);
    const double usual = std::max(median_of(errors), kErrorMin) * kFar;
    for (std::size_t i = 0; i < count; ++i)
      weights[i] = std::sqrt(std::min(1.0, usual / std::max(errors[i], 1e-12)));
  }
  return {coefficients[0], coefficients[1], coefficients[2]};
}

}  // namespace

void bind_curves(nb::module_& m) {
  m.def("fit_curve", &fit_curve, nb::arg("features"), nb::arg("times_ns"));
}

}  // namespace memserve
