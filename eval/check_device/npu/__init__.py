"""`pasa check-device --npu`: everything about the Ascend C kernels that only an NPU can tell, in one archive."""
