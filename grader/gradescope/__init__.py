"""Gradescope: `archive` builds the autograder that an instructor uploads, `harness` runs inside it."""
