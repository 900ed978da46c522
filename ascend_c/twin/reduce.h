// Reductions within a repeat, a block or a pair: kernel_operator_vec_reduce_intf.h, which has the new names; the old
// names and their argument orders: page "ReduceRepeat" and its neighbours. Sums are binary trees over adjacent lanes
// with a rounding at every node; a lane that is masked out counts as 0 (inferred).
#pragma once

#include "vector_select.h"

namespace twin {

enum class Reduction { sum, max, min };

template <typename T>
float rounded_to(float x, bool saturate)
{
    if constexpr (std::is_same_v<T, half>) {
        const float y = to_float(half_from(x));
        return saturate ? saturated(y, kHalfMax) : y;
    } else {
        return x;
    }
}

template <typename T>
float tree_sum(const float* values, int n, bool saturate)
{
    float level[kMaxLanes];
    std::memcpy(level, values, static_cast<size_t>(n) * sizeof(float));
    for (; n > 1; n /= 2) {
        for (int i = 0; i < n / 2; ++i) level[i] = rounded_to<T>(level[2 * i] + level[2 * i + 1], saturate);
    }
    return level[0];
}

struct Extremum {
    float value = 0;
    int index = -1;
};

// The first of equal extrema wins (page "ReduceRepeat"). A NaN wins over all (inferred).
inline Extremum extremum(const float* values, const Lanes& active, int from, int to, bool largest)
{
    Extremum best;
    for (int i = from; i < to; ++i) {
        if (!active[i]) continue;
        const bool better =
            best.index < 0 || (best.value == best.value &&
                               (values[i] != values[i] || (largest ? values[i] > best.value : values[i] < best.value)));
        if (better) best = Extremum{values[i], i};
    }
    return best;
}

template <typename T>
float reduced(Reduction kind, const float* values, const Lanes& active, int from, int to, bool saturate)
{
    if (kind != Reduction::sum) return extremum(values, active, from, to, kind == Reduction::max).value;
    float lanes[kMaxLanes];
    for (int i = from; i < to; ++i) lanes[i - from] = active[i] ? values[i] : 0.0f;
    return tree_sum<T>(lanes, to - from, saturate);
}

inline Reduction reduction_of(AscendC::ReduceType type)
{
    return type == AscendC::ReduceType::SUM   ? Reduction::sum
           : type == AscendC::ReduceType::MAX ? Reduction::max
                                              : Reduction::min;
}

// The arguments that all reductions share.
struct ReduceArguments {
    MaskArgument mask;
    int64_t repeats;
    int64_t dst_repeat;
    int64_t src_block;
    int64_t src_repeat;
    bool set_mask;
};

// The source operand, checked; results per repeat go to offsets that the caller computes.
template <typename T>
Plan prepare_source(Instruction& op, const AscendC::LocalTensor<T>& src, const ReduceArguments& a, Operand& s)
{
    static_assert(is_one_of<T, half, float>, "reductions on A2 take half and float");
    op.in_range(a.dst_repeat, "dstRepStride", 0, 65535);
    op.in_range(a.src_block, "srcBlkStride", 0, 65535);
    op.in_range(a.src_repeat, "srcRepStride", 0, 65535);
    const Plan plan = plan_of(op, kLanes<T>, a.mask, a.repeats, a.set_mask);
    s = operand(src, a.src_block, a.src_repeat);
    check_vector_operand(op, s, "src");
    s.runs(plan, [&](size_t at, size_t n) { op.read(s.span, at, n); });
    count_vector(op, TypeName<T>::value, plan);
    return plan;
}

// A result may replace its own repeat's source, but not lie where a later repeat reads.
inline void check_reduced_overlap(const Instruction& op, const Plan& plan, const Operand& s, const Span& out,
                                  size_t bytes, int64_t stride)
{
    if (out.memory != s.span.memory || plan.repeats == 0) return;
    const auto [low, high] = s.hull(plan);
    if (out.begin >= high || out.begin + static_cast<size_t>((plan.repeats - 1) * stride) + bytes <= low) return;
    for (int64_t w = 0; w + 1 < plan.repeats; ++w) {
        const size_t at = out.begin + static_cast<size_t>(w * stride);
        for (int64_t r = w + 1; r < plan.repeats; ++r) {
            for (int b = 0; b < static_cast<int>(kBlocksPerRepeat); ++b) {
                const size_t from = s.span.begin + static_cast<size_t>((r * s.repeat + b * s.block) * kBlockBytes);
                if (at >= from + kBlockBytes || at + bytes <= from) continue;
                op.core().fault(FaultKind::overlap, out.describe(static_cast<size_t>(w * stride)),
                                "repeat " + std::to_string(r) + " reads what repeat " + std::to_string(w) +
                                    " of the same call writes");
            }
        }
    }
}

template <typename T>
void reduce_repeat(Instruction& op, Reduction kind, const AscendC::LocalTensor<T>& dst,
                   const AscendC::LocalTensor<T>& src, const ReduceArguments& a, AscendC::ReduceOrder order)
{
    using O = AscendC::ReduceOrder;
    Operand s;
    const Plan plan = prepare_source(op, src, a, s);
    const bool both = kind != Reduction::sum && (order == O::ORDER_VALUE_INDEX || order == O::ORDER_INDEX_VALUE);
    const bool only_index = kind != Reduction::sum && order == O::ORDER_ONLY_INDEX;
    const size_t unit = only_index ? 4 : both ? 2 * sizeof(T) : sizeof(T);
    const Span out = dst.span();
    op.lies_in(out, {Space::UB}, "dst");
    op.aligned(out, unit, "dst");
    const int64_t stride = a.dst_repeat * static_cast<int64_t>(unit);
    check_reduced_overlap(op, plan, s, out, unit, stride);
    for (int64_t r = 0; r < plan.repeats; ++r) op.write(out, static_cast<size_t>(r * stride), unit);
    const bool saturate = op.core().saturate;
    op.run([=] {
        float x[kMaxLanes] = {};
        for (int64_t r = 0; r < plan.repeats; ++r) {
            load<T>(s, plan, r, x);
            uint8_t* to = out.data() + r * stride;
            if (kind == Reduction::sum) {
                const T sum = static_cast<T>(reduced<T>(kind, x, plan.at(r), 0, kLanes<T>, saturate));
                std::memcpy(to, &sum, sizeof(T));
                continue;
            }
            const Extremum best = extremum(x, plan.at(r), 0, kLanes<T>, kind == Reduction::max);
            const T value = static_cast<T>(best.value);
            const uint32_t index = static_cast<uint32_t>(best.index);  // kept as the bits of an integer of T's size
            const bool index_first = order == O::ORDER_INDEX_VALUE;
            if (!only_index) std::memcpy(to + (index_first ? sizeof(T) : 0), &value, sizeof(T));
            if (only_index) std::memcpy(to, &index, 4);
            if (both) std::memcpy(to + (index_first ? 0 : sizeof(T)), &index, sizeof(T));
        }
    });
}

// Eight results per repeat; a block without an active lane leaves its result as it was.
template <typename T>
void reduce_block(Instruction& op, Reduction kind, const AscendC::LocalTensor<T>& dst,
                  const AscendC::LocalTensor<T>& src, const ReduceArguments& a)
{
    Operand s;
    const Plan plan = prepare_source(op, src, a, s);
    const Span out = dst.span();
    op.lies_in(out, {Space::UB}, "dst");
    op.aligned(out, 8 * sizeof(T), "dst");  // 16 bytes for half, 32 for float
    const int64_t stride = a.dst_repeat * static_cast<int64_t>(8 * sizeof(T));
    constexpr int per_block = static_cast<int>(kBlockBytes / sizeof(T));
    check_reduced_overlap(op, plan, s, out, 8 * sizeof(T), stride);
    const auto live = [plan](int64_t r, int b) {
        for (int i = 0; i < per_block; ++i) {
            if (plan.at(r)[b * per_block + i]) return true;
        }
        return false;
    };
    for (int64_t r = 0; r < plan.repeats; ++r) {
        for (int b = 0; b < 8; ++b) {
            if (live(r, b))
                op.write(out, static_cast<size_t>(r * stride) + static_cast<size_t>(b) * sizeof(T), sizeof(T));
        }
    }
    const bool saturate = op.core().saturate;
    op.run([=] {
        float x[kMaxLanes] = {};
        for (int64_t r = 0; r < plan.repeats; ++r) {
            load<T>(s, plan, r, x);
            for (int b = 0; b < 8; ++b) {
                if (!live(r, b)) continue;
                const T y =
                    static_cast<T>(reduced<T>(kind, x, plan.at(r), b * per_block, (b + 1) * per_block, saturate));
                std::memcpy(out.data() + r * stride + b * static_cast<int>(sizeof(T)), &y, sizeof(T));
            }
        }
    });
}

// Half as many results as lanes, 128 bytes per repeat; a pair without an active lane leaves its result as it was.
template <typename T>
void reduce_pair(Instruction& op, const AscendC::LocalTensor<T>& dst, const AscendC::LocalTensor<T>& src,
                 const ReduceArguments& a)
{
    Operand s;
    const Plan plan = prepare_source(op, src, a, s);
    const Span out = dst.span();
    check_vector_operand(op, Operand{out, sizeof(T)}, "dst");
    const int64_t stride = a.dst_repeat * 128;
    check_reduced_overlap(op, plan, s, out, 128, stride);
    for (int64_t r = 0; r < plan.repeats; ++r) {
        for (int i = 0; i < kLanes<T>; i += 2) {
            if (plan.at(r)[i] || plan.at(r)[i + 1])
                op.write(out, static_cast<size_t>(r * stride) + static_cast<size_t>(i / 2) * sizeof(T), sizeof(T));
        }
    }
    const bool saturate = op.core().saturate;
    op.run([=] {
        float x[kMaxLanes] = {};
        for (int64_t r = 0; r < plan.repeats; ++r) {
            load<T>(s, plan, r, x);
            for (int i = 0; i < kLanes<T>; i += 2) {
                if (!plan.at(r)[i] && !plan.at(r)[i + 1]) continue;
                const T y = static_cast<T>(reduced<T>(Reduction::sum, x, plan.at(r), i, i + 2, saturate));
                std::memcpy(out.data() + r * stride + i / 2 * static_cast<int>(sizeof(T)), &y, sizeof(T));
            }
        }
    });
}

inline MaskArgument mask_argument(int32_t mask)
{
    return MaskArgument::count(static_cast<uint64_t>(static_cast<int64_t>(mask)));
}
inline MaskArgument mask_argument(const uint64_t mask[]) { return MaskArgument::list(mask); }

}  // namespace twin

