"""Training of the small model on a mesh: `torchrun --nproc-per-node 4 -m lab.train`."""
