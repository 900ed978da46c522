// The cube unit's part of attention on an Ascend 310P, of tiles that lie in L1: S' = Q K'^T, P V and P 1, and products
// of rows with the queries. They are FP32 in L0C, from where the vector unit copies them to UB.
#pragma once

#include "../multiply.h"

namespace pasa {

// A tile in L1 that comes from UB. Its events say that it is there, and that it may be overwritten.
class StoredTile {
public:
    using Tile = AscendC::LocalTensor<half>;

    __aicore__ inline void Init(uint32_t numbers, AscendC::TPipe& pipe)
    {
        pipe.InitBuffer(buffer_, numbers * sizeof(half));
        tile_ = buffer_.Get<half>();
        stored_ = pipe.AllocEventID<AscendC::HardEvent::MTE3_MTE1>();
        loaded_ = pipe.AllocEventID<AscendC::HardEvent::MTE1_MTE3>();
        AscendC::SetFlag<AscendC::HardEvent::MTE1_MTE3>(loaded_);
    }
    // After the last use.
    __aicore__ inline void Close(AscendC::TPipe& pipe)
    {
        AscendC::WaitFlag<AscendC::HardEvent::MTE1_MTE3>(loaded_);
        pipe.ReleaseEventID<AscendC::HardEvent::MTE3_MTE1>(stored_);
        pipe.ReleaseEventID<AscendC::HardEvent::MTE1_MTE3>(loaded_);
    }

    __aicore__ inline void BeginStore() { AscendC::WaitFlag<AscendC::HardEvent::MTE1_MTE3>(loaded_); }
    // Columns from `first` on, so many fractals of 16 (columns, rows, 16).
    __aicore__ inline void Store(uint32_t first, const Tile& from, uint32_t fractals, uint32_t rows)
    {
        AscendC::DataCopyParams p;
        p.blockCount = fractals;
        p.blockLen = rows;
        p.dstGap = kTileRows - rows;
        AscendC::DataCopy(tile_[first / kFractal * kColumnBlock], from, p);
    }
    __aicore__ inline void EndStore() { AscendC::SetFlag<AscendC::HardEvent::MTE3_MTE1>(stored_); }

    __aicore__ inline const Tile& Take()
    {
        AscendC::WaitFlag<AscendC::HardEvent::MTE3_MTE1>(stored_);
        return tile_;
    }
    __aicore__ inline void Free() { AscendC::SetFlag<AscendC::HardEvent::MTE1_MTE3>(loaded_); }

private:
    AscendC::TBuf<AscendC::TPosition::A1> buffer_;
    Tile tile_;
    AscendC::TEventID stored_, loaded_;
};

// A row-major matrix in memory to a tile of fractals in L1, in pieces of 32 bytes.
__aicore__ inline void LoadPieces(const AscendC::LocalTensor<half>& tile, const AscendC::GlobalTensor<half>& from,
                                  uint32_t rows, uint32_t columns)
{
    AscendC::DataCopyParams p;
    p.blockCount = rows;
    p.blockLen = 1;
    p.srcGap = columns / kFractal - 1;
    for (uint32_t d = 0; d < columns; d += kFractal) {
        AscendC::DataCopy(tile[d / kFractal * kColumnBlock], from[d], p);
    }
}

class CoreProducts {
public:
    using Tile = AscendC::LocalTensor<half>;
    using Accumulator = AscendC::LocalTensor<float>;

    // Products of at most `row_products` rows and the queries are formed at a time.
    __aicore__ inline CoreProducts(uint32_t dim, uint32_t row_products, AscendC::TPipe& pipe)
        : pipe_(pipe),
          multiplier_(pipe),
          dim_(dim)
    {
        weights_.Init(HalfTileNumbers(kBlockKeys), pipe);
        pipe.InitBuffer(scores_, 2, kHalfRows * kBlockKeys * sizeof(float));
        pipe.InitBuffer(offsets_, 1, row_products * kHalfRows * sizeof(float));
        pipe.InitBuffer(outputs_, 2, kHalfRows * (dim + kFractal) * sizeof(float));
    }
    __aicore__ inline void Close() { weights_.Close(pipe_); }

    // S' (keys / 16, rows, 16) of the next block.
    __aicore__ inline Accumulator TakeScores() { return scores_.DeQue<float>(); }
    __aicore__ inline void FreeScores(Accumulator& c) { scores_.FreeTensor(c); }
    __aicore__ inline void FreeOffsets(Accumulator& c) { offsets_.FreeTensor(c); }
    // P V of the next block, and behind it P 1, the sum of each row sixteen times: (D / 16 + 1, rows, 16).
    __aicore__ inline Accumulator TakeProduct() { return outputs_.DeQue<float>(); }
    __aicore__ inline void FreeProduct(Accumulator& c) { outputs_.FreeTensor(c); }

    // Weights of so many keys (keys / 16, rows, 16) from UB to L1.
    __aicore__ inline void StoreWeights(uint32_t keys, const Tile& weights)
    {
        weights_.BeginStore();
        weights_.Store(0, weights, DivideUp(keys, kFractal), rows_);
        weights_.EndStore();
    }

protected:
    // `keys` is a multiple of 16.
    __aicore__ inline void FormScores(const Tile& k, uint32_t keys)
    {
        Accumulator c = scores_.AllocTensor<float>();
        Multiply(c, queries_, k, rows_, keys);
        scores_.EnQue(c);
    }

    // Products of so many rows and the queries: (rows_ / 16, rows, 16).
    __aicore__ inline void FormOffsets(const Tile& some, uint32_t rows)
    {
        Accumulator c = offsets_.AllocTensor<float>();
        Multiply(c, some, queries_, rows, rows_);
        offsets_.EnQue(c);
    }

    // P V and P 1, of the weights that were stored last.
    __aicore__ inline void FormProduct(const Tile& v, uint32_t keys)
    {
        Tile left = multiplier_.TakeLeft(weights_.Take(), rows_, keys);
        weights_.Free();
        Accumulator c = outputs_.AllocTensor<float>();
        for (uint32_t d = 0; d < dim_; d += kChunk) {
            const Factors f{rows_, Least(kChunk, dim_ - d), keys, false, false};
            Tile right = multiplier_.TakeRight(v[d / kFractal * kColumnBlock], f);
            multiplier_.Contract(c[d * rows_], left, right, f);
            multiplier_.FreeRight(right);
        }
        Tile ones = multiplier_.TakeNumber(static_cast<half>(1.0f), keys, kFractal);
        multiplier_.Contract(c[dim_ * rows_], left, ones, Factors{rows_, kFractal, keys, false, false});
        multiplier_.FreeRight(ones);
        multiplier_.FreeLeft(left);
        outputs_.EnQue(c);
    }

    AscendC::TPipe& pipe_;
    AscendC::TQue<AscendC::TPosition::CO1, 1> scores_, offsets_, outputs_;
    Tile queries_;
    uint32_t rows_ = 0;

private:
    // C (m, n) = A (m, D) B^T of tiles whose rows are both of D numbers.
    __aicore__ inline void Multiply(const Accumulator& c, const Tile& a, const Tile& b, uint32_t m, uint32_t n)
    {
        for (uint32_t d = 0; d < dim_; d += kChunk) {
            const uint32_t column = d / kFractal * kColumnBlock;
            multiplier_.Multiply(c, a[column], b[column], Factors{m, n, Least(kChunk, dim_ - d), true, d > 0});
        }
    }

    StoredTile weights_;
    Multiplier multiplier_;
    uint32_t dim_;
};

}  // namespace pasa
