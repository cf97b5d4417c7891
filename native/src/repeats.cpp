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

// Where each rank has a part of the buffer, of so many rows: reduce_scatter, all_gather, gather,
// scatter and all_to_all; see farandole/communicator.py.
bool has_parts(int collective) noexcept {
  return collective == 1 || collective == 2 || (collective >= 5 && collective <= 7);
}

// An attribute or the result of a method; null, and no error set, if there is none.
nb::object taken(PyObject* result) noexcept {
  if (result == nullptr) PyErr_Clear();
  return nb::steal(result);
}

// Names of what a tensor is asked for.
struct TensorNames {
  static const TensorNames& get() {
    static const auto* names = new TensorNames;  // never freed: the interpreter may end before
    return *names;
  }
  PyObject* data_ptr = PyUnicode_InternFromString("data_ptr");
  PyObject* nbytes = PyUnicode_InternFromString("nbytes");
  PyObject* dtype = PyUnicode_InternFromString("dtype");
  PyObject* shape = PyUnicode_InternFromString("shape");
  PyObject* is_contiguous = PyUnicode_InternFromString("is_contiguous");
  PyObject* is_neg = PyUnicode_InternFromString("is_neg");
  PyObject* is_conj = PyUnicode_InternFromString("is_conj");
  PyObject* is_cpu = PyUnicode_InternFromString("is_cpu");
  PyObject* grad_fn = PyUnicode_InternFromString("grad_fn");
};

}  // namespace

bool Repeats::TensorTypes::know(nb::handle object) const noexcept {
  // Not of subclasses: what their memory means is up to them.
  const auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object.ptr()));
  return tensor.is_valid() && (type == tensor.ptr() || type == parameter.ptr());
}

void Repeats::TensorTypes::learn_from(nb::handle object) {
  if (tensor.is_valid() || object.is_none() || PyObject_CheckBuffer(object.ptr()) != 0) return;
  const nb::object torch = nb::steal(PyImport_GetModule(nb::str("torch").ptr()));
  if (!torch.is_valid() || !nb::isinstance(object, torch.attr("Tensor"))) return;
  parameter = torch.attr("nn").attr("Parameter");
  tensor = torch.attr("Tensor");
}

// What the buffers of one call are.
class Repeats::Views {
 public:
  Views(const TensorTypes& types, int collective, nb::handle source, nb::handle target) noexcept {
    in_place_ = source.is(target) && !target.is_none();
    const bool rows = has_parts(collective);
    is_usual_ = (in_place_ || source_.open(types, source, rows, false)) &&
                target_.open(types, target, rows, true);
  }
  Views(const Views&) = delete;
  Views& operator=(const Views&) = delete;

  const std::byte* input() const noexcept { return (in_place_ ? target_ : source_).memory; }
  std::byte* output() const noexcept { return target_.memory; }

  // False if these buffers are nothing that could have been remembered.
  bool fill(Key& key) const noexcept {
    if (!is_usual_) return false;
    const View& source = in_place_ ? target_ : source_;
    const View& rows = source.is_there ? source : target_;
    if (source.is_there && target_.is_there &&
        (source.format != target_.format || source.dtype != target_.dtype)) {
      return false;
    }
    key.kind |= rows.format << 48 | std::uint64_t{in_place_} << 40 |
                std::uint64_t{source.is_there} << 41 | std::uint64_t{target_.is_there} << 42;
    key.dtype = rows.dtype;
    key.source_bytes = source.bytes;
    key.source_rows = rows.rows;
    key.target_bytes = target_.bytes;
    return true;
  }

  // Whether they lie apart, or where the starts say.
  bool fit(const Known& known) const noexcept {
    if (in_place_ || !source_.is_there || !target_.is_there) return true;
    const std::byte* in = source_.memory;
    const std::byte* out = target_.memory;
    const bool apart = in + source_.bytes <= out || out + target_.bytes <= in;
    return apart || in - known.input_start == out - known.output_start;
  }

