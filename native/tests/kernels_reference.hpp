// What the kernels must compute, element by element in plain C++: each operand is read as a number
// of a wider type, folded there and rounded. Obviously right rather than fast, and written
// differently from the kernels on purpose.
#pragma once

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels.hpp"
#include "numbers.hpp"

namespace farandole::testing {

using Bytes = std::vector<std::byte>;

// ---- Elements: how the bits of a dtype read as numbers ----------------------------------------

// 16-bit floats are read by their definition, sign * significand * 2^exponent, and written by
// rounding the number of quanta; the kernels shift bits instead.
template <int num_mantissa_bits>
struct Float16Of {
  static constexpr int bias = (1 << (14 - num_mantissa_bits)) - 1;
  static constexpr int infinity = (2 * bias + 1) << num_mantissa_bits;
  std::uint16_t bits;

  static Float16Of from(double number) {
    const int sign = std::signbit(number) ? 0x8000 : 0;
    if (std::isnan(number)) return {infinity | 1 << (num_mantissa_bits - 1)};
    int magnitude = infinity;
    if (number == 0) {
      magnitude = 0;
    } else if (!std::isinf(number)) {
      const int exponent = std::max(std::ilogb(number), 1 - bias);
      const double quanta =
          std::nearbyint(std::ldexp(std::fabs(number), num_mantissa_bits - exponent));
      magnitude = ((exponent + bias - 1) << num_mantissa_bits) + static_cast<int>(quanta);
    }
    return {static_cast<std::uint16_t>(sign | std::min(magnitude, infinity))};
  }

  double number() const {
    const double sign = bits & 0x8000 ? -1 : 1;
    const int magnitude = bits & 0x7fff;
    if (magnitude > infinity) return std::numeric_limits<double>::quiet_NaN();
    if (magnitude == infinity) return sign * std::numeric_limits<double>::infinity();
    const int exponent = magnitude >> num_mantissa_bits;
    const int mantissa = magnitude & ((1 << num_mantissa_bits) - 1);
    if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - num_mantissa_bits);
    return sign *
           std::ldexp((1 << num_mantissa_bits) + mantissa, exponent - bias - num_mantissa_bits);
  }
};
using Half = Float16Of<10>;
using BrainFloat = Float16Of<7>;

struct Truth {
  std::uint8_t byte;
};

template <typename T>
struct Pair {
  T real;
  T imaginary;
};

// ---- The reference: what kernels.hpp promises, for one element --------------------------------

template <std::floating_point T>
T one_nan(T value) {
  return std::isnan(value) ? std::numeric_limits<T>::quiet_NaN() : value;
}

// T is float or double. A float operation is one in double, rounded: double has more than twice the
// digits, so that rounding twice changes nothing.
template <std::floating_point T>
T fold_floats(ReduceOp op, double a, double b) {
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::avg:
      return static_cast<T>(a + b);
    case ReduceOp::prod:
      return static_cast<T>(a * b);
    default:
      if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<T>::quiet_NaN();
      if (a == b) {  // equal, or zeros, of which the negative one is the smaller
        const bool negative = op == ReduceOp::min ? std::signbit(a) || std::signbit(b)
                                                  : std::signbit(a) && std::signbit(b);
        return static_cast<T>(negative ? -std::abs(a) : std::abs(a));
      }
      return static_cast<T>((op == ReduceOp::min) == (a < b) ? a : b);
  }
}

template <std::floating_point T>
T reduce(ReduceOp op, const std::vector<T>& operands, std::uint32_t divisor) {
  T result = operands[0];
  for (std::size_t s = 1; s < operands.size(); ++s) {
    result = fold_floats<T>(op, result, operands[s]);
  }
  return one_nan(static_cast<T>(static_cast<double>(result) / divisor));
}

template <int num_mantissa_bits>
Float16Of<num_mantissa_bits> reduce(ReduceOp op,
                                    const std::vector<Float16Of<num_mantissa_bits>>& operands,
                                    std::uint32_t divisor) {
  std::vector<float> wide;
  for (const auto& operand : operands) wide.push_back(static_cast<float>(operand.number()));
  return Float16Of<num_mantissa_bits>::from(reduce(op, wide, divisor));
}

