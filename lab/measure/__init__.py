"""Instruments: clocks, a simulated GPU, and what they measure of a piece of code."""
