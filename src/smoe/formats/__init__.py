"""How bytes become numbers: one declaration for every quantised format, from which decoders and kernels are made."""
