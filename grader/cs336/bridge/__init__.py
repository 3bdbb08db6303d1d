"""Wraps a CS336 fork's adapters in the objects that our tests expect. The grader copies this folder into each fork.

This code runs in the sandbox as part of the submission, so the grader does not trust it.
"""
