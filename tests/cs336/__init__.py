"""Tests by CS336's assignment 2: the same exercises, with its interfaces and requirements only. Run on its forks."""