namespace AscendC {

// Each name takes its mask as a count or as bits. The WholeReduce calls take mask before repeatTime, the BlockReduce
// and PairReduce calls repeatTime before mask.
#define TWIN_WHOLE(Name, kind, Mask)                                                                              \
    template <typename T, bool isSetMask = true>                                                                  \
    void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, Mask, const int32_t repeatTime,               \
              const int32_t dstRepStride, const int32_t srcBlkStride, const int32_t srcRepStride,                 \
              ReduceOrder order = ReduceOrder::ORDER_VALUE_INDEX, Here here = Here::now())                        \
    {                                                                                                             \
        twin::Instruction op(#Name, twin::Pipe::V, here);                                                         \
        twin::reduce_repeat(                                                                                      \
            op, twin::Reduction::kind, dst, src,                                                                  \
            {twin::mask_argument(mask), repeatTime, dstRepStride, srcBlkStride, srcRepStride, isSetMask}, order); \
    }
TWIN_WHOLE(WholeReduceMax, max, const int32_t mask)
TWIN_WHOLE(WholeReduceMax, max, const uint64_t mask[])
TWIN_WHOLE(WholeReduceMin, min, const int32_t mask)
TWIN_WHOLE(WholeReduceMin, min, const uint64_t mask[])

#define TWIN_WHOLE_SUM(Mask)                                                                                  \
    template <typename T, bool isSetMask = true>                                                              \
    void WholeReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, Mask, const int32_t repeatTime, \
                        const int32_t dstRepStride, const int32_t srcBlkStride, const int32_t srcRepStride,   \
                        Here here = Here::now())                                                              \
    {                                                                                                         \
        twin::Instruction op("WholeReduceSum", twin::Pipe::V, here);                                          \
        twin::reduce_repeat(                                                                                  \
            op, twin::Reduction::sum, dst, src,                                                               \
            {twin::mask_argument(mask), repeatTime, dstRepStride, srcBlkStride, srcRepStride, isSetMask},     \
            ReduceOrder::ORDER_ONLY_VALUE);                                                                   \
    }
