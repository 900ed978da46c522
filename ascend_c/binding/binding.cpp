// torch.ops.pasa.npu_*: checks, tiling, workspace, launch. Compiled against torch and run on the CPU twin by
// tests/ascend_c/test_binding.py; never run on an NPU.
//
// Nothing here waits for the device or reads it, and all memory is torch's, so that calls can be captured in a graph.
// K' and the workspace go back to torch's allocator when a call returns, because their next use comes later in the same
// stream.
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <tuple>
#include <vector>

#include "build_record.h"
#include "checks.h"
#include "enqueue.h"
#include "launch.h"
#include "starts.h"

namespace pasa {
namespace {

// ---- masks

// A bool or FP32 mask (B, H, Sq, Skv), expanded to all batch entries, heads and rows by strides of 0. The table of
// visits has one entry for all batch entries, or one for each, and likewise for heads.
void ReadMask(const Tensor& mask, const Tensor& visits, const Tensor& q, int64_t keys, Settings& settings)
{
    const at::IntArrayRef rows = q.sizes().slice(0, 3);
    std::vector<int64_t> shape = rows.vec();
    shape.push_back(keys);
    TORCH_CHECK_TYPE(mask.scalar_type() == at::kBool || mask.scalar_type() == at::kFloat, "mask is ",
                     mask.scalar_type(), ", expected Bool or Float");
    TORCH_CHECK_VALUE(mask.device() == q.device(), "mask is on ", mask.device(), " but the first tensor is on ",
                      q.device());
    TORCH_CHECK_VALUE(mask.sizes() == at::IntArrayRef(shape), "mask has shape ", mask.sizes(), ", expected ",
                      at::IntArrayRef(shape), ": expand it");
    TORCH_CHECK_VALUE(mask.stride(3) == 1 || keys == 1, "mask has a stride of ", mask.stride(3),
                      " between keys, expected 1");
    TORCH_CHECK_VALUE(mask.stride(2) == 0 || mask.stride(2) >= keys || mask.size(2) == 1, "mask has a stride of ",
                      mask.stride(2), " between rows, expected 0 or at least ", keys);
    constexpr int64_t most = int64_t{1} << 30;  // elements: a copy expresses the gap in bytes, with 32 bits
    TORCH_CHECK_VALUE(mask.stride(2) < most || mask.size(2) == 1, "mask has a stride of ", mask.stride(2),
                      " between rows, expected less than ", most, ": copy it");
    settings.has_mask = true;
    settings.adds_mask = mask.scalar_type() == at::kFloat;
    CheckVisits(visits, q, DivideUp<int64_t>(rows[2], kTileRows), Blocks(keys), kVisitWords);
    const auto stride = [&mask](int64_t axis) {
        return static_cast<uint64_t>(mask.size(axis) == 1 ? 0 : mask.stride(axis));
    };
    settings.mask = {static_cast<uint32_t>(visits.size(0)), static_cast<uint32_t>(visits.size(1)), stride(0), stride(1),
                     stride(2)};
}

// ---- launches

ShiftTiling PlanShiftOf(const Tensor& k, const OptionalTensor& lengths, double scale, bool saturate,
                        bool begins_anywhere = false, uint32_t sequences = 0)
{
    const Shape shape{Count("k", k, 0), Count("k", k, 1), Count("k", k, 1), 1, Count("k", k, 2), Count("k", k, 3)};
    CheckTensor("k", k, k, at::kHalf, k.sizes());
    if (lengths) CheckTensor("lengths", *lengths, k, at::kInt, {k.size(0)});
    return PlanShift(shape, scale, saturate, lengths.has_value(), begins_anywhere, sequences);
}

// ---- the operators

// `begins_anywhere`: windows or a mask may hide the first blocks from rows that see others. `starts` (sequences + 1,):
// the keys are packed sequences.
std::tuple<Tensor, Tensor, Tensor> ShiftExact(const Tensor& k, const OptionalTensor& lengths,
                                              const OptionalTensor& starts, double scale, bool saturate,
                                              bool begins_anywhere)
{
    Require(scale > 0 && std::isfinite(scale), "scale must be positive and finite");
    uint32_t sequences = 0;
    if (starts) {
        TORCH_CHECK_VALUE(starts->numel() > 1, "starts has shape ", starts->sizes(), ", expected [sequences + 1]");
        CheckTensor("starts", *starts, k, at::kInt, {starts->numel()});
        CheckCumulative("starts", *starts, k.size(2));
        sequences = static_cast<uint32_t>(starts->numel() - 1);
    }
    const ShiftTiling tiling = PlanShiftOf(k, lengths, scale, saturate, begins_anywhere, sequences);
    const c10::DeviceGuard guard(k.device());
    const int64_t batch = k.size(0), heads = k.size(1), dim = k.size(3), blocks = tiling.blocks;
    Tensor keys = at::empty(k.sizes(), k.options());
    Tensor anchors = at::empty({batch, heads, tiling.anchor_rows * blocks, dim}, k.options());
    Tensor units = at::empty({batch, heads, blocks, kUnitCopies}, k.options().dtype(at::kFloat));
    const ShiftPointers given{Pointer(k),    Pointer(lengths), Pointer(starts), nullptr,
                              Pointer(keys), Pointer(anchors), Pointer(units)};
    const uint32_t cores = ChipOf(k).vector_cores;
    Enqueue("pasa_shift_exact", [=](void* stream) { LaunchShiftExact(given, tiling, cores, stream); });
    return {keys, anchors, units};
}

// `k` is whole blocks of keys, `matrix` is M.
Tensor ShiftPaper(const Tensor& k, const Tensor& matrix, bool saturate)
{
    const ShiftTiling tiling = PlanShiftOf(k, std::nullopt, 1.0, saturate);
    TORCH_CHECK_VALUE(tiling.keys % kBlockKeys == 0, "k has ", tiling.keys, " keys, no multiple of ", kBlockKeys,
                      ": fill the last block (ops/attention/spec/shift_keys.py, whole_blocks)");
    CheckTensor("matrix", matrix, k, at::kHalf, {kBlockKeys, kBlockKeys});
    const c10::DeviceGuard guard(k.device());
    Tensor keys = at::empty(k.sizes(), k.options());
    const ShiftPointers given{Pointer(k), nullptr, nullptr, Pointer(matrix), Pointer(keys), nullptr, nullptr};
    const uint32_t cores = ChipOf(k).cube_cores;
    Enqueue("pasa_shift_paper", [=](void* stream) { LaunchShiftPaper(given, tiling, cores, stream); });
    return keys;
}

// Exact where there are anchors, as published without them; `keys` are K'. `unbiased_columns` as in tiling/plan.h.
std::tuple<Tensor, Tensor, Tensor, Tensor> Attention(const Tensor& q, const Tensor& keys, const Tensor& v,
                                     const OptionalTensor& anchors, const OptionalTensor& units,
                                     const OptionalTensor& lengths, const OptionalTensor& starts,
                                     const OptionalTensor& sinks, const OptionalTensor& mask,
                                     const OptionalTensor& visits, bool is_causal,
                                     int64_t left, int64_t right, double scale, double invariance, bool saturate,
                                     int64_t unbiased_columns, bool to_bf16, bool largest_scores, bool counted)
{
    const bool exact = anchors.has_value();
    TORCH_CHECK_VALUE(units.has_value() == exact, "anchors and units come together");
    const Shape shape{Count("q", q, 0), Count("q", q, 1), Count("v", v, 1),
                      Count("q", q, 2), Count("v", v, 2), Count("q", q, 3)};
    Settings settings;
    settings.exact = exact;
    settings.causal = is_causal;
    settings.saturates = saturate;
    settings.has_lengths = lengths.has_value();
    if (starts) settings.sequences = ReadStarts(*starts, q, q.size(2), static_cast<int64_t>(shape.keys));
    settings.has_sinks = sinks.has_value();
    settings.has_largest = largest_scores;
    settings.has_counts = counted;
    settings.left = left;
    settings.right = right;
    TORCH_CHECK_VALUE(visits.has_value() == mask.has_value(), "mask and visits come together");
    if (mask) ReadMask(*mask, *visits, q, static_cast<int64_t>(shape.keys), settings);
    settings.scale = scale;
    settings.invariance = invariance;
    TORCH_CHECK_VALUE(unbiased_columns >= 0, "unbiased_columns=", unbiased_columns, " is negative");
    settings.unbiased_columns = static_cast<uint32_t>(std::min<int64_t>(unbiased_columns, kMaxDim));
    settings.to_bf16 = to_bf16;
    const Chip chip = ChipOf(q);
    const AttentionTiling tiling = PlanAttention(shape, settings, chip);
    const int64_t batch = q.size(0), heads = v.size(1), rows = v.size(2), dim = q.size(3);
    CheckTensor("q", q, q, at::kHalf, q.sizes());
    CheckTensor("v", v, q, at::kHalf, {batch, heads, rows, dim});
    CheckTensor("keys", keys, q, at::kHalf, {batch, heads, exact ? rows : Blocks(rows) * kBlockKeys, dim});
    if (exact) {
        const int64_t anchor_rows = int64_t{tiling.anchor_rows} * tiling.blocks;
        CheckTensor("anchors", *anchors, q, at::kHalf, {batch, heads, anchor_rows, dim});
        CheckTensor("units", *units, q, at::kFloat, {batch, heads, tiling.blocks, kUnitCopies});
    }
    if (lengths) CheckTensor("lengths", *lengths, q, at::kInt, {batch});
    if (sinks) CheckTensor("sinks", *sinks, q, at::kFloat, {q.size(1)});
    const c10::DeviceGuard guard(q.device());
    Tensor out = at::empty(q.sizes(), q.options().dtype(OutputType(to_bf16)));
    Tensor lse = at::empty({batch, q.size(1), q.size(2)}, q.options().dtype(at::kFloat));
    const int64_t nothing[] = {0}, all[] = {kCountRows, batch, q.size(1), q.size(2)};
    Tensor largest = at::empty(largest_scores ? lse.sizes() : at::IntArrayRef(nothing), lse.options());
    Tensor counts = at::empty(counted ? at::IntArrayRef(all) : at::IntArrayRef(nothing), lse.options());
    const Tensor workspace = at::empty({static_cast<int64_t>(tiling.workspace_bytes)}, q.options().dtype(at::kByte));
    const AttentionPointers given{Pointer(q),       Pointer(keys),   Pointer(v),       Pointer(anchors), Pointer(units),
                                  Pointer(lengths), Pointer(starts), Pointer(sinks),   Pointer(mask),    Pointer(visits),
                                  Pointer(out),     Pointer(lse),    Pointer(largest), Pointer(counts),
                                  Pointer(workspace)};
    const uint32_t cores = chip.cube_cores;
    Enqueue("pasa_attention", [=](void* stream) { LaunchAttention(exact, given, tiling, cores, stream); });
    return {out, lse, largest, counts};
}

// ---- shapes alone, for tracing

std::tuple<Tensor, Tensor, Tensor> ShiftExactShapes(const Tensor& k, const OptionalTensor&,
                                                    const OptionalTensor& starts, double, bool, bool begins_anywhere)
{
    const auto s = k.sym_sizes();
    const c10::SymInt blocks = starts ? s[2] / kBlockKeys + starts->sym_numel() - 1
                                      : DivideUp<c10::SymInt>(s[2], kBlockKeys);
    return {at::empty_symint(s, k.options()),
            at::empty_symint({s[0], s[1], blocks * AnchorRows(begins_anywhere), s[3]}, k.options()),
            at::empty_symint({s[0], s[1], blocks, kUnitCopies}, k.options().dtype(at::kFloat))};
}

Tensor ShiftPaperShapes(const Tensor& k, const Tensor&, bool)
{
    return at::empty_symint(k.sym_sizes(), k.options());
}

std::tuple<Tensor, Tensor, Tensor, Tensor> AttentionShapes(
    const Tensor& q, const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
    const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, bool, int64_t, int64_t,
    double, double, bool, int64_t, bool to_bf16, bool largest_scores, bool counted)
{
    const auto rows = q.sym_sizes().slice(0, 3);
    const c10::SymInt nothing[] = {0}, counts[] = {kCountRows, rows[0], rows[1], rows[2]};
    return {at::empty_symint(q.sym_sizes(), q.options().dtype(OutputType(to_bf16))),
            at::empty_symint(rows, q.options().dtype(at::kFloat)),
            at::empty_symint(largest_scores ? rows : c10::SymIntArrayRef(nothing), q.options().dtype(at::kFloat)),
            at::empty_symint(counted ? c10::SymIntArrayRef(counts) : c10::SymIntArrayRef(nothing),
                             q.options().dtype(at::kFloat))};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(pasa, m)
{
    m.def("npu_chip_error", &ChipError);
    m.def(
        "npu_shift_exact(Tensor k, Tensor? lengths, Tensor? starts, float scale, bool saturate, bool begins_anywhere) "
        "-> (Tensor, Tensor, Tensor)");
    m.def("npu_shift_paper(Tensor k, Tensor matrix, bool saturate) -> Tensor");
    m.def(
        "npu_attention(Tensor q, Tensor keys, Tensor v, Tensor? anchors, Tensor? units, Tensor? lengths, "
        "Tensor? starts, Tensor? sinks, Tensor? mask, Tensor? visits, bool is_causal, int left, int right, "
        "float scale, float invariance, bool saturate, int unbiased_columns, bool to_bf16, bool largest_scores, "
        "bool counted) "
        "-> (Tensor, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(pasa, PASA_DEVICE, m)
{
    m.impl("npu_shift_exact", ShiftExact);
    m.impl("npu_shift_paper", ShiftPaper);
    m.impl("npu_attention", Attention);
}

TORCH_LIBRARY_IMPL(pasa, Meta, m)
{
    m.impl("npu_shift_exact", ShiftExactShapes);
    m.impl("npu_shift_paper", ShiftPaperShapes);
    m.impl("npu_attention", AttentionShapes);
}

}  // namespace pasa
