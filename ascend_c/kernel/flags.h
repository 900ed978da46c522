// Flags between the cube core and the two vector cores of a group.
#pragma once

#include "port.h"

namespace pasa {

// A lane has its own, one behind the other.
// Set by the cube core on FIX, waited for by both vector cores:
constexpr uint16_t kScoresReady = 0;   // an FP16 score tile is in the workspace
constexpr uint16_t kWideReady = 2;     // the verdict was read, and a tile that was asked for is there in FP32
constexpr uint16_t kProductReady = 4;  // P V is there; before the first block: the offsets
// Set by both vector cores on MTE3, waited for by the cube core:
constexpr uint16_t kVerdictReady = 6;  // whether the score tile has to come in FP32
constexpr uint16_t kWeightsReady = 8;  // P is there, and the reference of the next score tile
constexpr uint8_t kGroup = 2;          // the mode of these flags: a cube core and its vector cores

}  // namespace pasa
