// Reductions within a repeat, a block or a pair: kernel_operator_vec_reduce_intf.h. Sums are binary trees over adjacent
// lanes with a rounding at every node (page "ReduceDataBlock"); a lane that is masked out counts as 0 (inferred).
#pragma once

#include "vector_select.h"

namespace twin {

using AscendC::ReduceType;

template <typename T>
float tree_sum(const float* values, int n, bool saturate)
{
    float level[kMaxLanes];
    std::memcpy(level, values, static_cast<size_t>(n) * sizeof(float));
    for (; n > 1; n /= 2) {
        for (int i = 0; i < n / 2; ++i) {
            level[i] = level[2 * i] + level[2 * i + 1];
            if constexpr (std::is_same_v<T, half>) {
                level[i] = to_float(half_from(level[i]));
                if (saturate) level[i] = saturated(level[i], kHalfMax);
            }
        }
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

// Lanes [from, to) of one repeat. A sum that leaves the range, or a partial sum that does, is an overflow.
template <typename T>
float reduced(ReduceType kind, const float* values, const Lanes& active, int from, int to, bool saturate,
              uint64_t& overflows)
{
    if (kind != ReduceType::SUM) return extremum(values, active, from, to, kind == ReduceType::MAX).value;
    float lanes[kMaxLanes];
    bool finite = true;
    for (int i = from; i < to; ++i) {
        lanes[i - from] = active[i] ? values[i] : 0.0f;
        finite &= is_finite(lanes[i - from]);
    }
    overflows += finite && !is_finite(tree_sum<T>(lanes, to - from, false)) ? 1 : 0;
    return tree_sum<T>(lanes, to - from, saturate);
}

// The arguments that all reductions share.
struct ReduceArguments {
    Mask mask;
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
void reduce_repeat(ReduceType kind, const AscendC::LocalTensor<T>& dst, const AscendC::LocalTensor<T>& src,
                   const ReduceArguments& a, AscendC::ReduceOrder order, Here here)
{
    using O = AscendC::ReduceOrder;
    Instruction op("ReduceRepeat", Pipe::V, here);
    op.require(op.core().kind != CoreKind::ai || kind == ReduceType::SUM ||
                   order == O::ORDER_VALUE_INDEX || order == O::ORDER_INDEX_VALUE,
               FaultKind::type, "the page of ReduceRepeat lists this order for no Ascend 310P");
    Operand s;
    const Plan plan = prepare_source(op, src, a, s);
    const bool both = kind != ReduceType::SUM && (order == O::ORDER_VALUE_INDEX || order == O::ORDER_INDEX_VALUE);
    const bool only_index = kind != ReduceType::SUM && order == O::ORDER_ONLY_INDEX;
    const size_t unit = only_index ? 4 : both ? 2 * sizeof(T) : sizeof(T);
    const Span out = dst.span();
    op.lies_in(out, {Space::UB}, "dst");
    op.aligned(out, unit, "dst");
    const int64_t stride = a.dst_repeat * static_cast<int64_t>(unit);
    check_reduced_overlap(op, plan, s, out, unit, stride);
    for (int64_t r = 0; r < plan.repeats; ++r) op.write(out, static_cast<size_t>(r * stride), unit);
    op.run([=, &core = op.core(), saturate = op.core().saturate] {
        float x[kMaxLanes] = {};
        uint64_t overflows = 0;
        for (int64_t r = 0; r < plan.repeats; ++r) {
            load<T>(s, plan, r, x);
            uint8_t* to = out.data() + r * stride;
            if (kind == ReduceType::SUM) {
                const T sum = static_cast<T>(reduced<T>(kind, x, plan.at(r), 0, kLanes<T>, saturate, overflows));
                std::memcpy(to, &sum, sizeof(T));
                continue;
            }
            const Extremum best = extremum(x, plan.at(r), 0, kLanes<T>, kind == ReduceType::MAX);
            const T value = static_cast<T>(best.value);
            const uint32_t index = static_cast<uint32_t>(best.index);  // kept as the bits of an integer of T's size
            const bool index_first = order == O::ORDER_INDEX_VALUE;
            if (!only_index) std::memcpy(to + (index_first ? sizeof(T) : 0), &value, sizeof(T));
            if (only_index) std::memcpy(to, &index, 4);
            if (both) std::memcpy(to + (index_first ? 0 : sizeof(T)), &index, sizeof(T));
        }
        core.counters.count_overflows("ReduceRepeat", overflows);
    });
}

// Eight results per repeat; a block without an active lane leaves its result as it was.
template <typename T>
void reduce_block(ReduceType kind, const AscendC::LocalTensor<T>& dst, const AscendC::LocalTensor<T>& src,
                  const ReduceArguments& a, Here here)
{
    Instruction op("ReduceDataBlock", Pipe::V, here);
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
    op.run([=, &core = op.core(), saturate = op.core().saturate] {
        float x[kMaxLanes] = {};
        uint64_t overflows = 0;
        for (int64_t r = 0; r < plan.repeats; ++r) {
            load<T>(s, plan, r, x);
            for (int b = 0; b < 8; ++b) {
                if (!live(r, b)) continue;
                const int from = b * per_block;
                const T y =
                    static_cast<T>(reduced<T>(kind, x, plan.at(r), from, from + per_block, saturate, overflows));
                std::memcpy(out.data() + r * stride + b * static_cast<int>(sizeof(T)), &y, sizeof(T));
            }
        }
        core.counters.count_overflows("ReduceDataBlock", overflows);
    });
}

// Half as many results as lanes, 128 bytes per repeat; a pair without an active lane leaves its result as it was.
template <typename T>
void reduce_pair(const AscendC::LocalTensor<T>& dst, const AscendC::LocalTensor<T>& src, const ReduceArguments& a,
                 Here here)
{
    Instruction op("ReducePairElem", Pipe::V, here);
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
    op.run([=, &core = op.core(), saturate = op.core().saturate] {
        float x[kMaxLanes] = {};
        uint64_t overflows = 0;
        for (int64_t r = 0; r < plan.repeats; ++r) {
            load<T>(s, plan, r, x);
            for (int i = 0; i < kLanes<T>; i += 2) {
                if (!plan.at(r)[i] && !plan.at(r)[i + 1]) continue;
                const T y = static_cast<T>(reduced<T>(ReduceType::SUM, x, plan.at(r), i, i + 2, saturate, overflows));
                std::memcpy(out.data() + r * stride + i / 2 * static_cast<int>(sizeof(T)), &y, sizeof(T));
            }
        }
        core.counters.count_overflows("ReducePairElem", overflows);
    });
}

}  // namespace twin

namespace AscendC {

template <ReduceType reduceType, typename T, typename U, bool isSetMask = true>
void ReduceRepeat(const LocalTensor<T>& dst, const LocalTensor<U>& src, twin::ConstMask mask, const int32_t repeatTime,
                  const int32_t dstRepStride, const int32_t srcBlkStride, const int32_t srcRepStride,
                  ReduceOrder order = ReduceOrder::ORDER_VALUE_INDEX, Here here = Here::now())
{
    static_assert(std::is_same_v<T, U>, "ReduceRepeat: source and destination have one type on A2");
    twin::reduce_repeat(reduceType, dst, src, {mask, repeatTime, dstRepStride, srcBlkStride, srcRepStride, isSetMask},
                        order, here);
}
template <ReduceType reduceType, typename T, typename U, bool isSetMask = true>
void ReduceDataBlock(const LocalTensor<T>& dst, const LocalTensor<U>& src, twin::ConstMask mask,
                     const int32_t repeatTime, const int32_t dstRepStride, const int32_t srcBlkStride,
                     const int32_t srcRepStride, Here here = Here::now())
{
    static_assert(std::is_same_v<T, U>, "ReduceDataBlock: source and destination have one type on A2");
    twin::reduce_block(reduceType, dst, src, {mask, repeatTime, dstRepStride, srcBlkStride, srcRepStride, isSetMask},
                       here);
}
template <ReduceType reduceType, typename T, typename U, bool isSetMask = true>
void ReducePairElem(const LocalTensor<T>& dst, const LocalTensor<U>& src, twin::ConstMask mask,
                    const int32_t repeatTime, const int32_t dstRepStride, const int32_t srcBlkStride,
                    const int32_t srcRepStride, Here here = Here::now())
{
    static_assert(std::is_same_v<T, U> && reduceType == ReduceType::SUM, "ReducePairElem adds, in one type");
    twin::reduce_pair(dst, src, {mask, repeatTime, dstRepStride, srcBlkStride, srcRepStride, isSetMask}, here);
}

}  // namespace AscendC
