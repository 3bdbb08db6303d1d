"""A solution's files: found, loaded, compiled, searched for forbidden calls; and values to and from its process."""
