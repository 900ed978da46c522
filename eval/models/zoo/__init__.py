"""Every architecture of the installed transformers and diffusers that can be built small: patched against unpatched."""
