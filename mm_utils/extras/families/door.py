"""What models of others add to the core, see `mm_utils.doors`."""

TOWER_CHANGES = {"image_size": "mm_utils.extras.families.image_size.resize"}
