// The host's side of tiling for the Ascend 310P: what fits, what is refused. Pure C++17, tested on the CPU.
#pragma once

#include "decode_plan.h"

namespace pasa {

// Bytes that a core may use; the last 8 KiB of UB are scratch space of vector calls (docs/ascend/310p.md).
constexpr uint64_t kUnifiedBuffer310P = 248 * kKiB, kL1Of310P = 1024 * kKiB, kL0COf310P = 256 * kKiB;

// Bytes that the kernel takes for a tile of 64 rows: kernel/310p/attention.h and products.h.
constexpr uint64_t UnifiedBytes310P(uint32_t dim)
{
    const uint64_t rows = kHalfRows, tile = rows * kBlockKeys;
    const uint64_t work = (kBlockKeys / 2 + 8) * rows, numbers = 11 * rows;
    const uint64_t floats = tile + work + rows * dim + rows * rows + 2 * rows * kFractal + numbers + 2 * rows;
    return 4 * floats + 2 * (tile + rows * dim) + 2 * kMaskTileBytes;
}
constexpr uint64_t L1Bytes310P(uint32_t dim)
{
    return 2 * (2 * HalfTileNumbers(dim) + 6 * kBlockKeys * dim + HalfTileNumbers(kBlockKeys));
}
constexpr uint64_t L0CBytes310P(uint32_t dim)
{
    return 4 * uint64_t{kHalfRows} * (2 * kBlockKeys + kHalfRows + 2 * (dim + kFractal));
}
// Bytes that decoding takes: kernel/310p/decode_rows.h, decode.h and decode_products.h.
constexpr uint64_t DecodeUnifiedBytes310P(uint32_t dim)
{
    const uint64_t rows = kHalfRows, tile = rows * kBlockKeys, chunk = dim < kChunk ? dim : kChunk;
    const uint64_t work = (kBlockKeys / 2 + 8) * rows, numbers = 11 * rows, columns = 6 * kMaxDim;
    const uint64_t floats = tile + work + rows * dim + 3 * rows * kFractal + numbers + columns + rows * kFractal / 2;
    const uint64_t halves = 2 * kBlockKeys * chunk + (dim <= kChunk ? 2 : 1) * kBlockKeys * kChunk + kMaxDim + kChunk;
    return 4 * floats + 2 * halves;
}
constexpr uint64_t DecodeL1Bytes310P(uint32_t dim)
{
    return 2 * (2 * HalfTileNumbers(dim) + 4 * kBlockKeys * dim + HalfTileNumbers(kBlockKeys));
}
static_assert(DecodeUnifiedBytes310P(kChunk) <= kUnifiedBuffer310P &&
                  DecodeUnifiedBytes310P(kMaxDim) <= kUnifiedBuffer310P && DecodeL1Bytes310P(kMaxDim) <= kL1Of310P,
              "every head dimension fits");
static_assert(UnifiedBytes310P(kMaxDim) <= kUnifiedBuffer310P && L1Bytes310P(kMaxDim) <= kL1Of310P &&
                  L0CBytes310P(kMaxDim) <= kL0COf310P,
              "every head dimension fits");

// The parts that the keys of a tile are cut into, so that no core idles while a few have long tasks. By the model
// (eval/npu) a block takes some 2 us; a part is worth the launch that merges it from eight blocks on.
inline uint32_t PartsOf(const AttentionTiling& t, uint32_t cores)
{
    constexpr uint32_t least = 8;
    const uint64_t tasks = uint64_t{t.batch} * t.heads * DivideUp(t.rows, kHalfRows);
    if (tasks >= cores) return 1;
    return Largest(1, Least(t.blocks / least, static_cast<uint32_t>(DivideUp<uint64_t>(cores, tasks))));
}

// `token_rows` neighbouring rows are query heads of one token, which see the same keys.
inline AttentionTiling PlanAttention310P(const Shape& shape, const Settings& settings, uint32_t token_rows = 1)
{
    AttentionTiling t = PlanRows(shape, settings, kHalfRows);
    Require(settings.exact, "an Ascend 310P has no kernel of the published recovery");
    Require(settings.unbiased_columns == 0, "an Ascend 310P has no unbiased rounding: its vector unit does not shift");
    Require(!settings.to_bf16, "an Ascend 310P has no BF16");
    Require(settings.sequences == 0, "an Ascend 310P has no kernel of packed sequences");
    Require(token_rows > 0 && shape.rows % token_rows == 0, "rows=" + std::to_string(shape.rows) +
                                                                " are no multiple of token_rows=" +
                                                                std::to_string(token_rows));
    t.anchor_rows = AnchorRows(false);
    t.lanes = 1;
    t.token_rows = token_rows;
    t.saturates = 1;  // the chip has no other mode
    return t;
}

// Cut the keys of each tile into parts, whose outputs need a workspace.
inline void CutKeys(AttentionTiling& t, uint32_t parts)
{
    t.parts = parts;
    const uint64_t tiles = uint64_t{t.batch} * t.heads * DivideUp(t.rows, kHalfRows);
    t.workspace_bytes = parts > 1 ? tiles * parts * (kPartNumbers + t.dim) * kHalfRows * sizeof(float) : 0;
}

// What a core leaves of its first segment and of its last, for the launch that merges them.
constexpr DecodeWorkspace DecodeParts310P(uint32_t dim)
{
    DecodeWorkspace w{};
    w.product_bytes = uint64_t{kDecodeRows} * dim * 4;
    w.outputs = 0;
    w.states = w.outputs + 2 * w.product_bytes;
    w.ends = w.states + 2 * 2 * kDecodeRows * 4;
    w.bytes = RoundUp<uint64_t>(w.ends + 2 * dim * 2, 512);
    return w;
}

inline DecodeTiling PlanDecode310P(const Shape& shape, const DecodeLayout& layout, const Settings& settings,
                                   uint32_t cores)
{
    DecodeTiling t = PlanTokens(PlanAttention310P(shape, settings), shape, layout, settings);
    t.group_workspace = DecodeParts310P(shape.dim);
    t.attention.workspace_bytes = uint64_t{cores} * t.group_workspace.bytes;
    return t;
}

}  // namespace pasa
