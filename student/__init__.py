"""The solutions: read one after you have written your own."""
