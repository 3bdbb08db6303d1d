"""Tests of the mesh stage."""
