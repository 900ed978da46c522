// One wrong call at a time. Arguments beyond their range, and of other types.
#include "misuse.h"

namespace misuse {

static const Register arguments({
    {"repeat_range",
     {aiv,
      [](bool bug, half*, float*) {
          LocalTensor<half> x = ub(0, 80 * 1024);
          const int repeats = bug ? 256 : 255;
          Duplicate(x, half(0), uint64_t(128), repeats, 1, 8);
      }}},
    {"mask_range",
     {aiv,
      [](bool bug, half*, float*) {
          LocalTensor<float> x(TPosition::VECCALC, 0, 1024);
          Duplicate(x, 0.0f, uint64_t(bug ? 128 : 64), 1, 1, 8);
      }}},
    {"nd2nz_range",
     {aic,
      [](bool bug, half* gx, float*) {
          GlobalTensor<half> x;
          x.SetGlobalBuffer(gx, 4096);
          Nd2NzParams p(1, 1, 16, 0, bug ? 65536 : 65535, 16, 1, 0);
          DataCopy(LocalTensor<half>(TPosition::A1, 0, 1024), x, p);
      }}},
    {"fixpipe_range",
     {aic,
      [](bool bug, half* gx, float* gz) {
          LocalTensor<half> a, b;
          cube_operands(a, b, gx);
          LocalTensor<float> c(TPosition::CO1, 0, 4096);
          Mmad(c, a, b, mmad_params(32, 32, 16));
          PipeBarrier<PIPE_ALL>();
          GlobalTensor<float> z;
          z.SetGlobalBuffer(gz, 4096);
          Fixpipe<float, float>(z, c, fixpipe_params(32, bug ? 24 : 32));
      }}},
    {"fixpipe_quant",
     {aic,
      [](bool bug, half* gx, float* gz) {
          LocalTensor<half> a, b;
          cube_operands(a, b, gx);
          LocalTensor<float> c(TPosition::CO1, 0, 4096);
          Mmad(c, a, b, mmad_params(16, 16, 16));
          PipeBarrier<PIPE_ALL>();
          GlobalTensor<half> z;
          z.SetGlobalBuffer(reinterpret_cast<half*>(gz), 4096);
          FixpipeParamsV220 p = fixpipe_params(16, 16);
          if (!bug) p.quantPre = F322F16;
          Fixpipe<half, float>(z, c, p);
      }}},
    {"cast_mode",
     {aiv,
      [](bool bug, half*, float*) {
          LocalTensor<half> x = some_input();
          Cast(LocalTensor<float>(TPosition::VECCALC, 4096, 1024), x,
               bug ? RoundMode::CAST_RINT : RoundMode::CAST_NONE, 1024);
      }}},
    {"integer_overflow",
     {aiv,
      [](bool bug, half*, float*) {
          LocalTensor<int32_t> x(TPosition::VECCALC, 0, 64);
          Duplicate(x, 1 << 16, 64);
          PipeBarrier<PIPE_V>();
          Muls(x, x, (1 << 15) - (bug ? 0 : 1), 64);
      }}},
    {"shift_range",
     {aiv,
      [](bool bug, half*, float*) {
          LocalTensor<uint32_t> x(TPosition::VECCALC, 0, 64);
          Duplicate(x, 1u, 64);
          PipeBarrier<PIPE_V>();
          ShiftLeft(x, x, bug ? 33u : 32u, 64);
      }}},
    {"select_mode",
     {aiv,
      [](bool bug, half*, float*) {
          LocalTensor<half> x = some_input();
          LocalTensor<uint8_t> bits(TPosition::VECCALC, 4096, 32);
          Compares(bits, x, half(1), CMPMODE::GT, 128);
          PipeBarrier<PIPE_V>();
          Select(ub(8192, 128), bits, x, x,
                 bug ? SELMODE::VSEL_TENSOR_SCALAR_MODE : SELMODE::VSEL_TENSOR_TENSOR_MODE, 128);
      }}},
    {"compare_count",
     {aiv,
      [](bool bug, half*, float*) {
          Compares(LocalTensor<uint8_t>(TPosition::VECCALC, 4096, 32), some_input(), half(1), CMPMODE::GT,
                   bug ? 100 : 128);
      }}},
    {"compare_int32",
     {aiv,
      [](bool bug, half*, float*) {
          Compares(LocalTensor<uint8_t>(TPosition::VECCALC, 4096, 32), some_input().ReinterpretCast<int32_t>(), 1,
                   bug ? CMPMODE::GT : CMPMODE::EQ, 64);
      }}},
    {"pad_block",
     {aiv,
      [](bool bug, half* gx, float*) {
          GlobalTensor<half> x;
          x.SetGlobalBuffer(gx, 4096);
          DataCopyPad(in(0, 64), x, DataCopyExtParams(1, bug ? 21 : 20, 0, 0, 0), DataCopyPadExtParams<half>());
      }}},
    {"pad_block_out",
     {aiv,
      [](bool bug, half*, float* gz) {
          some_input();
          PipeBarrier<PIPE_ALL>();
          GlobalTensor<half> z;
          z.SetGlobalBuffer(reinterpret_cast<half*>(gz), 64);
          DataCopyPad(z, out(0, 64), DataCopyExtParams(1, bug ? 21 : 20, 0, 0, 0));
      }}},
    {"pad_width",
     {aiv,
      [](bool bug, half* gx, float*) {
          GlobalTensor<half> x;
          x.SetGlobalBuffer(gx, 4096);
          DataCopyPad(in(0, 64), x, DataCopyExtParams(1, 20, 0, 0, 0),
                      DataCopyPadExtParams<half>(true, 0, bug ? 17 : 16, half(0)));
      }}},
    {"load_address_mode",
     {aic,
      [](bool bug, half* gx, float*) {
          LocalTensor<half> a, b;
          cube_operands(a, b, gx);
          LoadData2DParams p;
          p.repeatTimes = 1;
          p.addrMode = bug;
          LoadData(a, LocalTensor<half>(TPosition::A1, 0, 4096), p);
      }}},
    {"unit_flag_range", {aic, [](bool bug, half* gx, float*) { some_product(gx, bug ? 1 : 0); }}},
    {"fixpipe_stride",
     {aic,
      [](bool bug, half* gx, float* gz) {
          LocalTensor<float> c = some_product(gx);
          GlobalTensor<float> z;
          z.SetGlobalBuffer(gz, 256);
          FixpipeParamsV220 p = fixpipe_params(16, 16);
          if (bug) p.dstStride = 0;
          Fixpipe(z, c, p);
      }}},
    {"fixpipe_unit_flag",
     {aic,
      [](bool bug, half* gx, float* gz) {
          LocalTensor<float> c = some_product(gx);
          GlobalTensor<float> z;
          z.SetGlobalBuffer(gz, 256);
          FixpipeParamsV220 p = fixpipe_params(16, 16);
          if (bug) p.unitFlag = 1;
          Fixpipe(z, c, p);
      }}},
    {"fixpipe_to_l1",
     {aic,
      [](bool bug, half* gx, float*) {
          LocalTensor<float> c = some_product(gx);
          LocalTensor<half> l1(TPosition::A1, 65536, 256);
          FixpipeParamsV220 p = fixpipe_params(16, 16);
          p.quantPre = F322F16;
          if (bug) Fixpipe<half, float, CFG_ROW_MAJOR>(l1, c, p);
          else Fixpipe<half, float, CFG_NZ>(l1, c, p);
      }}},
    {"mask_bits",
     {aiv,
      [](bool bug, half*, float*) {
          uint64_t bits[2] = {1, bug ? 1u : 0u};
          Duplicate(LocalTensor<float>(TPosition::VECCALC, 0, 64), 0.0f, bits, 1, 1, 8);
      }}},
    {"mask_mode",
     {aiv,
      [](bool bug, half*, float*) {
          if (!bug) SetMaskCount();
          SetVectorMask<half, MaskMode::COUNTER>(100);
      }}},
    {"negative_count", {aiv, [](bool bug, half*, float*) { Duplicate(ub(0, 64), half(0), bug ? -1 : 64); }}},
    {"queue_of_nothing",
     {aiv,
      [](bool bug, half*, float*) {
          TPipe pipe;
          TQue<TPosition::VECIN, 1> q;
          pipe.InitBuffer(q, 1, bug ? 0 : 64);
      }}},
});

}  // namespace misuse
