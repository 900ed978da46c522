// torch.ops.pasa.npu_310p_*: checks, tiling, launch. Compiled against torch and run on the CPU twin by
// tests/ascend_c/test_binding_310p.py; never run on an NPU.
//
// As in binding.cpp nothing waits for the device, and all memory is torch's.
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <tuple>

#include "../tiling/plan_310p.h"
#include "build_record.h"
#include "checks_310p.h"
#include "enqueue.h"
#include "launch_310p.h"

namespace pasa {
namespace {

// Of keys or values (B, Hkv, Skv, D).
ShiftTiling PlanBlocks(const char* name, const Tensor& x, const OptionalTensor& lengths, double scale)
{
    const Shape shape{Count(name, x, 0), Count(name, x, 1), Count(name, x, 1),
                      1,                 Count(name, x, 2), Count(name, x, 3)};
    CheckTensor(name, x, x, at::kHalf, x.sizes());
    if (lengths) CheckTensor("lengths", *lengths, x, at::kInt, {x.size(0)});
    return PlanShift(shape, scale, true, lengths.has_value(), false);
}

// (B, Hkv, blocks, D / 16, 128, 16)
Tensor Fractals(const Tensor& x)
{
    return at::empty({x.size(0), x.size(1), Blocks(x.size(2)), x.size(3) / kFractal, kBlockKeys, kFractal}, x.options());
}

std::tuple<Tensor, Tensor, Tensor> Shift(const Tensor& k, const OptionalTensor& lengths, double scale)
{
    Require(scale > 0 && std::isfinite(scale), "scale must be positive and finite");
    const ShiftTiling tiling = PlanBlocks("k", k, lengths, scale);
    const c10::DeviceGuard guard(k.device());
    const int64_t batch = k.size(0), heads = k.size(1), blocks = Blocks(k.size(2));
    Tensor keys = Fractals(k);
    Tensor anchors = at::empty({batch, heads, 2 * blocks, k.size(3)}, k.options());
    Tensor units = at::empty({batch, heads, blocks, kUnitCopies}, k.options().dtype(at::kFloat));
    const ShiftPointers given{Pointer(k),    Pointer(lengths), nullptr,       nullptr,
                              Pointer(keys), Pointer(anchors), Pointer(units)};
    const uint32_t cores = CoresOf(k);
    Enqueue("pasa_shift_310p", [=](void* stream) { LaunchShift(given, tiling, cores, stream); });
    return {keys, anchors, units};
}

Tensor LayOutValues(const Tensor& v, const OptionalTensor& lengths)
{
    const ShiftTiling tiling = PlanBlocks("v", v, lengths, 1.0);
    const c10::DeviceGuard guard(v.device());
    Tensor values = Fractals(v);
    const LayoutPointers given{Pointer(v), Pointer(lengths), Pointer(values)};
    const uint32_t cores = CoresOf(v);
    Enqueue("pasa_lay_out_310p", [=](void* stream) { LaunchLayOut(given, tiling, cores, stream); });
    return values;
}

// The bits of a mask (B or 1, H or 1, tiles or 1, blocks, 1024), and its table of visits
// (ops/attention/ascend/masks.py).
void ReadMask(const Tensor& mask, const Tensor& visits, const Tensor& q, int64_t rows, int64_t keys, Settings& settings)
{
    const int64_t tiles = DivideUp<int64_t>(rows, kHalfRows), blocks = Blocks(keys);
    TORCH_CHECK_VALUE(mask.dim() == 5, "mask has ", mask.dim(), " dimensions ", mask.sizes(), ", expected 5");
    const auto one_or = [&mask](int64_t axis, int64_t all) { return mask.size(axis) == 1 ? 1 : all; };
    const int64_t batches = one_or(0, q.size(0)), heads = one_or(1, q.size(1));
    CheckTensor("mask", mask, q, at::kByte, {batches, heads, one_or(2, tiles), blocks, kMaskTileBytes});
    CheckTensor("visits", visits, q, at::kLong, {batches, heads, tiles, blocks + 1, VisitWords(kHalfRows)});
    CheckVisits(visits, q, tiles, blocks, VisitWords(kHalfRows));
    const auto stride = [&mask](int64_t axis) {
        return static_cast<uint64_t>(mask.size(axis) == 1 ? 0 : mask.stride(axis));
    };
    settings.has_mask = true;
    settings.mask = {static_cast<uint32_t>(batches), static_cast<uint32_t>(heads), stride(0), stride(1), stride(2)};
}

// `rows` of the queries exist, `keys` of K' and V; the queries are filled up to a multiple of 16 rows, and so are the
// sinks of each head's rows. `token_rows` as in tiling/plan_310p.h.
std::tuple<Tensor, Tensor, Tensor> Attention(const Tensor& q, const Tensor& shifted, const Tensor& values,
                                             const Tensor& anchors, const Tensor& units, const OptionalTensor& lengths,
                                             const OptionalTensor& sinks, const OptionalTensor& mask,
                                             const OptionalTensor& visits, int64_t rows, int64_t keys,
                                             int64_t token_rows, bool is_causal, int64_t left, int64_t right,
                                             double scale, bool largest_scores)
{
    TORCH_CHECK_VALUE(shifted.dim() == 6, "keys has ", shifted.dim(), " dimensions ", shifted.sizes(), ", expected 6");
    const int64_t batch = q.size(0), heads = shifted.size(1), dim = q.size(3);
    TORCH_CHECK_VALUE(RoundUp<int64_t>(rows, kFractal) == q.size(2), "q has ", q.size(2), " rows, expected ", rows,
                      " rounded up to a multiple of ", kFractal);
    Settings settings;
    settings.causal = is_causal;
    settings.has_lengths = lengths.has_value();
    settings.has_sinks = sinks.has_value();
    settings.has_largest = largest_scores;
    settings.left = left;
    settings.right = right;
    settings.scale = scale;
    TORCH_CHECK_VALUE(visits.has_value() == mask.has_value(), "mask and visits come together");
    if (mask) ReadMask(*mask, *visits, q, rows, keys, settings);
    TORCH_CHECK_VALUE(token_rows > 0 && token_rows <= rows, "token_rows=", token_rows, " is not in 1 to rows=", rows);
    const Shape shape{Count("q", q, 0),          Count("q", q, 1),           static_cast<uint32_t>(heads),
                      static_cast<uint32_t>(rows), static_cast<uint32_t>(keys), Count("q", q, 3)};
    const uint32_t cores = CoresOf(q);
    AttentionTiling tiling = PlanAttention310P(shape, settings, static_cast<uint32_t>(token_rows));
    CutKeys(tiling, PartsOf(tiling, cores));
    CheckTensor("q", q, q, at::kHalf, q.sizes());
    const int64_t blocks = Blocks(keys);
    for (const auto& [name, x] : {std::pair{"keys", shifted}, std::pair{"values", values}}) {
        CheckTensor(name, x, q, at::kHalf, {batch, heads, blocks, dim / kFractal, kBlockKeys, kFractal});
    }
    CheckTensor("anchors", anchors, q, at::kHalf, {batch, heads, 2 * blocks, dim});
    CheckTensor("units", units, q, at::kFloat, {batch, heads, blocks, kUnitCopies});
    if (lengths) CheckTensor("lengths", *lengths, q, at::kInt, {batch});
    if (sinks) CheckTensor("sinks", *sinks, q, at::kFloat, {q.size(1), q.size(2)});
    const c10::DeviceGuard guard(q.device());
    Tensor out = at::empty(q.sizes(), q.options());
    Tensor lse = at::empty({batch, q.size(1), q.size(2)}, q.options().dtype(at::kFloat));
    Tensor largest = at::empty(largest_scores ? lse.sizes() : at::IntArrayRef({0}), lse.options());
    const Tensor workspace = at::empty({static_cast<int64_t>(tiling.workspace_bytes)}, q.options().dtype(at::kByte));
    const AttentionPointers given{Pointer(q),       Pointer(shifted), Pointer(values),
                                  Pointer(anchors), Pointer(units),   Pointer(lengths),
                                  nullptr,          Pointer(sinks),   Pointer(mask),
                                  Pointer(visits),  Pointer(out),     Pointer(lse),
                                  largest_scores ? Pointer(largest) : nullptr, nullptr, Pointer(workspace)};
    Enqueue("pasa_attention_310p", [=](void* stream) { LaunchAttention(given, tiling, cores, stream); });
    return {out, lse, largest};
}

// ---- shapes alone, for tracing

at::Tensor FractalShape(const Tensor& x)
{
    const auto s = x.sym_sizes();
    const c10::SymInt blocks = DivideUp<c10::SymInt>(s[2], kBlockKeys);
    return at::empty_symint({s[0], s[1], blocks, s[3] / kFractal, kBlockKeys, kFractal}, x.options());
}

std::tuple<Tensor, Tensor, Tensor> ShiftShapes(const Tensor& k, const OptionalTensor&, double)
{
    const auto s = k.sym_sizes();
    const c10::SymInt blocks = DivideUp<c10::SymInt>(s[2], kBlockKeys);
    return {FractalShape(k), at::empty_symint({s[0], s[1], blocks * 2, s[3]}, k.options()),
            at::empty_symint({s[0], s[1], blocks, kUnitCopies}, k.options().dtype(at::kFloat))};
}

Tensor LayOutShapes(const Tensor& v, const OptionalTensor&) { return FractalShape(v); }

std::tuple<Tensor, Tensor, Tensor> AttentionShapes(const Tensor& q, const Tensor&, const Tensor&, const Tensor&,
                                                   const Tensor&, const OptionalTensor&, const OptionalTensor&,
                                                   const OptionalTensor&, const OptionalTensor&, int64_t, int64_t,
                                                   int64_t, bool, int64_t, int64_t, double, bool largest_scores)
{
    const auto rows = q.sym_sizes().slice(0, 3);
    const auto floats = q.options().dtype(at::kFloat);
    return {at::empty_symint(q.sym_sizes(), q.options()), at::empty_symint(rows, floats),
            largest_scores ? at::empty_symint(rows, floats) : at::empty({0}, floats)};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(pasa, m)
{
    m.def("npu_310p_chip_error", &ChipError);
    m.def("npu_310p_shift(Tensor k, Tensor? lengths, float scale) -> (Tensor, Tensor, Tensor)");
    m.def("npu_310p_lay_out(Tensor v, Tensor? lengths) -> Tensor");
    m.def(
        "npu_310p_attention(Tensor q, Tensor keys, Tensor values, Tensor anchors, Tensor units, Tensor? lengths, "
        "Tensor? sinks, Tensor? mask, Tensor? visits, int rows, int key_count, int token_rows, bool is_causal, int left, "
        "int right, float scale, bool largest_scores) -> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(pasa, PASA_DEVICE, m)
{
    m.impl("npu_310p_shift", Shift);
    m.impl("npu_310p_lay_out", LayOutValues);
    m.impl("npu_310p_attention", Attention);
}

TORCH_LIBRARY_IMPL(pasa, Meta, m)
{
    m.impl("npu_310p_shift", ShiftShapes);
    m.impl("npu_310p_lay_out", LayOutShapes);
    m.impl("npu_310p_attention", AttentionShapes);
}

}  // namespace pasa
