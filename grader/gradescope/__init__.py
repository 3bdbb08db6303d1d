"""Gradescope: `archive` makes what an instructor uploads, `harness` is what runs there."""
