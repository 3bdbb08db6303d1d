"""Copied into a CS336 fork, so that our tests can judge it: wraps the fork's adapters in the objects that they expect.

Everything here runs in the sandbox as part of the submission, so nothing here is trusted.
"""
