"""Fixtures come from lab.pytest_plugin."""

pytest_plugins = ["lab.pytest_plugin"]
