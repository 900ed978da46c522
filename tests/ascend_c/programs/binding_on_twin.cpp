// The launches that binding.cpp asks for, on the CPU twin.
#include "../../../ascend_c/binding/on_twin.h"

#include <stdexcept>

namespace pasa {
namespace {

void Require(const twin::Report& report)
{
    if (!report.ok) throw std::runtime_error(report.json());
}

}  // namespace

void LaunchAttention(bool exact, const AttentionPointers& given, const AttentionTiling& tiling, uint32_t cores, void*)
{
    Require(AttendOnTwin(exact, given, tiling, cores));
}

void LaunchShiftExact(const ShiftPointers& given, const ShiftTiling& tiling, uint32_t cores, void*)
{
    Require(ShiftOnTwin(true, given, tiling, cores));
}

void LaunchShiftPaper(const ShiftPointers& given, const ShiftTiling& tiling, uint32_t cores, void*)
{
    Require(ShiftOnTwin(false, given, tiling, cores));
}

}  // namespace pasa
