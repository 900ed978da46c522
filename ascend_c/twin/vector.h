// Element-wise vector calls on half, float and integers: kernel_operator_vec_unary_intf.h, _vec_binary_intf.h,
// _vec_binary_scalar_intf.h. half is computed in float and rounded once per call, which is the correctly rounded half
// result for + - * / too, since float has more than twice its digits.
#pragma once

#include "functions.h"
#include "vector_engine.h"

namespace twin {

template <typename T>
constexpr int kLanes = static_cast<int>(kRepeatBytes / sizeof(T));

struct UnaryStrides {
    int64_t dst_block = 1, src_block = 1, dst_repeat = 8, src_repeat = 8;
};
inline UnaryStrides strides(const Instruction& op, const AscendC::UnaryRepeatParams& p)
{
    op.fits(p.dstBlkStride, "dstBlkStride", 0, 65535);
    op.fits(p.srcBlkStride, "srcBlkStride", 0, 65535);
    op.fits(p.dstRepStride, "dstRepStride", 0, 255);
    op.fits(p.srcRepStride, "srcRepStride", 0, 255);
    return UnaryStrides{p.dstBlkStride.full(), p.srcBlkStride.full(), p.dstRepStride.full(), p.srcRepStride.full()};
}

inline void check_strides(const Instruction& op, const AscendC::BinaryRepeatParams& p)
{
    const Field<uint8_t>* fields[] = {&p.dstBlkStride, &p.src0BlkStride, &p.src1BlkStride,
                                      &p.dstRepStride, &p.src0RepStride, &p.src1RepStride};
    for (const Field<uint8_t>* field : fields) op.fits(*field, "a stride of BinaryRepeatParams", 0, 255);
}

// dst = f(src) lane by lane. An infinite `scalar` is meant, so what comes of it is no overflow.
template <typename T, typename F>
void map_unary(const char* name, const AscendC::LocalTensor<T>& dst, const AscendC::LocalTensor<T>& src,
               const Extent& e, const AscendC::UnaryRepeatParams& params, F f, Here here, float scalar = 0)
{
    static_assert(is_one_of<T, half, float, int32_t>, "the twin's vector arithmetic takes half, float and int32_t");
    Instruction op(name, Pipe::V, here);
    constexpr int lanes = kLanes<T>;
    const Plan plan = e.plan(op, lanes);
    const UnaryStrides s = strides(op, params);
    const Operand d = e.counted ? packed(dst, lanes) : operand(dst, s.dst_block, s.dst_repeat);
    const Operand a = e.counted ? packed(src, lanes) : operand(src, s.src_block, s.src_repeat);
    prepare(op, plan, d, {a});
    count_vector(op, TypeName<T>::value, plan);
    op.run([=, &core = op.core(), saturate = op.core().saturates<T>()] {
        Wide<T> x[kMaxLanes] = {};
        Exact<T> y[kMaxLanes] = {};
        T out[kMaxLanes] = {};
        uint64_t overflows = 0;
        for (int64_t r = 0; r < plan.repeats; ++r) {
            load<T>(a, plan, r, x);
            for (int i = 0; i < lanes; ++i) y[i] = f(Exact<T>(x[i]));
            if constexpr (std::is_same_v<T, int32_t>) round_lanes(y, out, plan.at(r), core);
            else overflows += round_lanes<T>(y, out, plan.at(r), saturate, {x});
            store<T>(d, plan, r, out);
        }
        if (is_finite(scalar)) core.counters.count_overflows(name, overflows);
    });
}

// dst = f(src0, src1) lane by lane. `accumulates`: dst may be src1 of a later repeat.
template <typename T, typename F>
void map_binary(const char* name, const AscendC::LocalTensor<T>& dst, const AscendC::LocalTensor<T>& src0,
                const AscendC::LocalTensor<T>& src1, const Extent& e, const AscendC::BinaryRepeatParams& p, F f,
                bool accumulates, Here here)
{
    static_assert(is_one_of<T, half, float, int32_t>, "the twin's vector arithmetic takes half, float and int32_t");
    Instruction op(name, Pipe::V, here);
    constexpr int lanes = kLanes<T>;
    const Plan plan = e.plan(op, lanes);
    check_strides(op, p);
    const Operand d = e.counted ? packed(dst, lanes) : operand(dst, p.dstBlkStride.full(), p.dstRepStride.full());
    const Operand a = e.counted ? packed(src0, lanes) : operand(src0, p.src0BlkStride.full(), p.src0RepStride.full());
    const Operand b = e.counted ? packed(src1, lanes) : operand(src1, p.src1BlkStride.full(), p.src1RepStride.full());
    prepare(op, plan, d, {a, b}, accumulates);
    count_vector(op, TypeName<T>::value, plan);
    op.run([=, &core = op.core(), saturate = op.core().saturates<T>()] {
        Wide<T> x[kMaxLanes] = {}, y[kMaxLanes] = {};
        Exact<T> z[kMaxLanes] = {};
        T out[kMaxLanes] = {};
        uint64_t overflows = 0;
        for (int64_t r = 0; r < plan.repeats; ++r) {
            load<T>(a, plan, r, x);
            load<T>(b, plan, r, y);
            for (int i = 0; i < lanes; ++i) z[i] = f(Exact<T>(x[i]), Exact<T>(y[i]));
            if constexpr (std::is_same_v<T, int32_t>) round_lanes(z, out, plan.at(r), core);
            else overflows += round_lanes<T>(z, out, plan.at(r), saturate, {x, y});
            store<T>(d, plan, r, out);
        }
        core.counters.count_overflows(name, overflows);
    });
}

inline float quotient(float a, float b)
{
    const float q = a / b;
    return deviates(Deviation::div) ? std::nextafter(q, std::numeric_limits<float>::infinity()) : q;
}
void quotient(int64_t, int64_t) = delete;  // half and float alone

inline float sum(float a, float b)
{
    const float s = a + b;
    return deviates(Deviation::float_sums) ? std::nextafter(s, std::numeric_limits<float>::infinity()) : s;
}
inline int64_t sum(int64_t a, int64_t b) { return a + b; }
inline float product(float a, float b) { return a * b; }
inline int64_t product(int64_t a, int64_t b)
{
    return deviates(Deviation::integers) ? static_cast<int64_t>(static_cast<float>(a * b)) : a * b;
}

inline float exact(half x) { return to_float(x); }
inline float exact(float x) { return x; }
inline int64_t exact(int32_t x) { return x; }

template <typename T>
Function<T> with_options(Function<T> f, Deviation deviation)
{
    f.jitter = core().options.jitter || deviates(deviation);
    f.flush = core().options.flush_subnormals;
    f.seed = core().options.seed;
    return f;
}

// dst = f(src0, src1) on the bits of unsigned integers.
template <typename T, typename F>
void map_bits(const char* name, const AscendC::LocalTensor<T>& dst, const AscendC::LocalTensor<T>& src0,
              const AscendC::LocalTensor<T>& src1, const Extent& e, const AscendC::BinaryRepeatParams& p, F f,
              Here here)
{
    Instruction op(name, Pipe::V, here);
    constexpr int lanes = kLanes<T>;
    const Plan plan = e.plan(op, lanes);
    check_strides(op, p);
    const Operand d = e.counted ? packed(dst, lanes) : operand(dst, p.dstBlkStride.full(), p.dstRepStride.full());
    const Operand a = e.counted ? packed(src0, lanes) : operand(src0, p.src0BlkStride.full(), p.src0RepStride.full());
    const Operand b = e.counted ? packed(src1, lanes) : operand(src1, p.src1BlkStride.full(), p.src1RepStride.full());
    prepare(op, plan, d, {a, b});
    count_vector(op, TypeName<T>::value, plan);
    op.run([=] {
        T x[kMaxLanes] = {}, y[kMaxLanes] = {};
        for (int64_t r = 0; r < plan.repeats; ++r) {
            load_bits(a, plan, r, x);
            load_bits(b, plan, r, y);
            for (int i = 0; i < lanes; ++i) x[i] = static_cast<T>(f(x[i], y[i]));
            store<T>(d, plan, r, x);
        }
    });
}

// dst = f(src, places), which is that many places of a shift.
template <typename T, typename F>
void shift(const char* name, const AscendC::LocalTensor<T>& dst, const AscendC::LocalTensor<T>& src, T places,
           const Extent& e, const AscendC::UnaryRepeatParams& params, F f, Here here)
{
    static_assert(is_one_of<T, uint16_t, uint32_t>, "the twin shifts unsigned integers; signed ones keep their sign");
    Instruction op(name, Pipe::V, here);
    op.in_range(places, "scalarValue", 0, 8 * sizeof(T));
    constexpr int lanes = kLanes<T>;
    const Plan plan = e.plan(op, lanes);
    const UnaryStrides s = strides(op, params);
    const Operand d = e.counted ? packed(dst, lanes) : operand(dst, s.dst_block, s.dst_repeat);
    const Operand a = e.counted ? packed(src, lanes) : operand(src, s.src_block, s.src_repeat);
    prepare(op, plan, d, {a});
    count_vector(op, TypeName<T>::value, plan);
    op.run([=] {
        T x[kMaxLanes] = {};
        for (int64_t r = 0; r < plan.repeats; ++r) {
            load_bits(a, plan, r, x);
            for (int i = 0; i < lanes; ++i) x[i] = static_cast<T>(f(uint64_t{x[i]}, places));
            store<T>(d, plan, r, x);
        }
    });
}

// A NaN operand wins (inferred).
template <typename T>
T larger(T a, T b)
{
    return a != a ? a : b != b ? b : (a > b ? a : b);
}
template <typename T>
T smaller(T a, T b)
{
    return a != a ? a : b != b ? b : (a < b ? a : b);
}

}  // namespace twin

