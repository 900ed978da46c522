// Vector calls that move, convert or choose rather than compute: Duplicate, Brcb, CreateVecIndex, Cast, Compare,
// Select. Signatures: kernel_operator_vec_duplicate_intf.h, _brcb_, _createvecindex_, _vconv_, _cmpsel_.
#pragma once

#include "vector.h"

namespace twin {

template <typename T, typename F>
void fill(Instruction& op, const AscendC::LocalTensor<T>& dst, const Extent& e, int64_t block, int64_t repeat,
          F value_at)
{
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

// Which roundings a conversion has on A2 (page "Cast"). NONE stands for RINT where bits are lost.
enum class CastKind { unsupported, exact, integer, to_half, to_bf16 };

template <typename D, typename S>
constexpr CastKind cast_kind()
{
    if constexpr (std::is_same_v<S, half>) {
        if (is_one_of<D, float>) return CastKind::exact;
        if (is_one_of<D, int32_t, int16_t, int8_t, uint8_t>) return CastKind::integer;
    } else if constexpr (std::is_same_v<S, float>) {
        if (is_one_of<D, half>) return CastKind::to_half;
        if (is_one_of<D, bfloat16_t>) return CastKind::to_bf16;
        if (is_one_of<D, int32_t, int16_t, float>) return CastKind::integer;
    } else if constexpr (std::is_same_v<S, bfloat16_t>) {
        if (is_one_of<D, float>) return CastKind::exact;
        if (is_one_of<D, int32_t>) return CastKind::integer;
    } else if constexpr (std::is_same_v<S, int32_t>) {
        if (is_one_of<D, float>) return CastKind::integer;
    } else if constexpr (std::is_same_v<S, int16_t>) {
        if (is_one_of<D, float>) return CastKind::exact;
        if (is_one_of<D, half>) return CastKind::to_half;
    } else if constexpr (is_one_of<S, uint8_t, int8_t>) {
        if (is_one_of<D, half>) return CastKind::exact;
    }
    return CastKind::unsupported;
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

template <typename D, typename S>
void check_round_mode(const Instruction& op, AscendC::RoundMode mode)
{
    using R = AscendC::RoundMode;
    constexpr CastKind kind = cast_kind<D, S>();
    bool good = mode != R::UNKNOWN;
    if (kind == CastKind::exact) good = mode == R::CAST_NONE;
    if (kind == CastKind::integer || kind == CastKind::to_bf16) good = mode != R::CAST_NONE && mode != R::CAST_ODD;
    if (kind == CastKind::to_half && std::is_same_v<S, int16_t>) good = mode != R::CAST_NONE && mode != R::CAST_ODD;
    op.require(good, FaultKind::type,
               "this conversion does not have the round mode " + std::to_string(static_cast<int>(mode)));
}

// S is the source type, whose value arrives widened.
template <typename D, typename S>
D convert(Wide<S> from, Rounding rounding, bool saturate)
{
    constexpr CastKind kind = cast_kind<D, S>();
    double x = static_cast<double>(from);
    if constexpr (std::is_same_v<D, half>) {
        float y = rounding == Rounding::nearest_even ? static_cast<float>(x) : round_to_half(x, rounding);
        y = to_float(half_from(y));
        return half_from(saturate ? saturated(y, kHalfMax) : y);
    } else if constexpr (std::is_same_v<D, bfloat16_t>) {
        const float y = rounding == Rounding::nearest_even ? to_float(bfloat16_t(static_cast<float>(x)))
                                                           : round_to_bf16(x, rounding);
        return bfloat16_t(saturate ? saturated(y, kBf16Max) : y);
    } else if constexpr (std::is_same_v<D, float>) {
        if constexpr (kind == CastKind::integer && std::is_same_v<S, float>) x = round_integer(x, rounding);
        if constexpr (std::is_same_v<S, int32_t>) x = round_to_format(x, 24, -126, 3.4028234663852886e38, rounding);
        return static_cast<float>(x);
    } else {  // to an integer: out of range saturates, NaN gives 0
        const double y = round_integer(x, rounding);
        if (!(y == y)) return 0;
        const double low = static_cast<double>(std::numeric_limits<D>::lowest());
        const double high = static_cast<double>(std::numeric_limits<D>::max());
        return static_cast<D>(std::min(std::max(y, low), high));
    }
}

template <typename D, typename S>
void cast(Instruction& op, const AscendC::LocalTensor<D>& dst, const AscendC::LocalTensor<S>& src,
          AscendC::RoundMode mode, const Extent& e, const AscendC::UnaryRepeatParams& params)
{
    static_assert(cast_kind<D, S>() != CastKind::unsupported, "Cast: A2 does not have this conversion");
    check_round_mode<D, S>(op, mode);
    constexpr int lanes = std::min(kLanes<D>, kLanes<S>);
    const Plan plan = e.plan(op, lanes);
    const UnaryStrides s = strides(op, params);
    const Operand d = e.counted ? packed(dst, lanes) : operand(dst, s.dst_block, s.dst_repeat);
    const Operand a = e.counted ? packed(src, lanes) : operand(src, s.src_block, s.src_repeat);
    prepare(op, plan, d, {a});
    count_vector(op, TypeName<S>::value, plan);
    const bool saturate = op.core().saturate;
    const Rounding rounding = rounding_of(mode);
    op.run([=] {
        Wide<S> x[kMaxLanes] = {};
        D out[kMaxLanes] = {};
        for (int64_t r = 0; r < plan.repeats; ++r) {
            load<S>(a, plan, r, x);
            if constexpr (std::is_same_v<D, half> && std::is_same_v<S, float>) {
                if (rounding == Rounding::nearest_even) {  // the fast way, with the same results
                    round_lanes<half>(x, out, saturate);
                    store<D>(d, plan, r, out);
                    continue;
                }
            }
            if constexpr (std::is_same_v<D, float> && std::is_same_v<S, half>) {
                store<float>(d, plan, r, x);
            } else {
                for (int i = 0; i < lanes; ++i) out[i] = convert<D, S>(x[i], rounding, saturate);
                store<D>(d, plan, r, out);
            }
        }
    });
}

}  // namespace twin

namespace AscendC {

#define TWIN_STORED(T)                                                                               \
    static_assert(twin::is_one_of<T, half, bfloat16_t, float, int16_t, uint16_t, int32_t, uint32_t>, \
                  "data type not supported on A2")

template <typename T, bool isSetMask = true>
void Duplicate(const LocalTensor<T>& dst, const T& scalarValue, uint64_t mask, const U8 repeatTime,
               const U16 dstBlockStride, const U8 dstRepeatStride, Here here = Here::now())
{
    TWIN_STORED(T);
    twin::Instruction op("Duplicate", twin::Pipe::V, here);
    twin::fill(op, dst, twin::extent(twin::MaskArgument::count(mask), repeatTime, isSetMask), dstBlockStride.full(),
               dstRepeatStride.full(), [scalarValue](int64_t) { return scalarValue; });
}
template <typename T, bool isSetMask = true>
void Duplicate(const LocalTensor<T>& dst, const T& scalarValue, uint64_t mask[], const U8 repeatTime,
               const U16 dstBlockStride, const U8 dstRepeatStride, Here here = Here::now())
{
    TWIN_STORED(T);
    twin::Instruction op("Duplicate", twin::Pipe::V, here);
    twin::fill(op, dst, twin::extent(twin::MaskArgument::list(mask), repeatTime, isSetMask), dstBlockStride.full(),
               dstRepeatStride.full(), [scalarValue](int64_t) { return scalarValue; });
}
template <typename T>
void Duplicate(const LocalTensor<T>& dst, const T& scalarValue, const int32_t& count, Here here = Here::now())
{
    TWIN_STORED(T);
    twin::Instruction op("Duplicate", twin::Pipe::V, here);
    twin::fill(op, dst, twin::extent(count), 1, 8, [scalarValue](int64_t) { return scalarValue; });
}

// The index goes on from repeat to repeat (inferred for the mask forms).
template <typename T>
void CreateVecIndex(LocalTensor<T>& dst, const T& firstValue, uint64_t mask, U8 repeatTime, U16 dstBlkStride,
                    U8 dstRepStride, Here here = Here::now())
{
    static_assert(twin::is_one_of<T, half, float, int16_t, int32_t>, "CreateVecIndex: data type not supported on A2");
    twin::Instruction op("CreateVecIndex", twin::Pipe::V, here);
    twin::fill(op, dst, twin::extent(twin::MaskArgument::count(mask), repeatTime, true), dstBlkStride.full(),
               dstRepStride.full(), [firstValue](int64_t i) {
                   return static_cast<T>(static_cast<double>(firstValue) + static_cast<double>(i));
               });
}
template <typename T>
void CreateVecIndex(LocalTensor<T>& dst, const T& firstValue, uint64_t mask[], U8 repeatTime, U16 dstBlkStride,
                    U8 dstRepStride, Here here = Here::now())
{
    static_assert(twin::is_one_of<T, half, float, int16_t, int32_t>, "CreateVecIndex: data type not supported on A2");
    twin::Instruction op("CreateVecIndex", twin::Pipe::V, here);
    twin::fill(op, dst, twin::extent(twin::MaskArgument::list(mask), repeatTime, true), dstBlkStride.full(),
               dstRepStride.full(), [firstValue](int64_t i) {
                   return static_cast<T>(static_cast<double>(firstValue) + static_cast<double>(i));
               });
}
template <typename T>
void CreateVecIndex(LocalTensor<T> dst, const T& firstValue, uint32_t count, Here here = Here::now())
{
    static_assert(twin::is_one_of<T, half, float, int16_t, int32_t>, "CreateVecIndex: data type not supported on A2");
    twin::Instruction op("CreateVecIndex", twin::Pipe::V, here);
    twin::fill(op, dst, twin::extent(static_cast<int64_t>(count)), 1, 8, [firstValue](int64_t i) {
        return static_cast<T>(static_cast<double>(firstValue) + static_cast<double>(i));
    });
}

// Eight elements to eight blocks per repeat. Source and destination may not share memory.
template <typename T>
void Brcb(const LocalTensor<T>& dst, const LocalTensor<T>& src, const U8 repeatTime,
          const BrcbRepeatParams& repeatParams, Here here = Here::now())
{
    TWIN_STORED(T);
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
            for (int j = 0; j < 8; ++j) {
                const uint8_t* from = s.data() + (static_cast<size_t>(r) * 8 + static_cast<size_t>(j)) * sizeof(T);
                uint8_t* to = d.span.data() + d.at(r, j * per_block);
                for (int i = 0; i < per_block; ++i)
                    std::memcpy(to + static_cast<size_t>(i) * sizeof(T), from, sizeof(T));
            }
        }
    });
}

