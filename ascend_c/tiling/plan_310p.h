// The host's side of tiling for the Ascend 310P: what fits, what is refused. Pure C++17, tested on the CPU.
#pragma once

#include "plan.h"

namespace pasa {

// Bytes that a core may use; the last 8 KiB of UB are scratch space of vector calls (docs/ascend/310p.md).
constexpr uint64_t kUnifiedBuffer310P = 248 * kKiB, kL1Of310P = 1024 * kKiB, kL0COf310P = 256 * kKiB;

// Bytes that the kernel takes for a tile of 64 rows: kernel/310p/attention.h and products.h.
constexpr uint64_t UnifiedBytes310P(uint32_t dim)
{
    const uint64_t rows = kHalfRows, tile = rows * kBlockKeys;
    const uint64_t work = (kBlockKeys / 2 + 8) * rows, numbers = 10 * rows;
    const uint64_t floats = tile + work + rows * dim + rows * rows + 2 * rows * kFractal + numbers + rows;
    return 4 * floats + 2 * (tile + rows * dim);
}
constexpr uint64_t L1Bytes310P(uint32_t dim)
{
    return 2 * (2 * HalfTileNumbers(dim) + 6 * kBlockKeys * dim + HalfTileNumbers(kBlockKeys));
}
constexpr uint64_t L0CBytes310P(uint32_t dim)
{
    return 4 * uint64_t{kHalfRows} * (2 * kBlockKeys + kHalfRows + 2 * (dim + kFractal));
}
static_assert(UnifiedBytes310P(kMaxDim) <= kUnifiedBuffer310P && L1Bytes310P(kMaxDim) <= kL1Of310P &&
                  L0CBytes310P(kMaxDim) <= kL0COf310P,
              "every head dimension fits");

inline AttentionTiling PlanAttention310P(const Shape& shape, const Settings& settings)
{
    CheckShape(shape);
    Require(settings.scale > 0 && std::isfinite(settings.scale), "scale must be positive and finite");
    Require(settings.exact, "an Ascend 310P has no kernel of the published recovery");
    Require(settings.unbiased_columns == 0, "an Ascend 310P has no unbiased rounding: its vector unit does not shift");
    Require(!settings.to_bf16, "an Ascend 310P has no BF16");
    Require(!settings.has_sinks, "the kernel for the Ascend 310P takes no sinks");
    AttentionTiling t{};
    t.batch = shape.batch;
    t.heads = shape.heads;
    t.kv_heads = shape.kv_heads;
    t.rows = shape.rows;
    t.keys = shape.keys;
    t.dim = shape.dim;
    t.blocks = DivideUp(shape.keys, kBlockKeys);
    t.tile_rows = kHalfRows;
    t.anchor_rows = AnchorRows(false);
    t.lanes = 1;
    t.causal = settings.causal;
    t.saturates = 1;  // the chip has no other mode
    t.has_lengths = settings.has_lengths;
    t.scale = static_cast<float>(settings.scale);
    return t;
}

}  // namespace pasa
