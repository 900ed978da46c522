// Conversions between half and float, built with and without F16C.
#include "harness.h"

TWIN_CASE(convert)
{
    std::vector<half> every(65536);
    for (uint32_t b = 0; b < 65536; ++b) every[b] = twin::bits_of<half>(static_cast<uint16_t>(b));
    std::vector<float> wide(every.size());
    twin::widen(every.data(), wide.data(), every.size());
    arguments.save("widened", wide.data(), wide.size());

    std::vector<float> floats;  // every half, the middle to its neighbour, and the floats on both sides of that middle
    for (uint32_t b = 0; b < 65536; ++b) {
        const float x = wide[b];
        if (x != x) continue;
        const float next = twin::float_from_half_bits(static_cast<uint16_t>(b + 1));
        const float middle = x + (next == next ? (next - x) / 2 : 0);
        for (float f : {x, middle, std::nextafter(middle, 1e30f), std::nextafter(middle, -1e30f)}) {
            if (f == f) floats.push_back(f);
        }
    }
    std::vector<half> narrowed(floats.size());
    twin::narrow(floats.data(), narrowed.data(), floats.size());
    arguments.save("floats", floats.data(), floats.size());
    arguments.save("narrowed", narrowed.data(), narrowed.size());
    return twin::Report{};
}
