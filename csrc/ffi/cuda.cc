// XLA FFI handlers for GPUs. prepare asks XLA for the communicator of the call's group; initialize loads every kernel
// and makes the arenas that a group shares; execute only launches, so that XLA can capture it in a command buffer.
#include "ffi/cuda.h"

#include <optional>
#include <string>

#include "cuda/runtime/device.h"
#include "cuda/runtime/launch.h"
#include "cuda/runtime/peers.h"
#include "cuda/runtime/report.h"
#include "ffi/buffers.h"
#include "ffi/collectives.h"

namespace mok::xla_ffi {
namespace {

using cuda::bf16;

ffi::Error to_error(const std::optional<std::string>& text) {
  return text ? ffi::Error::Internal("mok_jax: " + *text) : ffi::Error::Success();
}

// Measured on H200s: from 32 to 64 row blocks all is equal or better; 17 cost 8 % at H 7168, I 2048.
int64_t minibatch_rows(const Attributes& a) { return a.minibatch_rows > 0 ? a.minibatch_rows : 64 * kRowBlock; }

// What both directions have alike.
void begin_call(const Operands<bf16>& in, const cuda::Peers* peers, cuda::Call& c) {
  const Attributes& a = in.attributes;
  c.program = a.program;
  c.shape = in.shape;
  c.shape.rank = peers ? peers->rank : 0;
  c.shape.minibatch_rows = minibatch_rows(a);
  c.peers = peers;
  c.save = in.save;
  c.activation = static_cast<Activation>(a.activation);
  c.activation_limit = a.activation_limit;
  c.timeout_s = a.timeout_s;
  c.entry_timeout_s = a.entry_timeout_s;
  c.ranks_here = a.virtual_ranks;
  c.communication_ctas = larger(0, a.communication_sms);
  c.reserved_sms = larger(0, a.reserved_sms);
  c.x = in.x;
  c.expert_ids = in.expert_ids;
  c.where = in.where;
  c.expert_weights = in.expert_weights;
  c.wi_0 = in.wi_0;
  c.wi_1 = in.wi_1;
  c.wo = in.wo;
}

std::optional<std::string> run(const Forward<bf16>& f, const cuda::Peers* peers, cudaStream_t stream) {
  cuda::ForwardCall c;
  begin_call(f.in, peers, c);
  c.out = f.y;
  c.row_table = f.row_table;
  c.expert_rows = f.expert_rows;
  c.bad_tokens = f.bad_tokens;
  c.pre_activations = f.pre_activations;
  c.rows = f.rows;
  c.hidden = f.hidden;
  c.workspace = f.workspace;
  return cuda::launch_forward(c, stream);
}

std::optional<std::string> run(const Backward<bf16>& b, const cuda::Peers* peers, cudaStream_t stream) {
  cuda::BackwardCall c;
  begin_call(b.in, peers, c);
  c.dy = b.dy;
  c.out = b.dx;
  c.row_table = b.row_table;
  c.expert_rows = b.expert_rows;
  c.saved_pre_activations = b.saved_pre_activations;
  c.saved_rows = b.saved_rows;
  c.router_grads = b.router_grads;
  c.wi_0_grad = b.wi_0_grad;
  c.wi_1_grad = b.wi_1_grad;
  c.wo_grad = b.wo_grad;
  c.grads_in_f32 = b.grads_in_f32;
  c.rows = b.rows;
  c.grads = b.grads;
  c.pre_activations = b.pre_activations;
  c.hidden = b.hidden;
  c.gate_up_grads = b.gate_up_grads;
  c.row_weights = b.row_weights;
  c.router_parts = b.router_parts;
  c.straddle = b.straddle;
  c.workspace = b.workspace;
  return cuda::launch_backward(c, stream);
}

// Whether ranks of the call are elsewhere.
bool has_peers(const Operands<bf16>& in) { return in.shape.ranks > in.attributes.virtual_ranks; }

std::optional<std::string> no_communicators() {
  return "this XLA lends no communicators to FFI calls; expert parallelism on GPUs wants jaxlib 0.11.2 or newer";
}

// Requested anew for every execution: that XLA then holds its lock orders programs that run at the same time alike on
// all devices.
std::optional<std::string> request(const Operands<bf16>& in, std::optional<Communicators>& communicators) {
  if (!has_peers(in)) return std::nullopt;
  if (!communicators) return no_communicators();
  const ffi::Error error =
      communicators->RequestCommunicator(ffi::GroupMode::kFlattenedId, groups_of(in.attributes), 0);
  return error.failure() ? std::optional(error.message()) : std::nullopt;
}

// The communicator of the call's group, as NCCL knows it.
std::optional<std::string> borrow(const Operands<bf16>& in, std::optional<Communicators>& communicators, void*& found) {
  if (!communicators) return no_communicators();
  const auto got = communicators->GetCommunicator(ffi::GroupMode::kFlattenedId, groups_of(in.attributes), 0);
  if (got.has_error()) return got.error().message();
  found = *got;
  return std::nullopt;
}

// Makes a call ready to be launched. XLA ends the process if one of several devices fails before a call is executed, so
// what goes wrong here is told by execute; but what an earlier call ran into is told here too where the process has one
// device, since a captured graph is replayed without execute.
std::optional<std::string> initialize_call(const Operands<bf16>& in, std::optional<Communicators>& communicators) {
  cuda::prepare(in.shape);
  if (cuda::devices_in_use() == 1) {
    if (const auto text = cuda::failure_text()) return text;
  }
  void* communicator;
  if (has_peers(in) && !borrow(in, communicators, communicator)) {
    cuda::make_peers(communicator, in.shape, in.attributes.entry_timeout_s);
  }
  return std::nullopt;
}

// Where a call's peers are; null where there are none.
std::optional<std::string> find_peers(const Operands<bf16>& in, std::optional<Communicators>& communicators,
                                      const cuda::Peers*& peers) {
  if (!has_peers(in)) return std::nullopt;
  void* communicator;
  if (const auto error = borrow(in, communicators, communicator)) return error;
  return cuda::find_peers(communicator, in.shape, peers);
}

// `stage` is given the call's buffers.
template <template <class> class Buffers, class Stage>
ffi::Error with_buffers(const ffi::RemainingArgs& operands, const ffi::RemainingRets& results,
                        const ffi::Dictionary& attributes, const Stage& stage) {
  try {
    Reader reader(Buffers<bf16>::kTarget, operands, results, attributes);
    return to_error(stage(reader.all<Buffers<bf16>>()));
  } catch (const WrongCall& wrong) {
    return to_error(wrong.what());
  }
}

template <template <class> class Buffers>
ffi::Error prepare(std::optional<Communicators> communicators, ffi::RemainingArgs operands, ffi::RemainingRets results,
                   ffi::Dictionary attributes) {
  return with_buffers<Buffers>(operands, results, attributes,
                               [&](const Buffers<bf16>& buffers) { return request(buffers.in, communicators); });
}

template <template <class> class Buffers>
ffi::Error initialize(std::optional<Communicators> communicators, ffi::RemainingArgs operands,
                      ffi::RemainingRets results, ffi::Dictionary attributes) {
  return with_buffers<Buffers>(operands, results, attributes, [&](const Buffers<bf16>& buffers) {
    return initialize_call(buffers.in, communicators);
  });
}

template <template <class> class Buffers>
ffi::Error execute(std::optional<Communicators> communicators, cudaStream_t stream, ffi::RemainingArgs operands,
                   ffi::RemainingRets results, ffi::Dictionary attributes) {
  return with_buffers<Buffers>(operands, results, attributes,
                               [&](const Buffers<bf16>& buffers) -> std::optional<std::string> {
                                 const cuda::Peers* peers = nullptr;
                                 if (auto text = cuda::failure_text()) return text;
                                 if (auto error = find_peers(buffers.in, communicators, peers)) return error;
                                 return run(buffers, peers, stream);
                               });
}

auto bind_prepare() {
  return ffi::Ffi::Bind<ffi::ExecutionStage::kPrepare>()
      .Ctx<MaybeCommunicators>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs();
}
auto bind_initialize() {
  return ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>()
      .Ctx<MaybeCommunicators>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs();
}
auto bind_execute() {
  return ffi::Ffi::Bind()
      .Ctx<MaybeCommunicators>()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs();
}

}  // namespace
}  // namespace mok::xla_ffi

