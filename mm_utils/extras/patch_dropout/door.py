"""What dropping patches adds to the core, see `mm_utils.doors`."""

PATCHES = {"drop": "mm_utils.extras.patch_dropout.patches.drop_patches"}
"""What makes a vision tower drop a share of the patches in training."""
