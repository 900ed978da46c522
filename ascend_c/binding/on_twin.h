// Launches of all kernels on the CPU twin: arrays of the host are copied in and out.
#pragma once

#include "../kernel/pasa_attention.h"
#include "../kernel/pasa_decode.h"
#include "../kernel/probes.h"
#include "../kernel/shift_rows.h"
#include "../kernel/shift_paper.h"
#include "../tiling/decode_plan.h"
#include "launch.h"
#include "probes.h"
#include "twin_memory.h"

namespace pasa {

inline twin::Report ShiftOnTwin(bool exact, const ShiftPointers& p, const ShiftTiling& t, uint32_t cores,
                                twin::Options options = {})
{
    TwinMemory memory;
    const size_t rows = size_t{t.heads} * t.keys, blocks = size_t{t.heads} * t.blocks;
    ShiftArguments given{};
    given.k = memory.Input<half>("k", p.k, rows * t.dim);
    given.lengths = memory.Input<int32_t>("lengths", p.lengths, t.heads / t.kv_heads);
    given.starts = memory.Input<int32_t>("starts", p.starts, size_t{t.sequences} + 1);
    given.matrix = memory.Input<half>("matrix", p.matrix, kBlockKeys * kBlockKeys);
    given.keys = memory.Output<half>("keys", p.keys, rows * t.dim);
    given.anchors = memory.Output<half>("anchors", p.anchors, blocks * t.anchor_rows * t.dim);
    given.units = memory.Output<float>("units", p.units, blocks * kUnitCopies);
    options.shape = exact ? twin::Shape::aiv_only : twin::Shape::aic_only;
    return memory.Launch(exact ? "shift_exact" : "shift_paper", cores, t.saturates != 0, options, [&] {
        KERNEL_TASK_TYPE_DEFAULT(exact ? KERNEL_TYPE_MIX_AIV_1_0 : KERNEL_TYPE_AIC_ONLY);
        exact ? ShiftExact(given, t) : ShiftPaper(given, t);
    });
}

// From the first element of a mask to its last one.
inline size_t MaskElements(const AttentionTiling& t)
{
    const MaskTiling& m = t.mask;
    return (t.batch - 1) * m.batch_stride + (t.heads - 1) * m.head_stride + (t.rows - 1) * m.row_stride + t.keys;
}

// Numbers of the table of visits (kernel/key_blocks.h).
inline size_t VisitWords(const AttentionTiling& t)
{
    return size_t{t.mask.batches} * t.mask.heads * DivideUp(t.rows, kTileRows) * (t.blocks + 1) * kVisitWords;
}

// FP16 score tiles that the tiling may keep.
inline size_t KeptTiles(const AttentionTiling& t)
{
    const size_t tiles = t.sequences > 0 ? PackedPlaces(t.rows, t.sequences + 1) : DivideUp(t.rows, kTileRows);
    return size_t{t.batch} * t.heads * tiles * t.blocks;
}

// `scores`: where to, if the tiling keeps them.
inline twin::Report AttendOnTwin(bool exact, const AttentionPointers& p, const AttentionTiling& t, uint32_t cores,
                                 twin::Options options = {}, half* scores = nullptr)
{
    TwinMemory memory;
    const size_t queries = size_t{t.batch} * t.heads * t.rows, keys = size_t{t.batch} * t.kv_heads * t.keys;
    const size_t blocks = size_t{t.batch} * t.kv_heads * t.blocks;
    const size_t shifted = exact ? keys : blocks * kBlockKeys;
    Arguments given{};
    given.q = memory.Input<half>("q", p.q, queries * t.dim);
    given.keys = memory.Input<half>("keys", p.keys, shifted * t.dim);
    given.v = memory.Input<half>("v", p.v, keys * t.dim);
    given.anchors = memory.Input<half>("anchors", p.anchors, blocks * t.anchor_rows * t.dim);
    given.units = memory.Input<float>("units", p.units, blocks * kUnitCopies);
    given.lengths = memory.Input<int32_t>("lengths", p.lengths, t.batch);
    given.starts = memory.Input<int32_t>("starts", p.starts, 2 * (size_t{t.sequences} + 1));
    given.sinks = memory.Input<float>("sinks", p.sinks, t.heads);
    given.mask = t.adds_mask ? memory.Input<float>("mask", p.mask, MaskElements(t))
                             : memory.Input<uint8_t>("mask", p.mask, MaskElements(t));
    given.visits = memory.Input<int64_t>("visits", p.visits, VisitWords(t));
    given.out = memory.Output<half>("out", p.out, queries * t.dim);
    given.lse = memory.Output<float>("lse", p.lse, queries);
    given.largest = memory.Output<float>("largest", p.largest, queries);
    given.counts = memory.Output<float>("counts", p.counts, kCountRows * queries);
    if (t.keep_scores) given.scores = memory.Scratch<half>("scores", scores, KeptTiles(t) * kTileRows * kBlockKeys);
    given.workspace = memory.Scratch<uint8_t>("workspace", nullptr, t.workspace_bytes);
    options.shape = twin::Shape::mix_1_2;
    return memory.Launch("pasa_attention", cores, t.saturates != 0, options, [&] {
        KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
        exact ? PasaAttention<true>(given, t) : PasaAttention<false>(given, t);
    });
}

inline twin::Report DecodeOnTwin(const DecodePointers& p, const DecodeTiling& t, uint32_t cores,
                                 twin::Options options = {})
{
    TwinMemory memory;
    const AttentionTiling& a = t.attention;
    const size_t queries = size_t{a.rows} * a.heads;
    DecodeArguments given = DecodeInputsOf(memory, p, t);
    given.out = memory.Output<half>("out", p.out, queries * a.dim);
    given.lse = memory.Output<float>("lse", p.lse, queries);
    given.workspace = memory.Scratch<uint8_t>("workspace", nullptr, a.workspace_bytes);
    options.shape = twin::Shape::mix_1_2;
    return memory.Launch("pasa_decode", cores, a.saturates != 0, options, [&] {
        KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
        PasaDecode(given, t);
    });
}

inline twin::Report ProbeVectorOnTwin(const VectorProbePointers& p, uint32_t probe, uint32_t count, bool saturates,
                                      twin::Options options = {})
{
    TwinMemory memory;
    const VectorProbeArguments given = ProbeArrays(memory, p, count);
    options.shape = twin::Shape::aiv_only;
    return memory.Launch("probe_vector", 1, saturates, options, [&] {
        KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
        ProbeVector(given, probe, count, saturates);
    });
}

inline twin::Report ProbeProductOnTwin(const ProductProbePointers& p, uint32_t m, uint32_t n, uint32_t k,
                                       twin::Options options = {})
{
    TwinMemory memory;
    const ProductProbeArguments given = ProbeArrays(memory, p, m, n, k);
    options.shape = twin::Shape::aic_only;
    return memory.Launch("probe_product", 1, false, options, [&] {
        KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIC_ONLY);
        ProbeProduct(given, m, n, k);
    });
}

}  // namespace pasa
