"""ZeRO: optimizer state, then gradients, then parameters, each on one rank only."""
