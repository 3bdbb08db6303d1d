"""A transformer of today and its data, small enough for a laptop: what every stage times, splits and accounts for."""
