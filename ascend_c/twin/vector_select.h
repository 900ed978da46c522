// Compare and Select: bits from a comparison, and lanes chosen by bits. Signatures: kernel_operator_vec_cmpsel_intf.h.
#pragma once

#include "vector_move.h"

namespace twin {

inline bool compared(AscendC::CMPMODE mode, double a, double b)
{
    if (deviates(Deviation::compare_nan) && a != a) return true;
    switch (mode) {
        case AscendC::CMPMODE::LT: return a < b;
        case AscendC::CMPMODE::GT: return a > b;
        case AscendC::CMPMODE::EQ: return a == b;
        case AscendC::CMPMODE::LE: return a <= b;
        case AscendC::CMPMODE::GE: return a >= b;
        default: return a != b;
    }
}

// A comparison's lanes: whole repeats, because Compare ignores the mask on A2 and elements beyond the last whole repeat
// (page "Compare").
template <typename T>
int64_t whole_repeats(const Instruction& op, int64_t count)
{
    op.require(count % kLanes<T> == 0, FaultKind::range,
               "count = " + std::to_string(count) +
                   ": the elements must fill whole repeats of 256 bytes, the rest is not compared");
    return count / kLanes<T>;
}

// Writes one bit per lane, packed. Without `src1` the scalar is the second operand.
template <typename T, typename U>
void compare(Instruction& op, const AscendC::LocalTensor<U>& dst, const Operand& a, const Operand* src1, T scalar,
             AscendC::CMPMODE mode, int64_t repeats)
{
    static_assert(is_one_of<T, half, float, int32_t> && std::is_same_v<U, uint8_t>,
                  "Compare: data types not supported on A2");
    op.require(!std::is_same_v<T, int32_t> || mode == AscendC::CMPMODE::EQ, FaultKind::type,
               "int32_t compares with EQ only");
    op.in_range(repeats, "repeatTime", 0, 255);
    constexpr int lanes = kLanes<T>;
    const Plan plan{lanes, repeats, Lanes::first(lanes), Lanes::first(lanes)};
    const bool has_tensor = src1 != nullptr;
    const Operand b = has_tensor ? *src1 : a;
    const Span out = dst.span();
    check_vector_operand(op, Operand{out, 1}, "dst");
    for (const Operand* o : {&a, &b}) {
        check_vector_operand(op, *o, "src");
        o->runs(plan, [&](size_t at, size_t n) { op.read(o->span, at, n); });
    }
    op.write(out, 0, static_cast<size_t>(repeats * lanes / 8));
    count_vector(op, TypeName<T>::value, plan);
    op.run([=] {
        Wide<T> x[kMaxLanes] = {}, y[kMaxLanes] = {};
        std::fill(y, y + kMaxLanes, static_cast<Wide<T>>(scalar));
        for (int64_t r = 0; r < repeats; ++r) {
            load<T>(a, plan, r, x);
            if (has_tensor) load<T>(b, plan, r, y);
            uint8_t bits[kMaxLanes / 8] = {};
            const int turned = deviates(Deviation::compare_bits) ? 7 : 0;
            for (int i = 0; i < lanes; ++i) {
                if (compared(mode, static_cast<double>(x[i]), static_cast<double>(y[i])))
                    bits[i / 8] |= static_cast<uint8_t>(1u << (i % 8 ^ turned));
            }
            std::memcpy(out.data() + r * lanes / 8, bits, lanes / 8);
        }
    });
}

// Bit 1 takes src0, bit 0 takes src1 or the scalar. Mode 0 uses the same bits in every repeat, modes 1 and 2 go on
// through the bits (page "Select").
template <typename T, typename U>
void select(const AscendC::LocalTensor<T>& dst, const AscendC::LocalTensor<U>& choice,
            const AscendC::LocalTensor<T>& src0, const AscendC::LocalTensor<T>* src1, T scalar, AscendC::SELMODE mode,
            const Extent& e, const AscendC::BinaryRepeatParams& p, Here here)
{
    static_assert(is_one_of<T, half, float> && is_one_of<U, uint8_t, uint16_t, uint32_t, uint64_t>,
                  "Select: data types not supported on A2");
    using M = AscendC::SELMODE;
    Instruction op("Select", Pipe::V, here);
    op.require((src1 == nullptr) == (mode == M::VSEL_TENSOR_SCALAR_MODE), FaultKind::type,
               "the mode does not fit the type of src1");
    op.require(op.core().options.asc_reserved_ubuf, FaultKind::capacity,
               "Select uses the 8 KiB of UB that --cce-disable-asc-reserved-ubuf gives to the kernel");
    constexpr int lanes = kLanes<T>;
    const Plan plan = e.plan(op, lanes);
    check_strides(op, p);
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
        T x[kMaxLanes] = {}, y[kMaxLanes] = {}, out[kMaxLanes] = {};
        std::fill(y, y + kMaxLanes, scalar);
        for (int64_t r = 0; r < plan.repeats; ++r) {
            const uint8_t* chosen = bits.data() + (same_bits ? 0 : r * lanes / 8);
            load_bits(a, plan, r, x);
            if (has_tensor) load_bits(b, plan, r, y);
            for (int i = 0; i < plan.at(r).last(); ++i) out[i] = chosen[i / 8] >> (i % 8) & 1 ? x[i] : y[i];
            store<T>(d, plan, r, out);
        }
    });
}

}  // namespace twin

