// Every kernel of every instruction set that the machine has, against kernels_reference.hpp. Bits
// are compared, there are no tolerances.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <cstring>
#include <iomanip>
#include <limits>
#include <random>
#include <vector>

#include "check.hpp"
#include "kernels.hpp"
#include "kernels_reference.hpp"

namespace farandole::testing {
namespace {

// ---- Data -------------------------------------------------------------------------------------

using Random = std::mt19937_64;

// Random bits: every integer, and floats of any size with infinities, NaNs and subnormals.
Bytes any_bits(std::size_t num_bytes, Random& random) {
  Bytes bytes(num_bytes);
  for (auto& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

template <typename T>
T moderate(T, Random& random) {
  std::uniform_real_distribution<double> between(-4, 4);
  if constexpr (std::floating_point<T>) {
    return static_cast<T>(between(random));
  } else if constexpr (requires { T::from(0.0); }) {
    return T::from(between(random));
  } else if constexpr (requires(T pair) { pair.imaginary; }) {
    return {moderate(T{}.real, random), moderate(T{}.real, random)};
  } else if constexpr (std::same_as<T, Truth>) {
    return {static_cast<std::uint8_t>(random() % 4)};
  } else {
    return static_cast<T>(random());
  }
}

// Mostly numbers whose sums and products are neither 0 nor infinite, and some of any bits.
Bytes operand(DType dtype, std::size_t count, Random& random) {
  Bytes bytes = any_bits(count * size_of(dtype), random);
  with_type_of(dtype, [&]<typename T>(T) {
    for (std::size_t i = 0; i < count; ++i) {
      if (random() % 64 != 0) set(bytes, i, moderate(T{}, random));
    }
  });
  return bytes;
}

std::vector<Bytes> operands(DType dtype, std::size_t num_srcs, std::size_t count, Random& random) {
  std::vector<Bytes> srcs;
  for (std::size_t s = 0; s < num_srcs; ++s) srcs.push_back(operand(dtype, count, random));
  return srcs;
}

// ---- Calling a kernel -------------------------------------------------------------------------

std::vector<ReduceOp> ops_of(DType dtype) {
  std::vector<ReduceOp> ops;
  for (std::uint8_t op = 0; op < num_reduce_ops; ++op) {
    if (is_supported(dtype, ReduceOp{op})) ops.push_back(ReduceOp{op});
  }
  return ops;
}

std::vector<DType> dtypes() {
  std::vector<DType> all;
  for (std::uint8_t dtype = 0; dtype < num_dtypes; ++dtype) all.push_back(DType{dtype});
  return all;
}

Bytes combine(InstructionSet isa, DType dtype, ReduceOp op, const std::vector<Bytes>& srcs,
              std::uint32_t divisor) {
  std::vector<const std::byte*> pointers;
  for (const auto& src : srcs) pointers.push_back(src.data());
  Bytes dst(srcs[0].size());
  find_combine(dtype, op, isa)(dst.data(), pointers.data(), srcs.size(),
                               dst.size() / size_of(dtype), divisor);
  return dst;
}

// Sizes are equal by construction. An empty vector may have no address, which memcmp may not get.
bool are_same(const Bytes& a, const Bytes& b) {
  return a.empty() || std::memcmp(a.data(), b.data(), a.size()) == 0;
}

struct Case {
  InstructionSet isa;
  DType dtype;
  ReduceOp op;
  std::size_t num_srcs;
  std::uint32_t divisor;
};

void check_bytes(const Bytes& actual, const Bytes& expected, const Case& of,
                 std::source_location place = std::source_location::current()) {
  check(
      are_same(actual, expected),
      [&](std::ostream& out) {
        const auto differing =
            std::mismatch(actual.begin(), actual.end(), expected.begin(), expected.end());
        const std::size_t size = size_of(of.dtype);
        const auto i = static_cast<std::size_t>(differing.first - actual.begin()) / size;
        out << name_of(of.isa) << ", dtype " << int(of.dtype) << ", op " << int(of.op) << ", "
            << of.num_srcs << " sources, divisor " << of.divisor << ", " << expected.size() / size
            << " elements: element " << i << " is 0x" << std::hex << std::setfill('0');
        for (std::size_t b = size; b-- > 0;) {
          out << std::setw(2) << int(actual[i * size + b]);
        }
        out << ", expected 0x";
        for (std::size_t b = size; b-- > 0;) {
          out << std::setw(2) << int(expected[i * size + b]);
        }
        out << std::dec;
      },
      place);
}

// ---- Tests ------------------------------------------------------------------------------------

void test_which_pairs_exist() {
  for (std::uint8_t dtype = 0; dtype <= num_dtypes; ++dtype) {
    for (std::uint8_t op = 0; op <= num_reduce_ops; ++op) {
      const bool supported = is_supported(DType{dtype}, ReduceOp{op});
      check_equal(find_combine(DType{dtype}, ReduceOp{op}) != nullptr, supported);
      for (auto isa : available_instruction_sets()) {
        check_equal(find_combine(DType{dtype}, ReduceOp{op}, isa) != nullptr, supported);
      }
    }
  }
  check_equal(is_supported(DType::boolean, ReduceOp::avg), false);
  check_equal(is_supported(DType::boolean, ReduceOp::sum), true);
  check_equal(is_supported(DType::float16, ReduceOp::max), true);
  check_equal(is_supported(DType::float32, ReduceOp::band), false);
  check_equal(is_supported(DType::complex64, ReduceOp::prod), true);
  check_equal(is_supported(DType::complex128, ReduceOp::min), false);
  check_equal(is_supported(DType::int8, ReduceOp::avg), true);
  check_equal(instruction_set(), name_of(available_instruction_sets().back()));
  for (auto dtype : dtypes()) {
    with_type_of(dtype, [&]<typename T>(T) { check_equal(size_of(dtype), sizeof(T)); });
  }
}

// Memory of exactly the bytes of a source, at an offset: a sanitizer sees a byte read too many.
class Placed {
 public:
  Placed(const std::byte* contents, std::size_t num_bytes, std::size_t offset)
      : memory_(offset + num_bytes), offset_(offset) {
    std::copy_n(contents, num_bytes, data());
  }
  std::byte* data() { return memory_.data() + offset_; }
  Bytes contents() { return {data(), memory_.data() + memory_.size()}; }

 private:
  Bytes memory_;
  std::size_t offset_;
};

// Disjoint, then in place over each source; aligned, then each buffer at an odd offset of its own.
void check_every_placement(const Case& of, const std::vector<Bytes>& srcs, const Bytes& expected) {
  const std::size_t num_bytes = expected.size();
  for (std::size_t odd : {0, 1}) {
    std::vector<Placed> placed;
    std::vector<const std::byte*> pointers;
    for (std::size_t s = 0; s < of.num_srcs; ++s) {
      placed.emplace_back(srcs[s].data(), num_bytes, odd * (2 * s + 1));
    }
    for (auto& src : placed) pointers.push_back(src.data());
    const auto combine_into = [&](std::byte* dst) {
      find_combine(of.dtype, of.op, of.isa)(dst, pointers.data(), of.num_srcs,
                                            num_bytes / size_of(of.dtype), of.divisor);
    };
    const Bytes garbage(num_bytes, std::byte{0xa5});
    Placed apart(garbage.data(), num_bytes, odd * 3);
    combine_into(apart.data());
    check_bytes(apart.contents(), expected, of);
    for (std::size_t s = 0; s < of.num_srcs; ++s) {
      Placed dst(srcs[s].data(), num_bytes, odd * 5);
      pointers[s] = dst.data();
      combine_into(dst.data());
      check_bytes(dst.contents(), expected, of);
      pointers[s] = placed[s].data();
    }
    for (std::size_t s = 0; s < of.num_srcs; ++s) {
      check(std::equal(placed[s].data(), placed[s].data() + num_bytes, srcs[s].begin()),
            "sources other than dst are left alone");
    }
  }
}

void test_every_kernel() {
  constexpr std::array<std::size_t, 17> counts = {0,  1,  2,  3,  7,  8,  15,   16,  17,
                                                  31, 33, 63, 64, 65, 67, 1000, 4099};
  Random random(1);
  for (auto dtype : dtypes()) {
    const auto all_srcs = operands(dtype, 17, counts.back(), random);
    for (auto op : ops_of(dtype)) {
      for (std::uint32_t num_srcs : {1, 2, 3, 4, 5, 9, 17}) {
        const std::vector<Bytes> srcs(all_srcs.begin(), all_srcs.begin() + num_srcs);
        for (auto divisor : {1u, std::max(num_srcs, 2u)}) {
          const Bytes all_expected = reduce_all(dtype, op, srcs, divisor);
          for (auto count : counts) {
            const auto num_bytes = static_cast<std::ptrdiff_t>(count * size_of(dtype));
            const Bytes expected(all_expected.begin(), all_expected.begin() + num_bytes);
            for (auto isa : available_instruction_sets()) {
              check_every_placement({isa, dtype, op, num_srcs, divisor}, srcs, expected);
            }
          }
        }
      }
    }
  }
}

void test_instruction_sets_agree_on_any_bits() {
  Random random(2);
  for (auto dtype : dtypes()) {
    for (std::uint32_t num_srcs : {1, 2, 3, 8}) {
      std::vector<Bytes> srcs;
      for (std::size_t s = 0; s < num_srcs; ++s) srcs.push_back(any_bits(16 * 10007, random));
      for (auto op : ops_of(dtype)) {
        for (auto divisor : {1u, 7u}) {
          const Bytes expected = reduce_all(dtype, op, srcs, divisor);
          for (auto isa : available_instruction_sets()) {
            check_bytes(combine(isa, dtype, op, srcs, divisor), expected,
                        {isa, dtype, op, num_srcs, divisor});
          }
        }
      }
    }
  }
}

// All bit patterns of a 16-bit float: first against fixed partners, then among themselves.
template <typename Float>
void test_all_16_bit_floats(DType dtype) {
  constexpr std::size_t num_patterns = 65536;
  Bytes patterns(2 * num_patterns), minus_zeros(2 * num_patterns), successors(2 * num_patterns);
  Bytes same_but_one_nan(2 * num_patterns);
  for (std::size_t i = 0; i < num_patterns; ++i) {
    const Float pattern = {static_cast<std::uint16_t>(i)};
    const bool is_nan = std::isnan(pattern.number());
    set(patterns, i, pattern);
    set(minus_zeros, i, Float{0x8000});
    set(successors, i, Float{static_cast<std::uint16_t>(i + 1)});
    set(same_but_one_nan, i, is_nan ? Float::from(std::nan("")) : pattern);
    check_equal(Float::from(pattern.number()).bits, get<Float>(same_but_one_nan, i).bits);
  }
  Random random(3);
  const std::vector<Bytes> others = {successors, any_bits(2 * num_patterns, random),
                                     any_bits(2 * num_patterns, random)};
  for (auto isa : available_instruction_sets()) {
    const auto check_all = [&](ReduceOp op, const std::vector<Bytes>& srcs, std::uint32_t divisor,
                               const Bytes& expected) {
      check_bytes(combine(isa, dtype, op, srcs, divisor), expected,
                  {isa, dtype, op, srcs.size(), divisor});
    };
    check_all(ReduceOp::sum, {patterns}, 1, patterns);
    check_all(ReduceOp::sum, {patterns, minus_zeros}, 1, same_but_one_nan);
    check_all(ReduceOp::min, {patterns, patterns}, 1, same_but_one_nan);
    check_all(ReduceOp::max, {patterns, patterns}, 1, same_but_one_nan);
    for (const auto& other : others) {
      for (auto op : {ReduceOp::sum, ReduceOp::prod, ReduceOp::min, ReduceOp::max}) {
        for (auto divisor : {1u, 2u, 3u, 1024u}) {  // by 2, the sums with successors are ties
          check_all(op, {patterns, other}, divisor,
                    reduce_all(dtype, op, {patterns, other}, divisor));
        }
      }
    }
  }
}

template <typename T>
Bytes repeated(T value, std::size_t count) {
  Bytes bytes(count * sizeof(T));
  for (std::size_t i = 0; i < count; ++i) set(bytes, i, value);
  return bytes;
}

// Checks, at a count that uses all loops of a kernel, that combining these values gives expected.
template <typename T>
void check_values(DType dtype, ReduceOp op, const std::vector<T>& values, std::uint32_t divisor,
                  T expected) {
  constexpr std::size_t count = 421;
  std::vector<Bytes> srcs;
  for (const auto& value : values) srcs.push_back(repeated(value, count));
  for (auto isa : available_instruction_sets()) {
    check_bytes(combine(isa, dtype, op, srcs, divisor), repeated(expected, count),
                {isa, dtype, op, values.size(), divisor});
  }
}

void test_16_bit_floats_are_rounded_once() {
  const auto brain = [](double number) { return BrainFloat::from(number); };
  const auto half = [](double number) { return Half::from(number); };
  // One at a time, 256 + 1 would round to 256 seven times. 263 lies between 262 and 264.
  std::vector<BrainFloat> ones(8, brain(1));
  ones[0] = brain(256);
  check_values(DType::bfloat16, ReduceOp::sum, ones, 1, brain(264));
  check_values(DType::float16, ReduceOp::avg, std::vector(4, half(40000)), 4, half(40000));
  check_values(DType::float16, ReduceOp::sum, std::vector(2, half(40000)), 1, Half{0x7c00});
  check_values(DType::float16, ReduceOp::sum, {half(65504), half(8)}, 1, half(65504));
  check_values(DType::float16, ReduceOp::sum, {half(65504), half(16)}, 1, Half{0x7c00});
  check_values(DType::float16, ReduceOp::sum, {Half{0x0001}, Half{0x0001}}, 1, Half{0x0002});
  check_values(DType::float16, ReduceOp::sum, {Half{0x0400}, Half{0x8001}}, 1, Half{0x03ff});
  check_values(DType::float16, ReduceOp::avg, {Half{0x0001}, Half{0x0002}}, 2, Half{0x0002});
  check_values(DType::float16, ReduceOp::avg, {Half{0x0001}, Half{0x0000}}, 2, Half{0x0000});
  check_values(DType::float16, ReduceOp::prod, {Half{0x8001}, half(0.25)}, 1, Half{0x8000});
  check_values(DType::bfloat16, ReduceOp::avg, {BrainFloat{0x0001}, BrainFloat{0x0002}}, 2,
               BrainFloat{0x0002});
}

template <typename T>
T number_as(double number) {
  if constexpr (std::floating_point<T>) {
    return static_cast<T>(number);
  } else {
    return T::from(number);
  }
}

// A NaN with a sign and a payload, in one operand and one element at a time.
template <typename T>
void test_nan_in_each_place(DType dtype, T odd_nan) {
  constexpr std::size_t count = 300;
  constexpr std::uint32_t num_srcs = 5;
  for (auto op : ops_of(dtype)) {
    std::vector<Bytes> srcs;
    for (std::size_t s = 0; s < num_srcs; ++s) {
      Bytes src(count * sizeof(T));
      for (std::size_t i = 0; i < count; ++i)
        set(src, i, number_as<T>(1.0 + double((7 * i + s) % 5)));
      srcs.push_back(src);
    }
    const Bytes without_nan = reduce_all(dtype, op, srcs, 1);
    for (std::size_t s = 0; s < num_srcs; ++s) {
      for (std::size_t i = 0; i < count; ++i) {
        const T before = get<T>(srcs[s], i);
        set(srcs[s], i, odd_nan);
        Bytes expected = without_nan;
        set(expected, i, number_as<T>(std::nan("")));
        for (auto isa : available_instruction_sets()) {
          check_bytes(combine(isa, dtype, op, srcs, 1), expected, {isa, dtype, op, num_srcs, 1});
        }
        set(srcs[s], i, before);
      }
    }
  }
}

template <typename T>
void test_infinities(DType dtype) {
  const T infinity = number_as<T>(std::numeric_limits<double>::infinity());
  const T minus_infinity = number_as<T>(-std::numeric_limits<double>::infinity());
  const T nan = number_as<T>(std::nan(""));
  const T one = number_as<T>(1), zero = number_as<T>(0), minus_zero = number_as<T>(-0.0);
  check_values(dtype, ReduceOp::sum, {infinity, one}, 1, infinity);
  check_values(dtype, ReduceOp::avg, {one, minus_infinity, one}, 3, minus_infinity);
  check_values(dtype, ReduceOp::sum, {infinity, minus_infinity}, 1, nan);
  check_values(dtype, ReduceOp::prod, {infinity, zero}, 1, nan);
  check_values(dtype, ReduceOp::prod, {infinity, minus_infinity}, 1, minus_infinity);
  check_values(dtype, ReduceOp::min, {one, minus_infinity, infinity}, 1, minus_infinity);
  check_values(dtype, ReduceOp::max, {one, minus_infinity, infinity}, 1, infinity);
  for (const auto& zeros : {std::vector<T>{zero, minus_zero}, std::vector<T>{minus_zero, zero}}) {
    check_values(dtype, ReduceOp::min, zeros, 1, minus_zero);
    check_values(dtype, ReduceOp::max, zeros, 1, zero);
  }
  check_values(dtype, ReduceOp::sum, {minus_zero, minus_zero}, 1, minus_zero);
}

// Quotients next to integers, and the ends of each range, by divisors small and large.
template <std::integral T>
void test_integer_division(DType dtype) {
  constexpr T lowest = std::numeric_limits<T>::min(), highest = std::numeric_limits<T>::max();
  for (std::uint32_t divisor : {2u, 3u, 5u, 7u, 255u, 256u, 65537u, 16777217u, 4294967295u}) {
    const auto multiple = static_cast<T>(highest / divisor * divisor);
    for (T value : {lowest, static_cast<T>(lowest + 1), T{0}, T{1}, static_cast<T>(-1), multiple,
                    static_cast<T>(multiple - 1), static_cast<T>(-multiple),
                    static_cast<T>(1 - multiple), static_cast<T>(highest - 1), highest}) {
      const auto expected = static_cast<T>(static_cast<__int128>(value) / divisor);
      check_values(dtype, ReduceOp::avg, {value}, divisor, expected);
      check_values(dtype, ReduceOp::avg, {T{1}, static_cast<T>(static_cast<__int128>(value) - 1)},
                   divisor, expected);
    }
  }
}

void test_integers_wrap_and_booleans_are_one_bit() {
  using Limits = std::numeric_limits<std::int32_t>;
  check_values(DType::int32, ReduceOp::sum, {Limits::max(), 1}, 1, Limits::min());
  check_values(DType::int32, ReduceOp::avg, {-3, -4}, 2, -3);
  check_values<std::uint16_t>(DType::uint16, ReduceOp::prod, {65535, 65535}, 1, 1);
  check_values<std::int8_t>(DType::int8, ReduceOp::prod, {-128, -1}, 1, -128);
  check_values(DType::boolean, ReduceOp::sum, {Truth{2}}, 1, Truth{1});
  check_values(DType::boolean, ReduceOp::bxor, {Truth{2}, Truth{1}}, 1, Truth{0});
  check_values(DType::boolean, ReduceOp::prod, {Truth{2}, Truth{0x80}}, 2, Truth{1});
}

}  // namespace
}  // namespace farandole::testing

int main() {
  using namespace farandole;
  using namespace farandole::testing;
  test_which_pairs_exist();
  test_every_kernel();
  test_instruction_sets_agree_on_any_bits();
  test_all_16_bit_floats<Half>(DType::float16);
  test_all_16_bit_floats<BrainFloat>(DType::bfloat16);
  test_16_bit_floats_are_rounded_once();
  test_nan_in_each_place<double>(DType::float64, std::bit_cast<double>(0xfff4000000000123u));
  test_nan_in_each_place<float>(DType::float32, std::bit_cast<float>(0xffa00123u));
  test_nan_in_each_place(DType::float16, Half{0xfd23});
  test_nan_in_each_place(DType::bfloat16, BrainFloat{0xffa3});
  test_infinities<double>(DType::float64);
  test_infinities<float>(DType::float32);
  test_infinities<Half>(DType::float16);
  test_infinities<BrainFloat>(DType::bfloat16);
  test_integer_division<std::int8_t>(DType::int8);
  test_integer_division<std::int16_t>(DType::int16);
  test_integer_division<std::int32_t>(DType::int32);
  test_integer_division<std::int64_t>(DType::int64);
  test_integer_division<std::uint8_t>(DType::uint8);
  test_integer_division<std::uint16_t>(DType::uint16);
  test_integer_division<std::uint32_t>(DType::uint32);
  test_integer_division<std::uint64_t>(DType::uint64);
  test_integers_wrap_and_booleans_are_one_bit();
  for (auto isa : available_instruction_sets()) std::cout << name_of(isa) << ' ';
  return report();
}
