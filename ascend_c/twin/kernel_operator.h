// The CPU twin of Ascend C for Atlas A2 (910B, NPU architecture 2201) and the Ascend 310P (2002): a functional emulator
// with checks, header only.
// Kernel sources include this file in place of the vendor's kernel_operator.h; the host side is device.h.
//
//   numbers.h, functions.h     number types, Exp and Ln
//   vendor_types.h, chip.h     names, parameter structures and sizes that kernels use
//   faults.h, options.h        what is reported; how a launch is emulated
//   clocks.h, memory.h         happens-before order; memories with shadow cells
//   core.h                     a core: memories, pipes, flags, mask, control state
//   scheduler.h, pipeline.h    cores as fibers; deferred work
//   instruction.h, tensor.h    one instruction with its checks; tensors
//   events.h, sync.h, queue.h  flags, barriers, cross-core flags, TPipe and TQue
//   vector_engine.h, vector.h, vector_move.h, vector_select.h, reduce.h
//   copy.h, cube.h, fixpipe.h, l0c_to_ub.h, counters.h, device.h
#pragma once

#include "device.h"
