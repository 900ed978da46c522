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

inline bool compared(AscendC::CMPMODE mode, double a, double b)
{
    switch (mode) {
        case AscendC::CMPMODE::LT: return a < b;
        case AscendC::CMPMODE::GT: return a > b;
        case AscendC::CMPMODE::EQ: return a == b;
        case AscendC::CMPMODE::LE: return a <= b;
        case AscendC::CMPMODE::GE: return a >= b;
        default: return a != b;
    }
}

// Compare writes one bit per lane, packed, and ignores the mask on A2 (page "Compare"). `src1` may be null: a scalar.
template <typename T, typename U>
void compare(Instruction& op, const AscendC::LocalTensor<U>& dst, const AscendC::LocalTensor<T>& src0,
             const AscendC::LocalTensor<T>* src1, T scalar, AscendC::CMPMODE mode, int64_t repeats,
             const std::array<int64_t, 4>& s)
{
    static_assert(is_one_of<T, half, float, int32_t> && is_one_of<U, uint8_t, int8_t>,
                  "Compare: data types not supported on A2");
    op.require(!std::is_same_v<T, int32_t> || mode == AscendC::CMPMODE::EQ, FaultKind::type,
               "int32_t compares with EQ only");
    constexpr int lanes = kLanes<T>;
    const Plan plan{lanes, repeats, Lanes::first(lanes), Lanes::first(lanes)};
    const Operand a = operand(src0, s[0], s[2]);
    const Operand b = src1 != nullptr ? operand(*src1, s[1], s[3]) : a;
    const Span out = dst.span();
    check_vector_operand(op, Operand{out, 1}, "dst");
    check_vector_operand(op, a, "src0");
    check_vector_operand(op, b, "src1");
    a.runs(plan, [&](size_t at, size_t n) { op.read(a.span, at, n); });
    b.runs(plan, [&](size_t at, size_t n) { op.read(b.span, at, n); });
    op.write(out, 0, static_cast<size_t>(repeats * lanes / 8));
    count_vector(op, TypeName<T>::value, plan);
    const bool has_tensor = src1 != nullptr;
    op.run([=] {
        Wide<T> x[kMaxLanes] = {};
        Wide<T> y[kMaxLanes] = {};
        for (Wide<T>& value : y) value = static_cast<Wide<T>>(scalar);
        for (int64_t r = 0; r < repeats; ++r) {
            load<T>(a, plan, r, x);
            if (has_tensor) load<T>(b, plan, r, y);
            uint8_t bits[kMaxLanes / 8] = {};
            for (int i = 0; i < lanes; ++i) {
                if (compared(mode, static_cast<double>(x[i]), static_cast<double>(y[i])))
                    bits[i / 8] |= static_cast<uint8_t>(1u << (i % 8));
            }
            std::memcpy(out.data() + r * lanes / 8, bits, lanes / 8);
        }
    });
}

template <typename T>
int64_t whole_repeats(const Instruction& op, uint32_t count)
{
    op.require(count % static_cast<uint32_t>(kLanes<T>) == 0, FaultKind::range,
               "count = " + std::to_string(count) +
                   ": the elements must fill whole repeats of 256 bytes, the rest is not compared");
    return count / kLanes<T>;
}

