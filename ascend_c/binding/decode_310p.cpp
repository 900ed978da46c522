// torch.ops.pasa.npu_310p_decode: checks, tiling, workspace, launch, as in binding_310p.cpp.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <tuple>

#include "../tiling/plan_310p.h"
#include "checks_310p.h"
#include "decode_call.h"
#include "enqueue.h"
#include "launch_310p.h"

namespace pasa {
namespace {

// The output has the strides of q. The kernel writes the log-sum-exp (Hkv, T, G) of each row eight times, 32 bytes.
std::tuple<Tensor, Tensor> Decode(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& table,
                                  const OptionalTensor& lengths, const OptionalTensor& starts,
                                  const OptionalTensor& sinks, int64_t tokens, bool is_causal, double scale)
{
    const DecodeCall call{q, k, v, table, lengths, starts, sinks, tokens};
    TORCH_CHECK_VALUE(!call.packed(), "starts come with a table: this chip has no kernel of packed sequences, so pad them "
                                      "to one length, and pass lengths");
    const Shape shape = ShapeOf(call);
    const uint32_t cores = CoresOf(q);
    const DecodeTiling tiling = PlanDecode310P(shape, LayoutOf(call), SettingsOf(call, is_causal, scale), cores);
    const c10::DeviceGuard guard(q.device());
    Tensor out = at::empty_strided(q.sizes(), q.strides(), q.options());
    const int64_t token = q.stride(1) / q.size(3), head = q.stride(0) / q.size(3);
    Tensor lse = at::empty_strided({q.size(0), q.size(1), q.size(2), kUnitCopies},
                                   {head * kUnitCopies, token * kUnitCopies, kUnitCopies, 1},
                                   q.options().dtype(at::kFloat));
    const auto bytes = static_cast<int64_t>(tiling.attention.workspace_bytes);
    const Tensor workspace = at::empty({bytes}, q.options().dtype(at::kByte));
    const DecodePointers given = PointersOf(call, out, lse, workspace);
    Enqueue("pasa_decode_310p", [=](void* stream) { LaunchDecode(given, tiling, cores, stream); });
    return {out, lse.select(3, 0)};
}

// Shapes alone, for tracing.
std::tuple<Tensor, Tensor> DecodeShapes(const Tensor& q, const Tensor&, const Tensor&, const OptionalTensor&,
                                        const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, int64_t,
                                        bool, double)
{
    const auto n = q.sym_sizes(), s = q.sym_strides();
    const c10::SymInt copies = kUnitCopies;
    Tensor lse = at::empty_strided_symint({n[0], n[1], n[2], copies},
                                          {s[0] / n[3] * copies, s[1] / n[3] * copies, copies, 1},
                                          q.options().dtype(at::kFloat));
    return {at::empty_strided_symint(n, s, q.options()), lse.select(3, 0)};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(pasa, m)
{
    m.def(
        "npu_310p_decode(Tensor q, Tensor k, Tensor v, Tensor? table, Tensor? lengths, Tensor? starts, Tensor? sinks, "
        "int tokens, bool is_causal, float scale) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(pasa, PASA_DEVICE, m)
{
    m.impl("npu_310p_decode", Decode);
}

TORCH_LIBRARY_IMPL(pasa, Meta, m)
{
    m.impl("npu_310p_decode", DecodeShapes);
}

}  // namespace pasa
