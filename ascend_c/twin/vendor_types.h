// Names that kernel sources take from the vendor's headers: markers, enumerations, parameter structures.
// Field order, constructor order and defaults follow kernel_struct_*.h of the public toolkit headers; the code is ours.
#pragma once

#include <cstdint>
#include <type_traits>

#include "numbers.h"

#define __aicore__
#define __global__
#define __gm__
#define __ubuf__
#define __cbuf__
#define __ca__
#define __cb__
#define __cc__
#define __mix__(cube, vector)
#define __vector__
#define __cube__
#define GM_ADDR __gm__ uint8_t*

// The device's pipes; the values are the vendor's.
enum pipe_t {
    PIPE_S = 0,
    PIPE_V = 1,
    PIPE_M = 2,
    PIPE_MTE1 = 3,
    PIPE_MTE2 = 4,
    PIPE_MTE3 = 5,
    PIPE_ALL = 6,
    PIPE_FIX = 10
};

enum event_t { EVENT_ID0 = 0, EVENT_ID1, EVENT_ID2, EVENT_ID3, EVENT_ID4, EVENT_ID5, EVENT_ID6, EVENT_ID7 };

// Only the modes that the twin emulates; their numbers are not public, kernels use the names.
enum QuantMode_t { NoQuant = 0, F322F16 = 1, F322BF16 = 16 };

enum KernelMetaType {
    KERNEL_TYPE_AIV_ONLY,
    KERNEL_TYPE_AIC_ONLY,
    KERNEL_TYPE_MIX_AIV_1_0,
    KERNEL_TYPE_MIX_AIC_1_0,
    KERNEL_TYPE_MIX_AIC_1_1,
    KERNEL_TYPE_MIX_AIC_1_2,
};

namespace twin {

// An integer field of a parameter structure. On the device a value that does not fit is cut in silence; here the field
// keeps it, and the call that uses the field reports it.
template <typename T>
class Field {
public:
    constexpr Field() = default;
    template <typename I, typename = std::enable_if_t<std::is_integral_v<I> || std::is_enum_v<I>>>
    constexpr Field(I value) : value_(static_cast<int64_t>(value))
    {
    }
    template <typename U, typename = std::enable_if_t<!std::is_same_v<U, T>>>
    constexpr Field(Field<U> other) : value_(other.full())
    {
    }
    constexpr operator T() const { return static_cast<T>(value_); }
    constexpr int64_t full() const { return value_; }
    constexpr bool fits() const { return static_cast<int64_t>(static_cast<T>(value_)) == value_; }

private:
    int64_t value_ = 0;
};

}  // namespace twin

namespace AscendC {

enum class TPosition : uint8_t {
    GM,
    A1,
    A2,
    B1,
    B2,
    C1,
    C2,
    CO1,
    CO2,
    VECIN,
    VECOUT,
    VECCALC,
    LCM = VECCALC,
    SPM,
    SHM = SPM,
    TSCM,
    C2PIPE2GM,
    C2PIPE2LOCAL,
    MAX,
};
using QuePosition = TPosition;

enum class HardEvent : uint8_t {
    MTE2_MTE1,
    MTE1_MTE2,
    MTE1_M,
    M_MTE1,
    MTE2_V,
    V_MTE2,
    MTE3_V,
    V_MTE3,
    M_V,
    V_M,
    V_V,
    MTE3_MTE1,
    MTE1_MTE3,
    MTE1_V,
    MTE2_M,
    M_MTE2,
    V_MTE1,
    M_FIX,
    FIX_M,
    MTE3_MTE2,
    MTE2_MTE3,
    S_V,
    V_S,
    S_MTE2,
    MTE2_S,
    S_MTE3,
    MTE3_S,
    MTE2_FIX,
    FIX_MTE2,
    FIX_S,
    M_S,
    FIX_MTE3,
    MTE1_FIX,
    FIX_MTE1,
    FIX_FIX,
    MAX,
};

using TEventID = int8_t;
enum class MaskMode : uint8_t { NORMAL = 0, COUNTER };
enum class SaturationMode : uint8_t { FLOAT, FLOAT8, INT, CAST };
enum class RoundMode : uint8_t {
    CAST_NONE = 0,
    CAST_RINT,
    CAST_FLOOR,
    CAST_CEIL,
    CAST_ROUND,
    CAST_TRUNC,
    CAST_ODD,
    UNKNOWN = 0xFF,
};
enum class CMPMODE : uint8_t { LT = 0, GT, EQ, LE, GE, NE };
enum class SELMODE : uint8_t { VSEL_CMPMASK_SPR = 0, VSEL_TENSOR_SCALAR_MODE, VSEL_TENSOR_TENSOR_MODE };
enum class ReduceOrder : uint8_t { ORDER_VALUE_INDEX = 0, ORDER_INDEX_VALUE, ORDER_ONLY_VALUE, ORDER_ONLY_INDEX };
enum class ReduceType { NONE = -1, SUM = 0, MAX, MIN };
enum class CO2Layout : uint8_t { NZ = 0, ROW_MAJOR };

constexpr uint64_t MASK_PLACEHOLDER = 0;

using U8 = twin::Field<uint8_t>;
using U16 = twin::Field<uint16_t>;
using U32 = twin::Field<uint32_t>;

struct DataCopyParams {
    DataCopyParams() {}
    DataCopyParams(U16 count, U16 len, U16 src, U16 dst) : blockCount(count), blockLen(len), srcGap(src), dstGap(dst) {}

