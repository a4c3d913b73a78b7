"""Model FLOPs: counted for any model, and logged as a rate and as a share of the device's peak."""
