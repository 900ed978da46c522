// Flags between the cube core and the two vector cores of a group.
#pragma once

#include "port.h"

namespace pasa {

// Each stands for two flags, one behind the other: of the two lanes in the published recovery, and of blocks with an
// even and an odd number in the exact one.
// Set by the cube core on FIX, waited for by both vector cores:
constexpr uint16_t kScoresReady = 0;   // an FP16 score tile is in the workspace
constexpr uint16_t kWideReady = 2;     // the verdict was read, and what it asked for is in the workspace
constexpr uint16_t kProductReady = 4;  // P V is there; before the first block: the offsets
// Set by both vector cores on MTE3, waited for by the cube core:
constexpr uint16_t kVerdictReady = 6;  // what a vector core wants
constexpr uint16_t kWeightsReady = 8;  // P is there, and the reference of a later score tile
constexpr uint8_t kGroup = 2;          // the mode of these flags: a cube core and its vector cores

// Bits of a verdict.
constexpr int32_t kWantsWide = 1;    // the score tile again, in FP32
constexpr int32_t kWantsOutput = 2;  // the products of the blocks before
constexpr int32_t kBringsReference = 4;  // with its weights comes a new reference, of the second block from here

}  // namespace pasa