namespace AscendC {

template <typename T, typename U>
void Compare(const LocalTensor<U>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, CMPMODE cmpMode,
             uint32_t count, Here here = Here::now())
{
    twin::Instruction op("Compare", twin::Pipe::V, here);
    const twin::Operand b = twin::packed(src1, twin::kLanes<T>);
    twin::compare(op, dst, twin::packed(src0, twin::kLanes<T>), &b, T(0), cmpMode, twin::whole_repeats<T>(op, count));
}
template <typename T, typename U, bool isSetMask = true>
void Compare(const LocalTensor<U>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, CMPMODE cmpMode,
             twin::ConstMask, U8 repeatTime, const BinaryRepeatParams& p, Here here = Here::now())
{
    twin::Instruction op("Compare", twin::Pipe::V, here);
    twin::check_strides(op, p);
    const twin::Operand b = twin::operand(src1, p.src1BlkStride.full(), p.src1RepStride.full());
    twin::compare(op, dst, twin::operand(src0, p.src0BlkStride.full(), p.src0RepStride.full()), &b, T(0), cmpMode,
                  repeatTime.full());
}
template <typename T, typename U>
void Compares(const LocalTensor<U>& dst, const LocalTensor<T>& src0, const T src1Scalar, CMPMODE cmpMode,
              uint32_t count, Here here = Here::now())
{
    twin::Instruction op("Compares", twin::Pipe::V, here);
    twin::compare(op, dst, twin::packed(src0, twin::kLanes<T>), nullptr, src1Scalar, cmpMode,
                  twin::whole_repeats<T>(op, count));
}
template <typename T, typename U, bool isSetMask = true>
void Compares(const LocalTensor<U>& dst, const LocalTensor<T>& src0, const T src1Scalar, CMPMODE cmpMode,
              twin::ConstMask, U8 repeatTime, const UnaryRepeatParams& p, Here here = Here::now())
{
    twin::Instruction op("Compares", twin::Pipe::V, here);
    const twin::UnaryStrides s = twin::strides(op, p);
    twin::compare(op, dst, twin::operand(src0, s.src_block, s.src_repeat), nullptr, src1Scalar, cmpMode,
                  repeatTime.full());
}

template <typename T, typename U>
void Select(const LocalTensor<T>& dst, const LocalTensor<U>& selMask, const LocalTensor<T>& src0,
            const LocalTensor<T>& src1, SELMODE selMode, uint32_t count, Here here = Here::now())
{
    twin::select(dst, selMask, src0, &src1, T(0), selMode, twin::counted(count), BinaryRepeatParams(), here);
}
template <typename T, typename U>
void Select(const LocalTensor<T>& dst, const LocalTensor<U>& selMask, const LocalTensor<T>& src0, T src1,
            SELMODE selMode, uint32_t count, Here here = Here::now())
{
    twin::select<T, U>(dst, selMask, src0, nullptr, src1, selMode, twin::counted(count), BinaryRepeatParams(), here);
}
template <typename T, typename U, bool isSetMask = true>
void Select(const LocalTensor<T>& dst, const LocalTensor<U>& selMask, const LocalTensor<T>& src0,
            const LocalTensor<T>& src1, SELMODE selMode, twin::Mask mask, U8 repeatTime,
            const BinaryRepeatParams& repeatParams, Here here = Here::now())
{
    twin::select(dst, selMask, src0, &src1, T(0), selMode, twin::repeated(mask, repeatTime), repeatParams, here);
}
template <typename T, typename U, bool isSetMask = true>
void Select(const LocalTensor<T>& dst, const LocalTensor<U>& selMask, const LocalTensor<T>& src0, T src1,
            SELMODE selMode, twin::Mask mask, U8 repeatTime, const BinaryRepeatParams& repeatParams,
            Here here = Here::now())
{
    twin::select<T, U>(dst, selMask, src0, nullptr, src1, selMode, twin::repeated(mask, repeatTime), repeatParams,
                       here);
}

}  // namespace AscendC
