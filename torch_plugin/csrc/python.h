// Calls of Python from the engine's threads, during which the interpreter may end.
#pragma once

#include <Python.h>
#include <cxxabi.h>
#include <pybind11/functional.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <utility>

namespace ncclx {

// After the interpreter's end, Python before 3.14 ends each thread that takes its lock: it unwinds the stack, through
// destructors that need the lock, and through Rust, which aborts the process. Here such a thread stops for good instead,
// as with later Pythons. `body` holds no object with a destructor while it calls Python.
template <typename F>
void or_stop(F&& body) {
  try {
    body();
  } catch (abi::__forced_unwind&) {
    for (;;) pause();
  }
}

// Runs `body`, under the same condition, with Python's lock; does nothing after the interpreter's end.
template <typename F>
void with_python(F&& body) {
  or_stop([&] {
    if (!Py_IsInitialized()) return;
    const PyGILState_STATE state = PyGILState_Ensure();
    body();
    PyGILState_Release(state);
  });
}

// Calls a function, with Python's lock. `sys.unraisablehook` gets its exceptions.
inline void call_python(PyObject* function, PyObject* arguments) {
  or_stop([&] {
    PyObject* result = PyObject_CallObject(function, arguments);
    if (!result) PyErr_WriteUnraisable(function);
    Py_XDECREF(result);
  });
}

// The same hook; if it is a Python function, it is called by `call_python`. PyTorch's binding of it has frames in which a
// thread cannot stop.
inline std::function<void()> stoppable(std::function<void()> hook) {
  using FromPython = pybind11::detail::type_caster_std_function_specializations::func_wrapper<void>;
  const auto* found = hook.target<FromPython>();
  if (!found) return hook;
  PyObject* kept = nullptr;
  with_python([&] { kept = Py_NewRef(found->hfunc.f.ptr()); });
  const std::shared_ptr<PyObject> function(kept, [](PyObject* dropped) {
    with_python([&] { Py_XDECREF(dropped); });
  });
  return [function] { with_python([&] { call_python(function.get(), nullptr); }); };
}

}  // namespace ncclx
