// Calls that were made before, found again by what the caller passes: the way from Python into the
// engine that a small message can afford. What is not found here takes the long way, through
// farandole/communicator.py and farandole/runner.py, which ends with remember().
#pragma once

#include <nanobind/nanobind.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <unordered_map>

#include "engine.hpp"

namespace farandole {

class Repeats {
 public:
  explicit Repeats(std::shared_ptr<Engine> engine) : engine_(std::move(engine)) {}

  // Runs the call that remember() was told for such arguments. False if it is unknown, if anything
  // about it is unusual, or if it failed: then all later runs fail in the same way.
  //
  // `source`, `target`: numpy arrays and the like, or torch tensors, or None; the same object if in
  // place.
  // `op`, `algorithm`: str or None, told apart by identity. `root`: an int. `timeout_s`: a float.
  bool run(int collective, nanobind::handle source, nanobind::handle target, nanobind::handle op,
           nanobind::handle root, nanobind::handle algorithm, nanobind::handle timeout_s);

  // The starts are those of the part that an input or output is of a whole buffer, in bytes: where
  // the two overlap, they must be views of one.
  void remember(int collective, nanobind::handle source, nanobind::handle target,
                nanobind::object op, nanobind::handle root, nanobind::object algorithm,
                std::shared_ptr<SettledCall> settled, std::int64_t input_start,
                std::int64_t output_start);

 private:
  struct Key {
    std::uint64_t kind = 0;  // collective, root, format, which buffers there are
    std::int64_t source_bytes = 0;
    std::int64_t source_rows = 0;
    std::int64_t target_bytes = 0;
    const PyObject* dtype = nullptr;  // of tensors; buffers have their format in kind
    const PyObject* op = nullptr;
    const PyObject* algorithm = nullptr;
    bool operator==(const Key&) const = default;
    bool set_kind(int collective, nanobind::handle root) noexcept;  // false if no usual root
  };
  struct Hash {
    std::size_t operator()(const Key& key) const noexcept;
  };
  struct Known {
    std::shared_ptr<SettledCall> settled;
    // Kept, so that no other object gets their address. (torch keeps its dtypes.)
    nanobind::object op;
    nanobind::object algorithm;
    std::int64_t input_start;
    std::int64_t output_start;
  };
  class Views;
  struct TensorTypes {
    nanobind::object tensor;  // torch.Tensor, once a tensor was remembered
    nanobind::object parameter;
    bool know(nanobind::handle object) const noexcept;
    void learn_from(nanobind::handle object);
  };

  static constexpr std::size_t kMost = 4096;

  std::shared_ptr<Engine> engine_;
  // Both guarded by the GIL.
  TensorTypes tensor_types_;
  std::unordered_map<Key, Known, Hash> known_;
};

// Lets go of the GIL for as long as it lives. A thread that takes the GIL again once the
// interpreter has ended is held there for good: CPython before 3.14 would end it by unwinding its
// stack, through frames that do not allow that.
class WithoutGil {
 public:
  WithoutGil() noexcept : state_(PyEval_SaveThread()) {}
  ~WithoutGil() { take(); }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

  // Runs signal handlers. True if one raised; its exception is then pending in this thread.
  bool signal_raised() noexcept;

 private:
  void take() noexcept;

  PyThreadState* state_;
};

// Runs `call` with the GIL released. Throws what a signal handler raised meanwhile.
Receipt run_without_gil(Engine& engine, const Call& call);

// `seconds` as the engine takes it; none if infinite.
std::optional<std::chrono::nanoseconds> timeout_of(double seconds) noexcept;

}  // namespace farandole
