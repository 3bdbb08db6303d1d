"""The tests of lab and grader. They run only if their path is given."""
