// The Python classes of the extension.
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

#include "backend.cpp"
#include "device.cpp"
#include "direct_call.cpp"
#include "memory.cpp"
#include "monitored_barrier.cpp"
#include "operators.cpp"
#include "window.cpp"
#include "wrapper.cpp"

namespace ncclx {
namespace {

const NcclxEngine* g_engine = nullptr;

c10::intrusive_ptr<NcclxBackend> create_backend(const c10d::DistributedBackendOptions& opts,
                                                const c10::intrusive_ptr<NcclxOptions>& given) {
  // The caller's options are not changed: it may use them for other groups.
  auto options = given ? c10::make_intrusive<NcclxOptions>(*given) : c10::make_intrusive<NcclxOptions>();
  const auto timeout = std::chrono::duration_cast<Milliseconds>(opts.timeout);
  // PyTorch passes its default if the program has given no timeout.
  if (timeout != kBackendDefaultTimeout) options->limit(timeout);
  options->group_name = opts.group_id;
  options->global_ranks_in_group.assign(opts.global_ranks_in_group.begin(), opts.global_ranks_in_group.end());
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  const bool joins = !opts.enable_reconfigure;
#else
  const bool joins = true;
#endif
  return c10::make_intrusive<NcclxBackend>(g_engine, opts.store, opts.group_rank, opts.group_size, opts.group_id,
                                           options, joins);
}

template <NcclxKind kind>
WorkPtr access_with_tensor(NcclxBackend& self, uint64_t window, const at::Tensor& tensor, int peer, int64_t offset,
                           bool async, int64_t timeout_ms) {
  return self.access_window(kind, window, tensor, peer, offset, async, Milliseconds(timeout_ms));
}

template <NcclxKind kind>
WorkPtr access_without_tensor(NcclxBackend& self, uint64_t window, int peer, bool async, int64_t timeout_ms) {
  return self.access_window(kind, window, std::nullopt, peer, 0, async, Milliseconds(timeout_ms));
}

// Blocks the thread, also for a work whose `wait` only orders streams.
void wait_blocking(c10::intrusive_ptr<c10d::Work> work) {
  if (const auto* message = dynamic_cast<const MessageWork*>(work.get())) work = message->whole();
  if (const auto* on_stream = dynamic_cast<const StreamWork*>(work.get())) on_stream->block(std::nullopt);
  work->wait();
}

int32_t cuda_devices() {
  NcclxError error;
  const int32_t devices = g_engine->cuda_devices(&error);
  if (devices < 0) raise(NCCLX_USAGE, error.text);
  return devices;
}

void define(py::module_& m) {
  using Options = c10d::Backend::Options;
  py::class_<NcclxOptions, c10::intrusive_ptr<NcclxOptions>, Options>(m, "Options")
      .def(py::init<std::optional<Milliseconds>, Hints>(), py::arg("timeout") = py::none(), py::arg("hints") = Hints{})
      // Reading copies them, so that changes of what was read would be lost: none can be made.
      .def_property(
          "hints",
          [](const NcclxOptions& self) { return py::module_::import("types").attr("MappingProxyType")(self.hints); },
          [](NcclxOptions& self, Hints hints) { self.hints = std::move(hints); })
      .def("__deepcopy__", [](const NcclxOptions& self, const py::object&) {
        return c10::make_intrusive<NcclxOptions>(self);
      });
  py::class_<Part, std::shared_ptr<Part>>(m, "_Part");
  py::class_<NcclxBackend, c10::intrusive_ptr<NcclxBackend>, c10d::Backend>(m, "Backend", py::dynamic_attr())
      .def_property_readonly("options", &NcclxBackend::getBackendOptions)
      .def("_set_default_timeout", &NcclxBackend::setTimeout, py::arg("timeout"),
           py::call_guard<py::gil_scoped_release>())
      // Torch binds it from 2.14 on.
      .def("_settle", &NcclxBackend::settle, py::call_guard<py::gil_scoped_release>())
      .def("get_error", &NcclxBackend::getError, py::call_guard<py::gil_scoped_release>())
      .def("_has_failed", &NcclxBackend::has_failed)
      .def("_wait_for_hooks", &NcclxBackend::wait_for_hooks, py::call_guard<py::gil_scoped_release>())
      .def("_host", &NcclxBackend::host, py::arg("rank"), py::call_guard<py::gil_scoped_release>())
      .def("_name_ranks", &NcclxBackend::name_ranks, py::arg("members"), py::call_guard<py::gil_scoped_release>())
      .def("_on_failure", &NcclxBackend::onFailure, py::arg("hook"), py::arg("number") = -1,
           py::call_guard<py::gil_scoped_release>())
#ifdef C10D_BACKEND_HAS_RECONFIGURE
      .def("_set_rendezvous", &NcclxBackend::set_rendezvous, py::arg("handle"), py::arg("rendezvous"))
#endif
      .def("_message",
           [](NcclxBackend& self, bool sends, at::Tensor tensor, int peer, int tag, Milliseconds timeout, bool async) {
             Tensors tensors{std::move(tensor)};
             return self.message(sends ? NCCLX_SEND : NCCLX_RECV, tensors, peer, tag, timeout, async);
           },
           py::arg("sends"), py::arg("tensor"), py::arg("peer"), py::arg("tag"), py::arg("timeout"),
           py::arg("async_op") = true,
           py::call_guard<py::gil_scoped_release>())
      .def("_direct_calls", &direct_calls)
      .def("_barrier", &NcclxBackend::barrier_in_order, py::arg("async_op"), py::arg("timeout"),
           py::call_guard<py::gil_scoped_release>())
      .def("_set_device", &NcclxBackend::eagerConnectSingleDevice, py::arg("device"),
           py::call_guard<py::gil_scoped_release>())
      .def("_part", &NcclxBackend::part, py::arg("ranks"), py::call_guard<py::gil_scoped_release>())
      .def("_inherit", &NcclxBackend::inherit, py::arg("part"), py::call_guard<py::gil_scoped_release>())
      .def("_allocates", &NcclxBackend::allocates, py::call_guard<py::gil_scoped_release>())
      .def("_register", &NcclxBackend::register_memory, py::arg("tensor"), py::call_guard<py::gil_scoped_release>())
      .def("_deregister", &NcclxBackend::deregister_memory, py::arg("tensor"), py::call_guard<py::gil_scoped_release>())
      .def("_window_register", &NcclxBackend::register_window, py::arg("tensor"), py::arg("owning") = true,
           py::call_guard<py::gil_scoped_release>())
      .def("_window_deregister", &NcclxBackend::deregister_window, py::arg("window"),
           py::call_guard<py::gil_scoped_release>())
      .def("_window_put", &access_with_tensor<NCCLX_PUT>, py::arg("window"), py::arg("tensor"), py::arg("dst"),
           py::arg("byte_offset"), py::arg("async_op") = false, py::arg("timeout_ms") = -1,
           py::call_guard<py::gil_scoped_release>())
      .def("_window_get", &access_with_tensor<NCCLX_GET>, py::arg("window"), py::arg("tensor"), py::arg("src"),
           py::arg("byte_offset"), py::arg("async_op") = false, py::arg("timeout_ms") = -1,
           py::call_guard<py::gil_scoped_release>())
      .def("_window_signal", &access_without_tensor<NCCLX_SIGNAL>, py::arg("window"), py::arg("dst"),
           py::arg("async_op") = false, py::arg("timeout_ms") = -1, py::call_guard<py::gil_scoped_release>())
      .def("_window_wait_signal", &access_without_tensor<NCCLX_WAIT_SIGNAL>, py::arg("window"), py::arg("src"),
           py::arg("async_op") = false, py::arg("timeout_ms") = -1, py::call_guard<py::gil_scoped_release>())
      .def("_window_accumulate", &access_with_tensor<NCCLX_ACCUMULATE>, py::arg("window"), py::arg("tensor"),
           py::arg("dst"), py::arg("byte_offset"), py::arg("async_op") = false, py::arg("timeout_ms") = -1,
           py::call_guard<py::gil_scoped_release>())
      .def("_window_flush", &access_without_tensor<NCCLX_FLUSH>, py::arg("window"), py::arg("dst"),
           py::arg("async_op") = false, py::arg("timeout_ms") = -1, py::call_guard<py::gil_scoped_release>())
      .def("_window_all_gather", &NcclxBackend::gather_into_window, py::arg("window"), py::arg("output"),
           py::arg("input"), py::arg("async_op") = false, py::arg("timeout_ms") = -1,
           py::call_guard<py::gil_scoped_release>())
      .def("_window_fence", &NcclxBackend::fence_window, py::arg("window"), py::call_guard<py::gil_scoped_release>())
      .def("_window_map", &NcclxBackend::map_window, py::arg("window"), py::arg("rank"),
           py::call_guard<py::gil_scoped_release>())
      .def("_window_get_path", &NcclxBackend::window_get_path, py::arg("window"), py::arg("rank"),
           py::call_guard<py::gil_scoped_release>())
      // Ranks in no new group of a split have nothing to do.
      .def("perform_nocolor_split", [](NcclxBackend&, at::Device) {});
  m.def("_end_all", [] { NcclxBackend::end_all(g_engine); }, py::call_guard<py::gil_scoped_release>());
  m.def("_call_hook", [](const py::object& hook) { call_python(hook.ptr(), nullptr); }, py::arg("hook"));
  m.def("_wait_blocking", &wait_blocking, py::arg("work"), py::call_guard<py::gil_scoped_release>());
  m.def("_cuda_devices", &cuda_devices, py::call_guard<py::gil_scoped_release>());
  m.def("_shared_memory", [](int64_t bytes) { return shared_memory(g_engine, bytes); }, py::arg("bytes"),
        py::call_guard<py::gil_scoped_release>());
  py::class_<BackendWrapper, c10::intrusive_ptr<BackendWrapper>, c10d::Backend>(m, "BackendWrapper")
      .def(py::init([](py::object comm, bool owns) {
             auto inner = comm.attr("_c10d_backend")().cast<c10::intrusive_ptr<c10d::Backend>>();
             return c10::make_intrusive<BackendWrapper>(std::move(comm), std::move(inner), owns);
           }),
           py::arg("comm"), py::arg("owns") = true)
      .def("get_comm", &BackendWrapper::comm)
      .def("get_error", &BackendWrapper::getError, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("options", &BackendWrapper::getBackendOptions)
      .def("_set_default_timeout", &BackendWrapper::setTimeout, py::arg("timeout"),
           py::call_guard<py::gil_scoped_release>())
      .def("perform_nocolor_split", [](BackendWrapper&, at::Device) {});
  m.def("create_backend", &create_backend, py::arg("opts"), py::arg("pg_options") = py::none(),
        py::call_guard<py::gil_scoped_release>());
}

}  // namespace
}  // namespace ncclx

extern "C" const char* ncclx_shim_torch_version() { return TORCH_VERSION; }

extern "C" void ncclx_shim_call(void* function, void* arguments) {
  ncclx::call_python(static_cast<PyObject*>(function), static_cast<PyObject*>(arguments));
}

extern "C" int32_t ncclx_shim_init(void* py_module, const NcclxEngine* engine) {
  try {
    if (engine->size != sizeof(NcclxEngine)) throw std::runtime_error("ncclx_rs: the engine and its shim do not match");
    ncclx::g_engine = engine;
    auto module = py::reinterpret_borrow<py::module_>(static_cast<PyObject*>(py_module));
    ncclx::define(module);
    return 0;
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_ImportError, error.what());
  } catch (...) {
    PyErr_SetString(PyExc_ImportError, "ncclx_rs: the shim could not be set up");
  }
  return -1;
}
