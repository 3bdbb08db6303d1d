"""The instructor's side: grades submissions without trusting their process."""
