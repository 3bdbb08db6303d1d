"""Ranks as processes: forked by a zygote, isolated, joined only by the switch that records what they send."""
