"""What is laid beside a CS336 fork, so that it can be judged as a submission of ours: its adapters, behind our objects.

Everything here runs in the box, as part of the submission: it is trusted with nothing.
"""