    U16 blockCount = 1;
    U16 blockLen = 0;  // 32-byte blocks
    U16 srcGap = 0;    // the older names srcStride and dstStride will go
    U16 dstGap = 0;
};

struct DataCopyExtParams {
    DataCopyExtParams() {}
    DataCopyExtParams(U16 count, U32 len, U32 src, U32 dst, U32 reserved)
        : blockCount(count),
          blockLen(len),
          srcStride(src),
          dstStride(dst),
          rsv(reserved)
    {
    }

    U16 blockCount = 1;
    U32 blockLen = 0;  // bytes
    U32 srcStride = 0;
    U32 dstStride = 0;
    U32 rsv = 0;
};

template <typename T>
struct DataCopyPadExtParams {
    DataCopyPadExtParams() {}
    DataCopyPadExtParams(bool pad, U8 left, U8 right, T value)
        : isPad(pad),
          leftPadding(left),
          rightPadding(right),
          paddingValue(value)
    {
    }

    bool isPad = false;
    U8 leftPadding = 0;
    U8 rightPadding = 0;
    T paddingValue = T(0);
};

enum class BlockMode : uint8_t {
    BLOCK_MODE_NORMAL = 0,
    BLOCK_MODE_MATRIX,
    BLOCK_MODE_VECTOR,
    BLOCK_MODE_SMALL_CHANNEL,
    BLOCK_MODE_DEPTHWISE,
};

// Ascend 310P, L0C to UB. Conversions on the way are not emulated, so their fields are left out.
struct DataCopyEnhancedParams {
    BlockMode blockMode = BlockMode::BLOCK_MODE_NORMAL;
    bool isRelu = false;
};

struct Nd2NzParams {
    Nd2NzParams() {}
    Nd2NzParams(U16 nd, U16 rows, U16 columns, U16 srcMatrix, U16 srcRow, U16 dstC0, U16 dstN, U16 dstMatrix)
        : ndNum(nd),
          nValue(rows),
          dValue(columns),
          srcNdMatrixStride(srcMatrix),
          srcDValue(srcRow),
          dstNzC0Stride(dstC0),
          dstNzNStride(dstN),
          dstNzMatrixStride(dstMatrix)
    {
    }

    U16 ndNum = 0;
    U16 nValue = 0;
    U16 dValue = 0;
    U16 srcNdMatrixStride = 0;
    U16 srcDValue = 0;
    U16 dstNzC0Stride = 0;
    U16 dstNzNStride = 0;
    U16 dstNzMatrixStride = 0;
};

template <typename T>
struct InitConstValueParams {
    InitConstValueParams() {}
    InitConstValueParams(U16 repeat, U16 blocks, U16 gap, T value)
        : repeatTimes(repeat), blockNum(blocks), dstGap(gap), initValue(value)
    {
    }

    U16 repeatTimes = 0;
    U16 blockNum = 0;
    U16 dstGap = 0;
    T initValue = 0;
};

struct LoadData2DParams {  // the order of the fields is not the order of the constructor
    LoadData2DParams() {}
    LoadData2DParams(U16 start, U8 repeat, U16 stride, U8 sidIn, U16 gap, bool transpose, U8 mode)
        : startIndex(start),
          dstGap(gap),
          srcStride(stride),
          ifTranspose(transpose),
          repeatTimes(repeat),
          sid(sidIn),
          addrMode(mode)
    {
    }

