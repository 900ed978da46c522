"""The backend `npu`: Ascend C kernels where the library is built, Triton or the vendor's attention where it is not."""
