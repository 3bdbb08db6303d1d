"""Tests of the flash_attention stage."""