template <std::integral T>
T reduce(ReduceOp op, const std::vector<T>& operands, std::uint32_t divisor) {
  __int128 result = operands[0];
  for (std::size_t s = 1; s < operands.size(); ++s) {
    const __int128 operand = operands[s];
    switch (op) {
      case ReduceOp::sum:
      case ReduceOp::avg:
        result += operand;
        break;
      case ReduceOp::prod:
        result = static_cast<__int128>(static_cast<unsigned __int128>(result) *
                                       static_cast<unsigned __int128>(operand));
        break;
      case ReduceOp::min:
        result = std::min(result, operand);
        break;
      case ReduceOp::max:
        result = std::max(result, operand);
        break;
      case ReduceOp::band:
        result &= operand;
        break;
      case ReduceOp::bor:
        result |= operand;
        break;
      case ReduceOp::bxor:
        result ^= operand;
        break;
    }
    result = static_cast<T>(result);
  }
  return static_cast<T>(result / divisor);
}

inline Truth reduce(ReduceOp op, const std::vector<Truth>& operands, std::uint32_t) {
  const auto num_true = std::count_if(operands.begin(), operands.end(),
                                      [](Truth operand) { return operand.byte != 0; });
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::max:
    case ReduceOp::bor:
      return {num_true > 0};
    case ReduceOp::bxor:
      return {num_true % 2 == 1};
    default:
      return {num_true == static_cast<std::ptrdiff_t>(operands.size())};
  }
}

template <typename T>
Pair<T> reduce(ReduceOp op, const std::vector<Pair<T>>& operands, std::uint32_t divisor) {
  Pair<T> result = operands[0];
  for (std::size_t s = 1; s < operands.size(); ++s) {
    const auto [a, b] = result;
    const auto [c, d] = operands[s];
    if (op == ReduceOp::prod) {
      const auto times = [](T x, T y) { return fold_floats<T>(ReduceOp::prod, x, y); };
      result = {times(a, c) - times(b, d), times(a, d) + times(b, c)};
    } else {
      result = {a + c, b + d};
    }
  }
  const auto parts = static_cast<T>(divisor);
  return {one_nan(result.real / parts), one_nan(result.imaginary / parts)};
}

// ---- One place that knows which C++ type a dtype is -------------------------------------------

template <typename Function>
auto with_type_of(DType dtype, Function function) {
  switch (dtype) {
    case DType::float64:
      return function(double{});
    case DType::float32:
      return function(float{});
    case DType::float16:
      return function(Half{});
    case DType::bfloat16:
      return function(BrainFloat{});
    case DType::int8:
      return function(std::int8_t{});
    case DType::int16:
      return function(std::int16_t{});
    case DType::int32:
      return function(std::int32_t{});
    case DType::int64:
      return function(std::int64_t{});
    case DType::uint8:
      return function(std::uint8_t{});
    case DType::uint16:
      return function(std::uint16_t{});
    case DType::uint32:
      return function(std::uint32_t{});
    case DType::uint64:
      return function(std::uint64_t{});
    case DType::boolean:
      return function(Truth{});
    case DType::complex64:
      return function(Pair<float>{});
    default:
      return function(Pair<double>{});
  }
}

template <typename T>
void set(Bytes& bytes, std::size_t i, T value) {
  std::memcpy(bytes.data() + i * sizeof(T), &value, sizeof(T));
}

template <typename T>
T get(const Bytes& bytes, std::size_t i) {
  T value;
  std::memcpy(&value, bytes.data() + i * sizeof(T), sizeof(T));
  return value;
}

inline Bytes reduce_all(DType dtype, ReduceOp op, const std::vector<Bytes>& srcs,
                        std::uint32_t divisor) {
  const bool is_plain_copy = srcs.size() == 1 && divisor == 1 && dtype != DType::boolean;
  if (is_plain_copy) return srcs[0];
  return with_type_of(dtype, [&]<typename T>(T) {
    Bytes result(srcs[0].size());
    std::vector<T> operands(srcs.size());
    for (std::size_t i = 0; i < result.size() / sizeof(T); ++i) {
      for (std::size_t s = 0; s < srcs.size(); ++s) operands[s] = get<T>(srcs[s], i);
      set(result, i, reduce(op, operands, divisor));
    }
    return result;
  });
}

inline std::vector<InstructionSet> available_instruction_sets() {
  std::vector<InstructionSet> available;
  for (auto isa : {InstructionSet::baseline, InstructionSet::neon, InstructionSet::avx2,
                   InstructionSet::avx512}) {
    if (is_available(isa)) available.push_back(isa);
  }
  return available;
}

}  // namespace farandole::testing
