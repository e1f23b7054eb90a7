// llga_fuser._C: switches, passes and figures of the fuser. The public API is llga_fuser/*.py.
//
// pybind11 is torch's own copy: graphs cross between torch's module and this one.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <ATen/Parallel.h>

#include "bindings.h"
#include "jit/onednn/interface.h"
#include "jit/onednn/kernel.h"
#include "jit/onednn/ops/op_table.h"
#include "jit/onednn/runtime/autotune.h"
#include "jit/onednn/runtime/choices.h"
#include "jit/onednn/runtime/engine.h"
#include "jit/onednn/runtime/plan_cache.h"
#include "jit/onednn/runtime/speed_check.h"
#include "jit/onednn/runtime/thread_watch.h"
#include "llga_fuser_build_config.h"

namespace py = pybind11;

// torch holds graphs in shared pointers.
PYBIND11_DECLARE_HOLDER_TYPE(T, std::shared_ptr<T>)

namespace {

py::dict buildInfo() {
  py::dict info;
  info["version"] = LLGA_FUSER_VERSION;
  info["torch"] = LLGA_FUSER_TORCH_VERSION;
  info["onednn"] = std::to_string(DNNL_VERSION_MAJOR) + "." + std::to_string(DNNL_VERSION_MINOR) +
                   "." + std::to_string(DNNL_VERSION_PATCH);
  return info;
}

py::dict runtimeInfo() {
  py::dict info;
  info["onednn"] = llga::onednnVersion();
  info["onednn_hash"] = llga::onednnHash();
  info["isa"] = llga::effectiveIsa();
  info["bf16"] = llga::prefersBf16();
  info["int8_saturates"] = llga::saturatesInt8();
  info["cpu_runtime"] = dnnl_version()->cpu_runtime == DNNL_RUNTIME_OMP ? "OpenMP" : "other";
  info["threads"] = at::get_num_threads();
  return info;
}

py::dict cacheInfo() {
  const auto info = llga::PlanCache::instance().info();
  py::dict result;
  result["entries"] = info.entries;
  result["hits"] = info.hits;
  result["misses"] = info.misses;
  result["evictions"] = info.evictions;
  result["fallbacks"] = info.fallbacks;
  result["compile_seconds"] = info.compile_seconds;
  result["packed_bytes"] = info.packed_bytes;
  result["arena_bytes"] = info.arena_bytes;
  result["capacity_entries"] = info.capacity_entries;
  result["capacity_bytes"] = info.capacity_bytes;
  return result;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "The llga_fuser extension module; see the package llga_fuser for the public API.";
  llga::registerFusionGroup();

  m.def("set_enabled", &llga::setEnabled, py::arg("enabled"));
  m.def("is_enabled", &llga::isEnabled);
  m.def("build_info", &buildInfo);
  m.def("runtime_info", &runtimeInfo);

  m.def("pass_names", [] {
    std::vector<std::string> names;
    for (const auto& pass : llga::passes()) {
      names.emplace_back(pass.name);
    }
    return names;
  });
  m.def("set_pass_enabled", &llga::setPassEnabled, py::arg("name"), py::arg("enabled"));
  m.def("is_pass_enabled", &llga::isPassEnabled, py::arg("name"));
  m.def(
      "run_pass",
      [](const std::string& name, const std::shared_ptr<torch::jit::Graph>& graph) {
        llga::runPass(name, graph);
      },
      py::arg("name"), py::arg("graph"));
  m.def("allow_int8_saturation", &llga::allowInt8Saturation, py::arg("allow"));
  m.def("check_speed", &llga::checkSpeed, py::arg("on"));
  m.def("assume_contention", &llga::assumeContention, py::arg("high"));
  m.def("spread_threads", &llga::spreadThreads);
  m.def("places_apart", &llga::placesApart, py::arg("places"), py::arg("allowed"));
  m.def("waits_asleep", [] { return llga::waiting() == llga::Waiting::asleep; });
  m.def(
      "wait_asleep",
      [](bool asleep) { llga::waitFor(asleep ? llga::Waiting::asleep : llga::Waiting::awake); },
      py::arg("asleep"));
  py::class_<llga::WaitingChoice>(m, "WaitingChoice")
      .def(py::init<>())
      .def(
          "waits_asleep",
          [](llga::WaitingChoice& choice, double lateness, bool contended, double now) {
            return choice.next(lateness, contended, now) == llga::Waiting::asleep;
          },
          py::arg("lateness"), py::arg("contended"), py::arg("now"));
  m.def("autotune", &llga::autotune, py::arg("on"));
  py::class_<llga::AutotuneHere>(m, "AutotuneHere").def(py::init<>());
  m.def("autotunes", &llga::autotunes);
  m.def(
      "use_choices_in",
      [](const std::string& directory) { llga::Choices::instance().useDirectory(directory); },
      py::arg("directory"));
  m.def("choices", [] {
    const auto info = llga::Choices::instance().info();
    return std::make_pair(info.path, info.known);
  });
  m.def("op_names", [] {
    std::vector<std::string> names;
    for (const auto& entry : llga::opTable()) {
      names.emplace_back(entry.name);
    }
    return names;
  });

  m.def("cache_info", &cacheInfo);
  m.def("fallbacks", [] { return llga::PlanCache::instance().fallbackReasons(); });
  m.def("reset_stats", [] { llga::PlanCache::instance().resetStatistics(); });
  m.def(
      "clear_cache", [] { llga::PlanCache::instance().clear(); },
      py::call_guard<py::gil_scoped_release>());
  m.def(
      "set_cache_capacity",
      [](uint64_t entries, uint64_t bytes) {
        llga::PlanCache::instance().setCapacity(entries, bytes);
      },
      py::arg("entries"), py::arg("bytes"), py::call_guard<py::gil_scoped_release>());
  bindAheadOfTime(m);
  bindReport(m);
  m.def("set_fpmath_mode", &llga::setFpmathMode, py::arg("mode"));
  m.def("fpmath_mode", &llga::fpmathMode);
}
