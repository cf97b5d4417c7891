// The kernels of one instruction set, FARANDOLE_INSTRUCTION_SET, for what travels between hosts;
// wire_forms.hpp says what they compute. Loops that the compiler turns into vectors.
//
// As in kernels_impl.hpp, everything here has internal linkage and calls no inline function of the
// standard library.
#include "kernels.hpp"
#include "wire_forms.hpp"

namespace farandole::FARANDOLE_INSTRUCTION_SET {
namespace {

constexpr std::uint32_t kMagnitude = 0x7fffffff;  // of a float32: all but its sign
constexpr std::uint32_t kInfinity = 0x7f800000;

template <typename T>
[[gnu::always_inline]] inline T load(const std::byte* bytes, std::size_t index) {
  T value;
  __builtin_memcpy(&value, bytes + index * sizeof(T), sizeof(T));
  return value;
}

template <typename T>
[[gnu::always_inline]] inline void store(std::byte* bytes, std::size_t index, T value) {
  __builtin_memcpy(bytes + index * sizeof(T), &value, sizeof(T));
}

// ---- bfloat16 ---------------------------------------------------------------------------------

// A carry out of the mantissa is the right exponent, and infinity after the largest one.
[[gnu::always_inline]] inline std::uint32_t upper_half(std::uint32_t bits) {
  const std::uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return (bits & kMagnitude) > kInfinity ? 0x7fc0 : rounded;
}

void encode_bfloat16(std::byte* wire, const std::byte* floats, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    store(wire, i, static_cast<std::uint16_t>(upper_half(load<std::uint32_t>(floats, i))));
  }
}

void decode_bfloat16(std::byte* floats, const std::byte* wire, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    store(floats, i, std::uint32_t{load<std::uint16_t>(wire, i)} << 16);
  }
}

void round_bfloat16(std::byte* floats, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    store(floats, i, upper_half(load<std::uint32_t>(floats, i)) << 16);
  }
}

// ---- int8 -------------------------------------------------------------------------------------

constexpr std::uint32_t kNotFinite = 255;  // in place of a scale
constexpr std::uint32_t kLargestScale = 254;
constexpr std::int32_t kBias = 133;

// The scale c of a block whose largest magnitude has these bits. 127 * 2^k is 1.984375 * 2^(k + 6),
// so it is the exponent of that magnitude, and the next one if the mantissa is beyond 0.984375;
// subnormal numbers have the exponent of the least normal ones, and one bit less.
std::uint32_t scale_of(std::uint32_t largest) {
  if (largest >= kInfinity) return kNotFinite;
  if (largest <= 0x7f0000) return 0;
  const std::uint32_t scale = (largest + 0x1ffff) >> 23;
  return scale < kLargestScale ? scale : kLargestScale;
}

// 2^exponent is first * second: itself it may be no float32.
struct Power {
  float first, second;

  explicit Power(std::int32_t exponent)
      : first(of(exponent / 2)), second(of(exponent - exponent / 2)) {}

 private:
  static float of(std::int32_t exponent) {
    return __builtin_bit_cast(float, static_cast<std::uint32_t>(exponent + 127) << 23);
  }
};

// ---- blocks of tiny numbers -------------------------------------------------------------------
//
// A program, or a library that it loads, may have told the processor to take subnormal numbers for
// zeros, in one thread and not in another. So that all ranks hold the same bits nevertheless,
// blocks in which they matter, with scales up to this one, are done in integers: multiples of
// 2^-149, the least float32, of which 2^k is 2^(c + 16) and no number has 2^31.
constexpr std::uint32_t kLastTinyScale = 7;
constexpr std::uint32_t kMantissaBits = 23;
constexpr std::uint32_t kHiddenBit = 1U << kMantissaBits;

void encode_tiny_block(std::byte* wire, const std::byte* floats, std::size_t count,
                       std::uint32_t scale) {
  const std::uint32_t shift = scale + 16;
  for (std::size_t i = 0; i < count; ++i) {
    const auto bits = load<std::uint32_t>(floats, i);
    const std::uint32_t exponent = (bits & kMagnitude) >> kMantissaBits;
    const std::uint32_t mantissa = bits & (kHiddenBit - 1);
    const std::uint32_t units =
        exponent == 0 ? mantissa : (mantissa | kHiddenBit) << (exponent - 1);
    const std::uint32_t is_odd = units >> shift & 1;
    const auto whole =
        static_cast<std::int32_t>((units + (1U << (shift - 1)) - 1 + is_odd) >> shift);
    store(wire, i, static_cast<std::int8_t>(bits > kMagnitude ? -whole : whole));
  }
}

