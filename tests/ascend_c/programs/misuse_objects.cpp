// One wrong call at a time. Pipes, queues and buffers, flags between cores, and the launch itself.
#include "misuse.h"

namespace misuse {

static const Register objects({
    {"cross_core_aiv_only",
     {aiv,
      [](bool bug, half*, float*) {
          KERNEL_TASK_TYPE_DEFAULT(bug ? KERNEL_TYPE_AIV_ONLY : KERNEL_TYPE_MIX_AIV_1_0);
          CrossCoreSetFlag<0, PIPE_MTE3>(0);
          CrossCoreWaitFlag<0>(0);
      }}},
    {"cross_core_pipe",
     {aiv,
      [](bool bug, half*, float*) {
          if (bug) CrossCoreSetFlag<0, PIPE_S>(0);
          else CrossCoreSetFlag<0, PIPE_MTE3>(0);
          CrossCoreWaitFlag<0>(0);
      }}},
    {"mmad_bias",
     {aic,
      [](bool bug, half* gx, float*) {
          LocalTensor<half> a, b;
          cube_operands(a, b, gx);
          MmadParams p = mmad_params(16, 16, 16);
          p.cmatrixSource = bug;
          Mmad(LocalTensor<float>(TPosition::CO1, 0, 256), a, b, p);
      }}},
    {"fixpipe_channels",
     {aic,
      [](bool bug, half* gx, float* gz) {
          LocalTensor<float> c = some_product(gx);
          GlobalTensor<float> z;
          z.SetGlobalBuffer(gz, 256);
          FixpipeParamsV220 p = fixpipe_params(16, 16);
          p.isChannelSplit = bug;
          Fixpipe<float, float, CFG_NZ>(z, c, p);
      }}},
    {"buffer_uninitialised",
     {aiv,
      [](bool bug, half*, float*) {
          TPipe pipe;
          TBuf<TPosition::VECIN> b;
          if (!bug) pipe.InitBuffer(b, 64);
          b.Get<half>();
      }}},
    {"queue_uninitialised",
     {aiv,
      [](bool bug, half*, float*) {
          TPipe pipe;
          TQue<TPosition::VECIN, 1> q;
          if (!bug) pipe.InitBuffer(q, 1, 64);
          LocalTensor<half> t = q.AllocTensor<half>();
          q.FreeTensor(t);
      }}},
    {"queue_twice",
     {aiv,
      [](bool bug, half*, float*) {
          TPipe pipe;
          TQue<TPosition::VECIN, 1> q;
          pipe.InitBuffer(q, 1, 64);
          if (bug) pipe.InitBuffer(q, 1, 64);
      }}},
    {"queue_enqueue_twice",
     {aiv,
      [](bool bug, half*, float*) {
          TPipe pipe;
          TQue<TPosition::VECIN, 2> q;
          pipe.InitBuffer(q, 2, 64);
          LocalTensor<half> t = q.AllocTensor<half>();
          q.EnQue(t);
          if (bug) q.EnQue(t);
          t = q.DeQue<half>();
          q.FreeTensor(t);
      }}},
    {"queue_free_enqueued",
     {aiv,
      [](bool bug, half*, float*) {
          TPipe pipe;
          TQue<TPosition::VECIN, 1> q;
          pipe.InitBuffer(q, 1, 64);
          LocalTensor<half> t = q.AllocTensor<half>();
          q.EnQue(t);
          if (!bug) t = q.DeQue<half>();
          q.FreeTensor(t);
      }}},
    {"queue_never_freed",
     {aiv,
      [](bool bug, half*, float*) {
          TPipe pipe;
          TQue<TPosition::VECIN, 1> q;
          pipe.InitBuffer(q, 1, 64);
          LocalTensor<half> t = q.AllocTensor<half>();
          if (!bug) q.FreeTensor(t);
      }}},
    {"second_pipe",
     {aiv,
      [](bool bug, half*, float*) {
          TPipe pipe;
          if (!bug) pipe.Destroy();
          TPipe second;
      }}},
    {"kernel_type",
     {aiv,
      [](bool bug, half*, float*) {
          KERNEL_TASK_TYPE_DEFAULT(bug ? KERNEL_TYPE_MIX_AIC_1_2 : KERNEL_TYPE_AIV_ONLY);
      }}},
    {"host_exception",
     {aiv,
      [](bool bug, half*, float*) {
          if (bug) throw std::runtime_error("the kernel's own words");
      }}},
    {"cross_core_id",
     {aiv,
      [](bool bug, half*, float*) {
          CrossCoreSetFlag<0, PIPE_MTE3>(bug ? 16 : 15);
          CrossCoreWaitFlag<0>(15);
      }}},
    {"cross_core_wait_id",
     {aiv,
      [](bool bug, half*, float*) {
          CrossCoreSetFlag<0, PIPE_MTE3>(0);
          CrossCoreWaitFlag<0>(bug ? 16 : 0);
      }}},
    {"cross_core_wait_aiv_only",
     {aiv,
      [](bool bug, half*, float*) {
          if (bug) {
              KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
              CrossCoreWaitFlag<0>(0);
          }
      }}},
    {"cross_core_shape",
     {aiv,
      [](bool bug, half*, float*) {
          if (bug) CrossCoreSetFlag<2, PIPE_MTE3>(0);
      }}},
    {"cross_core_pair",
     {mix,
      [](bool bug, half*, float*) {
          if (ASCEND_IS_AIV || bug) {
              CrossCoreSetFlag<1, PIPE_MTE3>(0);
              CrossCoreWaitFlag<1>(0);
          }
      }}},
    {"cross_core_counter",
     {mix,
      [](bool bug, half*, float*) {
          for (int i = 0; i < (bug ? 16 : 15); ++i) {
              if ASCEND_IS_AIC {
                  CrossCoreSetFlag<2, PIPE_FIX>(0);
              }
          }
          for (int i = 0; i < 15; ++i) {
              if ASCEND_IS_AIV {
                  CrossCoreWaitFlag(0);
              }
          }
      },
      [](bool, twin::Options& options) { options.switch_one_in = 0; }}},
    {"cross_core_partners",
     {mix,
      [](bool bug, half*, float*) {
          if (ASCEND_IS_AIV && (!bug || GetSubBlockIdx() == 0)) CrossCoreSetFlag<1, PIPE_MTE3>(0);
          if (ASCEND_IS_AIV && !bug) CrossCoreWaitFlag<1>(0);
      }}},
});

}  // namespace misuse
