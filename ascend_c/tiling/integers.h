// Arithmetic of sizes, the same on the host and on the device.
#pragma once

#include <cstdint>

#ifdef __host_aicore__  // from CANN's headers, which a device source includes first
#define PASA_ANYWHERE __host_aicore__
#else
#define PASA_ANYWHERE
#endif

namespace pasa {

template <typename T>
PASA_ANYWHERE constexpr T DivideUp(T a, T b)
{
    return (a + b - 1) / b;
}
template <typename T>
PASA_ANYWHERE constexpr T RoundUp(T a, T step)
{
    return DivideUp(a, step) * step;
}
PASA_ANYWHERE constexpr uint32_t Least(uint32_t a, uint32_t b) { return a < b ? a : b; }
PASA_ANYWHERE constexpr uint32_t Largest(uint32_t a, uint32_t b) { return a < b ? b : a; }
// A length that somebody else wrote: from 0 to `most`.
PASA_ANYWHERE constexpr uint32_t Clamped(int32_t length, uint32_t most)
{
    return length <= 0 ? 0 : Least(static_cast<uint32_t>(length), most);
}

}  // namespace pasa
