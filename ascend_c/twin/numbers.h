// Number types: half is the compiler's _Float16 (IEEE binary16, one rounding per operation with
// -fexcess-precision=16), bfloat16_t is storage only, as on the A2 vector core, which has no bfloat16 arithmetic.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__F16C__)
#include <immintrin.h>
#endif

using half = _Float16;

namespace twin {

template <typename To, typename From>
inline To bits_of(From from)
{
    static_assert(sizeof(To) == sizeof(From), "bits_of needs types of one size");
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}

constexpr float kHalfMax = 65504.0f;
constexpr float kHalfNormal = 0x1p-14f;  // the least number that is not subnormal
constexpr float kBf16Max = 3.38953139e38f;

// float -> binary16, round to nearest, ties to even: the same bits as F16C.
inline uint16_t half_bits_from(float value)
{
    uint32_t u = bits_of<uint32_t>(value);
    const uint16_t sign = static_cast<uint16_t>((u >> 16) & 0x8000u);
    u &= 0x7fffffffu;
    if (u > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((u >> 13) & 0x3ffu));
    if (u >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and above
    if (u < 0x38800000u) {                                               // below 2^-14: let the FPU round at 2^-24
        const float shifted = bits_of<float>(u) + 0.5f;                  // ulp(0.5) = 2^-24
        return static_cast<uint16_t>(sign | (bits_of<uint32_t>(shifted) - 0x3f000000u));
    }
    const uint32_t odd = (u >> 13) & 1u;
    return static_cast<uint16_t>(sign | ((u - 0x38000000u + 0xfffu + odd) >> 13));
}

inline float float_from_half_bits(uint16_t h)
{
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
    const uint32_t rest = h & 0x7fffu;
    if (rest >= 0x7c00u) {  // a NaN comes out quiet, as from F16C
        const uint32_t mantissa = (rest & 0x3ffu) << 13;
        return bits_of<float>(sign | 0x7f800000u | mantissa | (mantissa != 0 ? 0x400000u : 0u));
    }
    if (rest < 0x400u) {
        const float magnitude = static_cast<float>(rest) * 5.9604644775390625e-08f;  // 2^-24
        return bits_of<float>(sign | bits_of<uint32_t>(magnitude));
    }
    return bits_of<float>(sign | ((rest << 13) + 0x38000000u));
}

inline uint16_t bf16_bits_from(float value)
{
    const uint32_t u = bits_of<uint32_t>(value);
    if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((u >> 16) | 0x40u);
    return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

inline float float_from_bf16_bits(uint16_t b) { return bits_of<float>(static_cast<uint32_t>(b) << 16); }

}  // namespace twin

struct bfloat16_t {
    uint16_t bits;

    bfloat16_t() = default;
    explicit bfloat16_t(float value) : bits(twin::bf16_bits_from(value)) {}
    explicit operator float() const { return twin::float_from_bf16_bits(bits); }
};
static_assert(sizeof(half) == 2 && sizeof(bfloat16_t) == 2, "16-bit types");

namespace twin {

inline float to_float(half x) { return float_from_half_bits(bits_of<uint16_t>(x)); }
inline float to_float(bfloat16_t x) { return float_from_bf16_bits(x.bits); }
inline float to_float(float x) { return x; }

inline float saturated(float x, float largest)
{
    if (std::isnan(x)) return 0.0f;
    return x > largest ? largest : (x < -largest ? -largest : x);
}

// Vectorised conversions of n elements; without F16C the same results, slower.
inline void widen(const half* from, float* to, size_t n)
{
    size_t i = 0;
#if defined(__F16C__)
    for (const size_t whole = n / 8 * 8; i < whole; i += 8) {
        __m128i packed;
        std::memcpy(&packed, from + i, 16);
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(packed));
    }
#endif
    for (; i < n; ++i) to[i] = to_float(from[i]);
}

inline void narrow(const float* from, half* to, size_t n)
{
    size_t i = 0;
#if defined(__F16C__)
    for (const size_t whole = n / 8 * 8; i < whole; i += 8) {
        const __m128i packed = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
        std::memcpy(to + i, &packed, 16);
    }
#endif
    for (; i < n; ++i) {
        const uint16_t b = half_bits_from(from[i]);
        std::memcpy(to + i, &b, 2);
    }
}

inline half half_from(float x) { return bits_of<half>(half_bits_from(x)); }

enum class Rounding { nearest_even, down, up, nearest_away, to_zero, to_odd };

inline double round_integer(double x, Rounding mode)
{
    switch (mode) {
        case Rounding::down: return std::floor(x);
        case Rounding::up: return std::ceil(x);
        case Rounding::nearest_away: return std::round(x);
        case Rounding::to_zero: return std::trunc(x);
        case Rounding::to_odd: {
            const double low = std::floor(x);
            if (low == x) return x;
            return std::fmod(low, 2.0) != 0.0 ? low : low + 1.0;
        }
        default: return std::nearbyint(x);
    }
}

// The one slow rounding routine: to `digits` significant binary digits with the smallest normal exponent `emin`.
// Beyond the largest finite value the directed modes stay finite where the direction says so, as IEEE 754 does.
inline double round_to_format(double x, int digits, int emin, double largest, Rounding mode)
{
    if (x == 0.0 || !std::isfinite(x)) return x;
    int exponent = 0;
    std::frexp(x, &exponent);
    const int lowest = std::max(exponent - 1, emin) - (digits - 1);
    const double rounded = std::ldexp(round_integer(std::ldexp(x, -lowest), mode), lowest);
    if (std::fabs(rounded) <= largest) return rounded;
    const bool stays_finite = mode == Rounding::to_zero || mode == Rounding::to_odd ||
                              (mode == Rounding::down && x > 0) || (mode == Rounding::up && x < 0);
    return std::copysign(stays_finite ? largest : std::numeric_limits<double>::infinity(), x);
}

inline float round_to_half(double x, Rounding mode = Rounding::nearest_even)
{
    return static_cast<float>(round_to_format(x, 11, -14, kHalfMax, mode));
}

inline float round_to_bf16(double x, Rounding mode = Rounding::nearest_even)
{
    return static_cast<float>(round_to_format(x, 8, -126, kBf16Max, mode));
}

template <typename T>
struct TypeName;
#define TWIN_TYPE_NAME(type, text)                 \
    template <>                                    \
    struct TypeName<type> {                        \
        static constexpr const char* value = text; \
    }
TWIN_TYPE_NAME(half, "half");
TWIN_TYPE_NAME(bfloat16_t, "bfloat16");
TWIN_TYPE_NAME(float, "float");
TWIN_TYPE_NAME(int16_t, "int16");
TWIN_TYPE_NAME(uint16_t, "uint16");
TWIN_TYPE_NAME(uint8_t, "uint8");
TWIN_TYPE_NAME(int32_t, "int32");
TWIN_TYPE_NAME(uint32_t, "uint32");
#undef TWIN_TYPE_NAME

template <typename T, typename... Allowed>
constexpr bool is_one_of = (std::is_same_v<T, Allowed> || ...);

}  // namespace twin
