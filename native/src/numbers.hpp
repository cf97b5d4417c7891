// The dtypes and reduce operations, and which pairs of them mean something.
#pragma once

#include <cstddef>
#include <cstdint>

namespace farandole {

// The values travel in fingerprints between hosts: never renumber them.
enum class DType : std::uint8_t {
  float64 = 0,
  float32 = 1,
  float16 = 2,
  bfloat16 = 3,
  int8 = 4,
  int16 = 5,
  int32 = 6,
  int64 = 7,
  uint8 = 8,
  uint16 = 9,
  uint32 = 10,
  uint64 = 11,
  boolean = 12,
  complex64 = 13,
  complex128 = 14,
};
inline constexpr std::uint8_t num_dtypes = 15;

// The values travel in fingerprints between hosts: never renumber them.
enum class ReduceOp : std::uint8_t {
  sum = 0,
  avg = 1,
  prod = 2,
  min = 3,
  max = 4,
  band = 5,
  bor = 6,
  bxor = 7,
};
inline constexpr std::uint8_t num_reduce_ops = 8;

// Bytes of one element; 0 for a value that names no dtype.
constexpr std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::int8:
    case DType::uint8:
    case DType::boolean:
      return 1;
    case DType::float16:
    case DType::bfloat16:
    case DType::int16:
    case DType::uint16:
      return 2;
    case DType::float32:
    case DType::int32:
    case DType::uint32:
      return 4;
    case DType::float64:
    case DType::int64:
    case DType::uint64:
    case DType::complex64:
      return 8;
    case DType::complex128:
      return 16;
  }
  return 0;
}

// Whether op has a meaning for dtype. Integers take every op (avg truncates toward zero, as C++
// division does), real floats take all but the bitwise ones, complex numbers have no order and so
// take sum, avg and prod. Booleans take all but avg: sum, max and bor are "or", prod, min and band
// are "and". False for values that name no dtype or no op.
constexpr bool is_supported(DType dtype, ReduceOp op) {
  if (op > ReduceOp::bxor) return false;
  switch (dtype) {
    case DType::float64:
    case DType::float32:
    case DType::float16:
    case DType::bfloat16:
      return op <= ReduceOp::max;
    case DType::int8:
    case DType::int16:
    case DType::int32:
    case DType::int64:
    case DType::uint8:
    case DType::uint16:
    case DType::uint32:
    case DType::uint64:
      return true;
    case DType::boolean:
      return op != ReduceOp::avg;
    case DType::complex64:
    case DType::complex128:
      return op <= ReduceOp::prod;
  }
  return false;
}

}  // namespace farandole
