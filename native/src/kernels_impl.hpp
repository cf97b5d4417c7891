// Vectors of one instruction set: how each dtype is loaded, folded, divided and stored.
//
// A Format says how the elements of a dtype travel between memory and registers:
//   Lanes                what vector_bytes bytes of memory become in registers
//   load(bytes)          reads vector_bytes bytes, at any alignment
//   store(bytes, lanes)  rounds to the dtype and writes vector_bytes bytes, at any alignment
//   divide(lanes, d)     before rounding; or, for integers, divide_all over the stored result
// An Op folds two Lanes into one; the left one is the older.
//
// This file is compiled once per instruction set, in a namespace of its own. Everything in it has
// internal linkage and calls no inline function of the standard library: of such functions the
// linker keeps one copy, and must not hand one made of AVX-512 instructions to baseline code.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__F16C__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace farandole::FARANDOLE_INSTRUCTION_SET {
namespace {

#if defined(__AVX512F__)
constexpr std::size_t vector_bytes = 64;
#elif defined(__AVX2__)
constexpr std::size_t vector_bytes = 32;
#else
constexpr std::size_t vector_bytes = 16;
#endif

// The vector extension of GCC and Clang: arithmetic, comparisons and ?: work lane by lane.
template <typename T>
struct VectorOf {
  typedef T type __attribute__((vector_size(vector_bytes)));
};
template <typename T>
using Vector = typename VectorOf<T>::type;
using Floats = Vector<float>;
using Words = Vector<std::uint32_t>;

template <typename T>
[[gnu::always_inline]] inline T load_bytes(const std::byte* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

template <typename T>
[[gnu::always_inline]] inline void store_bytes(std::byte* bytes, T value) {
  std::memcpy(bytes, &value, sizeof value);
}

// Machines differ in the sign and payload of the NaNs that they make; these are the ones we store.
template <typename Lanes>
inline Lanes with_one_nan(Lanes lanes) {
  const Lanes nan = Lanes{} + __builtin_nanf("");
  return lanes == lanes ? lanes : nan;
}

// ---- Formats ----------------------------------------------------------------------------------

// Floats that the machine computes with as they are.
template <typename T>
struct Real {
  using Lanes = Vector<T>;
  static constexpr std::size_t element_bytes = sizeof(T);
  static constexpr bool is_copied_as_bytes = true;

  static Lanes load(const std::byte* bytes) { return load_bytes<Lanes>(bytes); }
  static void store(std::byte* bytes, Lanes lanes) { store_bytes(bytes, with_one_nan(lanes)); }
  static Lanes divide(Lanes lanes, std::uint32_t divisor) {
    return lanes / static_cast<T>(divisor);
  }
};

// Real and imaginary parts in turn, as in memory.
template <typename T>
struct Complex : Real<T> {
  static constexpr std::size_t element_bytes = 2 * sizeof(T);
};

// A vector of 16-bit floats, widened to twice as many bytes. Which elements are in which half is
// the Format's choice: ops do not mind.
struct FloatPair {
  Floats first;
  Floats second;
};

template <typename Rounding>
struct Float16Bits {
  using Lanes = FloatPair;
  static constexpr std::size_t element_bytes = 2;
  static constexpr bool is_copied_as_bytes = true;

  static void store(std::byte* bytes, FloatPair lanes) {
    Rounding::round_and_store(bytes, {with_one_nan(lanes.first), with_one_nan(lanes.second)});
  }
  static FloatPair divide(FloatPair lanes, std::uint32_t divisor) {
    const auto float_divisor = static_cast<float>(divisor);
    return {lanes.first / float_divisor, lanes.second / float_divisor};
  }
};

// The upper half of a float32. Seen as 32-bit words, memory holds the even elements in the lower
// halves and the odd ones in the upper halves, so that nothing has to cross lanes.
struct BFloat16 : Float16Bits<BFloat16> {
  static FloatPair load(const std::byte* bytes) {
    const auto words = load_bytes<Words>(bytes);
    return {__builtin_bit_cast(Floats, words << 16),
            __builtin_bit_cast(Floats, words & 0xffff0000u)};
  }
  static void round_and_store(std::byte* bytes, FloatPair lanes) {
    store_bytes(bytes,
                round_to_upper(lanes.first) >> 16 | (round_to_upper(lanes.second) & 0xffff0000u));
  }

 private:
  // To nearest, ties to even, in the upper half; the lower half is left over. A carry out of the
  // mantissa is the right exponent, and infinity after the largest one.
  static Words round_to_upper(Floats floats) {
    const auto words = __builtin_bit_cast(Words, floats);
    return words + 0x7fffu + ((words >> 16) & 1u);
  }
};

#if defined(__F16C__) || defined(__aarch64__)

// The machine converts half a vector of memory to and from a vector of float32.
struct Float16 : Float16Bits<Float16> {
  static FloatPair load(const std::byte* bytes) {
    return {widen(bytes), widen(bytes + vector_bytes / 2)};
  }
  static void round_and_store(std::byte* bytes, FloatPair lanes) {
    round_half(bytes, lanes.first);
    round_half(bytes + vector_bytes / 2, lanes.second);
  }

 private:
#if defined(__AVX512F__)
  // The forms with a mask, of all lanes: in the others GCC 12 warns of a variable of its own.
  static constexpr __mmask16 all_lanes = 0xffff;
  static Floats widen(const std::byte* bytes) {
    return _mm512_maskz_cvtph_ps(all_lanes, load_bytes<__m256i>(bytes));
  }
  static void round_half(std::byte* bytes, Floats lanes) {
    store_bytes(bytes, _mm512_maskz_cvtps_ph(all_lanes, lanes, _MM_FROUND_TO_NEAREST_INT));
  }
#elif defined(__AVX2__)
  static Floats widen(const std::byte* bytes) {
    return _mm256_cvtph_ps(load_bytes<__m128i>(bytes));
  }
  static void round_half(std::byte* bytes, Floats lanes) {
    store_bytes(bytes, _mm256_cvtps_ph(lanes, _MM_FROUND_TO_NEAREST_INT));
  }
#elif defined(__F16C__)
  static Floats widen(const std::byte* bytes) {
    return _mm_cvtph_ps(_mm_cvtsi64_si128(load_bytes<long long>(bytes)));
  }
  static void round_half(std::byte* bytes, Floats lanes) {
    store_bytes(bytes, _mm_cvtsi128_si64(_mm_cvtps_ph(lanes, _MM_FROUND_TO_NEAREST_INT)));
  }
#else
  static Floats widen(const std::byte* bytes) {
    return vcvt_f32_f16(load_bytes<float16x4_t>(bytes));
  }
  static void round_half(std::byte* bytes, Floats lanes) {
    store_bytes(bytes, vcvt_f16_f32(lanes));
  }
#endif
};

#else

// By hand. A float16 has a sign, 5 bits of exponent with bias 15 and 10 of mantissa, a float32 has
// 8, 127 and 23: a shift by 13 aligns the mantissas, 112 is the difference of the biases. The
// halves of a word are the elements, as in BFloat16. Comparisons are of signed words, which SSE2
// has.
struct Float16 : Float16Bits<Float16> {
  static FloatPair load(const std::byte* bytes) {
    const auto words = load_bytes<SignedWords>(bytes);
    return {widen(words & 0xffff), widen((words >> 16) & 0xffff)};
  }
  static void round_and_store(std::byte* bytes, FloatPair lanes) {
    store_bytes(bytes, round_half(lanes.first) | round_half(lanes.second) << 16);
  }

 private:
  using SignedWords = Vector<std::int32_t>;
  static constexpr std::int32_t exponent = 1 << 23;           // one step of a float32's exponent
  static constexpr std::int32_t min_normal = 113 * exponent;  // 2^-14, in float32
  static constexpr std::int32_t infinity = 255 * exponent;

  static Floats widen(SignedWords half) {
    const SignedWords sign = (half & 0x8000) << 16;
    const SignedWords magnitude = (half & 0x7fff) << 13;
    const SignedWords normal = magnitude + 112 * exponent;
    const SignedWords infinity_or_nan = magnitude + 224 * exponent;
    // Given the exponent of 2^-14, the mantissa m of the subnormal m * 2^-24 reads 2^-14 more.
    const SignedWords subnormal =
        bits_of(floats_of(magnitude + min_normal) - floats_of(SignedWords{} + min_normal));
    const SignedWords finite = magnitude < exponent ? subnormal : normal;
    return floats_of(sign | (magnitude < 31 * exponent ? finite : infinity_or_nan));
  }

  static SignedWords round_half(Floats floats) {
    const SignedWords sign = (bits_of(floats) >> 16) & 0x8000;
    const SignedWords magnitude = bits_of(floats) & 0x7fffffff;
    // To nearest, ties to even, at bit 13. A carry is the right exponent, up to infinity's.
    const SignedWords normal = (magnitude - 112 * exponent + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    // The last bit of 0.5 is worth 2^-24, as the last one of a subnormal is: the addition rounds.
    const Floats half = Floats{} + 0.5f;
    const SignedWords subnormal = bits_of(floats_of(magnitude) + half) - bits_of(half);
    const SignedWords finite = magnitude < min_normal ? subnormal : normal;
    const SignedWords infinity_or_nan =
        magnitude > infinity ? SignedWords{} + 0x7e00 : SignedWords{} + 0x7c00;
    return sign | (magnitude < 143 * exponent ? finite : infinity_or_nan);
  }

  static Floats floats_of(SignedWords words) { return __builtin_bit_cast(Floats, words); }
  static SignedWords bits_of(Floats floats) { return __builtin_bit_cast(SignedWords, floats); }
};

#endif

// Integers of type T, folded as LaneType: unsigned where the op may overflow, since that wraps.
template <typename T, typename LaneType = T>
struct Integer {
  using Lanes = Vector<LaneType>;
  static constexpr std::size_t element_bytes = sizeof(T);
  static constexpr bool is_copied_as_bytes = true;

  static Lanes load(const std::byte* bytes) { return load_bytes<Lanes>(bytes); }
  static void store(std::byte* bytes, Lanes lanes) { store_bytes(bytes, lanes); }

  // No machine divides vectors of integers, but the quotient of floats up to 16 bits, and of
  // doubles up to 32 bits, is exact when truncated: value/divisor falls short of the next integer
  // by 1/divisor or more, while its rounding error is below 2^-6/divisor.
  static void divide_all(std::byte* dst, std::size_t count, std::uint32_t divisor) {
    using Quotient = decltype(choose_quotient());
    const auto wide_divisor = static_cast<Quotient>(divisor);
    for (std::size_t i = 0; i < count; ++i) {
      const auto value = static_cast<Quotient>(load_bytes<T>(dst + i * sizeof(T)));
      store_bytes(dst + i * sizeof(T), static_cast<T>(value / wide_divisor));
    }
  }

 private:
  static constexpr auto choose_quotient() {
    if constexpr (sizeof(T) <= 2) {
      return float{};
    } else if constexpr (sizeof(T) == 4) {
      return double{};
    } else {
      return T{};
    }
  }
};

struct Boolean {
  using Lanes = Vector<std::uint8_t>;
  static constexpr std::size_t element_bytes = 1;
  static constexpr bool is_copied_as_bytes = false;

  static Lanes load(const std::byte* bytes) {
    const Lanes lanes = load_bytes<Lanes>(bytes);
    return lanes != 0 ? Lanes{} + 1 : Lanes{};
  }
  static void store(std::byte* bytes, Lanes lanes) { store_bytes(bytes, lanes); }
  static Lanes divide(Lanes lanes, std::uint32_t) { return lanes; }
};

// ---- Ops --------------------------------------------------------------------------------------

struct Sum {
  template <typename Lanes>
  static Lanes fold(Lanes a, Lanes b) {
    return a + b;
  }
};

struct Product {
  template <typename Lanes>
  static Lanes fold(Lanes a, Lanes b) {
    return a * b;
  }
};

template <typename Lanes>
inline constexpr bool has_floats = false;
template <>
inline constexpr bool has_floats<Vector<float>> = true;
template <>
inline constexpr bool has_floats<Vector<double>> = true;

// As IEEE 754-2019's minimum and maximum: -0 lies below +0, so that the order of the operands does
// not show. A NaN on the left stays, as no comparison with it holds; one on the right is taken.
struct Min {
  template <typename Lanes>
  static Lanes fold(Lanes a, Lanes b) {
    Lanes smaller = b < a ? b : a;
    if constexpr (has_floats<Lanes>) {
      using Bits = decltype(a == b);
      const Bits either = __builtin_bit_cast(Bits, a) | __builtin_bit_cast(Bits, b);
      smaller = a == b ? __builtin_bit_cast(Lanes, either) : smaller;
    }
    return b == b ? smaller : b;
  }
};

struct Max {
  template <typename Lanes>
  static Lanes fold(Lanes a, Lanes b) {
    Lanes larger = b > a ? b : a;
    if constexpr (has_floats<Lanes>) {
      using Bits = decltype(a == b);
      const Bits both = __builtin_bit_cast(Bits, a) & __builtin_bit_cast(Bits, b);
      larger = a == b ? __builtin_bit_cast(Lanes, both) : larger;
    }
    return b == b ? larger : b;
  }
};

struct And {
  template <typename Lanes>
  static Lanes fold(Lanes a, Lanes b) {
    return a & b;
  }
};

struct Or {
  template <typename Lanes>
  static Lanes fold(Lanes a, Lanes b) {
    return a | b;
  }
};

struct Xor {
  template <typename Lanes>
  static Lanes fold(Lanes a, Lanes b) {
    return a ^ b;
  }
};

// (ac - bd, ad + bc), with c and d in turn on the right.
struct ComplexProduct {
  template <typename Lanes>
  static Lanes fold(Lanes left, Lanes right) {
    return multiply(left, right, std::make_index_sequence<sizeof(Lanes) / sizeof(left[0])>());
  }

 private:
  template <typename Lanes, std::size_t... lane>
  static Lanes multiply(Lanes left, Lanes right, std::index_sequence<lane...>) {
    const Lanes a = __builtin_shufflevector(left, left, (lane & ~std::size_t{1})...);
    const Lanes b = __builtin_shufflevector(left, left, (lane | 1)...);
    const Lanes swapped = __builtin_shufflevector(right, right, (lane ^ 1)...);
    const Lanes ac_ad = a * right;
    const Lanes bd_bc = b * swapped;
    return __builtin_shufflevector(ac_ad - bd_bc, ac_ad + bd_bc,
                                   (lane + (lane & 1) * sizeof...(lane))...);
  }
};

template <typename Op, typename Lanes>
[[gnu::always_inline]] inline Lanes fold(Lanes a, Lanes b) {
  return Op::fold(a, b);
}

template <typename Op>
[[gnu::always_inline]] inline FloatPair fold(FloatPair a, FloatPair b) {
  return {Op::fold(a.first, b.first), Op::fold(a.second, b.second)};
}

}  // namespace
}  // namespace farandole::FARANDOLE_INSTRUCTION_SET
