"""A model of clusters: hardware, prices of kernels and collectives, a step's events, a simulator that plays them."""
