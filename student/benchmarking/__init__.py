"""Measuring how long work takes on a device that answers before it is done."""
