"""One transformer over data, pipeline, tensor and expert axes."""
