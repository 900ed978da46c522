// Products of decoding on an Ascend 310P: queries, K', V and frames come from UB, where the vector unit lays them out.
#pragma once

#include "core_products.h"

namespace pasa {

class DecodeProducts : public CoreProducts {
public:
    __aicore__ inline DecodeProducts(uint32_t dim, AscendC::TPipe& pipe) : CoreProducts(dim, kFractal, pipe)
    {
        queries.Init(HalfTileNumbers(dim), pipe);
        row.Init(HalfTileNumbers(dim), pipe);
        for (uint32_t i = 0; i < 2; ++i) {
            keys[i].Init(kBlockKeys * dim, pipe);
            values[i].Init(kBlockKeys * dim, pipe);
        }
    }
    __aicore__ inline void Close()
    {
        CoreProducts::Close();
        queries.Close(pipe_);
        row.Close(pipe_);
        for (uint32_t i = 0; i < 2; ++i) {
            keys[i].Close(pipe_);
            values[i].Close(pipe_);
        }
    }

    // So many rows of queries were stored.
    __aicore__ inline void Begin(uint32_t rows)
    {
        rows_ = rows;
        queries_ = queries.Take();
    }
    __aicore__ inline void End() { queries.Free(); }

    // S' of block j, whose K' were stored.
    __aicore__ inline void MakeScores(uint32_t j, uint32_t count)
    {
        FormScores(keys[j % 2].Take(), RoundUp(count, kFractal));
        keys[j % 2].Free();
    }
    // P V of block j, whose values and weights were stored, and P 1.
    __aicore__ inline void MakeProduct(uint32_t j, uint32_t count)
    {
        FormProduct(values[j % 2].Take(), RoundUp(count, kFractal));
        values[j % 2].Free();
    }
    // Products of the stored row and 15 rows of zeros.
    __aicore__ inline void MakeRowProduct()
    {
        FormOffsets(row.Take(), kFractal);
        row.Free();
    }
    __aicore__ inline Accumulator TakeRowProduct() { return offsets_.DeQue<float>(); }

    StoredTile queries, row, keys[2], values[2];
};

}  // namespace pasa
