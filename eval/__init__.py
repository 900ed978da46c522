"""Experiments on PASA, and the command line `pasa` that runs them.

- accuracy: errors of attention and of its gradients against FP64, and the bias of rounding
- models: whole models with and without PASA: language models, video, LongBench, every architecture in small
- speed: times on CUDA devices, beside other implementations
- random_calls: random calls of the API and of the kernels, checked against FP64 (fuzzing and soak tests)
- npu: a roofline model of the Ascend C kernels; nothing was run on an NPU
- research: studies of training, of FP8 and of rounding, beyond what the package promises
- kit: what the experiments share: declarations, options, tables, timing, devices, small models
- cli.py, commands.py, doctor.py: the console script, its commands, and `pasa doctor`, which checks an installation
"""
