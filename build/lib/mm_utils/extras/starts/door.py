"""What starts and ends of a run add to the core, see `mm_utils.doors`."""

CALLBACKS = {
    "closed_form": "mm_utils.extras.starts.callbacks.ClosedFormStart",
    "wise_ft": "mm_utils.extras.starts.callbacks.WiseFT",
}