namespace AscendC {

#define TWIN_UNARY(Name, function)                                                                                 \
    template <typename T, bool isSetMask = true, typename = std::enable_if_t<twin::is_one_of<T, half, float>>>     \
    void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, twin::Mask mask, const U8 repeatTime,          \
              const UnaryRepeatParams& repeatParams, Here here = Here::now())                                      \
    {                                                                                                              \
        twin::map_unary(#Name, dst, src, twin::repeated(mask, repeatTime, isSetMask), repeatParams, function,      \
                        here);                                                                                     \
    }                                                                                                              \
    template <typename T, typename = std::enable_if_t<twin::is_one_of<T, half, float>>>                            \
    void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t& count, Here here = Here::now()) \
    {                                                                                                              \
        twin::map_unary(#Name, dst, src, twin::counted(count), UnaryRepeatParams(), function, here);               \
    }

TWIN_UNARY(Exp, twin::with_options(twin::exp_function<T>(), twin::Deviation::exp))
TWIN_UNARY(Ln, twin::with_options(twin::ln_function<T>(), twin::Deviation::ln))
TWIN_UNARY(Reciprocal, [](float x) { return 1.0f / x; })
TWIN_UNARY(Abs, [](float x) { return std::fabs(x); })

#define TWIN_BINARY(Name, expression, accumulates)                                                                     \
    template <typename T, bool isSetMask = true>                                                                       \
    void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, twin::Mask mask,      \
              const U8 repeatTime, const BinaryRepeatParams& repeatParams, Here here = Here::now())                    \
    {                                                                                                                  \
        twin::map_binary(                                                                                              \
            #Name, dst, src0, src1, twin::repeated(mask, repeatTime, isSetMask), repeatParams,                         \
            [](auto x, auto y) { return expression; }, accumulates, here);                                             \
    }                                                                                                                  \
    template <typename T>                                                                                              \
    void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, const int32_t& count, \
              Here here = Here::now())                                                                                 \
    {                                                                                                                  \
        twin::map_binary(                                                                                              \
            #Name, dst, src0, src1, twin::counted(count), BinaryRepeatParams(),                                        \
            [](auto x, auto y) { return expression; }, false, here);                                                   \
    }

