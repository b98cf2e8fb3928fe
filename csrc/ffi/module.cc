// The Python extension: FFI entry points as capsules, and the shape rules of csrc/moe that Python needs while tracing.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <string>
#include <utility>

#include "cuda/architectures.h"
#include "cuda/workspace.h"
#include "ffi/cpu.h"
#include "host/timeline.h"
#include "moe/scratch.h"
#ifdef MOK_WITH_CUDA
#include "cuda/runtime/nccl.h"
#include "cuda/runtime/report.h"
#include "ffi/cuda.h"
#endif

namespace nb = nanobind;

namespace {

template <class F>
nb::capsule handler(F* function) {
  return nb::capsule(reinterpret_cast<void*>(function), "xla._CUSTOM_CALL_TARGET");
}

mok::Shape shape(int64_t ranks, int64_t tokens, int64_t top_k, int64_t local_experts, int64_t ring_rows) {
  return {.ranks = ranks,
          .rank = 0,
          .tokens = tokens,
          .top_k = top_k,
          .hidden_size = 0,
          .intermediate_size = 0,
          .local_experts = local_experts,
          .ring_rows = ring_rows,
          .minibatch_rows = mok::kRowBlock};
}

std::string failure_text() {
#ifdef MOK_WITH_CUDA
  if (const auto text = mok::cuda::failure_text()) return *text;
#endif
  return {};
}

std::string nccl_missing() {
#ifdef MOK_WITH_CUDA
  return mok::cuda::Nccl::instance().missing;
#endif
  return "the extension was built without CUDA";
}

// Calls, and cycles of their CTAs.
std::pair<int64_t, int64_t> gpu_cycles() {
#ifdef MOK_WITH_CUDA
  const auto [calls, cycles] = mok::cuda::cycles();
  return {calls, cycles};
#endif
  return {};
}

// Names by compute capability, such as "9.0", whether or not the extension has their kernels.
nb::dict architectures() {
  nb::dict names;
#define ROW(major, minor, name, folder, nvcc) names[#major "." #minor] = name;
  MOK_ARCHITECTURES(ROW)
#undef ROW
  return names;
}

// Each event as a dictionary; times in nanoseconds of one clock.
nb::list take_timeline() {
  const auto ns = [](std::chrono::steady_clock::time_point time) {
    return time.time_since_epoch() / std::chrono::nanoseconds(1);
  };
  nb::list events;
  for (const mok::host::Event& e : mok::host::Timeline::instance().take()) {
    nb::dict event;
    event["direction"] = e.direction == mok::Direction::forward ? "forward" : "backward";
    event["rank"] = e.rank;
    event["worker"] = e.worker;
    event["communicates"] = e.communicates;
    event["kind"] = mok::kTaskNames[static_cast<int>(e.task.kind)];
    event["macrobatch"] = e.task.macrobatch;
    event["block"] = e.task.block;
    event["blocks"] = e.task.blocks;
    event["expert"] = e.task.expert;
    event["part"] = e.task.part;
    event["begin"] = ns(e.begin);
    event["ready"] = ns(e.ready);
    event["end"] = ns(e.end);
    events.append(event);
  }
  return events;
}

// Stage to handler, by direction; empty where the extension was built without CUDA.
nb::dict cuda_handlers() {
  nb::dict directions;
#ifdef MOK_WITH_CUDA
  nb::dict forward, backward;
  forward["prepare"] = handler(mok_cuda_forward_prepare);
  forward["initialize"] = handler(mok_cuda_forward_initialize);
  forward["execute"] = handler(mok_cuda_forward);
  backward["prepare"] = handler(mok_cuda_backward_prepare);
  backward["initialize"] = handler(mok_cuda_backward_initialize);
  backward["execute"] = handler(mok_cuda_backward);
  directions["forward"] = forward;
  directions["backward"] = backward;
#endif
  return directions;
}

}  // namespace

