"""Stands in for torch_npu while the library is built: its headers alone."""
