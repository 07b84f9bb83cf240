// Calls of Python from the engine's threads, which may be inside one when the interpreter ends.
#pragma once

#include <Python.h>
#include <cxxabi.h>
#include <pybind11/functional.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <utility>

namespace ncclx {

// Before 3.14, Python ends each thread that wants the lock of an interpreter which has ended: it unwinds its stack, through
// destructors that need the lock, and through Rust, which aborts the process. Such a thread stops for good instead, as
// later Pythons have it. `body` keeps nothing that has a destructor while it is in Python.
template <typename F>
void or_stop(F&& body) {
  try {
    body();
  } catch (abi::__forced_unwind&) {
    for (;;) pause();
  }
}

// Runs `body`, of which the same is true, with Python's lock, unless there is no interpreter any more.
template <typename F>
void with_python(F&& body) {
  or_stop([&] {
    if (!Py_IsInitialized()) return;
    const PyGILState_STATE state = PyGILState_Ensure();
    body();
    PyGILState_Release(state);
  });
}

// With Python's lock: calls a function. Whoever hears of exceptions that nobody catches is told of its own.
inline void call_python(PyObject* function, PyObject* arguments) {
  or_stop([&] {
    PyObject* result = PyObject_CallObject(function, arguments);
    if (!result) PyErr_WriteUnraisable(function);
    Py_XDECREF(result);
  });
}

// A hook that is the same, called in this way if it is a Python function, which PyTorch's binding has put behind frames
// that a thread cannot stop in.
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