NB_MODULE(MOK_EXTENSION, m) {
  m.attr("INTERFACE") = MOK_INTERFACE;
  m.attr("ROW_BLOCK") = mok::kRowBlock;
  m.def("cpu_handlers", [] {
    nb::dict handlers;
    handlers["instantiate"] = handler(mok_cpu_instantiate);
    handlers["forward"] = handler(mok_cpu_forward);
    handlers["backward"] = handler(mok_cpu_backward);
    return handlers;
  });
  m.def("cuda_handlers", &cuda_handlers);
  m.def("architectures", &architectures,
        "The GPU architectures that have kernels: names by compute capability, such as \"9.0\".");
  m.def("gpu_cycles", &gpu_cycles, nb::call_guard<nb::gil_scoped_release>(),
        "Calls that the current GPU has completed, and clock cycles of all their CTAs; waits for it. For benchmarks.");
  m.def(
      "start_timeline", [] { mok::host::Timeline::instance().start(); },
      "Has the CPU executor record every task of the calls that begin from now on.");
  m.def("take_timeline", &take_timeline, "Ends that; returns the tasks of calls that are complete, as dictionaries.");
  m.def("nccl_missing", &nccl_missing, "Why the NCCL that is loaded cannot serve several GPUs; empty: it can.");
  m.def("failure_text", &failure_text, "What a GPU has reported of an earlier call; empty: nothing.");
  m.def("call_site_type", [] {
    nb::dict type;
    type["type_id"] = nb::capsule(mok_call_site_type_id());
    type["type_info"] = nb::capsule(mok_call_site_type_info());
    return type;
  });
  m.def(
      "max_rows",
      [](int64_t ranks, int64_t tokens, int64_t top_k, int64_t local_experts) {
        return mok::max_rows(shape(ranks, tokens, top_k, local_experts, 0));
      },
      nb::kw_only(), nb::arg("ranks"), nb::arg("tokens"), nb::arg("top_k"), nb::arg("local_experts"),
      "Rows, padding included, that can arrive at one rank at most.");
  m.def(
      "default_ring_rows",
      [](int64_t ranks, int64_t tokens, int64_t top_k, int64_t local_experts) {
        return mok::default_ring_rows(shape(ranks, tokens, top_k, local_experts, 0));
      },
      nb::kw_only(), nb::arg("ranks"), nb::arg("tokens"), nb::arg("top_k"), nb::arg("local_experts"),
      "Rows of the ring where the caller chooses none.");
  m.def(
      "workspace_bytes",
      [](int64_t ranks, int64_t tokens, int64_t top_k, int64_t local_experts, int64_t ring_rows, int64_t hidden,
         int64_t ranks_here) {
        mok::Shape s = shape(ranks, tokens, top_k, local_experts, ring_rows);
        s.hidden_size = hidden;
        return mok::cuda::workspace_bytes(s, ranks_here);
      },
      nb::kw_only(), nb::arg("ranks"), nb::arg("tokens"), nb::arg("top_k"), nb::arg("local_experts"),
      nb::arg("ring_rows"), nb::arg("hidden"), nb::arg("ranks_here"),
      "Bytes of one rank's schedule and counters on a GPU, and of its arena where all ranks are in one place.");
  m.def(
      "arena_bytes",
      [](int64_t ranks, int64_t tokens, int64_t top_k, int64_t hidden) {
        mok::Shape s = shape(ranks, tokens, top_k, 1, 0);
        s.hidden_size = hidden;
        return mok::SharedArenaLayout(mok::ArenaClass(s, 2)).bytes;
      },
      nb::kw_only(), nb::arg("ranks"), nb::arg("tokens"), nb::arg("top_k"), nb::arg("hidden"),
      "Bytes of the memory of one rank that its peers on other GPUs read and write.");
  m.def("pre_activation_width", &mok::pre_activation_width, nb::arg("intermediate"),
        "Elements of gate and up that a ring keeps of a row.");
  m.def("router_parts_width", &mok::router_parts_width, nb::arg("intermediate"),
        "Parts of the router gradient that a ring keeps of a row.");
  m.def("straddle_elements", &mok::straddle_elements, nb::kw_only(), nb::arg("hidden"), nb::arg("intermediate"),
        "Elements of an expert's gradients that wait between two macrobatches.");
}
