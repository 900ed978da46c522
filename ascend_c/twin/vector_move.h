// Vector calls that move or convert rather than compute: Duplicate, Brcb, CreateVecIndex, Cast.
// Signatures: kernel_operator_vec_duplicate_intf.h, _brcb_, _createvecindex_, _vconv_.
#pragma once

#include "vector.h"

namespace twin {

template <typename T, typename F>
void fill(const char* name, const AscendC::LocalTensor<T>& dst, const Extent& e, int64_t block, int64_t repeat,
          F value_at, Here here)
{
    static_assert(is_one_of<T, half, bfloat16_t, float, int16_t, uint16_t, int32_t, uint32_t>,
                  "data type not supported on A2");
    Instruction op(name, Pipe::V, here);
    constexpr int lanes = kLanes<T>;
    const Plan plan = e.plan(op, lanes);
    const Operand d = e.counted ? packed(dst, lanes) : operand(dst, block, repeat);
    prepare(op, plan, d, {});
    count_vector(op, TypeName<T>::value, plan);
    op.run([=] {
        T out[kMaxLanes];
        for (int64_t r = 0; r < plan.repeats; ++r) {
            for (int i = 0; i < lanes; ++i) out[i] = value_at(r * lanes + i);
            store<T>(d, plan, r, out);
        }
    });
}

// first, first + 1, first + 2...
template <typename T>
auto index_from(T first)
{
    static_assert(is_one_of<T, half, float, int32_t>, "CreateVecIndex: the twin takes half, float and int32_t");
    return [first](int64_t i) { return static_cast<T>(static_cast<double>(first) + static_cast<double>(i)); };
}

// The conversions that the twin has, by the roundings they take on A2 (page "Cast").
enum class CastKind { unsupported, exact, to_half, from_int, other };

template <typename D, typename S>
constexpr CastKind cast_kind()
{
    if (std::is_same_v<D, float> && is_one_of<S, half, bfloat16_t>) return CastKind::exact;
    if (std::is_same_v<D, half> && std::is_same_v<S, uint8_t>) return CastKind::exact;
    if (std::is_same_v<D, half> && std::is_same_v<S, float>) return CastKind::to_half;
    if (std::is_same_v<D, float> && std::is_same_v<S, int32_t>) return CastKind::from_int;
    if (is_one_of<D, bfloat16_t, int32_t, float> && std::is_same_v<S, float>) return CastKind::other;
    return CastKind::unsupported;
}

// NONE stands for RINT where bits can be lost.
inline bool takes(CastKind kind, AscendC::RoundMode mode)
{
    using R = AscendC::RoundMode;
    if (mode == R::CAST_NONE) return kind != CastKind::other;
    if (mode == R::CAST_ODD) return kind == CastKind::to_half;
    return kind != CastKind::exact && mode != R::UNKNOWN;
}

// The same on a 310P. Its page lists no conversion between floats, and none from float to int32_t.
inline bool takes_on_310p(CastKind kind, AscendC::RoundMode mode)
{
    using R = AscendC::RoundMode;
    return kind != CastKind::other && (mode == R::CAST_NONE || (kind == CastKind::to_half && mode == R::CAST_ODD));
}

inline Rounding rounding_of(AscendC::RoundMode mode)
{
    switch (mode) {
        case AscendC::RoundMode::CAST_FLOOR: return Rounding::down;
        case AscendC::RoundMode::CAST_CEIL: return Rounding::up;
        case AscendC::RoundMode::CAST_ROUND: return Rounding::nearest_away;
        case AscendC::RoundMode::CAST_TRUNC: return Rounding::to_zero;
        case AscendC::RoundMode::CAST_ODD: return Rounding::to_odd;
        default: return Rounding::nearest_even;
    }
}

// One lane, before saturation. S is the source type, whose value arrives widened.
template <typename D, typename S>
D converted(Wide<S> from, Rounding rounding)
{
    const double x = static_cast<double>(from);
    if constexpr (std::is_same_v<D, half>) {
        return half_from(rounding == Rounding::nearest_even ? static_cast<float>(from) : round_to_half(x, rounding));
    } else if constexpr (std::is_same_v<D, bfloat16_t>) {
        return bfloat16_t(rounding == Rounding::nearest_even ? from : round_to_bf16(x, rounding));
    } else if constexpr (std::is_same_v<S, int32_t>) {
        return static_cast<float>(round_to_format(x, 24, -126, 3.4028234663852886e38, rounding));
    } else if constexpr (std::is_same_v<D, float>) {
        return std::is_same_v<S, float> ? static_cast<float>(round_integer(x, rounding)) : from;
    } else {  // to an integer: out of range saturates, NaN gives 0
        const double low = std::numeric_limits<D>::lowest(), high = std::numeric_limits<D>::max();
        return std::isnan(x) ? 0 : static_cast<D>(std::min(std::max(round_integer(x, rounding), low), high));
    }
}

template <typename D, typename S>
void cast(const AscendC::LocalTensor<D>& dst, const AscendC::LocalTensor<S>& src, AscendC::RoundMode mode,
          const Extent& e, const AscendC::UnaryRepeatParams& params, Here here)
{
    static_assert(cast_kind<D, S>() != CastKind::unsupported, "Cast: the twin does not have this conversion");
    Instruction op("Cast", Pipe::V, here);
    op.require(takes(cast_kind<D, S>(), mode), FaultKind::type,
               "this conversion does not have the round mode " + std::to_string(static_cast<int>(mode)));
    op.require(op.core().kind != CoreKind::ai || takes_on_310p(cast_kind<D, S>(), mode), FaultKind::type,
               "an Ascend 310P does not have this conversion with this round mode");
    op.require(op.core().kind != CoreKind::ai || !(std::is_same_v<D, bfloat16_t> || std::is_same_v<S, bfloat16_t>),
               FaultKind::type, kNoBf16);
    constexpr int lanes = std::min(kLanes<D>, kLanes<S>);
    const Plan plan = e.plan(op, lanes);
    const UnaryStrides s = strides(op, params);
    const Operand d = e.counted ? packed(dst, lanes) : operand(dst, s.dst_block, s.dst_repeat);
    const Operand a = e.counted ? packed(src, lanes) : operand(src, s.src_block, s.src_repeat);
    prepare(op, plan, d, {a});
    count_vector(op, TypeName<S>::value, plan);
    const bool truncates = deviates(Deviation::half_rounding) && cast_kind<D, S>() == CastKind::to_half;
    op.run([=, &core = op.core(), saturate = op.core().saturate,
            rounding = rounding_of(truncates ? AscendC::RoundMode::CAST_TRUNC : mode)] {
        Wide<S> x[kMaxLanes] = {};
        D out[kMaxLanes] = {};
        uint64_t overflows = 0;
        for (int64_t r = 0; r < plan.repeats; ++r) {
            load<S>(a, plan, r, x);
            for (int i = 0; i < lanes; ++i) out[i] = converted<D, S>(x[i], rounding);
            if constexpr (is_one_of<D, half, bfloat16_t> && !std::is_same_v<S, uint8_t>) {
                constexpr float largest = std::is_same_v<D, half> ? kHalfMax : kBf16Max;
                overflows += count_overflows(out, plan.at(r), {x});
                for (int i = 0; saturate && i < lanes; ++i) out[i] = D(saturated(to_float(out[i]), largest));
            }
            store<D>(d, plan, r, out);
        }
        core.counters.count_overflows("Cast", overflows);
    });
}

}  // namespace twin

