"""Fixtures come from lab.harness.pytest_plugin."""

pytest_plugins = ["lab.harness.pytest_plugin"]
