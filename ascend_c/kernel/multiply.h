// Matrix products on the cube core: from tiles in L1 through L0A and L0B into L0C.
#pragma once

#include "port.h"

namespace pasa {

// A tile in L1: NZ format, at most 128 rows, column blocks of 16 stored one after the other, 128 rows apart.
constexpr uint32_t kColumnBlock = kTileRows * kFractal;
constexpr uint32_t kHalfL0 = kTileRows * kChunk * sizeof(half);  // 32 KiB: two operands fit into L0A, and two into L0B
constexpr uint32_t kAccumulator = kTileRows * kChunk * sizeof(float);  // 64 KiB: two of them are L0C
// Below so many fractals of C, a product that adds to the one before has to wait for it (page "Mmad").
constexpr uint32_t kOrderedFractals = 10;

// Rows of a row-major matrix in GM into a tile. `twice`: one row is loaded twice.
__aicore__ inline void LoadRows(const AscendC::LocalTensor<half>& tile, const AscendC::GlobalTensor<half>& from,
                                uint32_t rows, uint32_t columns, uint32_t stride, bool twice)
{
    AscendC::Nd2NzParams p;
    p.ndNum = twice ? 2 : 1;  // as two matrices at the same place: a stride of 0
    p.nValue = rows;
    p.dValue = columns;
    p.srcNdMatrixStride = 0;
    p.srcDValue = stride;
    p.dstNzC0Stride = kTileRows;
    p.dstNzNStride = 1;
    p.dstNzMatrixStride = kFractal;
    AscendC::DataCopy(tile, from, p);
}

// All rows of a tile: a single one twice.
__aicore__ inline void LoadTile(const AscendC::LocalTensor<half>& tile, const AscendC::GlobalTensor<half>& from,
                                uint32_t rows, uint32_t columns, uint32_t stride)
{
    LoadRows(tile, from, rows, columns, stride, rows == 1);
}

// What a product is of: C (m, n) = or += A (m, k) B, k at most 128.
struct Factors {
    uint32_t m;
    uint32_t n;
    uint32_t k;
    bool keys_are_rows;  // B is a tile (n, k), as keys are; otherwise (k, n), as values are
    bool adds;
};

class Multiplier {
public:
    using Operand = AscendC::LocalTensor<half>;

    __aicore__ inline explicit Multiplier(AscendC::TPipe& pipe)
    {
        pipe.InitBuffer(left_, 2, kHalfL0);
        pipe.InitBuffer(right_, 2, kHalfL0);
    }

    __aicore__ inline void Multiply(const AscendC::LocalTensor<float>& c, const Operand& a, const Operand& b,
                                    const Factors& f)
    {
        Operand left = TakeLeft(a, f.m, f.k);
        Operand right = TakeRight(b, f);
        Contract(c, left, right, f);
        FreeRight(right);
        FreeLeft(left);
    }

    // C (m, n) += A (m, 16) B, where all of B is one number.
    __aicore__ inline void AddMultiple(const AscendC::LocalTensor<float>& c, const Operand& a, half number, uint32_t m,
                                       uint32_t n)
    {
        Operand left = TakeLeft(a, m, kFractal);
        Operand right = TakeNumber(number, kFractal, n);
        Contract(c, left, right, Factors{m, n, kFractal, true, true});
        FreeRight(right);
        FreeLeft(left);
    }

    // Operands in L0A and L0B, for any number of products until they are freed.
    __aicore__ inline Operand TakeLeft(const Operand& a, uint32_t m, uint32_t k)
    {
        Operand left = left_.AllocTensor<half>();
        LoadLeft(left, a, m, k);
        left_.EnQue(left);
        return left_.DeQue<half>();
    }
    __aicore__ inline Operand TakeRight(const Operand& b, const Factors& f)
    {
        Operand right = right_.AllocTensor<half>();
        f.keys_are_rows ? LoadRows(right, b, f) : LoadColumns(right, b, f);
        right_.EnQue(right);
        return right_.DeQue<half>();
    }
    // A right operand (k, n) all of whose elements are one number.
    __aicore__ inline Operand TakeNumber(half number, uint32_t k, uint32_t n)
    {
        Operand right = right_.AllocTensor<half>();
        AscendC::InitConstValueParams<half> p;
        p.repeatTimes = Fractals(k) * Fractals(n);  // of one block: a 310P reads no other number
        p.blockNum = 1;
        p.dstGap = 0;
        p.initValue = number;
        AscendC::Fill(right, p);
        right_.EnQue(right);
        return right_.DeQue<half>();
    }
    __aicore__ inline void FreeLeft(Operand& left) { left_.FreeTensor(left); }
    __aicore__ inline void FreeRight(Operand& right) { right_.FreeTensor(right); }

