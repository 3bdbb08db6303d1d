"""Tests of the zero stage."""
