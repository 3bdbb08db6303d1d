"""The assignment as data: stages, exercises, questions, points, units."""
