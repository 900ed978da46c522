// Element-wise vector calls: kernel_operator_vec_unary_intf.h, _vec_binary_intf.h, _vec_binary_scalar_intf.h,
// _vec_ternary_scalar_intf.h, _vec_duplicate_intf.h. half is computed in float and rounded once per call, which is the
// correctly rounded half result for + - * / and sqrt, since float has more than twice its digits.
#pragma once

#include "functions.h"
#include "vector_engine.h"

namespace twin {

template <typename T>
constexpr int kLanes = static_cast<int>(kRepeatBytes / sizeof(T));

// How a call names its lanes: a mask with repeats, or a count.
struct Extent {
    MaskArgument mask;
    int64_t repeats = 0;
    int64_t count = 0;
    bool counted = false;
    bool set_mask = true;

    Plan plan(const Instruction& op, int lanes) const
    {
        return counted ? plan_of_count(op, lanes, count, set_mask) : plan_of(op, lanes, mask, repeats, set_mask);
    }
};
inline Extent extent(MaskArgument mask, const Field<uint8_t>& repeats, bool set_mask)
{
    return Extent{mask, repeats.full(), 0, false, set_mask};
}
inline Extent extent(int64_t count, bool set_mask = true) { return Extent{{}, 0, count, true, set_mask}; }

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

// T = f(U) lane by lane. D and S: types of destination and source; the wider one sets the lanes of a repeat.
template <typename D, typename S, typename F>
void map_unary(Instruction& op, const AscendC::LocalTensor<D>& dst, const AscendC::LocalTensor<S>& src, const Extent& e,
               const AscendC::UnaryRepeatParams& params, F f, bool reads_dst = false)
{
    constexpr int lanes = std::min(kLanes<D>, kLanes<S>);
    const Plan plan = e.plan(op, lanes);
    const UnaryStrides s = strides(op, params);
    const Operand d = e.counted ? packed(dst, lanes) : operand(dst, s.dst_block, s.dst_repeat);
    const Operand a = e.counted ? packed(src, lanes) : operand(src, s.src_block, s.src_repeat);
    prepare(op, plan, d, {a}, false, reads_dst);
    count_vector(op, TypeName<S>::value, plan);
    const bool saturate = op.core().saturate;
    op.run([=] {
        Wide<S> x[kMaxLanes] = {};
        Wide<D> y[kMaxLanes] = {};
        D out[kMaxLanes] = {};
        for (int64_t r = 0; r < plan.repeats; ++r) {
            load<S>(a, plan, r, x);
            if (reads_dst) load<D>(d, plan, r, y);
            for (int i = 0; i < lanes; ++i) y[i] = f(x[i], y[i]);
            round_lanes<D>(y, out, saturate);
            store<D>(d, plan, r, out);
        }
    });
}

template <typename D, typename S, typename F>
void map_binary(Instruction& op, const AscendC::LocalTensor<D>& dst, const AscendC::LocalTensor<S>& src0,
                const AscendC::LocalTensor<S>& src1, const Extent& e, const AscendC::BinaryRepeatParams& p, F f,
                bool may_accumulate, bool reads_dst = false)
{
    constexpr int lanes = std::min(kLanes<D>, kLanes<S>);
    const Plan plan = e.plan(op, lanes);
    const Field<uint8_t>* fields[] = {&p.dstBlkStride, &p.src0BlkStride, &p.src1BlkStride,
                                      &p.dstRepStride, &p.src0RepStride, &p.src1RepStride};
    for (const Field<uint8_t>* field : fields) op.fits(*field, "a stride of BinaryRepeatParams", 0, 255);
    const Operand d = e.counted ? packed(dst, lanes) : operand(dst, p.dstBlkStride.full(), p.dstRepStride.full());
    const Operand a = e.counted ? packed(src0, lanes) : operand(src0, p.src0BlkStride.full(), p.src0RepStride.full());
    const Operand b = e.counted ? packed(src1, lanes) : operand(src1, p.src1BlkStride.full(), p.src1RepStride.full());
    prepare(op, plan, d, {a, b}, may_accumulate, reads_dst);
    count_vector(op, TypeName<S>::value, plan);
    const bool saturate = op.core().saturate;
    op.run([=] {
        Wide<S> x[kMaxLanes] = {};
        Wide<S> y[kMaxLanes] = {};
        Wide<D> z[kMaxLanes] = {};
        D out[kMaxLanes] = {};
        for (int64_t r = 0; r < plan.repeats; ++r) {
            load<S>(a, plan, r, x);
            load<S>(b, plan, r, y);
            if (reads_dst) load<D>(d, plan, r, z);
            for (int i = 0; i < lanes; ++i) z[i] = f(x[i], y[i], z[i]);
            round_lanes<D>(z, out, saturate);
            store<D>(d, plan, r, out);
        }
    });
}

// Axpy and MulAddDst: one type, or half into float.
template <typename T, typename U>
constexpr bool fused_types =
    std::is_same_v<T, U> ? is_one_of<T, half, float> : std::is_same_v<T, float> && std::is_same_v<U, half>;

// Integers wrap (inferred: CTRL[53] exists on the 950 only).
template <typename T>
T add(T a, T b)
{
    if constexpr (std::is_integral_v<T>) return static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
    else return a + b;
}
template <typename T>
T sub(T a, T b)
{
    if constexpr (std::is_integral_v<T>) return static_cast<T>(static_cast<uint64_t>(a) - static_cast<uint64_t>(b));
    else return a - b;
}
template <typename T>
T mul(T a, T b)
{
    if constexpr (std::is_integral_v<T>) return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
    else return a * b;
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

#define TWIN_UNARY(Name, function, ...)                                                                            \
    template <typename T, bool isSetMask = true>                                                                   \
    void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, uint64_t mask[], const U8 repeatTime,          \
              const UnaryRepeatParams& repeatParams, Here here = Here::now())                                      \
    {                                                                                                              \
        static_assert(twin::is_one_of<T, __VA_ARGS__>, #Name ": data type not supported on A2");                   \
        twin::Instruction op(#Name, twin::Pipe::V, here);                                                          \
        twin::map_unary(op, dst, src, twin::extent(twin::MaskArgument::list(mask), repeatTime, isSetMask),         \
                        repeatParams, function);                                                                   \
    }                                                                                                              \
    template <typename T, bool isSetMask = true>                                                                   \
    void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, uint64_t mask, const U8 repeatTime,            \
              const UnaryRepeatParams& repeatParams, Here here = Here::now())                                      \
    {                                                                                                              \
        static_assert(twin::is_one_of<T, __VA_ARGS__>, #Name ": data type not supported on A2");                   \
        twin::Instruction op(#Name, twin::Pipe::V, here);                                                          \
        twin::map_unary(op, dst, src, twin::extent(twin::MaskArgument::count(mask), repeatTime, isSetMask),        \
                        repeatParams, function);                                                                   \
    }                                                                                                              \
    template <typename T>                                                                                          \
    void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t& count, Here here = Here::now()) \
    {                                                                                                              \
        static_assert(twin::is_one_of<T, __VA_ARGS__>, #Name ": data type not supported on A2");                   \
        twin::Instruction op(#Name, twin::Pipe::V, here);                                                          \
        twin::map_unary(op, dst, src, twin::extent(count), UnaryRepeatParams(), function);                         \
    }

#define TWIN_EACH(expression) [](auto x, auto) { return expression; }
#define TWIN_FUNCTION(maker)                    \
    [f = [&op] {                                \
        auto made = maker<T>();                 \
        made.jitter = op.core().options.jitter; \
        made.seed = op.core().options.seed;     \
        return made;                            \
    }()](float x, float) { return f(x); }

TWIN_UNARY(Exp, TWIN_FUNCTION(twin::exp_function), half, float)
TWIN_UNARY(Ln, TWIN_FUNCTION(twin::ln_function), half, float)
TWIN_UNARY(Sqrt, TWIN_EACH(std::sqrt(x)), half, float)
TWIN_UNARY(Reciprocal, TWIN_EACH(1.0f / x), half, float)
TWIN_UNARY(Abs, TWIN_EACH(std::fabs(x)), half, float)
TWIN_UNARY(Relu, TWIN_EACH(x > 0 ? x : x != x ? x : 0), half, float, int32_t)
TWIN_UNARY(Not, TWIN_EACH(static_cast<T>(~x)), int16_t, uint16_t)

#define TWIN_BINARY(Name, function, ...)                                                                               \
    template <typename T, bool isSetMask = true>                                                                       \
    void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, uint64_t mask[],      \
              const U8 repeatTime, const BinaryRepeatParams& repeatParams, Here here = Here::now())                    \
    {                                                                                                                  \
        static_assert(twin::is_one_of<T, __VA_ARGS__>, #Name ": data type not supported on A2");                       \
        twin::Instruction op(#Name, twin::Pipe::V, here);                                                              \
        twin::map_binary(op, dst, src0, src1, twin::extent(twin::MaskArgument::list(mask), repeatTime, isSetMask),     \
                         repeatParams, function, twin::may_accumulate<T>(#Name));                                      \
    }                                                                                                                  \
    template <typename T, bool isSetMask = true>                                                                       \
    void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, uint64_t mask,        \
              const U8 repeatTime, const BinaryRepeatParams& repeatParams, Here here = Here::now())                    \
    {                                                                                                                  \
        static_assert(twin::is_one_of<T, __VA_ARGS__>, #Name ": data type not supported on A2");                       \
        twin::Instruction op(#Name, twin::Pipe::V, here);                                                              \
        twin::map_binary(op, dst, src0, src1, twin::extent(twin::MaskArgument::count(mask), repeatTime, isSetMask),    \
                         repeatParams, function, twin::may_accumulate<T>(#Name));                                      \
    }                                                                                                                  \
    template <typename T>                                                                                              \
    void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, const int32_t& count, \
              Here here = Here::now())                                                                                 \
    {                                                                                                                  \
        static_assert(twin::is_one_of<T, __VA_ARGS__>, #Name ": data type not supported on A2");                       \
        twin::Instruction op(#Name, twin::Pipe::V, here);                                                              \
        twin::map_binary(op, dst, src0, src1, twin::extent(count), BinaryRepeatParams(), function, false);             \
    }

}  // namespace AscendC

namespace twin {

// dst may be the second source of a later repeat for these calls and types (page "general constraints on overlap").
template <typename T>
bool may_accumulate(const std::string& name)
{
    return is_one_of<T, half, int32_t, float> &&
           (name == "Add" || name == "Sub" || name == "Mul" || name == "Max" || name == "Min");
}

}  // namespace twin

namespace AscendC {

#define TWIN_PAIR(expression) [](auto x, auto y, auto) { return expression; }

TWIN_BINARY(Add, TWIN_PAIR(twin::add(x, y)), half, float, int16_t, int32_t)
TWIN_BINARY(Sub, TWIN_PAIR(twin::sub(x, y)), half, float, int16_t, int32_t)
TWIN_BINARY(Mul, TWIN_PAIR(twin::mul(x, y)), half, float, int16_t, int32_t)
TWIN_BINARY(Div, TWIN_PAIR(x / y), half, float)
TWIN_BINARY(Max, TWIN_PAIR(twin::larger(x, y)), half, float, int16_t, int32_t)
TWIN_BINARY(Min, TWIN_PAIR(twin::smaller(x, y)), half, float, int16_t, int32_t)
TWIN_BINARY(And, TWIN_PAIR(static_cast<T>(x& y)), int16_t, uint16_t)
TWIN_BINARY(Or, TWIN_PAIR(static_cast<T>(x | y)), int16_t, uint16_t)

#define TWIN_SCALAR(Name, expression)                                                                              \
    template <typename T, bool isSetMask = true>                                                                   \
    void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue, uint64_t mask[],         \
              const U8 repeatTime, const UnaryRepeatParams& repeatParams, Here here = Here::now())                 \
    {                                                                                                              \
        static_assert(twin::is_one_of<T, half, float, int16_t, int32_t>, #Name ": data type not supported on A2"); \
        twin::Instruction op(#Name, twin::Pipe::V, here);                                                          \
        twin::map_unary(op, dst, src, twin::extent(twin::MaskArgument::list(mask), repeatTime, isSetMask),         \
                        repeatParams,                                                                              \
                        [s = twin::Wide<T>(scalarValue)](twin::Wide<T> x, twin::Wide<T>) { return expression; });  \
    }                                                                                                              \
    template <typename T, bool isSetMask = true>                                                                   \
    void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue, uint64_t mask,           \
              const U8 repeatTime, const UnaryRepeatParams& repeatParams, Here here = Here::now())                 \
    {                                                                                                              \
        static_assert(twin::is_one_of<T, half, float, int16_t, int32_t>, #Name ": data type not supported on A2"); \
        twin::Instruction op(#Name, twin::Pipe::V, here);                                                          \
        twin::map_unary(op, dst, src, twin::extent(twin::MaskArgument::count(mask), repeatTime, isSetMask),        \
                        repeatParams,                                                                              \
                        [s = twin::Wide<T>(scalarValue)](twin::Wide<T> x, twin::Wide<T>) { return expression; });  \
    }                                                                                                              \
    template <typename T, bool isSetMask = true>                                                                   \
    void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue, const int32_t& count,    \
              Here here = Here::now())                                                                             \
    {                                                                                                              \
        static_assert(twin::is_one_of<T, half, float, int16_t, int32_t>, #Name ": data type not supported on A2"); \
        twin::Instruction op(#Name, twin::Pipe::V, here);                                                          \
        twin::map_unary(op, dst, src, twin::extent(count, isSetMask), UnaryRepeatParams(),                         \
                        [s = twin::Wide<T>(scalarValue)](twin::Wide<T> x, twin::Wide<T>) { return expression; });  \
    }

TWIN_SCALAR(Adds, twin::add(x, s))
TWIN_SCALAR(Muls, twin::mul(x, s))
TWIN_SCALAR(Maxs, twin::larger(x, s))
TWIN_SCALAR(Mins, twin::smaller(x, s))

// dst += src * scalar and dst += src0 * src1, with one rounding (inferred; the vendor does not say).
#define TWIN_MULTIPLY_ADD(x, y, z) \
    static_cast<float>(std::fma(static_cast<double>(x), static_cast<double>(y), static_cast<double>(z)))

template <typename T, typename U, bool isSetMask = true>
void Axpy(const LocalTensor<T>& dst, const LocalTensor<U>& src, const U& scalarValue, uint64_t mask,
          const U8 repeatTime, const UnaryRepeatParams& repeatParams, Here here = Here::now())
{
    static_assert(
        std::is_same_v<T, U> ? twin::is_one_of<T, half, float> : std::is_same_v<T, float> && std::is_same_v<U, half>,
        "Axpy: data types not supported on A2");
    twin::Instruction op("Axpy", twin::Pipe::V, here);
    twin::map_unary(
        op, dst, src, twin::extent(twin::MaskArgument::count(mask), repeatTime, isSetMask), repeatParams,
        [s = static_cast<float>(scalarValue)](float x, float z) { return TWIN_MULTIPLY_ADD(x, s, z); }, true);
}
template <typename T, typename U>
void Axpy(const LocalTensor<T>& dst, const LocalTensor<U>& src, const U& scalarValue, const int32_t& count,
          Here here = Here::now())
{
    static_assert(
        std::is_same_v<T, U> ? twin::is_one_of<T, half, float> : std::is_same_v<T, float> && std::is_same_v<U, half>,
        "Axpy: data types not supported on A2");
    twin::Instruction op("Axpy", twin::Pipe::V, here);
    twin::map_unary(
        op, dst, src, twin::extent(count), UnaryRepeatParams(),
        [s = static_cast<float>(scalarValue)](float x, float z) { return TWIN_MULTIPLY_ADD(x, s, z); }, true);
}
template <typename T, typename U, bool isSetMask = true>
void MulAddDst(const LocalTensor<T>& dst, const LocalTensor<U>& src0, const LocalTensor<U>& src1, uint64_t mask,
               const U8 repeatTime, const BinaryRepeatParams& repeatParams, Here here = Here::now())
{
    static_assert(
        std::is_same_v<T, U> ? twin::is_one_of<T, half, float> : std::is_same_v<T, float> && std::is_same_v<U, half>,
        "MulAddDst: data types not supported on A2");
    twin::Instruction op("MulAddDst", twin::Pipe::V, here);
    twin::map_binary(
        op, dst, src0, src1, twin::extent(twin::MaskArgument::count(mask), repeatTime, isSetMask), repeatParams,
        [](float x, float y, float z) { return TWIN_MULTIPLY_ADD(x, y, z); }, false, true);
}
template <typename T, typename U>
void MulAddDst(const LocalTensor<T>& dst, const LocalTensor<U>& src0, const LocalTensor<U>& src1, const int32_t& count,
               Here here = Here::now())
{
    static_assert(
        std::is_same_v<T, U> ? twin::is_one_of<T, half, float> : std::is_same_v<T, float> && std::is_same_v<U, half>,
        "MulAddDst: data types not supported on A2");
    twin::Instruction op("MulAddDst", twin::Pipe::V, here);
    twin::map_binary(
        op, dst, src0, src1, twin::extent(count), BinaryRepeatParams(),
        [](float x, float y, float z) { return TWIN_MULTIPLY_ADD(x, y, z); }, false, true);
}

template <typename T, typename U, bool isSetMask = true>
void Axpy(const LocalTensor<T>& dst, const LocalTensor<U>& src, const U& scalarValue, uint64_t mask[],
          const U8 repeatTime, const UnaryRepeatParams& repeatParams, Here here = Here::now())
{
    static_assert(twin::fused_types<T, U>, "Axpy: data types not supported on A2");
    twin::Instruction op("Axpy", twin::Pipe::V, here);
    twin::map_unary(
        op, dst, src, twin::extent(twin::MaskArgument::list(mask), repeatTime, isSetMask), repeatParams,
        [s = static_cast<float>(scalarValue)](float x, float z) { return TWIN_MULTIPLY_ADD(x, s, z); }, true);
}
template <typename T, typename U, bool isSetMask = true>
void MulAddDst(const LocalTensor<T>& dst, const LocalTensor<U>& src0, const LocalTensor<U>& src1, const uint64_t mask[],
               const U8 repeatTime, const BinaryRepeatParams& repeatParams, Here here = Here::now())
{
    static_assert(twin::fused_types<T, U>, "MulAddDst: data types not supported on A2");
    twin::Instruction op("MulAddDst", twin::Pipe::V, here);
    twin::map_binary(
        op, dst, src0, src1, twin::extent(twin::MaskArgument::list(mask), repeatTime, isSetMask), repeatParams,
        [](float x, float y, float z) { return TWIN_MULTIPLY_ADD(x, y, z); }, false, true);
}

#undef TWIN_UNARY
#undef TWIN_BINARY
#undef TWIN_SCALAR
#undef TWIN_EACH
#undef TWIN_PAIR
#undef TWIN_FUNCTION
#undef TWIN_MULTIPLY_ADD

}  // namespace AscendC