// Select: bit 1 takes src0, bit 0 takes src1 or the scalar. Mode 0 uses the same bits in every repeat, modes 1 and 2
// go on through the bits (page "Select").
template <typename T, typename U>
void select(Instruction& op, const AscendC::LocalTensor<T>& dst, const AscendC::LocalTensor<U>& choice,
            const AscendC::LocalTensor<T>& src0, const AscendC::LocalTensor<T>* src1, T scalar, AscendC::SELMODE mode,
            const Extent& e, const AscendC::BinaryRepeatParams& p)
{
    static_assert(is_one_of<T, half, float> && is_one_of<U, uint8_t, uint16_t, uint32_t, uint64_t>,
                  "Select: data types not supported on A2");
    using M = AscendC::SELMODE;
    op.require((src1 == nullptr) == (mode == M::VSEL_TENSOR_SCALAR_MODE), FaultKind::type,
               "the mode does not fit the type of src1");
    op.require(mode == M::VSEL_CMPMASK_SPR || op.core().options.asc_reserved_ubuf, FaultKind::capacity,
               "modes 1 and 2 use the 8 KiB of UB that --cce-disable-asc-reserved-ubuf takes away");
    constexpr int lanes = kLanes<T>;
    const Plan plan = e.plan(op, lanes);
    const Operand d = e.counted ? packed(dst, lanes) : operand(dst, p.dstBlkStride.full(), p.dstRepStride.full());
    const Operand a = e.counted ? packed(src0, lanes) : operand(src0, p.src0BlkStride.full(), p.src0RepStride.full());
    const Operand b = src1 == nullptr ? a
                      : e.counted     ? packed(*src1, lanes)
                                      : operand(*src1, p.src1BlkStride.full(), p.src1RepStride.full());
    const Span bits = choice.span();
    check_vector_operand(op, Operand{bits, 1}, "selMask");
    const bool same_bits = mode == M::VSEL_CMPMASK_SPR;
    if (plan.repeats > 0) {
        const int64_t used =
            same_bits ? (plan.repeats > 1 ? lanes : plan.last.last()) : (plan.repeats - 1) * lanes + plan.last.last();
        op.read(bits, 0, static_cast<size_t>((used + 7) / 8));
    }
    prepare(op, plan, d, {a, b});
    count_vector(op, TypeName<T>::value, plan);
    const bool has_tensor = src1 != nullptr;
    op.run([=] {
        T out[kMaxLanes] = {};
        constexpr int per_block = static_cast<int>(kBlockBytes / sizeof(T));
        for (int64_t r = 0; r < plan.repeats; ++r) {
            const uint8_t* chosen = bits.data() + (same_bits ? 0 : r * lanes / 8);
            for (int i = 0; i < plan.at(r).last(); ++i) {
                const bool first = chosen[i / 8] >> (i % 8) & 1;
                out[i] = scalar;
                if (first || has_tensor)
                    std::memcpy(&out[i],
                                (first ? a : b).span.data() + (first ? a : b).at(r, i / per_block * per_block) +
                                    static_cast<size_t>(i % per_block) * sizeof(T),
                                sizeof(T));
            }
            store<T>(d, plan, r, out);
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
                   return static_cast<T>(static_cast<float>(firstValue) + static_cast<float>(i));
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

template <typename T, typename U>
void Compare(const LocalTensor<U>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, CMPMODE cmpMode,
             uint32_t count, Here here = Here::now())
{
    twin::Instruction op("Compare", twin::Pipe::V, here);
    twin::compare(op, dst, src0, &src1, T(0), cmpMode, twin::whole_repeats<T>(op, count), {1, 1, 8, 8});
}
template <typename T, typename U, bool isSetMask = true>
void Compare(const LocalTensor<U>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, CMPMODE cmpMode,
             const uint64_t, U8 repeatTime, const BinaryRepeatParams& p, Here here = Here::now())
{
    twin::Instruction op("Compare", twin::Pipe::V, here);
    op.fits(repeatTime, "repeatTime", 0, 255);
    twin::compare(op, dst, src0, &src1, T(0), cmpMode, repeatTime.full(),
                  {p.src0BlkStride.full(), p.src1BlkStride.full(), p.src0RepStride.full(), p.src1RepStride.full()});
}
template <typename T, typename U>
void Compares(const LocalTensor<U>& dst, const LocalTensor<T>& src0, const T src1Scalar, CMPMODE cmpMode,
              uint32_t count, Here here = Here::now())
{
    twin::Instruction op("Compares", twin::Pipe::V, here);
    twin::compare<T, U>(op, dst, src0, nullptr, src1Scalar, cmpMode, twin::whole_repeats<T>(op, count), {1, 1, 8, 8});
}
template <typename T, typename U, bool isSetMask = true>
void Compares(const LocalTensor<U>& dst, const LocalTensor<T>& src0, const T src1Scalar, CMPMODE cmpMode,
              const uint64_t, U8 repeatTime, const UnaryRepeatParams& p, Here here = Here::now())
{
    twin::Instruction op("Compares", twin::Pipe::V, here);
    op.fits(repeatTime, "repeatTime", 0, 255);
    twin::compare<T, U>(op, dst, src0, nullptr, src1Scalar, cmpMode, repeatTime.full(),
                        {p.srcBlkStride.full(), 1, p.srcRepStride.full(), 8});
}
template <typename T, typename U>
void CompareScalar(const LocalTensor<U>& dst, const LocalTensor<T>& src0, const T src1Scalar, CMPMODE cmpMode,
                   uint32_t count, Here here = Here::now())
{
    Compares(dst, src0, src1Scalar, cmpMode, count, here);
}
template <typename T, typename U, bool isSetMask = true>
void CompareScalar(const LocalTensor<U>& dst, const LocalTensor<T>& src0, const T src1Scalar, CMPMODE cmpMode,
                   const uint64_t mask, U8 repeatTime, const UnaryRepeatParams& p, Here here = Here::now())
{
    Compares<T, U, isSetMask>(dst, src0, src1Scalar, cmpMode, mask, repeatTime, p, here);
}

template <typename T, typename U>
void Select(const LocalTensor<T>& dst, const LocalTensor<U>& selMask, const LocalTensor<T>& src0,
            const LocalTensor<T>& src1, SELMODE selMode, uint32_t count, Here here = Here::now())
{
    twin::Instruction op("Select", twin::Pipe::V, here);
    twin::select(op, dst, selMask, src0, &src1, T(0), selMode, twin::extent(static_cast<int64_t>(count)),
                 BinaryRepeatParams());
}
template <typename T, typename U>
void Select(const LocalTensor<T>& dst, const LocalTensor<U>& selMask, const LocalTensor<T>& src0, T src1,
            SELMODE selMode, uint32_t count, Here here = Here::now())
{
    twin::Instruction op("Select", twin::Pipe::V, here);
    twin::select<T, U>(op, dst, selMask, src0, nullptr, src1, selMode, twin::extent(static_cast<int64_t>(count)),
                       BinaryRepeatParams());
}
template <typename T, typename U, bool isSetMask = true>
void Select(const LocalTensor<T>& dst, const LocalTensor<U>& selMask, const LocalTensor<T>& src0,
            const LocalTensor<T>& src1, SELMODE selMode, uint64_t mask, U8 repeatTime,
            const BinaryRepeatParams& repeatParams, Here here = Here::now())
{
    twin::Instruction op("Select", twin::Pipe::V, here);
    twin::select(op, dst, selMask, src0, &src1, T(0), selMode,
                 twin::extent(twin::MaskArgument::count(mask), repeatTime, isSetMask), repeatParams);
}
template <typename T, typename U, bool isSetMask = true>
void Select(const LocalTensor<T>& dst, const LocalTensor<U>& selMask, const LocalTensor<T>& src0, T src1,
            SELMODE selMode, uint64_t mask, U8 repeatTime, const BinaryRepeatParams& repeatParams,
            Here here = Here::now())
{
    twin::Instruction op("Select", twin::Pipe::V, here);
    twin::select<T, U>(op, dst, selMask, src0, nullptr, src1, selMode,
                       twin::extent(twin::MaskArgument::count(mask), repeatTime, isSetMask), repeatParams);
}

#undef TWIN_STORED

}  // namespace AscendC