// Which of them may accumulate: page "general constraints on overlap".
TWIN_BINARY(Add, twin::sum(x, y), true)
TWIN_BINARY(Sub, x - y, true)
TWIN_BINARY(Mul, twin::product(x, y), true)
TWIN_BINARY(Div, twin::quotient(x, y), false)
TWIN_BINARY(Max, twin::larger(x, y), true)
TWIN_BINARY(Min, twin::smaller(x, y), true)

#define TWIN_SCALAR(Name, expression)                                                                           \
    template <typename T, bool isSetMask = true>                                                                \
    void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue, twin::Mask mask,      \
              const U8 repeatTime, const UnaryRepeatParams& repeatParams, Here here = Here::now())              \
    {                                                                                                           \
        const auto s = twin::exact(scalarValue);                                                                \
        twin::map_unary(                                                                                        \
            #Name, dst, src, twin::repeated(mask, repeatTime, isSetMask), repeatParams,                         \
            [s](auto x) { return expression; }, here, static_cast<float>(s));                                   \
    }                                                                                                           \
    template <typename T, bool isSetMask = true>                                                                \
    void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue, const int32_t& count, \
              Here here = Here::now())                                                                          \
    {                                                                                                           \
        const auto s = twin::exact(scalarValue);                                                                \
        twin::map_unary(                                                                                        \
            #Name, dst, src, twin::counted(count, isSetMask), UnaryRepeatParams(),                              \
            [s](auto x) { return expression; }, here, static_cast<float>(s));                                   \
    }

