// Chooses between the kernels of kernels_impl.cpp, which is compiled once per instruction set.
#include "kernels.hpp"

#include <algorithm>
#include <span>

namespace farandole {

// Each is defined where native/CMakeLists.txt compiles kernels for it.
namespace baseline {
CombineFunction find_combine(DType dtype, ReduceOp op);
}
namespace neon {
CombineFunction find_combine(DType dtype, ReduceOp op);
}
namespace avx2 {
CombineFunction find_combine(DType dtype, ReduceOp op);
}
namespace avx512 {
CombineFunction find_combine(DType dtype, ReduceOp op);
}

namespace {

struct Kernels {
  InstructionSet isa;
  bool is_available;
  CombineFunction (*find)(DType dtype, ReduceOp op);
};

// What native/CMakeLists.txt compiles for this architecture, the best first; the last runs on every
// machine of it.
std::span<const Kernels> compiled_kernels() {
#if defined(__x86_64__)
  // Asks for exactly what is passed there as -m flags.
  static const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  static const bool has_avx512 =
      has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  static const Kernels compiled[] = {{InstructionSet::avx512, has_avx512, avx512::find_combine},
                                     {InstructionSet::avx2, has_avx2, avx2::find_combine},
                                     {InstructionSet::baseline, true, baseline::find_combine}};
#elif defined(__aarch64__)
  static const Kernels compiled[] = {{InstructionSet::neon, true, neon::find_combine}};
#else
  static const Kernels compiled[] = {{InstructionSet::baseline, true, baseline::find_combine}};
#endif
  return compiled;
}

InstructionSet best_instruction_set() {
  static const auto best = std::ranges::find_if(compiled_kernels(), &Kernels::is_available)->isa;
  return best;
}

}  // namespace

bool is_available(InstructionSet isa) {
  return std::ranges::any_of(compiled_kernels(), [&](const Kernels& kernels) {
    return kernels.isa == isa && kernels.is_available;
  });
}

CombineFunction find_combine(DType dtype, ReduceOp op, InstructionSet isa) {
  if (!is_supported(dtype, op) || !is_available(isa)) return nullptr;
  return std::ranges::find(compiled_kernels(), isa, &Kernels::isa)->find(dtype, op);
}

CombineFunction find_combine(DType dtype, ReduceOp op) {
  return find_combine(dtype, op, best_instruction_set());
}

std::string_view instruction_set() { return name_of(best_instruction_set()); }

std::string_view name_of(InstructionSet isa) {
  switch (isa) {
    case InstructionSet::avx512:
      return "avx512";
    case InstructionSet::avx2:
      return "avx2";
    case InstructionSet::neon:
      return "neon";
    default:
      return "baseline";
  }
}

}  // namespace farandole
