"""Measured side by side: medians and ratios, kept in results/ with device, versions and commit."""
