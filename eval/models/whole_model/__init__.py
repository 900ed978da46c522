"""A language model that overflows FP16 by itself, before and after `pasa.to_fp16`, beside FP32 and BF16."""
