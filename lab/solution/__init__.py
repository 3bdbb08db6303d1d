"""A solution's files: found, loaded, searched for forbidden calls; and values to and from its process."""
