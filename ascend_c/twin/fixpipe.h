// Fixpipe: L0C -> GM (row-major or NZ) and L0C -> L1 (NZ), with one rounding to nearest even on the way.
// Signatures: kernel_operator_fixpipe_intf.h, kernel_struct_fixpipe.h; A2 takes FixpipeParamsV220 only.
#pragma once

#include "cube.h"

namespace twin {

struct FixpipeShape {
    int64_t n, m, src_stride, dst_stride, matrices, src_matrix, dst_matrix;
    bool row_major;

    size_t source(int64_t matrix, int64_t i, int64_t j) const  // in elements
    {
        return static_cast<size_t>(matrix * src_matrix * 256 + j / 16 * src_stride * 16 + i * 16 + j % 16);
    }
    // In bytes, for elements of `size` bytes. NZ: column blocks dst_stride * 32 bytes apart, rows of 16 elements.
    size_t destination(int64_t matrix, int64_t i, int64_t j, int64_t size) const
    {
        if (row_major) return static_cast<size_t>((matrix * dst_matrix + i * dst_stride + j) * size);
        return static_cast<size_t>(j / 16 * dst_stride * kBlockBytes + (i * 16 + j % 16) * size);
    }
};

// Sixteen values on their way out. Returns the number of overflows.
template <typename T>
uint64_t fixpipe_row(const float* from, T* to, bool relu, bool saturate)
{
    uint64_t overflows = 0;
    for (int i = 0; i < kFractalSide; ++i) {
        const float x = relu && from[i] < 0 ? 0 : from[i];
        if constexpr (std::is_same_v<T, float>) {
            to[i] = x;
        } else {
            constexpr bool is_half = std::is_same_v<T, half>;
            const T y = is_half ? T(half_from(x)) : T(x);
            overflows += is_finite(x) && !is_finite(to_float(y)) ? 1 : 0;
            to[i] = saturate ? T(saturated(to_float(y), is_half ? kHalfMax : kBf16Max)) : y;
        }
    }
    return overflows;
}

inline void check_fixpipe_fields(const Instruction& op, const AscendC::FixpipeParamsV220& p, bool row_major)
{
    op.fits(p.nSize, "nSize", 0, 4095);
    op.require(p.nSize % 16 == 0, FaultKind::range,
               "nSize = " + std::to_string(p.nSize.full()) + " must be a multiple of 16");
    op.fits(p.mSize, "mSize", 0, row_major ? 8192 : 65535);
    op.fits(p.srcStride, "srcStride", 0, 65535);
    op.fits(p.dstStride, "dstStride", 0, 4294967295ll);
    op.require(p.dstStride.full() != 0, FaultKind::range, "dstStride must not be 0");
    op.fits(p.ndNum, "ndNum", 0, 65535);
    op.fits(p.srcNdStride, "srcNdStride", 0, 512);
    op.fits(p.dstNdStride, "dstNdStride", 0, 65535);
    op.require(p.unitFlag == 0 || p.unitFlag == 2 || p.unitFlag == 3, FaultKind::range, "unitFlag is 0, 2 or 3");
    op.require(!p.isChannelSplit, FaultKind::program, "the twin does not emulate channel splitting");
}

template <typename T>
void fixpipe(const Span& dst, const Span& src, const AscendC::FixpipeParamsV220& p, bool row_major, Here here)
{
    Instruction op("Fixpipe", Pipe::FIX, here);
    const bool to_l1 = !on_gm(dst);
    op.lies_in(src, {Space::L0C}, "src");
    op.aligned(src, 64, "src");
    op.lies_in(dst, {to_l1 ? Space::L1 : Space::GM}, "dst");
    op.require(!to_l1 || !row_major, FaultKind::type,
               "L0C to L1 is NZ on A2: pass CFG_NZ, CFG_ROW_MAJOR has no effect there");
    if (to_l1 || !row_major) op.aligned(dst, kBlockBytes, "dst");
    check_fixpipe_fields(op, p, row_major);
    const QuantMode_t wanted = std::is_same_v<T, half> ? F322F16 : std::is_same_v<T, bfloat16_t> ? F322BF16 : NoQuant;
    op.require(p.quantPre == wanted, FaultKind::type,
               std::string("quantPre does not give ") + TypeName<T>::value + ": it is set by hand");
    if (p.nSize == 0 || p.mSize == 0 || p.ndNum == 0) return;
    if (p.unitFlag != 0) op.unit_flag();
    const FixpipeShape s{p.nSize.full(),
                         p.mSize.full(),
                         deviates(Deviation::fixpipe_rows) ? up_to(p.mSize.full(), 16) : p.srcStride.full(),
                         p.dstStride.full(),
                         row_major ? p.ndNum.full() : 1,
                         p.srcNdStride.full(),
                         p.dstNdStride.full(),
                         row_major};
    const int64_t size = sizeof(T);
    op.copies();
    for (int64_t d = 0; d < s.matrices; ++d) {
        for (int64_t j = 0; j < s.n; j += 16) {
            const size_t at = s.source(d, 0, j) * sizeof(float), bytes = static_cast<size_t>(s.m) * 16 * sizeof(float);
            op.read(src, at, bytes);
            use_unit_flags(op, src, at, bytes, p.unitFlag, false);
        }
        for (int64_t i = 0; row_major && i < s.m; ++i)
            op.write(dst, s.destination(d, i, 0, size), static_cast<size_t>(s.n * size));
        for (int64_t j = 0; !row_major && j < s.n; j += 16)
            op.write(dst, s.destination(d, 0, j, size), static_cast<size_t>(s.m * 16 * size));
    }
    for (int64_t d = 0; d < s.matrices; ++d) {
        for (int64_t i = 0; i < s.m; ++i) {
            for (int64_t j = 0; j < s.n; j += 16) {
                op.hand_on(dst, s.destination(d, i, j, size), static_cast<size_t>(16 * size), src,
                           s.source(d, i, j) * sizeof(float), 16 * sizeof(float));
            }
        }
    }
    op.copied(src);
    op.core().counters.bytes[index_of(Pipe::FIX)] += static_cast<uint64_t>(s.matrices * s.m * s.n * size);
    op.run([=, &core = op.core(), saturate = op.core().saturate, relu = p.reluEn] {
        const float* from = reinterpret_cast<const float*>(src.data());
        uint64_t overflows = 0;
        for (int64_t d = 0; d < s.matrices; ++d) {
            for (int64_t i = 0; i < s.m; ++i) {
                for (int64_t j = 0; j < s.n; j += 16) {
                    T row[kFractalSide];
                    overflows += fixpipe_row(from + s.source(d, i, j), row, relu, saturate);
                    std::memcpy(dst.data() + s.destination(d, i, j, size), row, sizeof(row));
                }
            }
        }
        core.counters.count_overflows("Fixpipe", overflows);
    });
}

}  // namespace twin

namespace AscendC {

template <typename T, typename U, const FixpipeConfig& config = CFG_ROW_MAJOR>
void Fixpipe(const GlobalTensor<T>& dst, const LocalTensor<U>& src, const FixpipeParamsV220& intriParams,
             Here here = Here::now())
{
    static_assert(twin::is_one_of<T, half, bfloat16_t, float> && std::is_same_v<U, float>,
                  "Fixpipe: the twin takes float to half, bfloat16 and float");
    twin::fixpipe<T>(dst.span(), src.span(), intriParams, config.format == CO2Layout::ROW_MAJOR, here);
}
template <typename T, typename U, const FixpipeConfig& config = CFG_ROW_MAJOR>
void Fixpipe(const LocalTensor<T>& dst, const LocalTensor<U>& src, const FixpipeParamsV220& intriParams,
             Here here = Here::now())
{
    static_assert(twin::is_one_of<T, half, bfloat16_t> && std::is_same_v<U, float>,
                  "Fixpipe to L1: A2 moves float as half or bfloat16");
    twin::fixpipe<T>(dst.span(), src.span(), intriParams, config.format == CO2Layout::ROW_MAJOR, here);
}

}  // namespace AscendC
