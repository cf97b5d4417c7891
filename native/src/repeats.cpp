#include "repeats.hpp"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>

namespace farandole {
namespace nb = nanobind;
namespace {

std::uint64_t mixed(std::uint64_t seed, std::uint64_t value) noexcept {
  const std::uint64_t x = (seed ^ value) * 0x9e3779b97f4a7c15;
  return x ^ (x >> 32);
}

}  // namespace

// What the Python buffers of one call are.
class Repeats::Views {
 public:
  Views(nb::handle source, nb::handle target) noexcept {
    in_place_ = source.is(target) && !target.is_none();
    is_usual_ = (in_place_ || open(source_, source, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)) &&
                open(target_, target, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | PyBUF_WRITABLE);
  }
  ~Views() {
    if (source_.obj != nullptr) PyBuffer_Release(&source_);
    if (target_.obj != nullptr) PyBuffer_Release(&target_);
  }
  Views(const Views&) = delete;
  Views& operator=(const Views&) = delete;

  const std::byte* input() const noexcept { return bytes_of(in_place_ ? target_ : source_); }
  std::byte* output() const noexcept { return bytes_of(target_); }

  // False if these buffers are nothing that could have been remembered.
  bool fill(Key& key) const noexcept {
    if (!is_usual_) return false;
    const Py_buffer& source = in_place_ ? target_ : source_;
    const bool has_source = source.obj != nullptr;
    const bool has_target = target_.obj != nullptr;
    std::uint64_t format = 0;
    if (has_source || has_target) {
      const char* text = has_source ? source.format : target_.format;
      const std::size_t length = std::strlen(text);
      if (length > 2 || (has_source && has_target && std::strcmp(text, target_.format) != 0)) {
        return false;
      }
      std::memcpy(&format, text, length);
    }
    const Py_buffer& rows = has_source ? source : target_;
    key.kind |= format << 48 | std::uint64_t{in_place_} << 40 | std::uint64_t{has_source} << 41 |
                std::uint64_t{has_target} << 42;
    key.source_bytes = has_source ? source.len : 0;
    key.source_rows = rows.obj != nullptr && rows.ndim > 0 ? rows.shape[0] : 1;
    key.target_bytes = has_target ? target_.len : 0;
    return true;
  }

  // Whether they lie apart, or where the starts say.
  bool fit(const Known& known) const noexcept {
    if (in_place_ || source_.obj == nullptr || target_.obj == nullptr) return true;
    const std::byte* in = bytes_of(source_);
    const std::byte* out = bytes_of(target_);
    const bool apart = in + source_.len <= out || out + target_.len <= in;
    return apart || in - known.input_start == out - known.output_start;
  }

 private:
  static bool open(Py_buffer& view, nb::handle object, int flags) noexcept {
    if (object.is_none()) return true;
    if (PyObject_CheckBuffer(object.ptr()) == 0) return false;
    if (PyObject_GetBuffer(object.ptr(), &view, flags) == 0) return true;
    PyErr_Clear();
    view.obj = nullptr;
    return false;
  }
  static std::byte* bytes_of(const Py_buffer& view) noexcept {
    return view.obj == nullptr ? nullptr : static_cast<std::byte*>(view.buf);
  }

  Py_buffer source_{};
  Py_buffer target_{};
  bool in_place_ = false;
  bool is_usual_ = false;
};

bool Repeats::Key::set_kind(int collective, nb::handle root) noexcept {
  if (!PyLong_CheckExact(root.ptr())) return false;
  int overflow = 0;
  const long number = PyLong_AsLongAndOverflow(root.ptr(), &overflow);
  if (overflow != 0 || number < 0 || number >= 1 << 24) return false;
  kind = static_cast<std::uint64_t>(collective) | static_cast<std::uint64_t>(number) << 8;
  return true;
}

std::size_t Repeats::Hash::operator()(const Key& key) const noexcept {
  std::uint64_t hash = mixed(key.kind, static_cast<std::uint64_t>(key.source_bytes));
  hash = mixed(hash, static_cast<std::uint64_t>(key.source_rows));
  hash = mixed(hash, static_cast<std::uint64_t>(key.target_bytes));
  hash = mixed(hash, reinterpret_cast<std::uintptr_t>(key.op));
  return mixed(hash, reinterpret_cast<std::uintptr_t>(key.algorithm));
}

bool Repeats::run(int collective, nb::handle source, nb::handle target, nb::handle op,
                  nb::handle root, nb::handle algorithm, nb::handle timeout_s) {
  if (!PyFloat_CheckExact(timeout_s.ptr()) || engine_->is_forked()) return false;
  const double seconds = PyFloat_AS_DOUBLE(timeout_s.ptr());
  if (!(seconds > 0)) return false;
  const Views views(source, target);
  Key key{.op = op.ptr(), .algorithm = algorithm.ptr()};
  if (!key.set_kind(collective, root) || !views.fill(key)) return false;
  const auto found = known_.find(key);
  if (found == known_.end() || !views.fit(found->second)) return false;
  // The map may change while the GIL is released.
  const Call call{found->second.settled, views.input(), views.output(), timeout_of(seconds)};
  return run_without_gil(*engine_, call).status == Abort::none;
}

void Repeats::remember(int collective, nb::handle source, nb::handle target, nb::object op,
                       nb::handle root, nb::object algorithm, std::shared_ptr<SettledCall> settled,
                       std::int64_t input_start, std::int64_t output_start) {
  const Views views(source, target);
  Key key{.op = op.ptr(), .algorithm = algorithm.ptr()};
  if (!key.set_kind(collective, root) || !views.fill(key)) return;
  if (known_.size() >= kMost) known_.clear();
  known_.insert_or_assign(key, Known{std::move(settled), std::move(op), std::move(algorithm),
                                     input_start, output_start});
}

Receipt run_without_gil(Engine& engine, const Call& call) {
  bool raised = false;
  Receipt receipt;
  {
    WithoutGil released;
    receipt = engine.run(call, [&] { return raised = raised || released.signal_raised(); });
  }
  if (raised) throw nb::python_error();
  return receipt;
}

std::optional<std::chrono::nanoseconds> timeout_of(double seconds) noexcept {
  constexpr double kForEver = 1e9;  // thirty years; the clock could not count much further
  if (!(seconds < kForEver)) return std::nullopt;
  return std::chrono::nanoseconds(std::max<std::int64_t>(1, std::llround(seconds * 1e9)));
}

bool WithoutGil::signal_raised() noexcept {
  take();
  const bool raised = PyErr_CheckSignals() != 0;
  state_ = PyEval_SaveThread();
  return raised;
}

void WithoutGil::take() noexcept {
  try {
    PyEval_RestoreThread(state_);
  } catch (...) {  // the unwinding, which ends if nobody leaves this block
    while (true) pause();
  }
}

}  // namespace farandole