void decode_tiny_block(std::byte* floats, const std::byte* wire, std::size_t count,
                       std::uint32_t scale) {
  for (std::size_t i = 0; i < count; ++i) {
    const std::int32_t whole = load<std::int8_t>(wire, i);
    const std::int32_t units = (whole < 0 ? -whole : whole) << (scale + 16);
    std::uint32_t bits = static_cast<std::uint32_t>(units);
    if (bits >= kHiddenBit) {
      bits = __builtin_bit_cast(std::uint32_t, static_cast<float>(units)) - (149U << kMantissaBits);
    }
    store(floats, i, whole < 0 ? bits | ~kMagnitude : bits);
  }
}

// ---- all blocks -------------------------------------------------------------------------------

[[gnu::always_inline]] inline void encode_block(std::byte* wire, const std::byte* floats,
                                                std::size_t count) {
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t magnitude = load<std::uint32_t>(floats, i) & kMagnitude;
    largest = magnitude > largest ? magnitude : largest;
  }
  const std::uint32_t scale = scale_of(largest);
  store(wire, 0, static_cast<std::uint8_t>(scale));
  if (scale == kNotFinite) {
    __builtin_memset(wire + 1, 0, count);
    return;
  }
  if (scale <= kLastTinyScale) {
    encode_tiny_block(wire + 1, floats, count, scale);
    return;
  }
  // Both products are exact wherever the outcome is 0.5 or more; what is less becomes 0.
  const Power factor(kBias - static_cast<std::int32_t>(scale));
  // The last bit of this is worth 1, and of what is added to it: the addition rounds.
  constexpr float kWhole = 12582912;  // 1.5 * 2^23
  constexpr auto kZero = __builtin_bit_cast(std::int32_t, kWhole);
  for (std::size_t i = 0; i < count; ++i) {
    const float quotient = load<float>(floats, i) * factor.first * factor.second;
    std::int32_t whole = __builtin_bit_cast(std::int32_t, quotient + kWhole) - kZero;
    whole = whole < 127 ? whole : 127;  // of integers: GCC makes no vectors of such floats
    whole = whole > -127 ? whole : -127;
    store(wire + 1, i, static_cast<std::int8_t>(whole));
  }
}

[[gnu::always_inline]] inline void decode_block(std::byte* floats, const std::byte* wire,
                                                std::size_t count) {
  const std::uint32_t scale = load<std::uint8_t>(wire, 0);
  if (scale == kNotFinite) {
    for (std::size_t i = 0; i < count; ++i) store(floats, i, __builtin_nanf(""));
    return;
  }
  if (scale <= kLastTinyScale) {
    decode_tiny_block(floats, wire + 1, count, scale);
    return;
  }
  const Power factor(static_cast<std::int32_t>(scale) - kBias);
  for (std::size_t i = 0; i < count; ++i) {
    const auto quotient = static_cast<float>(load<std::int8_t>(wire + 1, i));
    store(floats, i, quotient * factor.first * factor.second);
  }
}

// Calls visit(first number, how many) for each block; with a constant for the whole ones.
template <typename Visit>
[[gnu::always_inline]] inline void for_each_block(std::size_t count, const Visit& visit) {
  std::size_t first = 0;
  for (; count - first >= kWireBlock; first += kWireBlock) visit(first, kWireBlock);
  if (first < count) visit(first, count - first);
}

[[gnu::always_inline]] inline std::size_t place_on_wire(std::size_t first) {
  return first / kWireBlock * (kWireBlock + 1);
}

void encode_int8(std::byte* wire, const std::byte* floats, std::size_t count) {
  for_each_block(count, [&](std::size_t first, std::size_t size) {
    encode_block(wire + place_on_wire(first), floats + first * sizeof(float), size);
  });
}

void decode_int8(std::byte* floats, const std::byte* wire, std::size_t count) {
  for_each_block(count, [&](std::size_t first, std::size_t size) {
    decode_block(floats + first * sizeof(float), wire + place_on_wire(first), size);
  });
}

void round_int8(std::byte* floats, std::size_t count) {
  for_each_block(count, [&](std::size_t first, std::size_t size) {
    std::byte block[kWireBlock + 1];
    encode_block(block, floats + first * sizeof(float), size);
    decode_block(floats + first * sizeof(float), block, size);
  });
}

}  // namespace

WireKernels find_wire_kernels(WireForm form) {
  switch (form) {
    case WireForm::bfloat16:
      return {encode_bfloat16, decode_bfloat16, round_bfloat16};
    case WireForm::int8:
      return {encode_int8, decode_int8, round_int8};
    case WireForm::as_is:
      break;
  }
  return {};
}

}  // namespace farandole::FARANDOLE_INSTRUCTION_SET
