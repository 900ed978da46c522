// The host's side of tiling: what fits, what is refused, how much workspace it takes. Pure C++17, tested on the CPU.
#pragma once

#include <cmath>
#include <stdexcept>
#include <string>

#include "tiling.h"

namespace pasa {

// What of a chip decides on tiles. Sizes in bytes, as the vendor's documents give them.
struct Chip {
    const char* name;
    uint32_t cube_cores;
    uint32_t vector_cores;
    uint64_t unified_buffer;
    uint64_t l1;
    uint64_t l0a;
    uint64_t l0b;
    uint64_t l0c;
};

constexpr uint64_t kKiB = 1024;
// A group is a cube core and two vector cores. 310P has no such pairing, no FIX pipe into GM and no BF16: its kernels
// would keep scores in L0C -> UB, and are not written.
constexpr Chip kChips[] = {
    {"Ascend910B1", 24, 48, 192 * kKiB, 512 * kKiB, 64 * kKiB, 64 * kKiB, 128 * kKiB},
    {"Ascend910B2", 24, 48, 192 * kKiB, 512 * kKiB, 64 * kKiB, 64 * kKiB, 128 * kKiB},
    {"Ascend910B3", 20, 40, 192 * kKiB, 512 * kKiB, 64 * kKiB, 64 * kKiB, 128 * kKiB},
    {"Ascend910B4", 20, 40, 192 * kKiB, 512 * kKiB, 64 * kKiB, 64 * kKiB, 128 * kKiB},
};

struct Shape {
    uint32_t batch;
    uint32_t heads;
    uint32_t kv_heads;
    uint32_t rows;
    uint32_t keys;
    uint32_t dim;
};

struct Settings {
    bool exact = true;
    bool causal = false;
    bool saturates = false;
    bool has_lengths = false;
    bool keep_scores = false;
    double scale = 1.0;
    double invariance = 0.0;       // paper: of the first block
    double last_invariance = 0.0;  // paper: of the last block
};

inline void Require(bool holds, const std::string& what)
{
    if (!holds) throw std::invalid_argument(what);
}

inline void CheckShape(const Shape& s)
{
    const auto text = [](const char* name, uint32_t value) { return std::string(name) + "=" + std::to_string(value); };
    Require(s.batch > 0, text("batch", s.batch) + " must be above 0");
    Require(s.rows > 0, text("rows", s.rows) + " must be above 0");
    Require(s.keys > 0, text("keys", s.keys) + " must be above 0");
    Require(s.kv_heads > 0 && s.heads % s.kv_heads == 0 && s.heads > 0,
            text("heads", s.heads) + " must be a multiple of " + text("kv_heads", s.kv_heads));
    Require(s.dim % kFractal == 0 && s.dim > 0 && s.dim <= kMaxDim,
            text("dim", s.dim) + " must be a multiple of 16, from 16 to 256");
}

// Bytes of the unified buffer that a vector core needs: vector_side.h, InitBuffers.
constexpr uint64_t UnifiedBytes(uint32_t dim, uint32_t lanes)
{
    const uint64_t tile = kHalfRows * kBlockKeys;
    return tile * 2 + tile * 4 + tile * 2 + tile * 4 + uint64_t{lanes} * kHalfRows * dim * 4 + 16 * kKiB;
}

inline AttentionTiling PlanAttention(const Shape& shape, const Settings& settings, const Chip& chip)
{
    CheckShape(shape);
    Require(settings.scale > 0 && std::isfinite(settings.scale), "scale must be positive and finite");
    Require(settings.exact || !settings.has_lengths, "the published recovery takes no lengths");
    AttentionTiling t{};
    t.batch = shape.batch;
    t.heads = shape.heads;
    t.kv_heads = shape.kv_heads;
    t.rows = shape.rows;
    t.keys = shape.keys;
    t.dim = shape.dim;
    t.blocks = static_cast<uint32_t>(RoundUp(shape.keys, kBlockKeys) / kBlockKeys);
    t.lanes = UnifiedBytes(shape.dim, kLanes) <= chip.unified_buffer ? kLanes : 1;
    t.causal = settings.causal;
    t.saturates = settings.saturates;
    t.has_lengths = settings.has_lengths;
    t.keep_scores = settings.keep_scores;
    t.scale = static_cast<float>(settings.scale);
    t.invariance = static_cast<float>(settings.invariance);
    t.last_invariance = static_cast<float>(settings.last_invariance);
    t.lane_bytes = LaneParts(t.dim, t.blocks).bytes;
    t.workspace_bytes = uint64_t{chip.cube_cores} * kLanes * t.lane_bytes;
    return t;
}

// The share of the softmax scale that K' may hold: a power of two.
inline float ScaleUnit(double scale) { return static_cast<float>(std::fmin(1.0, std::exp2(std::floor(std::log2(scale) + 0.5)))); }

inline ShiftTiling PlanShift(const Shape& shape, double scale, bool saturates, bool has_lengths)
{
    CheckShape(shape);
    ShiftTiling t{};
    t.heads = shape.batch * shape.kv_heads;
    t.kv_heads = shape.kv_heads;
    t.keys = shape.keys;
    t.dim = shape.dim;
    t.blocks = static_cast<uint32_t>(RoundUp(shape.keys, kBlockKeys) / kBlockKeys);
    t.saturates = saturates;
    t.has_lengths = has_lengths;
    t.unit = ScaleUnit(scale);
    return t;
}

}  // namespace pasa
