"""A small modern transformer and its data, used in every stage."""
