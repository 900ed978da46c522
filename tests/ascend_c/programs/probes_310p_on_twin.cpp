// The launches that probes_310p.cpp asks for, on the CPU twin.
#include "../../../ascend_c/binding/on_twin_310p.h"
#include "fake_device.h"

namespace pasa {

void LaunchVectorProbe(const VectorProbePointers& given, uint32_t probe, uint32_t count, bool, void*)
{
    Require(ProbeVectorOnTwin(given, probe, count, FakeDevice()));
}

void LaunchProductProbe(const ProductProbePointers& given, uint32_t m, uint32_t n, uint32_t k, void*)
{
    Require(ProbeProductOnTwin(given, m, n, k, FakeDevice()));
}

}  // namespace pasa
