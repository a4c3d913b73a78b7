"""What pushing to the Hub adds to a run, see `mm_utils.doors`."""

CALLBACKS = {"hub": "mm_utils.extras.hub.pusher.HubPusher"}
