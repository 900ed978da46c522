// torch.ops.pasa.npu_decode: checks, tiling, workspace, launch, as in binding.cpp.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <tuple>

#include "checks.h"
#include "decode_call.h"
#include "enqueue.h"
#include "launch.h"

namespace pasa {
namespace {

// The output has the strides of q, and the log-sum-exp (Hkv, T, G) those of its rows.
std::tuple<Tensor, Tensor> Decode(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& table,
                                  const OptionalTensor& lengths, const OptionalTensor& starts,
                                  const OptionalTensor& sinks, int64_t tokens, bool is_causal, double scale,
                                  bool saturate, int64_t unbiased_columns, bool to_bf16)
{
    const DecodeCall call{q, k, v, table, lengths, starts, sinks, tokens};
    const Shape shape = ShapeOf(call);
    Settings settings = SettingsOf(call, is_causal, scale);
    settings.saturates = saturate;
    TORCH_CHECK_VALUE(unbiased_columns >= 0, "unbiased_columns=", unbiased_columns, " is negative");
    settings.unbiased_columns = static_cast<uint32_t>(std::min<int64_t>(unbiased_columns, kMaxDim));
    settings.to_bf16 = to_bf16;
    const Chip chip = ChipOf(q);
    const DecodeTiling tiling = PlanDecode(shape, LayoutOf(call), settings, chip);
    const c10::DeviceGuard guard(q.device());
    Tensor out = at::empty_strided(q.sizes(), q.strides(), q.options().dtype(OutputType(to_bf16)));
    Tensor lse = at::empty_strided(q.sizes().slice(0, 3), {q.stride(0) / q.size(3), q.stride(1) / q.size(3), 1},
                                   q.options().dtype(at::kFloat));
    const auto bytes = static_cast<int64_t>(tiling.attention.workspace_bytes);
    const Tensor workspace = at::empty({bytes}, q.options().dtype(at::kByte));
    const DecodePointers given = PointersOf(call, out, lse, workspace);
    const uint32_t cores = chip.cube_cores;
    Enqueue("pasa_decode", [=](void* stream) { LaunchDecode(given, tiling, cores, stream); });
    return {out, lse};
}

// Shapes alone, for tracing.
std::tuple<Tensor, Tensor> DecodeShapes(const Tensor& q, const Tensor&, const Tensor&, const OptionalTensor&,
                                        const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, int64_t,
                                        bool, double, bool, int64_t, bool to_bf16)
{
    const auto s = q.sym_strides();
    const c10::SymInt dim = q.sym_size(3);
    return {at::empty_strided_symint(q.sym_sizes(), s, q.options().dtype(OutputType(to_bf16))),
            at::empty_strided_symint(q.sym_sizes().slice(0, 3), {s[0] / dim, s[1] / dim, 1},
                                     q.options().dtype(at::kFloat))};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(pasa, m)
{
    m.def(
        "npu_decode(Tensor q, Tensor k, Tensor v, Tensor? table, Tensor? lengths, Tensor? starts, Tensor? sinks, "
        "int tokens, bool is_causal, float scale, bool saturate, int unbiased_columns, bool to_bf16) "
        "-> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(pasa, PASA_DEVICE, m)
{
    m.impl("npu_decode", Decode);
}

TORCH_LIBRARY_IMPL(pasa, Meta, m)
{
    m.impl("npu_decode", DecodeShapes);
}

}  // namespace pasa
