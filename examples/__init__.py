"""Submissions to grade out of the box, and what each must earn."""
