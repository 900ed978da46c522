"""The backend `triton`: one folder for each family of kernels, and here the files that families share."""
