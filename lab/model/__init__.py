"""A small modern transformer and its data, which every stage times, splits and accounts for."""
