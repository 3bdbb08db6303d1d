"""The student's commands, one module each: `lab`, `lab check`, `lab train` and the others."""
