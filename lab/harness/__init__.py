"""The test harness: runs a probe, judges its answer, and explains a failure."""