TWIN_WHOLE_SUM(const int32_t mask)
TWIN_WHOLE_SUM(const uint64_t mask[])

#define TWIN_REPEAT_BEFORE_MASK(Name, action, Mask)                                                      \
    template <typename T, bool isSetMask = true>                                                         \
    void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t repeatTime, Mask,      \
              const int32_t dstRepStride, const int32_t srcBlkStride, const int32_t srcRepStride,        \
              Here here = Here::now())                                                                   \
    {                                                                                                    \
        twin::Instruction op(#Name, twin::Pipe::V, here);                                                \
        const twin::ReduceArguments a{                                                                   \
            twin::mask_argument(mask), repeatTime, dstRepStride, srcBlkStride, srcRepStride, isSetMask}; \
        action;                                                                                          \
    }
TWIN_REPEAT_BEFORE_MASK(BlockReduceMax, twin::reduce_block(op, twin::Reduction::max, dst, src, a), const int32_t mask)
TWIN_REPEAT_BEFORE_MASK(BlockReduceMax, twin::reduce_block(op, twin::Reduction::max, dst, src, a),
                        const uint64_t mask[])
TWIN_REPEAT_BEFORE_MASK(BlockReduceMin, twin::reduce_block(op, twin::Reduction::min, dst, src, a), const int32_t mask)
TWIN_REPEAT_BEFORE_MASK(BlockReduceMin, twin::reduce_block(op, twin::Reduction::min, dst, src, a),
                        const uint64_t mask[])
TWIN_REPEAT_BEFORE_MASK(BlockReduceSum, twin::reduce_block(op, twin::Reduction::sum, dst, src, a), const int32_t mask)
TWIN_REPEAT_BEFORE_MASK(BlockReduceSum, twin::reduce_block(op, twin::Reduction::sum, dst, src, a),
                        const uint64_t mask[])
TWIN_REPEAT_BEFORE_MASK(PairReduceSum, twin::reduce_pair(op, dst, src, a), const int32_t mask)
TWIN_REPEAT_BEFORE_MASK(PairReduceSum, twin::reduce_pair(op, dst, src, a), const uint64_t mask[])

// The new names: mask before repeatTime throughout.
#define TWIN_REDUCE(Name, tail, call, action, Mask)                                                      \
    template <ReduceType reduceType, typename T, typename U, bool isSetMask = true>                      \
    void Name(const LocalTensor<T>& dst, const LocalTensor<U>& src, Mask, const int32_t repeatTime,      \
              const int32_t dstRepStride, const int32_t srcBlkStride, const int32_t srcRepStride,        \
              tail Here here = Here::now())                                                              \
    {                                                                                                    \
        static_assert(std::is_same_v<T, U>, #Name ": source and destination have one type on A2");       \
        twin::Instruction op(#Name, twin::Pipe::V, here);                                                \
        const twin::ReduceArguments a{                                                                   \
            twin::mask_argument(mask), repeatTime, dstRepStride, srcBlkStride, srcRepStride, isSetMask}; \
        action;                                                                                          \
    }
#define TWIN_COMMA ,
TWIN_REDUCE(ReduceRepeat, ReduceOrder order = ReduceOrder::ORDER_VALUE_INDEX TWIN_COMMA, ,
            twin::reduce_repeat(op, twin::reduction_of(reduceType), dst, src, a, order), const int32_t mask)
TWIN_REDUCE(ReduceRepeat, ReduceOrder order = ReduceOrder::ORDER_VALUE_INDEX TWIN_COMMA, ,
            twin::reduce_repeat(op, twin::reduction_of(reduceType), dst, src, a, order), const uint64_t mask[])
TWIN_REDUCE(ReduceDataBlock, , , twin::reduce_block(op, twin::reduction_of(reduceType), dst, src, a),
            const int32_t mask)
TWIN_REDUCE(ReduceDataBlock, , , twin::reduce_block(op, twin::reduction_of(reduceType), dst, src, a),
            const uint64_t mask[])
TWIN_REDUCE(ReducePairElem, , , twin::reduce_pair(op, dst, src, a), const int32_t mask)
TWIN_REDUCE(ReducePairElem, , , twin::reduce_pair(op, dst, src, a), const uint64_t mask[])

#undef TWIN_WHOLE
#undef TWIN_WHOLE_SUM
#undef TWIN_REPEAT_BEFORE_MASK
#undef TWIN_REDUCE
#undef TWIN_COMMA

}  // namespace AscendC