TWIN_SCALAR(Adds, x + s)
TWIN_SCALAR(Muls, x* s)
TWIN_SCALAR(Maxs, twin::larger(x, s))
TWIN_SCALAR(Mins, twin::smaller(x, s))

#undef TWIN_UNARY
#undef TWIN_BINARY
#undef TWIN_SCALAR

// Bit by bit; on A2 of 16-bit integers (page "And").
template <typename T>
void And(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, const int32_t& count,
         Here here = Here::now())
{
    static_assert(twin::is_one_of<T, int16_t, uint16_t>, "And takes int16_t and uint16_t on A2");
    twin::map_bits(
        "And", dst, src0, src1, twin::counted(count), BinaryRepeatParams(), [](T x, T y) { return x & y; }, here);
}
template <typename T, bool isSetMask = true>
void And(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, twin::Mask mask,
         const U8 repeatTime, const BinaryRepeatParams& repeatParams, Here here = Here::now())
{
    static_assert(twin::is_one_of<T, int16_t, uint16_t>, "And takes int16_t and uint16_t on A2");
    twin::map_bits(
        "And", dst, src0, src1, twin::repeated(mask, repeatTime, isSetMask), repeatParams,
        [](T x, T y) { return x & y; }, here);
}

// Bits that leave the word are lost, zeros come in (pages "ShiftLeft" and "ShiftRight", unsigned types).
#define TWIN_SHIFT(Name, expression)                                                                            \
    template <typename T, bool isSetMask = true>                                                                \
    void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue, twin::Mask mask,      \
              const U8 repeatTime, const UnaryRepeatParams& repeatParams, Here here = Here::now())              \
    {                                                                                                           \
        twin::shift(                                                                                            \
            #Name, dst, src, scalarValue, twin::repeated(mask, repeatTime, isSetMask), repeatParams,            \
            [](uint64_t x, T places) { return expression; }, here);                                             \
    }                                                                                                           \
    template <typename T, bool isSetMask = true>                                                                \
    void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue, const int32_t& count, \
              Here here = Here::now())                                                                          \
    {                                                                                                           \
        twin::shift(                                                                                            \
            #Name, dst, src, scalarValue, twin::counted(count, isSetMask), UnaryRepeatParams(),                 \
            [](uint64_t x, T places) { return expression; }, here);                                             \
    }

TWIN_SHIFT(ShiftLeft, x << places)
TWIN_SHIFT(ShiftRight, x >> places)
#undef TWIN_SHIFT

}  // namespace AscendC
