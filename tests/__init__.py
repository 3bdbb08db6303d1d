"""Tests: one folder a stage; tests/kit holds the kit's own."""