XLA_FFI_DEFINE_HANDLER_SYMBOL(mok_cuda_forward_prepare, mok::xla_ffi::prepare<mok::xla_ffi::Forward>,
                              mok::xla_ffi::bind_prepare());
XLA_FFI_DEFINE_HANDLER_SYMBOL(mok_cuda_forward_initialize, mok::xla_ffi::initialize<mok::xla_ffi::Forward>,
                              mok::xla_ffi::bind_initialize());
XLA_FFI_DEFINE_HANDLER_SYMBOL(mok_cuda_forward, mok::xla_ffi::execute<mok::xla_ffi::Forward>,
                              mok::xla_ffi::bind_execute(), {xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(mok_cuda_backward_prepare, mok::xla_ffi::prepare<mok::xla_ffi::Backward>,
                              mok::xla_ffi::bind_prepare());
XLA_FFI_DEFINE_HANDLER_SYMBOL(mok_cuda_backward_initialize, mok::xla_ffi::initialize<mok::xla_ffi::Backward>,
                              mok::xla_ffi::bind_initialize());
XLA_FFI_DEFINE_HANDLER_SYMBOL(mok_cuda_backward, mok::xla_ffi::execute<mok::xla_ffi::Backward>,
                              mok::xla_ffi::bind_execute(), {xla::ffi::Traits::kCmdBufferCompatible});
