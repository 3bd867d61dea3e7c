"""Our kernels in the place of the library's modules, where they give the library's bits."""