template <typename T, typename U, bool isSetMask = true>
void Cast(const LocalTensor<T>& dst, const LocalTensor<U>& src, const RoundMode& roundMode, const uint64_t mask[],
          const U8 repeatTime, const UnaryRepeatParams& repeatParams, Here here = Here::now())
{
    twin::Instruction op("Cast", twin::Pipe::V, here);
    twin::cast(op, dst, src, roundMode, twin::extent(twin::MaskArgument::list(mask), repeatTime, isSetMask),
               repeatParams);
}
template <typename T, typename U, bool isSetMask = true>
void Cast(const LocalTensor<T>& dst, const LocalTensor<U>& src, const RoundMode& roundMode, const uint64_t mask,
          const U8 repeatTime, const UnaryRepeatParams& repeatParams, Here here = Here::now())
{
    twin::Instruction op("Cast", twin::Pipe::V, here);
    twin::cast(op, dst, src, roundMode, twin::extent(twin::MaskArgument::count(mask), repeatTime, isSetMask),
               repeatParams);
}
template <typename T, typename U>
void Cast(const LocalTensor<T>& dst, const LocalTensor<U>& src, const RoundMode& roundMode, const uint32_t count,
          Here here = Here::now())
{
    twin::Instruction op("Cast", twin::Pipe::V, here);
    twin::cast(op, dst, src, roundMode, twin::extent(static_cast<int64_t>(count)), UnaryRepeatParams());
}
// The scalar conversions between float and bfloat16_t.
inline bfloat16_t Cast(const float& value) { return bfloat16_t(value); }
inline float Cast(const bfloat16_t& value) { return static_cast<float>(value); }

#undef TWIN_STORED

}  // namespace AscendC