    U16 startIndex = 0;
    U16 dstGap = 0;
    U16 srcStride = 0;
    bool ifTranspose = false;
    U8 repeatTimes = 0;
    U8 sid = 0;
    U8 addrMode = 0;
};

struct MmadParams {
    MmadParams() {}
    MmadParams(U16 mIn, U16 nIn, U16 kIn, U8 unit, bool source, bool init)
        : m(mIn),
          n(nIn),
          k(kIn),
          unitFlag(unit),
          cmatrixSource(source),
          cmatrixInitVal(init)
    {
    }

    U16 m = 0;
    U16 n = 0;
    U16 k = 0;
    bool isBias = false;
    int32_t fmOffset = 0;
    bool enSsparse = false;
    bool enWinogradA = false;
    bool enWinogradB = false;
    U8 unitFlag = 0;
    bool kDirectionAlign = false;
    bool cmatrixSource = false;
    bool cmatrixInitVal = true;
};

struct FixpipeConfig {
    CO2Layout format;
    constexpr FixpipeConfig(CO2Layout layout) : format(layout) {}
};
constexpr FixpipeConfig CFG_NZ = {CO2Layout::NZ};
constexpr FixpipeConfig CFG_ROW_MAJOR = {CO2Layout::ROW_MAJOR};

struct FixpipeParamsV220 {
    FixpipeParamsV220() {}
    FixpipeParamsV220(U16 n, U16 m, U16 src, U32 dst, bool relu)
        : nSize(n),
          mSize(m),
          srcStride(src),
          dstStride(dst),
          reluEn(relu)
    {
    }
    FixpipeParamsV220(U16 n, U16 m, U16 src, U32 dst, bool relu, QuantMode_t quant, int64_t scalar, U16 nd, U16 srcNd,
                      U16 dstNd, U8 unit)
        : nSize(n),
          mSize(m),
          srcStride(src),
          dstStride(dst),
          quantPre(quant),
          deqScalar(static_cast<uint64_t>(scalar)),
          ndNum(nd),
          srcNdStride(srcNd),
          dstNdStride(dstNd),
          reluEn(relu),
          unitFlag(unit)
    {
    }

    U16 nSize = 0;
    U16 mSize = 0;
    U16 srcStride = 0;
    U32 dstStride = 0;
    QuantMode_t quantPre = QuantMode_t::NoQuant;
    uint64_t deqScalar = 0xDEADBEEFDEADBEEFull;  // uninitialised on the device
    U16 ndNum = 1;
    U16 srcNdStride = 0;
    U16 dstNdStride = 0;
    bool reluEn = false;
    U8 unitFlag = 0;
    bool isChannelSplit = false;
};

struct UnaryRepeatParams {
    UnaryRepeatParams() {}
    UnaryRepeatParams(U16 dstBlk, U16 srcBlk, U8 dstRep, U8 srcRep)
        : dstBlkStride(dstBlk),
          srcBlkStride(srcBlk),
          dstRepStride(dstRep),
          srcRepStride(srcRep)
    {
    }

    uint32_t blockNumber = 8;
    U16 dstBlkStride = 1;
    U16 srcBlkStride = 1;
    U8 dstRepStride = 8;
    U8 srcRepStride = 8;
    bool repeatStrideMode = false;
    bool strideSizeMode = false;
    bool halfBlock = false;
};

struct BinaryRepeatParams {
    BinaryRepeatParams() {}
    BinaryRepeatParams(U8 dstBlk, U8 src0Blk, U8 src1Blk, U8 dstRep, U8 src0Rep, U8 src1Rep)
        : dstBlkStride(dstBlk),
          src0BlkStride(src0Blk),
          src1BlkStride(src1Blk),
          dstRepStride(dstRep),
          src0RepStride(src0Rep),
          src1RepStride(src1Rep)
    {
    }

    uint32_t blockNumber = 8;
    U8 dstBlkStride = 1;
    U8 src0BlkStride = 1;
    U8 src1BlkStride = 1;
    U8 dstRepStride = 8;
    U8 src0RepStride = 8;
    U8 src1RepStride = 8;
    bool repeatStrideMode = false;
    bool strideSizeMode = false;
};

struct BrcbRepeatParams {
    BrcbRepeatParams() {}
    BrcbRepeatParams(U16 dstBlk, U16 dstRep) : dstRepStride(dstRep), dstBlkStride(dstBlk) {}

    uint32_t blockNumber = 8;
    U16 dstRepStride = 8;
    U16 dstBlkStride = 1;
};

}  // namespace AscendC
