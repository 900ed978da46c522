"""Time, memory and error of whole models of full width on a GPU, before and after `pasa.to_fp16`."""
