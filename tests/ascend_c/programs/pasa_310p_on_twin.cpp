// The launches that binding_310p.cpp asks for, on the CPU twin.
#include "../../../ascend_c/binding/on_twin_310p.h"
#include "fake_device.h"

namespace pasa {

static void RequireNoOverflow(const twin::Report& report)
{
    Require(report);
    const auto& overflows = report.total(twin::CoreKind::ai).overflows;
    if (!overflows.empty()) throw std::runtime_error("a number saturated: " + report.json());
}

void LaunchShift(const ShiftPointers& given, const ShiftTiling& tiling, uint32_t cores, void*)
{
    RequireNoOverflow(ShiftOnTwin(given, tiling, cores, FakeDevice()));
}

void LaunchLayOut(const LayoutPointers& given, const ShiftTiling& tiling, uint32_t cores, void*)
{
    RequireNoOverflow(LayOutOnTwin(given, tiling, cores, FakeDevice()));
}

void LaunchAttention(const AttentionPointers& given, const AttentionTiling& tiling, uint32_t cores, void*)
{
    RequireNoOverflow(AttendOnTwin(given, tiling, cores, FakeDevice()));
}

void LaunchDecode(const DecodePointers& given, const DecodeTiling& tiling, uint32_t cores, void*)
{
    RequireNoOverflow(DecodeOnTwin(given, tiling, cores, FakeDevice()));
}

}  // namespace pasa
