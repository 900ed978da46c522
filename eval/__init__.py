"""Experiments on PASA, and the command line `pasa` that runs them.

accuracy
    Errors of attention and of its gradients against FP64, and the bias of rounding.
models
    Whole models with and without PASA: language models, video, LongBench, small models of every architecture.
speed
    Times on CUDA devices, beside other implementations.
random_calls
    Random calls of the API and of the kernels, checked against FP64 (fuzzing and soak tests).
npu
    A roofline model of the Ascend C kernels; nothing was run on an NPU.
research
    Studies of training and of FP8, beyond what the package promises.
kit
    Helpers that the experiments share: declarations, options, tables, timing, devices, small models.
cli.py, commands.py, doctor.py
    The console script, the list of its commands, and `pasa doctor`, which checks an installation.
"""