namespace AscendC {

template <typename T, bool isSetMask = true>
void Duplicate(const LocalTensor<T>& dst, const T& scalarValue, twin::Mask mask, const U8 repeatTime,
               const U16 dstBlockStride, const U8 dstRepeatStride, Here here = Here::now())
{
    twin::fill(
        "Duplicate", dst, twin::repeated(mask, repeatTime, isSetMask), dstBlockStride.full(), dstRepeatStride.full(),
        [scalarValue](int64_t) { return scalarValue; }, here);
}
template <typename T>
void Duplicate(const LocalTensor<T>& dst, const T& scalarValue, const int32_t& count, Here here = Here::now())
{
    twin::fill("Duplicate", dst, twin::counted(count), 1, 8, [scalarValue](int64_t) { return scalarValue; }, here);
}

// The index goes on from repeat to repeat (inferred for the mask form).
template <typename T>
void CreateVecIndex(LocalTensor<T>& dst, const T& firstValue, twin::Mask mask, U8 repeatTime, U16 dstBlkStride,
                    U8 dstRepStride, Here here = Here::now())
{
    twin::fill("CreateVecIndex", dst, twin::repeated(mask, repeatTime), dstBlkStride.full(), dstRepStride.full(),
               twin::index_from(firstValue), here);
}
template <typename T>
void CreateVecIndex(LocalTensor<T> dst, const T& firstValue, uint32_t count, Here here = Here::now())
{
    twin::fill("CreateVecIndex", dst, twin::counted(count), 1, 8, twin::index_from(firstValue), here);
}

// Eight elements to eight blocks per repeat. Source and destination may not share memory.
template <typename T>
void Brcb(const LocalTensor<T>& dst, const LocalTensor<T>& src, const U8 repeatTime,
          const BrcbRepeatParams& repeatParams, Here here = Here::now())
{
    static_assert(sizeof(T) == 2 || sizeof(T) == 4, "Brcb takes elements of 16 and 32 bits");
    twin::Instruction op("Brcb", twin::Pipe::V, here);
    op.fits(repeatTime, "repeatTime", 0, 255);
    op.fits(repeatParams.dstBlkStride, "dstBlkStride", 1, 65535);
    op.fits(repeatParams.dstRepStride, "dstRepStride", 0, 65535);
    constexpr int lanes = twin::kLanes<T>;
    const int64_t repeats = repeatTime.full();
    const twin::Plan plan{lanes, repeats, twin::Lanes::first(lanes), twin::Lanes::first(lanes)};
    const twin::Operand d = twin::operand(dst, repeatParams.dstBlkStride.full(), repeatParams.dstRepStride.full());
    const twin::Span s = src.span();
    twin::check_vector_operand(op, d, "dst");
    twin::check_vector_operand(op, twin::Operand{s, sizeof(T)}, "src");
    const size_t bytes = static_cast<size_t>(repeats) * 8 * sizeof(T);
    if (repeats > 0 && d.span.memory == s.memory) {
        const auto [low, high] = d.hull(plan);
        op.require(high <= s.begin || s.begin + bytes <= low, twin::FaultKind::overlap,
                   "source and destination share memory");
    }
    op.read(s, 0, bytes);
    d.runs(plan, [&](size_t at, size_t n) { op.write(d.span, at, n); });
    twin::count_vector(op, twin::TypeName<T>::value, plan);
    op.run([=] {
        constexpr int per_block = static_cast<int>(twin::kBlockBytes / sizeof(T));
        for (int64_t r = 0; r < repeats; ++r) {
            T values[8];
            std::memcpy(values, s.data() + static_cast<size_t>(r) * sizeof(values), sizeof(values));
            for (int j = 0; j < 8; ++j) {
                T* to = reinterpret_cast<T*>(d.span.data() + d.at(r, j * per_block));
                std::fill(to, to + per_block, values[j]);
            }
        }
    });
}

template <typename T, typename U, bool isSetMask = true>
void Cast(const LocalTensor<T>& dst, const LocalTensor<U>& src, const RoundMode& roundMode, twin::ConstMask mask,
          const U8 repeatTime, const UnaryRepeatParams& repeatParams, Here here = Here::now())
{
    twin::cast(dst, src, roundMode, twin::repeated(mask, repeatTime, isSetMask), repeatParams, here);
}
template <typename T, typename U>
void Cast(const LocalTensor<T>& dst, const LocalTensor<U>& src, const RoundMode& roundMode, const uint32_t count,
          Here here = Here::now())
{
    twin::cast(dst, src, roundMode, twin::counted(count), UnaryRepeatParams(), here);
}
// Scalar conversions. From float to half there is one, which rounds to odd (page "Cast (float to half/int32_t)").
template <typename T, typename U, RoundMode roundMode>
U Cast(T value)
{
    static_assert(std::is_same_v<T, float> && std::is_same_v<U, half> && roundMode == RoundMode::CAST_ODD,
                  "scalar Cast: the twin has float to half, which rounds to odd");
    return twin::half_from(twin::round_to_half(value, twin::Rounding::to_odd));
}
inline bfloat16_t Cast(const float& value) { return bfloat16_t(value); }
inline float Cast(const bfloat16_t& value) { return static_cast<float>(value); }

}  // namespace AscendC
