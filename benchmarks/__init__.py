"""Benchmarks. results/ keeps medians and ratios, with device, versions and commit."""
