"""The instructor's side: grades submissions without trusting the process that runs a student's code."""
