"""A package a stage, a file an exercise."""
