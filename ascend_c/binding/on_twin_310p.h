// Launches of the 310P's kernels on the CPU twin: arrays of the host are copied in and out.
#pragma once

#include "../kernel/310p/attention.h"
#include "../kernel/310p/decode.h"
#include "../kernel/310p/merge.h"
#include "../kernel/310p/probes.h"
#include "../kernel/310p/shift.h"
#include "../tiling/plan_310p.h"
#include "launch_310p.h"
#include "probes.h"
#include "twin_memory.h"

namespace pasa {

inline twin::Options On310P(twin::Options options)
{
    options.shape = twin::Shape::ai_core;
    options.chip = twin::chip_310p();
    return options;
}

// K', anchors and units, and the second launch if `makes_frames`. Rows behind the last key of a sequence are not written.
inline twin::Report ShiftOnTwin(const ShiftPointers& p, const ShiftTiling& t, uint32_t cores,
                                const twin::Options& options = {}, bool makes_frames = true)
{
    const size_t blocks = size_t{t.heads} * t.blocks;
    TwinMemory memory;
    ShiftArguments given{};
    given.k = memory.Input<half>("k", p.k, size_t{t.heads} * t.keys * t.dim);
    given.lengths = memory.Input<int32_t>("lengths", p.lengths, t.heads / t.kv_heads);
    given.keys = memory.Kept<half>("keys", p.keys, blocks * kBlockKeys * t.dim);
    given.anchors = memory.Kept<half>("anchors", p.anchors, blocks * 2 * t.dim);
    given.units = memory.Kept<float>("units", p.units, blocks * kUnitCopies);
    const twin::Options there = On310P(options);
    const twin::Report first = memory.Launch("shift_to_fractals", cores, there, [&] { ShiftToFractals(given, t); });
    if (!makes_frames || !first.ok) return first;
    return memory.Launch("make_frames", cores, there, [&] { MakeFrames(given, t); });
}

// V as fractals.
inline twin::Report LayOutOnTwin(const LayoutPointers& p, const ShiftTiling& t, uint32_t cores,
                                 const twin::Options& options = {})
{
    TwinMemory memory;
    LayoutArguments given{};
    given.v = memory.Input<half>("v", p.v, size_t{t.heads} * t.keys * t.dim);
    given.lengths = memory.Input<int32_t>("lengths", p.lengths, t.heads / t.kv_heads);
    given.values = memory.Kept<half>("values", p.values, size_t{t.heads} * t.blocks * kBlockKeys * t.dim);
    return memory.Launch("lay_out", cores, On310P(options), [&] { LayOut(given, t); });
}

inline twin::Report AttendOnTwin(const AttentionPointers& p, const AttentionTiling& t, uint32_t cores,
                                 const twin::Options& options = {})
{
    const size_t queries = size_t{t.batch} * t.heads * RoundUp(t.rows, kFractal);
    const size_t blocks = size_t{t.batch} * t.kv_heads * t.blocks;
    TwinMemory memory;
    Arguments given{};
    given.q = memory.Input<half>("q", p.q, queries * t.dim);
    given.keys = memory.Input<half>("keys", p.keys, blocks * kBlockKeys * t.dim);
    given.v = memory.Input<half>("values", p.v, blocks * kBlockKeys * t.dim);
    given.anchors = memory.Input<half>("anchors", p.anchors, blocks * 2 * t.dim);
    given.units = memory.Input<float>("units", p.units, blocks * kUnitCopies);
    given.lengths = memory.Input<int32_t>("lengths", p.lengths, t.batch);
    given.sinks = memory.Input<float>("sinks", p.sinks, size_t{t.heads} * RoundUp(t.rows, kFractal));
    const uint64_t tables = uint64_t{t.mask.batches} * t.mask.heads;
    const uint64_t tiles = t.mask.row_stride == 0 ? 1 : DivideUp(t.rows, kHalfRows);
    given.mask = memory.Input<uint8_t>("mask", p.mask, tables * tiles * t.blocks * kMaskTileBytes);
    given.visits = memory.Input<int64_t>("visits", p.visits, tables * DivideUp(t.rows, kHalfRows) * (t.blocks + 1) *
                                                                 VisitWords(kHalfRows));
    given.out = memory.Output<half>("out", p.out, queries * t.dim);
    given.lse = memory.Output<float>("lse", p.lse, queries);
    given.largest = memory.Output<float>("largest", p.largest, queries);
    if (t.parts > 1) given.workspace = memory.Kept<uint8_t>("parts", p.workspace, t.workspace_bytes);
    const twin::Report first = memory.Launch("attention_310p", cores, On310P(options), [&] { Attend(given, t); });
    if (!first.ok || t.parts == 1 || !first.total(twin::CoreKind::ai).overflows.empty()) return first;
    return memory.Launch("merge_310p", cores, On310P(options), [&] { MergeParts(given, t); });
}

// The first launch of decoding, and the second one if `merges`.
inline twin::Report DecodeOnTwin(const DecodePointers& p, const DecodeTiling& t, uint32_t cores,
                                 const twin::Options& options = {}, bool merges = true)
{
    TwinMemory memory;
    const AttentionTiling& a = t.attention;
    const size_t rows = size_t{a.rows} * a.heads;
    DecodeArguments given = DecodeInputsOf(memory, p, t);
    given.out = memory.Kept<half>("out", p.out, rows * a.dim);
    given.lse = memory.Kept<float>("lse", p.lse, rows * kUnitCopies);
    given.workspace = memory.Kept<uint8_t>("parts", p.workspace, a.workspace_bytes);
    const twin::Report first = memory.Launch("decode_310p", cores, On310P(options), [&] { Decode(given, t); });
    if (!merges || !first.ok || !first.total(twin::CoreKind::ai).overflows.empty()) return first;
    return memory.Launch("merge_decoded_310p", cores, On310P(options), [&] { MergeDecoded(given, t); });
}

inline twin::Report ProbeVectorOnTwin(const VectorProbePointers& p, uint32_t probe, uint32_t count,
                                      const twin::Options& options = {})
{
    TwinMemory memory;
    const VectorProbeArguments given = ProbeArrays(memory, p, count);
    return memory.Launch("probe_vector_310p", 1, On310P(options), [&] { ProbeCoreVector(given, probe, count); });
}

inline twin::Report ProbeProductOnTwin(const ProductProbePointers& p, uint32_t m, uint32_t n, uint32_t k,
                                       const twin::Options& options = {})
{
    TwinMemory memory;
    const ProductProbeArguments given = ProbeArrays(memory, p, m, n, k);
    return memory.Launch("probe_product_310p", 1, On310P(options), [&] { ProbeCoreProduct(given, m, n, k); });
}

}  // namespace pasa
