"""What restarts add to a start, see `mm_utils.doors`."""

RENDEZVOUS = {"fresh": "mm_utils.extras.elastic.rendezvous.init_method"}
"""What returns the `init_method` by which processes find each other, in place of `env://`."""
