// Chooses between the kernels of kernels_impl.cpp, which is compiled once per instruction set.
#include "kernels.hpp"

namespace farandole {

namespace baseline {
CombineFunction find_combine(DType dtype, ReduceOp op);
}
#if defined(__x86_64__)
namespace avx2 {
CombineFunction find_combine(DType dtype, ReduceOp op);
}
namespace avx512 {
CombineFunction find_combine(DType dtype, ReduceOp op);
}
#endif

namespace {

InstructionSet best_instruction_set() {
  static const InstructionSet best = is_available(InstructionSet::avx512) ? InstructionSet::avx512
                                     : is_available(InstructionSet::avx2)
                                         ? InstructionSet::avx2
                                         : InstructionSet::baseline;
  return best;
}

}  // namespace

// Asks for exactly what native/CMakeLists.txt passes as -m flags.
bool is_available(InstructionSet isa) {
  switch (isa) {
    case InstructionSet::baseline:
      return true;
#if defined(__x86_64__)
    case InstructionSet::avx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
    case InstructionSet::avx512:
      return is_available(InstructionSet::avx2) && __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl");
#endif
    default:
      return false;
  }
}

CombineFunction find_combine(DType dtype, ReduceOp op, InstructionSet isa) {
  if (!is_supported(dtype, op) || !is_available(isa)) return nullptr;
  switch (isa) {
#if defined(__x86_64__)
    case InstructionSet::avx512:
      return avx512::find_combine(dtype, op);
    case InstructionSet::avx2:
      return avx2::find_combine(dtype, op);
#endif
    default:
      return baseline::find_combine(dtype, op);
  }
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
    default:
      return "baseline";
  }
}

}  // namespace farandole
