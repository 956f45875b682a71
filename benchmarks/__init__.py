"""How fast the kernels are beside other implementations, as ratios of one run."""