    // Return rows of a left operand from a multiple of 16 on.
    static __aicore__ inline Operand RowsFrom(const Operand& left, uint32_t first, uint32_t k)
    {
        return left[first * Fractals(k) * kFractal];
    }

    __aicore__ inline void Contract(const AscendC::LocalTensor<float>& c, const Operand& left, const Operand& right,
                                    const Factors& f)
    {
        AscendC::MmadParams p;
        p.m = f.m;
        p.n = f.n;
        p.k = f.k;
        p.cmatrixInitVal = !f.adds;
        if (f.adds && f.m / kFractal * (f.n / kFractal) < kOrderedFractals) AscendC::PipeBarrier<PIPE_M>();
        AscendC::Mmad(c, left, right, p);
    }

private:
    static __aicore__ inline uint32_t Fractals(uint32_t elements) { return DivideUp(elements, kFractal); }

    // L0A wants rows of fractals, each along k.
    static __aicore__ inline void LoadLeft(const Operand& left, const Operand& a, uint32_t m, uint32_t k)
    {
        AscendC::LoadData2DParams p;
        p.repeatTimes = Fractals(k);
        p.srcStride = kTileRows / kFractal;
        p.ifTranspose = false;
        for (uint32_t row = 0; row < Fractals(m); ++row) {
            p.startIndex = row;
            AscendC::LoadData(left[row * Fractals(k) * kFractal * kFractal], a, p);
        }
    }

    // L0B wants, for each 16 of k, fractals along n, in which n is the row.
    static __aicore__ inline void LoadRows(const Operand& right, const Operand& b, const Factors& f)
    {
        AscendC::LoadData2DParams p;
        p.repeatTimes = Fractals(f.n);
        p.srcStride = 1;
        p.ifTranspose = false;
        for (uint32_t column = 0; column < Fractals(f.k); ++column) {
            p.startIndex = column * (kTileRows / kFractal);
            AscendC::LoadData(right[column * Fractals(f.n) * kFractal * kFractal], b, p);
        }
    }

    static __aicore__ inline void LoadColumns(const Operand& right, const Operand& b, const Factors& f)
    {
        AscendC::LoadData2DParams p;
        p.repeatTimes = Fractals(f.n);
        p.srcStride = kTileRows / kFractal;
        p.ifTranspose = true;
        for (uint32_t row = 0; row < Fractals(f.k); ++row) {
            p.startIndex = row;
            AscendC::LoadData(right[row * Fractals(f.n) * kFractal * kFractal], b, p);
        }
    }

    AscendC::TQue<AscendC::TPosition::A2, 1> left_;
    AscendC::TQue<AscendC::TPosition::B2, 1> right_;
};

// Rows and the first columns of an accumulator to row-major GM; FP16 is rounded on the way, once. `all_rows` are in the
// accumulator: its first 16 columns lie one row behind the other, then the next 16.
template <typename T>
__aicore__ inline void Store(const AscendC::GlobalTensor<T>& to, const AscendC::LocalTensor<float>& c, uint32_t rows,
                             uint32_t columns, uint32_t stride, uint32_t all_rows)
{
    AscendC::FixpipeParamsV220 p;
    p.nSize = RoundUp(columns, kFractal);
    p.mSize = rows;
    p.srcStride = RoundUp(all_rows, kFractal);
    p.dstStride = stride;
    p.quantPre = sizeof(T) == sizeof(half) ? QuantMode_t::F322F16 : QuantMode_t::NoQuant;
    p.deqScalar = 0;  // not read by these modes, and not initialised by the structure
    p.ndNum = 1;
    AscendC::Fixpipe<T, float, AscendC::CFG_ROW_MAJOR>(to, c, p);
}
template <typename T>
__aicore__ inline void Store(const AscendC::GlobalTensor<T>& to, const AscendC::LocalTensor<float>& c, uint32_t rows,
                             uint32_t columns, uint32_t stride)
{
    Store(to, c, rows, columns, stride, rows);
}

}  // namespace pasa
