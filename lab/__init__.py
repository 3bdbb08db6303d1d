"""The instruments everybody uses: students, the reference, the tests and the grader."""
