// The launches that binding_310p.cpp asks for, on the CPU twin.
#include "../../../ascend_c/binding/on_twin_310p.h"

#include <stdexcept>

namespace pasa {

static void Require(const twin::Report& report)
{
    if (!report.ok) throw std::runtime_error(report.json());
    const auto& overflows = report.total(twin::CoreKind::ai).overflows;
    if (!overflows.empty()) throw std::runtime_error("a number saturated: " + report.json());
}

void LaunchShift(const ShiftPointers& given, const ShiftTiling& tiling, uint32_t cores, void*)
{
    Require(ShiftOnTwin(given, tiling, cores));
}

void LaunchLayOut(const LayoutPointers& given, const ShiftTiling& tiling, uint32_t cores, void*)
{
    Require(LayOutOnTwin(given, tiling, cores));
}

void LaunchAttention(const AttentionPointers& given, const AttentionTiling& tiling, uint32_t cores, void*)
{
    Require(AttendOnTwin(given, tiling, cores));
}

void LaunchDecode(const DecodePointers& given, const DecodeTiling& tiling, uint32_t cores, void*)
{
    Require(DecodeOnTwin(given, tiling, cores));
}

}  // namespace pasa
