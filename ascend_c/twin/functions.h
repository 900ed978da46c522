// Exp and Ln: correctly rounded (the double function is rounded once). Nothing public gives the bits of the device's
// own, so they can err by one unit in the last place, and take subnormal numbers for 0.
#pragma once

#include <cmath>
#include <vector>

#include "numbers.h"

namespace twin {

// A function of half as a table of its 65536 values.
class HalfTable {
public:
    explicit HalfTable(double (*f)(double)) : values_(65536)
    {
        for (uint32_t b = 0; b < 65536; ++b) {
            values_[b] = round_to_half(f(float_from_half_bits(static_cast<uint16_t>(b))));
        }
    }
    float operator()(float x) const { return values_[half_bits_from(x)]; }

private:
    std::vector<float> values_;
};

// -1, 0 or +1 units in the last place of T, by seed and input: the same in every mode and interleaving.
template <typename T>
float jittered(float result, float input, uint64_t seed)
{
    if (!std::isfinite(result) || result == 0.0f) return result;
    uint64_t h = (seed + 1) * 0x9E3779B97F4A7C15ull ^ bits_of<uint32_t>(input) * 0xD1B54A32D192ED03ull;
    h ^= h >> 29;
    const int step = static_cast<int>(h * 0xBF58476D1CE4E5B9ull >> 33) % 3 - 1;
    if constexpr (std::is_same_v<T, half>) {
        const int b = half_bits_from(result) + step;
        return (b & 0x7fff) >= 0x7c00 ? result : float_from_half_bits(static_cast<uint16_t>(b));
    } else {
        const float moved =
            bits_of<float>(static_cast<uint32_t>(static_cast<int64_t>(bits_of<uint32_t>(result)) + step));
        return std::isfinite(moved) ? moved : result;
    }
}

// Zero in place of a subnormal number of T.
template <typename T>
float flushed(float x)
{
    constexpr float smallest_normal = std::is_same_v<T, half> ? 0x1p-14f : 0x1p-126f;
    return std::fabs(x) < smallest_normal ? std::copysign(0.0f, x) : x;
}

template <typename T>
struct Function {
    double (*exact)(double);
    const HalfTable* table;
    bool jitter = false;
    bool flush = false;
    uint64_t seed = 0;

    float operator()(float x) const
    {
        if (flush) x = flushed<T>(x);
        const float rounded = std::is_same_v<T, half> ? (*table)(x) : static_cast<float>(exact(x));
        const float y = jitter ? jittered<T>(rounded, x, seed) : rounded;
        return flush ? flushed<T>(y) : y;
    }
};

inline double exp_exact(double x) { return std::exp(x); }
inline double ln_exact(double x) { return std::log(x); }

template <typename T>
Function<T> exp_function()
{
    static const HalfTable table(exp_exact);
    return Function<T>{exp_exact, &table};
}
template <typename T>
Function<T> ln_function()
{
    static const HalfTable table(ln_exact);
    return Function<T>{ln_exact, &table};
}

}  // namespace twin
