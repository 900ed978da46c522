"""The backend `npu`: Ascend C kernels, where their library is built."""
