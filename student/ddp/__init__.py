"""Data parallelism: replicas that stay equal because they apply equal gradients."""
