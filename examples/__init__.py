"""Example submissions, and the points that each must earn."""
