// Facts about the chips. Atlas A2 (910B, NPU architecture 2201): sizes from the vendor's pages "TPosition" and "general
// constraints", core counts from the 910B3 data sheet. Ascend 310P (architecture 2002): docs/ascend/310p.md.
#pragma once

#include <cstddef>
#include <cstdint>

namespace twin {

constexpr size_t kKiB = 1024;
constexpr uint32_t kBlockBytes = 32;    // a data block: the unit of copies and of vector strides
constexpr uint32_t kRepeatBytes = 256;  // what a vector instruction handles in one repeat
constexpr uint32_t kBlocksPerRepeat = 8;
constexpr uint32_t kFractalBytes = 512;  // a cube fractal: 16 rows of 32 bytes
constexpr int kEventIds = 8;             // per pair of pipes
constexpr int kCrossCoreFlags = 16;      // per core
constexpr int kCrossCoreMax = 15;        // outstanding sets per flag (page "CrossCoreSetFlag")

struct ChipFacts {
    int aic_cores = 20;  // 910B3
    int aiv_cores = 40;
    size_t ub = 192 * kKiB;
    size_t ub_reserved_mix = 256;  // reserved in mixed kernels
    size_t ub_reserved_select =
        8 * kKiB;  // reserved without the option --cce-disable-asc-reserved-ubuf; Select needs it
    size_t l1 = 512 * kKiB;
    size_t l1_reserved_mix = 256;
    size_t l0a = 64 * kKiB;
    size_t l0b = 64 * kKiB;
    size_t l0c = 128 * kKiB;
    int ai_cores = 0;  // cores that hold a cube unit and a vector unit
};

// Ascend310P3: the chip of an Atlas 300I Duo. Its vector-only cores are not emulated.
inline ChipFacts chip_310p()
{
    ChipFacts c;
    c.aic_cores = c.aiv_cores = 0;
    c.ub = 256 * kKiB;
    c.l1 = 1024 * kKiB;
    c.l0c = 256 * kKiB;
    c.ai_cores = 8;
    return c;
}

}  // namespace twin
