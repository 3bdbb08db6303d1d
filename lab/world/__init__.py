"""Ranks on a laptop: the zygote that forks them, the group that counts what they send."""
