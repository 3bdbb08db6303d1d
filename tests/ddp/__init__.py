"""Tests of the ddp stage."""
