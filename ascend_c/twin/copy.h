// Copies: GM <-> UB, UB <-> UB, GM -> L1 (plain and ND to NZ), L1 -> GM. Signatures: kernel_operator_data_copy_intf.h.
#pragma once

#include "reduce.h"

namespace twin {

// blocks of `bytes`, `from_step` and `to_step` apart.
struct BlockCopy {
    int64_t count = 1;
    size_t bytes = 0;
    size_t from_step = 0;
    size_t to_step = 0;
};

inline bool on_gm(const Span& s) { return s.memory != nullptr && s.memory->space() == Space::GM; }

// The pipe that moves between two places (page "synchronisation within a core": what each pipe does).
inline Pipe copy_pipe(const Span& dst, const Span& src)
{
    if (on_gm(src)) return Pipe::MTE2;
    if (on_gm(dst)) return Pipe::MTE3;
    if (dst.memory != nullptr && dst.memory->space() == Space::L1) return Pipe::MTE3;  // UB -> L1 on a 310P
    return Pipe::V;  // UB -> UB
}

// Deviation::stored_infinities.
inline void replace_infinities(uint8_t* bytes, size_t count)
{
    constexpr uint32_t infinity = 0x7f800000, sign = 0x80000000;
    for (size_t at = 0; at + sizeof(uint32_t) <= count; at += sizeof(uint32_t)) {
        uint32_t bits;
        std::memcpy(&bits, bytes + at, sizeof(bits));
        if ((bits & ~sign) == infinity) --bits;
        std::memcpy(bytes + at, &bits, sizeof(bits));
    }
}

inline void copy_blocks(Instruction& op, Pipe pipe, const Span& dst, const Span& src, const BlockCopy& c)
{
    if (c.count == 0 || c.bytes == 0) return;  // documented as no operation
    const auto all = [&](size_t step, auto&& note) {
        if (step == c.bytes) {
            note(size_t{0}, c.bytes * static_cast<size_t>(c.count));
        } else {
            for (int64_t i = 0; i < c.count; ++i) note(static_cast<size_t>(i) * step, c.bytes);
        }
    };
    op.copies();
    all(c.from_step, [&](size_t at, size_t n) { op.read(src, at, n); });
    all(c.to_step, [&](size_t at, size_t n) { op.write(dst, at, n); });
    for (int64_t i = 0; i < c.count; ++i) {
        op.hand_on(dst, static_cast<size_t>(i) * c.to_step, c.bytes, src, static_cast<size_t>(i) * c.from_step,
                   c.bytes);
    }
    op.copied(src);
    op.core().counters.bytes[index_of(pipe)] += c.bytes * static_cast<size_t>(c.count);
    op.run([=] {
        for (int64_t i = 0; i < c.count; ++i) {
            std::memmove(dst.data() + static_cast<size_t>(i) * c.to_step,
                         src.data() + static_cast<size_t>(i) * c.from_step, c.bytes);
            if (!deviates(Deviation::stored_infinities) || !on_gm(dst)) continue;
            replace_infinities(dst.data() + static_cast<size_t>(i) * c.to_step, c.bytes);
        }
    });
}

// The ways that the pages name: GM -> VECIN and VECOUT -> GM; DataCopyPad also GM -> VECOUT and VECIN -> GM. All three
// positions are one memory on A2; what is loaded and stored in one place goes through DataCopyPad.
inline void check_position(const Instruction& op, const Span& local, AscendC::TPosition documented, bool pads)
{
    using P = AscendC::TPosition;
    if (local.memory->space() != Space::UB) return;
    op.require(local.position == documented || (pads && local.position != P::VECCALC), FaultKind::position,
               std::string(name_of(local.position)) + " is not among the documented positions of this copy");
}

inline void check_copy_places(const Instruction& op, const Span& dst, const Span& src, bool pads = false)
{
    const bool both = op.core().kind == CoreKind::ai;
    const Space local = op.core().kind == CoreKind::aic ? Space::L1 : Space::UB;
    if (on_gm(src)) {
        op.lies_in(dst, {local, both ? Space::L1 : local}, "dst");
        check_position(op, dst, AscendC::TPosition::VECIN, pads);
    } else if (on_gm(dst)) {
        op.lies_in(src, {local}, "src");
        check_position(op, src, AscendC::TPosition::VECOUT, pads);
    } else {
        op.lies_in(dst, {Space::UB, both ? Space::L1 : Space::UB}, "dst");
        op.lies_in(src, {Space::UB}, "src");
    }
    if (!on_gm(dst)) op.aligned(dst, kBlockBytes, "dst");
    if (!on_gm(src)) op.aligned(src, kBlockBytes, "src");
}

inline void data_copy(const Span& dst, const Span& src, const AscendC::DataCopyParams& p, Here here)
{
    const Pipe pipe = copy_pipe(dst, src);
    Instruction op("DataCopy", pipe, here);
    check_copy_places(op, dst, src);
    op.fits(p.blockCount, "blockCount", 0, 4095);
    op.fits(p.blockLen, "blockLen", 0, 65535);
    op.fits(p.srcGap, "srcGap", 0, 65535);
    op.fits(p.dstGap, "dstGap", 0, 65535);
    const size_t bytes = static_cast<size_t>(p.blockLen.full()) * kBlockBytes;
    const bool to_l1 = pipe == Pipe::MTE3 && !on_gm(dst);
    const size_t gap = to_l1 && deviates(Deviation::l1_gaps) ? 0 : static_cast<size_t>(p.dstGap.full());
    const BlockCopy c{p.blockCount.full(), bytes, bytes + static_cast<size_t>(p.srcGap.full()) * kBlockBytes,
                      bytes + gap * kBlockBytes};
    copy_blocks(op, pipe, dst, src, c);
}

inline void data_copy(const Span& dst, const Span& src, size_t bytes, Here here)
{
    const Pipe pipe = copy_pipe(dst, src);
    Instruction op("DataCopy", pipe, here);
    check_copy_places(op, dst, src);
    op.require(bytes % kBlockBytes == 0, FaultKind::alignment,
               std::to_string(bytes) + " bytes are not a multiple of 32: the device would cut the rest");
    copy_blocks(op, pipe, dst, src, BlockCopy{1, bytes, bytes, bytes});
}

struct PadCopy {
    int64_t count;
    size_t bytes;      // of one block, in GM
    size_t gm_gap;     // bytes
    size_t local_gap;  // 32-byte blocks
    size_t left = 0;   // bytes of padding
    size_t right = 0;
    bool has_value = false;
    uint64_t value = 0;
    size_t element = 1;
};

// GM -> UB: each block is padded on both sides to whole 32 bytes. What the padding holds: page "DataCopyPad".
// Without left and right padding the rest repeats the block's first element, whatever isPad says; with padding and
// without isPad it is undefined.
inline void copy_pad_in(const Span& dst, const Span& src, const PadCopy& c, Here here)
{
    Instruction op("DataCopyPad", Pipe::MTE2, here);
    check_copy_places(op, dst, src, true);
    op.in_range(c.count, "blockCount", 0, 4095);
    op.in_range(static_cast<int64_t>(c.bytes), "blockLen", 0, 2097151);
    op.require(c.bytes % c.element == 0, FaultKind::range, "blockLen must be a multiple of the element size");
    op.require(c.left <= 32 && c.right <= 32, FaultKind::range,
               "leftPadding and rightPadding may take 32 bytes each at most");
    if (c.count == 0 || c.bytes == 0) return;
    const size_t used = c.left + c.bytes + c.right;
    const size_t row = (used + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
    const size_t from_step = c.bytes + c.gm_gap;
    const size_t to_step = row + c.local_gap * kBlockBytes;
    const bool undefined = !c.has_value && c.left + c.right > 0;
    op.copies();
    for (int64_t i = 0; i < c.count; ++i) op.read(src, static_cast<size_t>(i) * from_step, c.bytes);
    for (int64_t i = 0; i < c.count; ++i) {
        const size_t at = static_cast<size_t>(i) * to_step;
        op.write(dst, at, row);
        op.hand_on(dst, at + c.left, c.bytes, src, static_cast<size_t>(i) * from_step, c.bytes);
        if (!undefined) continue;
        dst.memory->forget(dst.begin + at, c.left);
        dst.memory->forget(dst.begin + at + c.left + c.bytes, row - c.left - c.bytes);
    }
    op.copied(src);
    op.core().counters.bytes[index_of(Pipe::MTE2)] += c.bytes * static_cast<size_t>(c.count);
    op.run([=] {
        for (int64_t i = 0; i < c.count; ++i) {
            uint8_t* to = dst.data() + static_cast<size_t>(i) * to_step;
            const uint8_t* from = src.data() + static_cast<size_t>(i) * from_step;
            std::memset(to, kPoison, row);
            const bool first_element = c.left + c.right == 0;
            for (size_t b = 0; !undefined && b < row; b += c.element) {
                std::memcpy(to + b, first_element ? static_cast<const void*>(from) : static_cast<const void*>(&c.value),
                            c.element);
            }
            std::memcpy(to + c.left, from, c.bytes);
        }
    });
}

// UB -> GM: whole 32-byte blocks leave the UB, the bytes beyond blockLen are dropped.
inline void copy_pad_out(const Span& dst, const Span& src, const PadCopy& c, Here here)
{
    Instruction op("DataCopyPad", Pipe::MTE3, here);
    check_copy_places(op, dst, src, true);
    op.in_range(c.count, "blockCount", 0, 4095);
    op.in_range(static_cast<int64_t>(c.bytes), "blockLen", 0, 2097151);
    op.require(c.bytes % c.element == 0, FaultKind::range, "blockLen must be a multiple of the element size");
    const size_t row = (c.bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
    copy_blocks(op, Pipe::MTE3, dst, src,
                BlockCopy{c.count, c.bytes, row + c.local_gap * kBlockBytes, c.bytes + c.gm_gap});
}

// ND -> NZ: column blocks of 32 bytes become the outer dimension. Columns are filled with zeros to 32 bytes; rows
// beyond nValue are not touched (inferred: the page promises the columns only).
template <typename T>
void nd_to_nz(const Span& dst, const Span& src, const AscendC::Nd2NzParams& p, Here here)
{
    Instruction op("DataCopy", Pipe::MTE2, here);
    op.require(op.core().kind != CoreKind::ai, FaultKind::core,
               "a 310P makes ND-to-NZ copies of vector calls, which the twin does not emulate");
    op.lies_in(src, {Space::GM}, "src");
    op.lies_in(dst, {Space::L1}, "dst");
    op.aligned(dst, kBlockBytes, "dst");
    op.fits(p.ndNum, "ndNum", 0, 4095);
    op.fits(p.nValue, "nValue", 0, 16384);
    op.fits(p.dValue, "dValue", 0, 65535);
    if (p.ndNum == 0 || p.nValue == 0 || p.dValue == 0) return;
    op.fits(p.srcNdMatrixStride, "srcNdMatrixStride", 0, 65535);
    op.fits(p.srcDValue, "srcDValue", 1, 65535);
    op.fits(p.dstNzC0Stride, "dstNzC0Stride", 1, 16384);
    op.fits(p.dstNzNStride, "dstNzNStride", 1, 16384);
    op.fits(p.dstNzMatrixStride, "dstNzMatrixStride", 0, 16384);
    const size_t rows = p.nValue, row_bytes = static_cast<size_t>(p.dValue) * sizeof(T);
    const size_t column_blocks = (row_bytes + kBlockBytes - 1) / kBlockBytes;
    const size_t src_row = static_cast<size_t>(p.srcDValue) * sizeof(T),
                 src_matrix = static_cast<size_t>(p.srcNdMatrixStride) * sizeof(T);
    const size_t c0_step = static_cast<size_t>(p.dstNzC0Stride) * kBlockBytes,
                 n_step = static_cast<size_t>(p.dstNzNStride) * kBlockBytes;
    const size_t dst_matrix = static_cast<size_t>(p.dstNzMatrixStride) * sizeof(T), matrices = p.ndNum;
    op.copies();
    for (size_t m = 0; m < matrices; ++m) {
        for (size_t r = 0; r < rows; ++r) op.read(src, m * src_matrix + r * src_row, row_bytes);
        for (size_t c = 0; c < column_blocks; ++c) {
            if (n_step == kBlockBytes) {
                op.write(dst, m * dst_matrix + c * c0_step, rows * kBlockBytes);
            } else {
                for (size_t r = 0; r < rows; ++r) op.write(dst, m * dst_matrix + c * c0_step + r * n_step, kBlockBytes);
            }
        }
    }
    for (size_t m = 0; m < matrices; ++m) {
        for (size_t r = 0; r < rows; ++r) {
            for (size_t c = 0; c < column_blocks; ++c) {
                const size_t n = std::min(static_cast<size_t>(kBlockBytes), row_bytes - c * kBlockBytes);
                op.hand_on(dst, m * dst_matrix + r * n_step + c * c0_step, n, src,
                           m * src_matrix + r * src_row + c * kBlockBytes, n);
            }
        }
    }
    op.copied(src);
    op.core().counters.bytes[index_of(Pipe::MTE2)] += matrices * rows * row_bytes;
    op.run([=] {
        for (size_t m = 0; m < matrices; ++m) {
            for (size_t r = 0; r < rows; ++r) {
                const uint8_t* from = src.data() + m * src_matrix + r * src_row;
                uint8_t* to = dst.data() + m * dst_matrix + r * n_step;
                for (size_t c = 0; c < column_blocks; ++c) {
                    const size_t n = std::min(static_cast<size_t>(kBlockBytes), row_bytes - c * kBlockBytes);
                    std::memset(to + c * c0_step + n, 0, kBlockBytes - n);
                    std::memcpy(to + c * c0_step, from + c * kBlockBytes, n);
                }
            }
        }
    });
}

inline PadCopy pad_copy(const AscendC::DataCopyExtParams& p, bool into_local, size_t element)
{
    const int64_t gm = into_local ? p.srcStride.full() : p.dstStride.full();
    const int64_t local = into_local ? p.dstStride.full() : p.srcStride.full();
    return PadCopy{p.blockCount.full(),
                   static_cast<size_t>(p.blockLen.full()),
                   static_cast<size_t>(gm),
                   static_cast<size_t>(local),
                   0,
                   0,
                   false,
                   0,
                   element};
}

}  // namespace twin

namespace AscendC {

template <typename T>
void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const uint32_t count, Here here = Here::now())
{
    twin::data_copy(dst.span(), src.span(), static_cast<size_t>(count) * sizeof(T), here);
}
template <typename T>
void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const uint32_t count, Here here = Here::now())
{
    twin::data_copy(dst.span(), src.span(), static_cast<size_t>(count) * sizeof(T), here);
}
template <typename T>
void DataCopy(const LocalTensor<T>& dst, const LocalTensor<T>& src, const uint32_t count, Here here = Here::now())
{
    twin::data_copy(dst.span(), src.span(), static_cast<size_t>(count) * sizeof(T), here);
}
template <typename T>
void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyParams& repeatParams,
              Here here = Here::now())
{
    twin::data_copy(dst.span(), src.span(), repeatParams, here);
}
template <typename T>
void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyParams& repeatParams,
              Here here = Here::now())
{
    twin::data_copy(dst.span(), src.span(), repeatParams, here);
}
template <typename T>
void DataCopy(const LocalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyParams& repeatParams,
              Here here = Here::now())
{
    twin::data_copy(dst.span(), src.span(), repeatParams, here);
}
template <typename T>
void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const Nd2NzParams& intriParams,
              Here here = Here::now())
{
    twin::nd_to_nz<T>(dst.span(), src.span(), intriParams, here);
}

template <typename T>
void DataCopyPad(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyExtParams& dataCopyParams,
                 const DataCopyPadExtParams<T>& padParams, Here here = Here::now())
{
    twin::PadCopy c = twin::pad_copy(dataCopyParams, true, sizeof(T));
    c.left = static_cast<size_t>(padParams.leftPadding.full()) * sizeof(T);
    c.right = static_cast<size_t>(padParams.rightPadding.full()) * sizeof(T);
    c.has_value = padParams.isPad;
    std::memcpy(&c.value, &padParams.paddingValue, sizeof(T));
    twin::copy_pad_in(dst.span(), src.span(), c, here);
}
template <typename T>
void DataCopyPad(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyExtParams& dataCopyParams,
                 Here here = Here::now())
{
    twin::copy_pad_out(dst.span(), src.span(), twin::pad_copy(dataCopyParams, false, sizeof(T)), here);
}
}  // namespace AscendC
