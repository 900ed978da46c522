// Conversions between half and float, and half in the kernel's own code, built with and without F16C.
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

TWIN_CASE(scalar_code)
{
    // The kernel's own scalar arithmetic in half: one rounding per operation, not excess precision in float.
    twin::Device device;
    half* out = device.output<half>("z", 16);
    twin::Options options = arguments.options();
    options.shape = twin::Shape::aiv_only;
    const twin::Report report = device.launch("scalar", 1, options, [&] {
        AscendC::GlobalTensor<half> z;
        z.SetGlobalBuffer(out, 16);
        volatile half big = 2048, one = 1;
        const half a = big, b = one;
        z.SetValue(0, (a + b) - a);
    });
    arguments.save("z", out, 1);
    return report;
}

TWIN_CASE(scalar_to_half)
{
    const std::vector<float> x = arguments.load<float>("x");
    std::vector<half> z;
    for (float value : x) z.push_back(AscendC::Cast<float, half, AscendC::RoundMode::CAST_ODD>(value));
    arguments.save("z", z.data(), z.size());
    return twin::Report{};
}
