"""What CS336's assignment 2 asks of the same exercises: its domain, its interfaces, and no more. Run for its forks."""