 private:
  struct View {
    View() noexcept = default;
    ~View() {
      if (buffer.obj != nullptr) PyBuffer_Release(&buffer);
    }
    View(const View&) = delete;
    View& operator=(const View&) = delete;

    // False if it is neither None nor plain contiguous memory. `with_rows`: whether their number
    // matters.
    bool open(const TensorTypes& types, nb::handle object, bool with_rows, bool writable) noexcept {
      if (object.is_none()) return true;
      is_there = true;
      return types.know(object) ? open_tensor(object.ptr(), with_rows)
                                : open_buffer(object.ptr(), writable);
    }

    std::byte* memory = nullptr;
    std::int64_t bytes = 0;
    std::int64_t rows = 1;
    std::uint64_t format = 0;         // of a buffer
    const PyObject* dtype = nullptr;  // of a tensor
    bool is_there = false;

   private:
    bool open_buffer(PyObject* object, bool writable) noexcept {
      const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
      if (PyObject_CheckBuffer(object) == 0) return false;
      if (PyObject_GetBuffer(object, &buffer, flags) != 0) {
        PyErr_Clear();
        buffer.obj = nullptr;
        return false;
      }
      const std::size_t length = std::strlen(buffer.format);
      if (length > 2) return false;
      std::memcpy(&format, buffer.format, length);
      memory = static_cast<std::byte*>(buffer.buf);
      bytes = buffer.len;
      if (buffer.ndim > 0) rows = buffer.shape[0];
      return true;
    }

    // As farandole/buffers.py: memory of the CPU that means what it holds, and that autograd does
    // not watch.
    bool open_tensor(PyObject* tensor, bool with_rows) noexcept {
      const TensorNames& names = TensorNames::get();
      const auto attribute = [&](PyObject* name) { return taken(PyObject_GetAttr(tensor, name)); };
      const auto ask = [&](PyObject* name) {
        return taken(PyObject_CallMethodNoArgs(tensor, name));
      };
      if (ask(names.is_contiguous).ptr() != Py_True || ask(names.is_neg).ptr() != Py_False ||
          ask(names.is_conj).ptr() != Py_False || attribute(names.is_cpu).ptr() != Py_True ||
          attribute(names.grad_fn).ptr() != Py_None) {
        return false;
      }
      const nb::object address = ask(names.data_ptr);
      const nb::object size = attribute(names.nbytes);
      dtype = attribute(names.dtype).ptr();  // torch keeps it
      if (!address.is_valid() || !size.is_valid()) return false;
      memory = static_cast<std::byte*>(PyLong_AsVoidPtr(address.ptr()));
      bytes = PyLong_AsLongLong(size.ptr());
      if (with_rows) {
        const nb::object shape = attribute(names.shape);
        if (!shape.is_valid() || PyTuple_Check(shape.ptr()) == 0) return false;
        if (PyTuple_GET_SIZE(shape.ptr()) > 0) {
          rows = PyLong_AsLongLong(PyTuple_GET_ITEM(shape.ptr(), 0));
        }
      }
      return true;
    }

    Py_buffer buffer{};
  };

  View source_;
  View target_;
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
  hash = mixed(hash, reinterpret_cast<std::uintptr_t>(key.dtype));
  hash = mixed(hash, reinterpret_cast<std::uintptr_t>(key.op));
  return mixed(hash, reinterpret_cast<std::uintptr_t>(key.algorithm));
}

bool Repeats::run(int collective, nb::handle source, nb::handle target, nb::handle op,
                  nb::handle root, nb::handle algorithm, nb::handle timeout_s) {
  if (!PyFloat_CheckExact(timeout_s.ptr()) || engine_->is_forked()) return false;
  const double seconds = PyFloat_AS_DOUBLE(timeout_s.ptr());
  if (!(seconds > 0)) return false;
  const Views views(tensor_types_, collective, source, target);
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
  tensor_types_.learn_from(source);
  tensor_types_.learn_from(target);
  const Views views(tensor_types_, collective, source, target);
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
