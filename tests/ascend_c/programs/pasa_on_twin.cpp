// The launches that binding.cpp asks for, on the CPU twin.
#include "../../../ascend_c/binding/on_twin.h"
#include "fake_device.h"

namespace pasa {

void LaunchAttention(bool exact, const AttentionPointers& given, const AttentionTiling& tiling, uint32_t cores, void*)
{
    Require(AttendOnTwin(exact, given, tiling, cores, FakeDevice()));
}

void LaunchDecode(const DecodePointers& given, const DecodeTiling& tiling, uint32_t cores, void*)
{
    Require(DecodeOnTwin(given, tiling, cores, FakeDevice()));
}

void LaunchShiftExact(const ShiftPointers& given, const ShiftTiling& tiling, uint32_t cores, void*)
{
    Require(ShiftOnTwin(true, given, tiling, cores, FakeDevice()));
}

void LaunchShiftPaper(const ShiftPointers& given, const ShiftTiling& tiling, uint32_t cores, void*)
{
    Require(ShiftOnTwin(false, given, tiling, cores, FakeDevice()));
}

}  // namespace pasa
